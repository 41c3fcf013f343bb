"""FedPop: the population against the marginal maximum likelihood, the chain against a posterior in
closed form, and rounds in plain torch.
"""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds
from torch import nn
from torch.func import vmap

from bayflower.clients.fedpop import Client
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.strategies.fedpop import Config, Server, State, Update
from bayflower.tasks import make
from bayflower.tree import map_tree


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


def test_the_population_becomes_the_marginal_maximum_likelihood():
    """[eq. 1] with nine clients, y_ij ~ N(z_i, 4), 8 samples each: the maximum is
    the mean of client means and their variance less 4/8. Posteriors in closed form are the updates;
    [eq. 2] and [eq. 3] repeated must arrive there, also in part (pop_step).
    """
    draws = torch.Generator().manual_seed(0)
    means = 3 + 2 * torch.randn(9, generator=draws).double()
    noise = 4 / 8
    want = means.mean(), means.var(unbiased=False) - noise
    for step in (1.0, 0.4):
        server = Server(Config(pop_step=step, pop_floor=1e-9), Model(two_layers, 2).anatomy)
        state = server.init({"0.weight": doubles([1.0]), "1.weight": doubles([0.0])}, {}, ())
        assert set(state.mean) == {"1.weight"}
        for _ in range(80):
            mean, variance = float(state.mean["1.weight"]), float(state.variance["1.weight"])
            total = Total()
            for client, one in enumerate(means.tolist()):
                spread = 1 / (1 / variance + 1 / noise)
                middle = spread * (mean / variance + one / noise)
                square = doubles(spread + (middle - mean) ** 2)[0]
                update = Update(
                    torch.tensor(8),
                    state.params,
                    {},
                    {"1.weight": doubles([middle])},
                    {"1.weight": square},
                )
                assert server.check(state, client, update) is None
                total.add(server.statistic(state, client, update))
            state = server.finalise(state, total.value())
        torch.testing.assert_close(state.mean["1.weight"][0, 0], want[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state.variance["1.weight"], want[1], rtol=1e-6, atol=1e-9)
    lie = update._replace(square={"1.weight": doubles(1e-6)[0]}, mean={"1.weight": doubles([9.0])})
    assert "must be at least" in server.check(state, 0, lie)


def test_the_chain_samples_the_posterior():
    """One weight of a Gaussian likelihood with noise 1: posterior precision Σ x² + 1/variance.
    [eq. 4], [eq. 5] with small steps: mean and variance of the samples within their error.
    """
    model = Model(two_layers, 1, task=make("regression", noise="known", noise_std=1.0))
    half = Client(Config(pop_rate=0.01), Training(local_epochs=1), model)
    x = doubles([0.5], [1.5], [-1.0], [2.0])
    y = doubles(0.9, 1.8, -1.7, 2.2)
    sent = State(
        {"0.weight": doubles([1.0])},
        {},
        {"1.weight": doubles([0.3])},
        {"1.weight": doubles(0.5)[0]},
    )
    data = Batch(x, y, torch.ones(4).double())
    precision = float(x.square().sum()) + 1 / 0.5
    middle = (float((x[:, 0] * y).sum()) + 0.3 / 0.5) / precision
    state = half.init({"0.weight": sent.params["0.weight"], "1.weight": sent.mean["1.weight"]}, {})
    (phase,) = half.phases("finetune")
    work = solo.fresh_optimizer(phase, half.begin(state, sent, data))
    fresh = work.memo
    chains = map_tree(lambda leaf: leaf.expand(2000, *leaf.shape), work)
    draws = torch.Generator().manual_seed(1)

    def step(work, noise):
        return half.step(phase, work, (data,), {"1.weight": noise})[0]

    for number in range(600):
        noise = torch.randn(2000, 1, 1, generator=draws).double()
        chains = vmap(step)(chains, noise)
        if number == 299:  # the chains have forgotten where they began
            memo = map_tree(lambda leaf: leaf.expand(2000, *leaf.shape), fresh)
            chains = chains._replace(memo=memo)
    memo = chains.memo
    apart = float(memo.total["1.weight"].sum() / memo.steps.sum())
    square = float(memo.squares["1.weight"].sum() / memo.steps.sum())
    assert apart + 0.3 == pytest.approx(middle, abs=0.01)
    assert square - apart**2 == pytest.approx(1 / precision, rel=0.05)
    assert bool((chains.params["0.weight"] == sent.params["0.weight"]).all())


def plain_chain(case, client, round, common, head, mean, variance, purpose="train"):
    """Return (common part, last sample, all samples) of one client, sample by sample."""
    half, samples = case.prepared.halves.client, case.samples[client]
    (phase,), n = half.phases(purpose), len(samples.y)
    keys = {"seed": 0, "client": client, "round": round}
    shapes, chain = half.noise(phase.name, phase.batch_size), []
    plan = batches.plan(n, phase, **keys, purpose=purpose, coupled=False)
    for step, (rows,) in enumerate(plan):
        noise = batches.noise(
            shapes, **keys, stage=f"{purpose}/{phase.name}", step=step, dtype=torch.float64
        )
        module = case.prepared.halves.model.factory().double()
        module.load_state_dict(copy.deepcopy({**common, **head}))
        nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]).backward()
        grads = {name: value.grad for name, value in module.named_parameters()}
        if purpose == "train":
            common = {name: v - LR * grads[name] for name, v in common.items()}
        rate = half.config.pop_rate
        head = {
            name: z
            - rate * (grads[name] + (z - mean[name]) / (n * variance[name]))
            + (2 * rate * half.config.pop_temperature / n) ** 0.5 * noise[name]
            for name, z in head.items()
        }
        chain.append(head)
    return common, head, chain


