"""FedMAP against golden vectors, a slow round in plain torch, and a log-sum-exp oracle of its
weights.
"""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bayflower.clients.fedmap import Client
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.papers import build
from bayflower.rounds import solo
from bayflower.strategies.fedmap import BIN, Config, Server, State, Update, split


def server(**config) -> Server:
    return Server(Config(**config), None)


def update(log_weight: float, theta: torch.Tensor, count: int = 1) -> Update:
    return Update(torch.tensor(count), torch.tensor(log_weight, dtype=torch.float64), {"w": theta})


def aggregate(log_weights: list[float], thetas: torch.Tensor) -> State:
    half = server()
    state = State({"w": torch.zeros_like(thetas[0])}, torch.zeros((), dtype=torch.float64))
    total = Total()
    for client, (log_weight, theta) in enumerate(zip(log_weights, thetas, strict=True)):
        total.add(half.statistic(state, client, update(log_weight, theta)))
        total.drop(half.negligible(total.names()))
    return half.finalise(state, total.value())


def triple(log_weights: list[float], thetas: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """The oracle: SPEC's running log-sum-exp (m, a, b), merged pair by pair."""
    m, a, b = -math.inf, 0.0, torch.zeros_like(thetas[0])
    for log_weight, theta in zip(log_weights, thetas, strict=True):
        top = max(m, log_weight)
        a = math.exp(m - top) * a + math.exp(log_weight - top)
        b = math.exp(m - top) * b + math.exp(log_weight - top) * theta
        m = top
    return m, a, b


@pytest.mark.parametrize("mode", ["sum", "mean", "count"])
def test_golden_weights_and_aggregate(golden, mode):
    """[eq. 8] in three readings (E-M2) and [eq. 9], against the golden case."""
    case, want = golden["fedmap_aggregate"], golden["fedmap_aggregate"]["modes"][mode]
    half = Client(Config(sigma2=case["sigma2"], weights=mode), Training(), build("mlp", (4,), 2))
    logs = []
    for nll, count, dist2 in zip(case["sum_nll"], case["n"], case["dist2"], strict=True):
        prior = half.prior(
            {"w": torch.tensor([math.sqrt(dist2)], dtype=torch.float64)},
            {"w": torch.zeros(1, dtype=torch.float64)},
        )
        logs.append(
            float(
                half.log_weight(
                    torch.tensor(nll, dtype=torch.float64),
                    prior,
                    torch.tensor(count, dtype=torch.float64),
                )
            )
        )
    assert logs == pytest.approx(want["log_w"], rel=2e-5)
    thetas = torch.tensor(case["theta"], dtype=torch.float64)
    after = aggregate(logs, thetas)
    torch.testing.assert_close(
        after.params["w"], torch.tensor(want["gamma"], dtype=torch.float64), rtol=2e-5, atol=1e-9
    )
    assert float(after.effective_clients) == pytest.approx(want["effective_clients"], rel=2e-5)
    reference, weight, _ = triple(logs, thetas)
    assert reference == pytest.approx(want["merged_reference"], rel=2e-5)
    assert weight == pytest.approx(want["merged_weight"], rel=2e-5)
    assert [math.exp(one - reference) / weight for one in logs] == pytest.approx(
        want["weights"], rel=2e-5
    )


def test_golden_prior_scaling(golden):
    """E-M3: the minimiser of the mean NLL plus prior [eq. 7], not of the summed NLL plus prior
    [eq. 6].
    """
    case = golden["fedmap_prior_scaling"]
    half = Client(Config(sigma2=case["sigma2"]), Training(), build("mlp", (4,), 2))
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    x = torch.ones(case["n"], dtype=torch.float64)

    def minimiser(scale: float) -> float:
        stepper = torch.optim.LBFGS(
            [theta], max_iter=100, tolerance_grad=1e-14, tolerance_change=1e-16
        )

        def closure():
            stepper.zero_grad()
            loss = scale * (0.5 * (x - theta) ** 2).mean() + half.prior(
                {"w": theta}, {"w": torch.zeros(1, dtype=torch.float64)}
            )
            loss.backward()
            return loss

        for _ in range(5):
            stepper.step(closure)
        return float(theta.detach())

    assert minimiser(1.0) == pytest.approx(case["argmin_eq7"], rel=2e-5)
    assert minimiser(case["n"]) == pytest.approx(case["argmin_eq6"], rel=2e-5)


@pytest.mark.parametrize("mode", ["mean", "count", "sum", "uniform"])
def test_two_rounds_equal_plain_torch(mode):
    """[eq. 7] with a warm start at the own model, [eq. 8] and [eq. 9]: an ordinary module,
    torch.optim, loops and exp.
    """
    sigma2, tau = 0.7, 0.4
    prepared = small_prepared(
        "fedmap",
        sigma2=sigma2,
        tau=tau,
        weights=mode,
        optimizer="sgd",
        lr=0.1,
        momentum=0.5,
        dtype="float64",
    )
    run, halves = prepared.run, prepared.halves
    params, buffers = halves.initial
    state = halves.server.init(params, buffers, ())
    clients = prepared.federation.clients[:3]
    samples = {
        data.client: solo.samples(data, torch.device("cpu"), torch.float64).train
        for data in clients
    }
    states = {data.client: halves.client.init(params, buffers) for data in clients}
    gamma = copy.deepcopy(params)
    personal = {data.client: copy.deepcopy(params) for data in clients}
    for round in (1, 2):
        total, logs = Total(), {}
        broadcast = halves.server.broadcast(state, 0)
        for data in clients:
            client, own = data.client, samples[data.client]
            states[client], sent, _ = solo.train(
                halves.client, states[client], broadcast, own, seed=0, client=client, round=round
            )
            total.add(halves.server.statistic(state, client, sent))

            module = halves.model.factory().double()
            module.load_state_dict(personal[client])
            stepper = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
            phase = run.training.phase("local")
            for (rows,) in batches.plan(
                len(own.y),
                phase,
                seed=0,
                client=client,
                round=round,
                purpose="train",
                coupled=False,
            ):
                stepper.zero_grad()
                loss = nn.functional.cross_entropy(module(own.x[rows]), own.y[rows])
                for name, value in module.named_parameters():
                    loss = loss + ((value - gamma[name]) ** 2).sum() / (2 * sigma2)
                loss.backward()
                stepper.step()
            personal[client] = {
                name: value.detach().clone() for name, value in module.named_parameters()
            }
            with torch.no_grad():
                nll = sum(
                    float(nn.functional.cross_entropy(module(own.x[i : i + 1]), own.y[i : i + 1]))
                    for i in range(len(own.y))
                )
            distance = sum(
                float(((personal[client][name] - gamma[name]) ** 2).sum()) for name in gamma
            )
            objective = nll / len(own.y) + distance / (2 * sigma2)
            logs[client] = {
                "mean": -objective / tau,
                "count": math.log(len(own.y)) - objective / tau,
                "sum": -nll - distance / (2 * sigma2),
                "uniform": 0.0,
            }[mode]
            assert float(sent.log_weight) == pytest.approx(logs[client], rel=1e-8, abs=1e-12)
            for name, value in personal[client].items():
                torch.testing.assert_close(
                    states[client].params[name], value, rtol=1e-8, atol=1e-10
                )
        state = halves.server.finalise(state, total.value())
        peak = max(logs.values())
        weights = {client: math.exp(one - peak) for client, one in logs.items()}
        gamma = {
            name: sum(weights[c] * personal[c][name] for c in weights) / sum(weights.values())
            for name in gamma
        }
        for name, value in gamma.items():
            torch.testing.assert_close(state.params[name], value, rtol=1e-7, atol=1e-10)


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_weights_of_any_size_equal_the_log_sum_exp(logs, seed):
    """E-M1: weights down to e^{−100000} neither under- nor overflow [eq. 9]."""
    thetas = torch.randn(
        len(logs), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    _, weight, shift = triple(logs, thetas)
    after = aggregate(logs, thetas)
    torch.testing.assert_close(after.params["w"], shift / weight, rtol=1e-9, atol=1e-12)
    peak = max(logs)
    shares = [math.exp(one - peak) / weight for one in logs]
    assert float(after.effective_clients) == pytest.approx(
        1 / sum(share**2 for share in shares), rel=1e-9
    )


@pytest.mark.parametrize("bins", [-7, -1, 0, 3])
def test_weights_on_both_sides_of_a_bin_count_alike(bins):
    """Two nearly equal weights that fall into neighbouring bins: neither may be dropped [eq. 9]."""
    edge = (bins * BIN - BIN // 2) * math.log(2)
    logs = [edge - 0.3, edge + 0.2, edge - 1.1]
    assert len({split(one)[0] for one in logs}) == 2
    thetas = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    _, weight, shift = triple(logs, thetas)
    for order in itertools.permutations(range(3)):
        after = aggregate([logs[i] for i in order], thetas[list(order)])
        torch.testing.assert_close(after.params["w"], shift / weight, rtol=1e-10, atol=1e-12)
        assert 2 < float(after.effective_clients) < 3


def test_any_order_gives_the_same_bits_though_bins_are_dropped():
    logs = [-3000.0, -90.0, -0.3, -88.0, -200.0, -700.0]
    thetas = torch.randn(len(logs), 50, generator=torch.Generator().manual_seed(1))
    results = [
        aggregate([logs[i] for i in order], thetas[list(order)])
        for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37)
    ]
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_memory_holds_two_bins_at_most():
    half, total = server(), Total()
    state = State({"w": torch.zeros(3)}, torch.zeros((), dtype=torch.float64))
    order = list(range(-40, 0))
    random.Random(0).shuffle(order)
    for bin_number in order:
        total.add(half.statistic(state, 0, update(bin_number * BIN * math.log(2), torch.randn(3))))
        total.drop(half.negligible(total.names()))
        assert len({name.split("/")[1] for name in total.names()}) <= 2


@given(st.floats(-1e6, 1e6))
def test_split_keeps_the_weight(log_weight):
    number, mantissa = split(log_weight)
    assert 2.0 ** (-BIN / 2) <= mantissa < 2.0 ** (BIN / 2)
    assert math.log(mantissa) + number * BIN * math.log(2) == pytest.approx(log_weight, abs=1e-9)


def test_usual_weights_share_one_bin():
    assert {split(one)[0] for one in (0.0, -0.7, -10.0, 7.0)} == {0}


def test_a_lone_client_becomes_gamma_to_the_bit():
    theta = torch.randn(100) * torch.logspace(-20, 5, 100)
    assert torch.equal(aggregate([-0.37], theta[None]).params["w"], theta)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sigma2", -1, "sigma2 must be positive and finite, got -1"),
        ("sigma2", "inf", "sigma2 must be positive"),
        ("tau", 0, "tau must be positive"),
        ("weights", "median", "weights must be one of mean, count, sum, uniform, got 'median'"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        small("fedmap", **{key: value})


def test_a_reply_with_an_absurd_weight_is_refused():
    """A client cannot seize gamma by an infinite weight; [eq. 3] and [eq. 5] give no reason for one
    (E-M4, E-M5).
    """
    half = server()
    state = State({"w": torch.zeros(2)}, torch.zeros(()))
    assert half.check(state, 0, update(-3.0, torch.zeros(2))) is None
    assert "log_weight" in half.check(state, 0, update(2.0**41, torch.zeros(2)))
    assert "num_examples" in half.check(state, 0, update(-3.0, torch.zeros(2), count=0))
