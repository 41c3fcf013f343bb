"""PerFedAvg: the Hessian-free gradient [eq. 1] [eq. 2] against its formula, and against MAML's
exact one.
"""

from __future__ import annotations

import pytest
import torch
from conftest import small_prepared
from metaplain import SETTINGS, assert_rounds_agree, numeric, slopes, tiny

from bayflower.clients.perfedavg import Client
from bayflower.config import Training
from bayflower.contract import Work
from bayflower.strategies.perfedavg import Config

DELTA = 0.01


@pytest.mark.parametrize("steps", [1, 2])
def test_it_tends_to_the_exact_gradient_as_the_square_of_delta(steps):
    """Central differences: a tenth of delta, a hundredth of the error."""
    model, params, groups = tiny()
    want = numeric(model, params, groups, 0.8, steps)
    errors = []
    for delta in (0.3, 0.03):
        half = Client(Config(inner_lr=0.8, inner_steps=steps, hf_delta=delta), Training(), model)
        grads, _, _ = half.gradient(half.phases("train")[0], Work(params, {}, None), groups, {})
        errors.append(max(float((grads[name] - want[name]).abs().max()) for name in want))
    assert errors[0] < 0.05
    assert 60 < errors[0] / errors[1] < 170


def test_two_rounds_equal_plain_torch():
    """[eq. 1] and [eq. 2] written out, clients of unequal size, a server rate and momentum."""

    def step(loss, params, groups):
        (x, y), (x_query, y_query) = groups
        slope = slopes(loss(params, x, y), params, False)
        fast = {
            name: (value - 0.3 * slope[name]).detach().requires_grad_()
            for name, value in params.items()
        }
        g = slopes(loss(fast, x_query, y_query), fast, False)
        length = torch.cat([value.reshape(-1) for value in g.values()]).norm()
        ends = []
        for sign in (1, -1):
            there = {
                name: (value + sign * DELTA * g[name] / length).detach().requires_grad_()
                for name, value in params.items()
            }
            ends.append(slopes(loss(there, x, y), there, False))
        return {
            name: value - 0.3 * (ends[0][name] - ends[1][name]) * length / (2 * DELTA)
            for name, value in g.items()
        }

    assert_rounds_agree(small_prepared("perfedavg", inner_lr=0.3, hf_delta=DELTA, **SETTINGS), step)


def test_a_gradient_of_zero_is_no_trouble():
    """Where the query's gradient vanishes there is no direction for the difference; the answer is
    0, not NaN.
    """
    model, params, groups = tiny()
    half = Client(Config(), Training(), model)
    nothing = tuple(group._replace(mask=torch.zeros_like(group.mask)) for group in groups)
    grads, _, _ = half.gradient(half.phases("train")[0], Work(params, {}, None), nothing, {})
    assert all(bool((value == 0).all()) for value in grads.values())
