"""Ditto against golden vectors, its closed form, and two rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, mean, numbers, plain_sgd
from torch import nn

from bayflower.clients.ditto import Client, owned, with_own
from bayflower.config import Training
from bayflower.contract import Work
from bayflower.errors import ConfigError
from bayflower.maths.optim import Optimizer
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.strategies.ditto import Config
from bayflower.strategies.fedavg import State as Broadcast


class Bowl(nn.Module):
    """A loss that is quadratic in two weights: its output is the loss."""

    def __init__(self, curvature, optimum):
        super().__init__()
        self.head = nn.Linear(2, 1, bias=False)
        self.curvature, self.optimum = curvature, optimum

    def forward(self, x):
        self.head(x)
        apart = self.head.weight[0] - self.optimum
        return 0.5 * (self.curvature * apart.square()).sum().expand(len(x), 1)


def test_golden_steps_and_their_limit(baselines):
    """[eq. 1] by steps of SGD on F = ½ Σ a (v − t)², and v* = (a t + λ w)/(a + λ)."""
    known = baselines["ditto"]
    a, t, w, v = (
        torch.tensor(known[key], dtype=torch.float64)
        for key in ("curvature", "optimum", "w", "v_start")
    )
    model = Model(lambda: Bowl(a, t), 2, head="head")
    model.mean_nll = lambda out, y, mask: out.mean()
    half = Client(Config(known["weight"]), Training(), model)
    phase = Training().phase("local")._replace(optimizer=Optimizer("sgd", known["lr"]))
    sent = Broadcast({"head.weight": w[None]}, {})
    work = Work({**sent.params, **with_own({"head.weight": v[None]})}, {}, sent)
    work = solo.fresh_optimizer(phase, work)
    batch = Batch(torch.ones(1, 2).double(), torch.zeros(1).long(), torch.ones(1).double())
    shared = w
    for step, want in enumerate(known["steps"], start=1):
        work, _ = half.step(phase, work, (batch,), {})
        got = owned(work.params)["head.weight"][0]
        torch.testing.assert_close(
            got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-11
        )
        shared = shared - known["lr"] * a * (shared - t)  # [eq. 2]: FedAvg's, without a tie
        torch.testing.assert_close(work.params["head.weight"][0], shared)
        lam, limit = known["weight"], torch.tensor(known["limit"], dtype=torch.float64)
        torch.testing.assert_close(limit, (a * t + lam * w) / (a + lam))
        torch.testing.assert_close(got, limit + (1 - known["lr"] * (a + lam)) ** step * (v - limit))


def test_two_rounds_equal_plain_torch():
    """[eq. 2] as two separate trainings, client by client; the second round continues v."""
    lam = 2.0
    case = both("ditto", ditto_weight=lam)
    world, own = case.start, {}

    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        models = {}
        for client in case.clients:
            models[client] = numbers(
                plain_sgd(case, world, client, round, lambda module, x: 0.0)[0]
            )

            def tie(module, x, world=world):
                apart = [
                    (value - world[name]).square().sum()
                    for name, value in module.named_parameters()
                ]
                return lam / 2 * sum(apart)

            own[client] = numbers(plain_sgd(case, own.get(client, world), client, round, tie)[0])
            assert_equal(updates[client].params, models[client])
            assert_equal(states[client].params, own[client])
        world = mean(case, models)
        assert_equal(state.params, world)


def test_a_new_client_fits_a_personal_model_and_leaves_the_global_one():
    case = both("ditto")
    half, samples = case.prepared.halves.client, case.samples[case.clients[0]]
    sent = Broadcast(*case.prepared.halves.initial)
    fresh = half.init(*case.prepared.halves.initial)
    keys = {"seed": 0, "client": 9, "round": 1}
    before = half.predict("personal", fresh, sent, samples.x, {})
    assert torch.equal(before, half.predict("global", fresh, sent, samples.x, {}))
    state = solo.adapt(half, fresh, sent, samples, "new", **keys)
    after = half.predict("personal", state, sent, samples.x, {})
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(half.predict("global", state, sent, samples.x, {}), before)
    assert half.phases("finetune") == ()


def test_two_models_have_two_sets_of_running_statistics():
    case = both("ditto", model="mlp-bn", ditto_weight=0.5)
    half = case.prepared.halves.client
    sent = Broadcast(*case.prepared.halves.initial)
    client = case.clients[0]
    keys = {"seed": 0, "client": client, "round": 1}
    fresh = half.init(*case.prepared.halves.initial)
    trained = solo.train(half, fresh, sent, case.samples[client], **keys)
    assert trained.state.buffers.keys() == trained.update.buffers.keys() == sent.buffers.keys()
    means = [name for name in sent.buffers if name.endswith("running_mean")]
    assert means
    for name in means:
        mine, shared = trained.state.buffers[name], trained.update.buffers[name]
        assert not torch.equal(mine, sent.buffers[name])
        assert not torch.equal(mine, shared)
    assert not half.plain_loop


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="ditto_weight must be finite and not negative, got -1"):
        small("ditto", ditto_weight=-1)
