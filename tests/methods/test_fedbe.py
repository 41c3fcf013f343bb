"""FedBE's ensemble form against golden vectors, and rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, numbers, plain_sgd
from torch import nn

from bayflower.clients.fedbe import Client
from bayflower.config import Training
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Model
from bayflower.rounds import solo
from bayflower.strategies.fedbe import Config, Server, State, Update

W = "0.weight"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-11)


def test_golden_moments_and_samples(baselines):
    """[eq. 1] and [eq. 2] around any last mean; [eq. 3] with given noise."""
    known = baselines["fedbe"]
    model = Model(lambda: nn.Sequential(nn.Linear(4, 1, bias=False)), 2)
    server = Server(Config(be_samples=2), model.anatomy)
    for old in (known["old"], [0.0] * 4, [1e3] * 4):
        state = State({W: doubles([old])}, {}, {W: torch.zeros(1, 4).double()})
        total = Total()
        for params, number in zip(known["params"], known["n"], strict=True):
            update = Update(torch.tensor(number), {W: doubles([params])}, {})
            total.add(server.statistic(state, 0, update))
        after = server.finalise(state, total.value())
        close(after.params[W][0], known["mean"])
        rough = 1e-6 if old[0] > 1 else 1e-11  # squares of a distance of 1000
        torch.testing.assert_close(
            after.variance[W][0], doubles(known["variance"]), rtol=1e-5, atol=rough
        )
    after = after._replace(variance={W: doubles([known["variance"]])})
    half = Client(Config(be_samples=2), Training(), model)
    x = torch.eye(4).double()
    noise = {W: doubles(known["noise"])[:, None]}
    got = half.predict("ensemble", half.init(*model.initial(0)), after, x, noise)
    logits = doubles(known["gaussian_samples"])  # the input picks a weight
    torch.testing.assert_close(got[:, 1], logits.sigmoid().mean(0))


def test_two_rounds_equal_plain_torch():
    """FedAvg's models, and numpy's weighted variance of them."""
    case = both("fedbe")
    world, weights = case.start, doubles([float(len(case.samples[k].y)) for k in case.clients])
    for round, (state, _, updates) in enumerate(half_rounds(case, 2), start=1):
        models = {}
        for client in case.clients:
            models[client] = numbers(plain_sgd(case, world, client, round, lambda *_: 0.0)[0])
            assert_equal(updates[client].params, models[client])
        share = weights / weights.sum()
        stacked = {n: torch.stack([m[n] for m in models.values()]) for n in world}
        world = {n: torch.tensordot(share, v, 1) for n, v in stacked.items()}
        spread = {n: torch.tensordot(share, (v - world[n]) ** 2, 1) for n, v in stacked.items()}
        assert_equal(state.params, world)
        assert_equal(state.variance, spread, rtol=1e-6, atol=1e-13)


def test_the_ensemble_is_around_the_fine_tuned_model_and_one_reply_has_no_spread():
    case = both("fedbe", finetune_epochs=1)
    half, server = case.prepared.halves.client, case.prepared.halves.server
    client = case.clients[0]
    samples, keys = case.samples[client], {"seed": 0, "client": client, "round": 3}
    state, states, updates = list(half_rounds(case, 2))[-1]
    tuned = solo.adapt(half, states[client], state, samples, "finetune", **keys)
    draws = torch.Generator().manual_seed(0)
    noise = {
        n: torch.randn(shape, generator=draws).double()
        for n, shape in half.noise("predict", 9).items()
    }
    got, each = half.predict("ensemble", tuned, state, samples.x, noise), []
    for m in range(10):
        drawn = {n: tuned.tuned[n] + v.sqrt() * noise[n][m] for n, v in state.variance.items()}
        each.append(half.model.forward(drawn, {}, samples.x, train=False)[0].softmax(1))
    torch.testing.assert_close(got, torch.stack(each).mean(0))
    assert not torch.allclose(got, half.predict("global", tuned, state, samples.x, {}), atol=1e-3)
    found = half.posterior(state.params, state, None, None)["own"]
    assert_equal(found.tensors, {n: v.sqrt() for n, v in state.variance.items()})
    total = Total()
    total.add(server.statistic(state, client, updates[client]))
    alone = server.finalise(state, total.value())
    assert max(float(v.max()) for v in alone.variance.values()) < 1e-15


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="be_samples must be at least 1"):
        small("fedbe", be_samples=0)
    with pytest.raises(ConfigError, match="be_spread must be finite"):
        small("fedbe", be_spread=-1.0)