def test_two_rounds_equal_plain_torch():
    """[eq. 4] to [eq. 6] client by client, and [eq. 2], [eq. 3] from lists of samples."""
    case = both("fedpop", pop_step=0.7, pop_temperature=0.6, local_epochs=1)
    head = set(case.prepared.halves.client.head)
    common = {n: v for n, v in case.start.items() if n not in head}
    mean = {n: v for n, v in case.start.items() if n in head}
    variance = {n: 1.0 for n in head}
    ends = dict.fromkeys(case.clients, mean)
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        sent, firsts, seconds = {}, {n: [] for n in head}, {n: [] for n in head}
        for k in case.clients:
            known = (common, ends[k], mean, variance)
            sent[k], ends[k], chain = plain_chain(case, k, round, *known)
            assert_equal(updates[k].params, sent[k])
            assert_equal(states[k].params, ends[k])
            for n in head:
                each = torch.stack([one[n] for one in chain])
                firsts[n].append(each.mean(0))
                seconds[n].append((each - mean[n]).square().mean())
                assert_equal({n: states[k].std[n]}, {n: each.std(0, correction=0)}, atol=1e-8)
        sizes = {k: len(case.samples[k].y) for k in case.clients}
        common = {
            n: sum(sizes[k] * sent[k][n] for k in sizes) / sum(sizes.values()) for n in common
        }
        assert_equal(state.params, common)
        new = {n: mean[n] + 0.7 * (sum(firsts[n]) / 3 - mean[n]) for n in head}
        for n in head:
            second = 0.3 * variance[n] + 0.7 * sum(seconds[n]) / 3
            variance[n] = float(second - (new[n] - mean[n]).square().mean())
            assert float(state.variance[n]) == pytest.approx(variance[n], rel=1e-6)
        mean = new
        assert_equal(state.mean, mean)


def test_before_a_test_the_chain_goes_on_and_a_new_client_begins_at_the_population():
    case = both("fedpop", local_epochs=2, new_client_epochs=3)
    half, k = case.prepared.halves.client, case.clients[0]
    state, states, _ = list(half_rounds(case, 1))[-1]
    variance = {n: float(v) for n, v in state.variance.items()}
    for purpose, start, first in (
        ("finetune", states[k], states[k].params),
        ("new", half.init(*case.prepared.halves.initial), state.mean),
    ):
        keys = {"seed": 0, "client": k, "round": 2}
        got = solo.adapt(half, start, state, case.samples[k], purpose, **keys)
        known = (state.params, first, state.mean, variance)
        _, _, chain = plain_chain(case, k, 2, *known, purpose)
        for n in half.head:
            each = torch.stack([one[n] for one in chain])
            assert_equal({n: got.mean[n]}, {n: each.mean(0)})
            assert_equal({n: got.std[n]}, {n: each.std(0, correction=0)}, atol=1e-8)
        x = case.samples[k].x
        noise = {n: torch.ones(10, *half.model.shapes[n]).double() for n in half.head}
        drawn = {n: got.mean[n] + got.std[n] for n in half.head}
        for view, top in (("personal", got.mean), ("global", state.mean), ("sampled", drawn)):
            want = half.model.forward({**state.params, **top}, {}, x, train=False)[0].softmax(1)
            torch.testing.assert_close(half.predict(view, got, state, x, noise), want)
        assert_equal(half.spread(got, state), got.std)
        params = {f"spread:{n}": v for n, v in got.std.items()}
        found = half.posterior({**state.params, **params}, state, None, None)["own"]
        assert_equal(found.tensors, got.std)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="pop_rate must be positive"):
        small("fedpop", pop_rate=0.0)
    with pytest.raises(ConfigError, match="pop_step must be in"):
        small("fedpop", pop_step=0.0)
    with pytest.raises(ConfigError, match="pop_temperature must be finite"):
        small("fedpop", pop_temperature=-1.0)
