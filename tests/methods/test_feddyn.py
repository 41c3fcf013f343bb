"""FedDyn against three rounds in plain torch, and its promise: clients' drifts cancel at the
optimum of the whole.
"""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, mean, numbers, plain_sgd, zeros

from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.strategies.fedavg import Update
from bayflower.strategies.feddyn import Config, Server

ALPHA = 0.3


def test_three_rounds_equal_plain_torch():
    """[eq. 1], [eq. 2], [eq. 3], [eq. 4] with loops."""
    case = both("feddyn", dyn_alpha=ALPHA)
    theta, h = case.start, zeros(case.start)
    slopes = {client: zeros(case.start) for client in case.clients}
    for round, (state, states, updates) in enumerate(half_rounds(case, 3), start=1):
        models = {}
        for client in case.clients:

            def extra(module, x, slope=slopes[client], theta=theta):
                return sum(
                    -(slope[n] * v).sum() + ALPHA / 2 * ((v - theta[n]) ** 2).sum()
                    for n, v in module.named_parameters()
                )

            models[client] = numbers(plain_sgd(case, theta, client, round, extra)[0])
            slopes[client] = {
                n: v - ALPHA * (models[client][n] - theta[n]) for n, v in slopes[client].items()
            }
            assert_equal(updates[client].params, models[client])
            assert_equal(states[client].slope, slopes[client])
        plain = mean(case, models, weighted=False)
        h = {n: v - ALPHA / 3 * sum(models[c][n] - theta[n] for c in models) for n, v in h.items()}
        theta = {n: plain[n] - h[n] / ALPHA for n in plain}
        assert_equal(state.params, theta)
        assert_equal(state.drift, h)


def test_absent_clients_count_in_m():
    """[eq. 3]: two of five clients answer; h moves by their drifts over m = 5."""
    half = Server(Config(dyn_alpha=0.5), None)
    state = half.init({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}, {}, (0, 1, 2, 3, 4))
    total = Total()
    for client, value in ((1, [2.0, 2.0]), (4, [4.0, 0.0])):
        total.add(
            half.statistic(
                state,
                client,
                Update(
                    torch.tensor(7 + client), {"w": torch.tensor(value, dtype=torch.float64)}, {}
                ),
            )
        )
    state = half.finalise(state, total.value())
    torch.testing.assert_close(
        state.drift["w"], torch.tensor([-0.5 / 5 * 4.0, 0.5 / 5 * 2.0], dtype=torch.float64)
    )
    torch.testing.assert_close(
        state.params["w"], torch.tensor([3.0 + 0.8, 1.0 - 0.4], dtype=torch.float64)
    )


def test_quadratic_clients_meet_at_the_optimum_of_the_whole():
    """Clients a_k/2 (w − b_k)² with exact local minima: FedDyn ends at Σ a b / Σ a, where plain
    averaging does not.
    """
    a, b, alpha = [1.0, 5.0, 0.2], [0.0, 1.0, -4.0], 0.7
    half = Server(Config(dyn_alpha=alpha), None)
    state = half.init({"w": torch.zeros(1, dtype=torch.float64)}, {}, (0, 1, 2))
    slopes = [torch.zeros(1, dtype=torch.float64) for _ in a]
    for _ in range(200):
        total, theta = Total(), state.params["w"]
        for k in range(3):
            mine = (a[k] * b[k] + slopes[k] + alpha * theta) / (a[k] + alpha)
            slopes[k] = slopes[k] - alpha * (mine - theta)
            total.add(half.statistic(state, k, Update(torch.tensor(1), {"w": mine}, {})))
        state = half.finalise(state, total.value())
    assert float(state.params["w"]) == pytest.approx(
        sum(x * y for x, y in zip(a, b, strict=True)) / sum(a), abs=1e-6
    )


def test_alpha_must_be_positive():
    with pytest.raises(ConfigError, match="dyn_alpha must be positive and finite, got 0"):
        small("feddyn", dyn_alpha=0)
