"""MAML: the meta-gradient of [eq. 2] through [eq. 1] against finite differences and plain double
backward.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import small_prepared
from metaplain import SETTINGS, assert_rounds_agree, meta_loss, numeric, slopes, tiny

from bayflower.clients.maml import Client
from bayflower.config import Training
from bayflower.contract import Work
from bayflower.maths.meta import Way, hessian_free, second_order
from bayflower.networks.model import Batch
from bayflower.strategies.maml import Config


@pytest.mark.parametrize("steps", [1, 3])
def test_meta_gradient_against_finite_differences(steps):
    """[eq. 2] at a rate so large that the second derivatives matter."""
    model, params, groups = tiny()
    rate = 0.8
    half = Client(Config(inner_lr=rate, inner_steps=steps), Training(), model)
    phase = half.phases("train")[0]
    grads, _, value = half.gradient(phase, Work(params, {}, None), groups, {})
    assert float(value) == pytest.approx(meta_loss(model, params, groups, rate, steps), rel=1e-12)
    want = numeric(model, params, groups, rate, steps)
    first, _, _ = half.gradient(phase._replace(batches=1), Work(params, {}, None), (groups[1],), {})
    for name, slope in want.items():
        torch.testing.assert_close(grads[name], slope, rtol=1e-6, atol=1e-9)
    assert max(float((first[name] - want[name]).abs().max()) for name in want) > 1e-2


def test_parameters_that_are_not_inner_have_their_mixed_derivatives():
    """A scale of the support's loss that the inner step does not move, but whose gradient passes
    through it.
    """
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def loss(params, buffers, group):
        power = (params["theta"] - x).square().sum() * params["scale"].exp()
        return (power if group == 0 else (params["theta"] * x).sum().square()), buffers

    params = {
        "theta": torch.tensor([0.3, 0.4], dtype=torch.float64),
        "scale": torch.tensor(0.2, dtype=torch.float64),
    }
    way = Way(("theta",), 0.1)

    def whole(scale: float) -> float:
        theta = params["theta"] - 0.1 * 2 * (params["theta"] - x) * math.exp(scale)
        return float((theta * x).sum().square())

    for grads, _, _ in (
        second_order(loss, params, {}, way),
        hessian_free(loss, params, {}, way, 1e-4),
    ):
        assert float(grads["scale"]) == pytest.approx(
            (whole(0.2 + 1e-6) - whole(0.2 - 1e-6)) / 2e-6, rel=1e-6
        )


def test_two_rounds_equal_plain_torch():
    """[eq. 1] and [eq. 2] with double backward, clients of unequal size, a server rate and
    momentum.
    """

    def step(loss, params, groups):
        (x, y), (x_query, y_query) = groups
        slope = slopes(loss(params, x, y), params, True)
        fast = {name: value - 0.3 * slope[name] for name, value in params.items()}
        return slopes(loss(fast, x_query, y_query), params, False)

    assert_rounds_agree(small_prepared("maml", inner_lr=0.3, adapt_steps=1, **SETTINGS), step)


def test_buffers_of_both_passes_are_kept():
    """BatchNorm counts the support's pass and the query's."""
    prepared = small_prepared("maml", model="mlp-bn")
    _, client, _, (params, buffers) = prepared.halves
    draw = torch.Generator().manual_seed(0)
    shape = prepared.federation.clients[0].x_train.shape[1:]
    groups = tuple(
        Batch(torch.randn(6, *shape, generator=draw), torch.arange(6), torch.ones(6))
        for _ in range(2)
    )
    _, after, _ = client.gradient(
        client.phases("train")[0], Work(params, buffers, None), groups, {}
    )
    counters = [value for name, value in after.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(int(value) == 2 for value in counters)
