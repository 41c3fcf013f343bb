"""A linear layer's mean over a batch, with slopes of its own: against the plain formula, once and
twice differentiated, and in a step that leaves its slopes to the end.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.func import grad, vmap

from bayflower import stacked as package
from bayflower.stacked import meanlayer, products
from bayflower.stacked.meanlayer import LayerMean, layer_mean, plain

F64 = torch.float64


def inputs(clients: int = 3, samples: int = 4, features: int = 5, outputs: int = 2):
    make = torch.Generator().manual_seed(0)
    shapes = ((samples, features), (features, outputs), (outputs,))
    x, weight, bias = (torch.randn(clients, *s, generator=make, dtype=F64) for s in shapes)
    mask = torch.ones(clients, samples, dtype=F64)
    mask[1, 1:], mask[2] = 0, 0
    return x, weight, bias, mask


def with_form(*tensors):
    return LayerMean.apply(*tensors)[0]


def test_the_mean_is_over_the_samples_that_count():
    x, weight, bias, mask = inputs()
    got = vmap(layer_mean)(x, weight, bias, mask)
    torch.testing.assert_close(got[0], (x[0] @ weight[0] + bias[0]).mean(0))
    torch.testing.assert_close(got[1], x[1, 0] @ weight[1] + bias[1])
    assert torch.equal(got[2], torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("stacked", [False, True])
def test_slopes_are_those_of_the_plain_formula(stacked):
    def length(fn):
        return lambda *tensors: fn(*tensors).sin().sum()

    def again(fn):
        def of(*tensors):
            found = grad(length(fn), argnums=(0, 1, 2))(*tensors)
            return sum(value.square().sum() for value in found)

        return of

    for make in (length, again):
        one, two = (grad(make(fn), argnums=(0, 1, 2)) for fn in (with_form, plain))
        if stacked:
            got, want = (vmap(fn)(*inputs()) for fn in (one, two))
        else:
            got, want = (fn(*(value[0] for value in inputs())) for fn in (one, two))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
            assert float(b.norm()) > 0


@pytest.fixture
def called(monkeypatch):
    """Put formulas in the kernels' place; return the names of those that are called."""
    made, names = ModuleType("bayflower.stacked.meankernels"), []

    def shares(mask):
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def mean(x, weight, bias, mask):
        names.append("mean")
        pooled = torch.einsum("ab,abf->af", shares(mask), x)
        whole = shares(mask).sum(1, keepdim=True)
        return torch.einsum("af,afd->ad", pooled, weight) + whole * bias, pooled

    def slope_of_x(g, weight, mask):
        names.append("slope_of_x")
        return torch.einsum("ab,afd,ad->abf", shares(mask), weight, g)

    def slopes(g, weight, mask, pooled):
        to_x = slope_of_x(g, weight, mask)
        names[-1] = "slopes"
        return to_x, pooled[:, :, None] * g[:, None], shares(mask).sum(1, keepdim=True) * g

    def descend(g, mask, pooled, weight, bias, rate):
        names.append("descend")
        weight.sub_(rate * pooled[:, :, None] * g[:, None])
        bias.sub_(rate * shares(mask).sum(1, keepdim=True) * g)

    for one in (mean, slope_of_x, slopes, descend):
        setattr(made, one.__name__, one)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(package, "meankernels", made, raising=False)
    monkeypatch.setattr(meanlayer, "has_kernels", lambda x: True)
    return names


def step_of(loss, params, rate, x, mask):
    """Take a step; return the gradient of x and what was left to the end."""
    with products.products(params) as left:
        slopes, to_x = vmap(grad(loss, argnums=(0, 1)))(params, x, mask)
    left.descend(rate)
    for name, slope in left.others(slopes).items():
        params[name].sub_(rate * slope)
    return to_x, left.found


def test_a_step_takes_its_slopes_at_its_end(called):
    x, weight, bias, mask = (one.float() for one in inputs())
    params, rate = {"weight": weight, "bias": bias}, 0.3

    def loss(fn):
        def of(params, x, mask):
            found = fn(x, params["weight"], params["bias"], mask).sin().sum()
            return found + params["weight"].square().sum()  # a gradient beside

        return of

    want, want_x = vmap(grad(loss(plain), argnums=(0, 1)))(params, x, mask)
    after = {name: value - rate * want[name] for name, value in params.items()}
    to_x, found = step_of(loss(layer_mean), params, rate, x, mask)
    assert called == ["mean", "slope_of_x", "descend"]
    assert len(found) == 1
    torch.testing.assert_close(to_x, want_x)
    torch.testing.assert_close(params, after)


def test_only_parameters_themselves_and_first_derivatives_are_left_to_the_end(called):
    x, weight, bias, mask = (one.float() for one in inputs())

    def scaled(fn):
        return lambda params, x, mask: fn(x, 2 * params["weight"], params["bias"], mask).sin().sum()

    def fixed(fn):
        own = torch.ones(2)
        return lambda params, x, mask: fn(x, params["weight"], own, mask).sin().sum()

    def nested(fn):
        def of(params, x, mask):
            def inner(params):
                return fn(x, params["weight"], params["bias"], mask).sin().sum()

            return sum(value.square().sum() for value in grad(inner)(params).values())

        return of

    # the outer derivative of a nested one goes through the layer itself, too
    for make, calls, number in (
        (scaled, ["mean", "slopes"], 0),
        (fixed, ["mean", "slopes"], 0),
        (nested, ["mean", "slopes", "slope_of_x", "descend"], 1),
    ):
        params, rate = {"weight": weight.clone(), "bias": bias.clone()}, 0.3
        want, want_x = vmap(grad(make(plain), argnums=(0, 1)))(params, x, mask)
        after = {name: value - rate * want[name] for name, value in params.items()}
        called.clear()
        to_x, found = step_of(make(layer_mean), params, rate, x, mask)
        assert (called, len(found)) == (calls, number), make.__name__
        torch.testing.assert_close(to_x, want_x)
        torch.testing.assert_close(params, after)
