"""QLSD against golden vectors, every outcome of the quantiser, and rounds in plain torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds
from torch import nn

from bayflower.clients.qlsd import Client, quantised
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.maths.hypernet import generator
from bayflower.networks.model import Model
from bayflower.strategies import qlsd
from bayflower.strategies.qlsd import Config, Server, Update, decoded, memory_rate

W = "0.weight"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-10)


def test_golden_codes_and_every_outcome(baselines):
    """[eq. 2]: codes of given uniforms; the mean over all outcomes is v, the variance known."""
    known = baselines["qlsd"]
    v, levels = doubles(known["v"]), known["levels"]
    codes, norm = quantised(v, doubles(known["uniforms"]), levels)
    assert codes.tolist() == known["codes"]
    close(norm, known["norm"])
    close(decoded(codes, norm, levels), known["value"])
    assert memory_rate(len(v), levels) == pytest.approx(known["memory_rate"], rel=1e-9)
    up = levels * v.abs() / norm % 1
    mean, square = torch.zeros_like(v), 0.0
    for raised in itertools.product([0, 1], repeat=len(v)):
        chance = torch.stack([p if r else 1 - p for p, r in zip(up, raised, strict=True)]).prod()
        uniform = doubles([-1.0 if r else 2.0 for r in raised])
        value = decoded(*quantised(v, uniform, levels), levels)
        mean, square = mean + chance * value, square + chance * (value - v).square().sum()
    torch.testing.assert_close(mean, v)
    assert float(square) == pytest.approx(known["variance"], rel=1e-9)
    assert float(square) <= known["variance_bound"]
    nothing, zero = quantised(torch.zeros(4), torch.full((4,), 0.5), levels)
    assert not nothing.any()
    assert float(zero) == 0


def test_golden_round(baselines, monkeypatch):
    """[eq. 3], [eq. 4] and [eq. 5]: two of ten clients, memories and given noise."""
    whole, known = baselines["qlsd"], baselines["qlsd"]["round"]
    model = Model(lambda: nn.Sequential(nn.Linear(5, 1, bias=False)), 2)
    config = Config(qlsd_step=known["lr"], qlsd_levels=whole["levels"])
    server, half = Server(config, model.anatomy), Client(config, Training(), model)
    state = server.init({W: doubles([known["theta"]])}, {}, tuple(range(10)))
    state = state._replace(memory={W: doubles([known["memory_total"]])})
    total = Total()
    for k in range(2):
        start = half.init({W: doubles([known["theta"]])}, {})
        start = start._replace(memory={W: doubles([known["memory"][k]])})
        apart = doubles([known["gradients"][k]]) - start.memory[W]
        codes, norm = quantised(apart, doubles([known["uniforms"][k]]), whole["levels"])
        sent = decoded(codes, norm, whole["levels"])
        close(sent[0], known["sent"][k])
        after = start.memory[W] + memory_rate(5, whole["levels"]) * sent
        close(after[0], known["memory_new"][k])
        update = Update(torch.tensor(3), {}, {W: codes.to(torch.int16)}, {W: norm}, torch.tensor(0))
        assert server.check(state, k, update) is None
        total.add(server.statistic(state, k, update))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: doubles([known["noise"]]))
    after = server.finalise(state, total.value())
    close(after.params[W][0], known["theta_new"])
    close(after.memory[W][0], known["memory_total_new"])


@pytest.mark.parametrize("memory", [True, False])
def test_three_rounds_equal_plain_torch(memory):
    """[eq. 1] by autograd with the engines' noise; memories add up to the server's; mean and
    variance of the samples that count.
    """
    step, tau, levels = 1e-4, 3.0, 16
    case = both(
        "qlsd",
        qlsd_memory=memory,
        qlsd_step=step,
        qlsd_prior=tau,
        qlsd_levels=levels,
        qlsd_burn_in=1,
    )
    half, server = case.prepared.halves.client, case.prepared.halves.server
    (phase,) = half.phases("train")
    first = server.init(*case.prepared.halves.initial, tuple(case.clients))
    theta, held, samples = case.start, {}, []
    zero = {n: torch.zeros_like(v) for n, v in theta.items()}
    together = zero
    for round, (state, states, updates) in enumerate(half_rounds(case, 3), start=1):
        sum_sent, module = zero, half.model.factory().double()
        for k in case.clients:
            data, keys = case.samples[k], {"seed": 0, "client": k, "round": round}
            ((rows,),) = batches.plan(len(data.y), phase, **keys, purpose="train", coupled=False)
            module.load_state_dict(theta)
            module.zero_grad()
            nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            noise = batches.noise(
                half.noise("local", 16), **keys, stage="train/local", step=0, dtype=torch.float64
            )
            own, sent = held.get(k, zero), {}
            for n, value in module.named_parameters():
                v = len(data.y) * value.grad + tau / 3 * theta[n] - own[n]
                r = levels * v.abs() / v.norm()
                u = torch.distributions.Normal(0, 1).cdf(noise[n])
                code = v.sign() * (r.floor() + (u < r - r.floor()))
                assert torch.equal(updates[k].codes[n].double(), code)
                sent[n] = v.norm() * code / levels
            if memory:
                rate = {n: memory_rate(v.numel(), levels) for n, v in zero.items()}
                held[k] = {n: own[n] + rate[n] * sent[n] for n in zero}
                assert_equal(states[k].memory, held[k], rtol=1e-6, atol=1e-8)
            else:
                assert states[k].memory == {}
            sum_sent = {n: sum_sent[n] + sent[n] for n in zero}
        draw = generator("qlsd", int(first.key), round - 1)
        xi = {
            n: torch.randn(v.shape, generator=draw, dtype=torch.float64) for n, v in theta.items()
        }
        theta = {
            n: theta[n] - step * (together[n] + sum_sent[n]) + (2 * step) ** 0.5 * xi[n]
            for n in zero
        }
        assert_equal(state.params, theta, rtol=1e-6, atol=1e-8)
        if memory:
            together = {n: sum(one[n] for one in held.values()) for n in zero}
            assert_equal(state.memory, together, rtol=1e-6, atol=1e-8)
        if round > 1:
            samples.append(theta)
    sent = server.broadcast(state, 0)
    every = {n: torch.stack([one[n] for one in samples]) for n in theta}
    assert_equal(sent.mean, {n: v.mean(0) for n, v in every.items()}, rtol=1e-6, atol=1e-9)
    assert_equal(sent.spread, {n: v.std(0) for n, v in every.items()}, rtol=1e-5, atol=1e-9)
    own = half.posterior(sent.mean, sent, None, None)["own"]
    assert_equal(own.tensors, sent.spread)


def test_a_lost_memory_makes_all_start_anew():
    case = both("qlsd")
    half, server = case.prepared.halves.client, case.prepared.halves.server
    state, states, updates = list(half_rounds(case, 2))[-1]
    k = case.clients[0]
    total = Total()
    lost = updates[k]._replace(turns=torch.tensor(0))
    assert server.check(state, k, lost) is None
    total.add(server.statistic(state, k, lost))
    after = server.finalise(state, total.value())
    assert int(after.epoch) == 1
    assert after.turns == {}
    assert not any(v.any() for v in after.memory.values())
    work = half.begin(states[k], server.broadcast(after, k), case.samples[k])
    assert not any(v.any() for v in work.memo.memory.values())
    wrong = {n: torch.full_like(v, 300) for n, v in updates[k].codes.items()}
    assert "at most qlsd_levels" in server.check(state, k, updates[k]._replace(codes=wrong))


def test_settings_are_checked():
    for key, value in (
        ("qlsd_step", -1.0),
        ("qlsd_burn_in", -2),
        ("qlsd_levels", 0),
        ("qlsd_prior", -1.0),
    ):
        with pytest.raises(ConfigError, match=f"{key} must"):
            small("qlsd", **{key: value})


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_step_of_a_first_run_is_tame_and_cold(noise):
    """Oracle: from the gradients and the noise of two rounds with a given step, tensor by tensor;
    two of three clients reply [eq. 6] [eq. 7].
    """
    found = {}
    for given in ({}, {"qlsd_step": 1.0}, {"qlsd_step": 1.0, "qlsd_noise": 0.0}):
        case = both("qlsd", **{"qlsd_noise": noise, **given})
        server, chosen = case.prepared.halves.server, case.clients[:2]
        ((_, _, updates),) = half_rounds(case, 1)
        number = sum(int(updates[k].num_examples) for k in chosen)
        before = server.init(*case.prepared.halves.initial, tuple(case.clients))
        total = Total()
        for k in chosen:
            total.add(server.statistic(before, k, updates[k]))
        found[len(given)] = server.finalise(before, total.value()).params
    gamma = 2 / (number * len(case.clients) / len(chosen))
    widest = max(value[0].numel() for value in before.params.values() if value.ndim == 2)
    heat = 5 / (3 * widest)
    assert heat < 1
    for n, start in before.params.items():
        old, plain, drawn = (v.double().numpy() for v in (start, found[2][n], found[1][n]))
        m, xi = gamma * (old - plain), (drawn - plain) / np.sqrt(2)
        length = max(np.linalg.norm(old), 0.02 * np.sqrt(old.size))
        new = old - m / (1 + np.linalg.norm(m) / (0.1 * length)) + np.sqrt(2 * gamma * heat) * xi
        assert np.linalg.norm(m) > 0
        np.testing.assert_allclose(found[0][n].double().numpy(), new, rtol=1e-6, atol=1e-8)


def test_no_step_leads_far_however_long_the_gradient():
    value = torch.tensor([[3.0, 4.0]])
    for size in (1e-9, 1.0, 1e30):
        move = qlsd.tamed(size * torch.tensor([[1.0, 0.0]], dtype=torch.float64), value)
        expected = size / (1 + size / 0.5)
        assert float(move.norm()) == pytest.approx(expected, rel=1e-12)
        assert float(move.norm()) <= 0.5
    assert float(qlsd.tamed(torch.ones(4).double(), torch.zeros(4)).norm()) < 0.004
    assert qlsd.temperature({"w": torch.zeros(7, 3, 5, 5), "b": torch.zeros(900)}, 5.0) == 5 / 225
    assert qlsd.temperature({"b": torch.zeros(900)}, 5.0) == 1.0


def test_samples_of_the_way_to_the_posterior_are_forgotten():
    """Oracle: mean and variance of the samples since the last start, by numpy."""
    starts = [round for round in range(1, 400) if qlsd.starts_anew(round)]
    assert starts == [3, 6, 11, 22, 44, 88, 176, 352]
    case = both("qlsd", qlsd_noise=1.0)
    server = case.prepared.halves.server
    state = server.init(*case.prepared.halves.initial, tuple(case.clients))
    rng, seen = np.random.default_rng(0), []
    for round in range(1, 15):
        sample = {n: torch.tensor(rng.normal(size=v.shape)) for n, v in state.params.items()}
        seen.append(sample)
        state = server.counted(state._replace(params=sample, rounds=torch.tensor(round)))
        since = seen[max((one - 1 for one in starts if one <= round), default=0) :]
        assert int(state.kept) == len(since)
        spread = server.broadcast(state, 0).spread
        for n in sample:
            rows = np.stack([one[n].numpy() for one in since])
            np.testing.assert_allclose(state.mean[n].numpy(), rows.mean(0), rtol=1e-9, atol=1e-12)
            if len(since) > 1:
                np.testing.assert_allclose(spread[n].numpy(), rows.std(0, ddof=1), rtol=1e-9)
