"""FedNP's regulariser of a batch's features: value and slopes against those of the f-layer's mean
and the regulariser one after the other, written out and left to a step.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad_and_value, vmap

from bayflower.maths import fromfeatures, propagation
from bayflower.maths.fromfeatures import LAYER, TENSORS, FromFeatures, regularised
from bayflower.maths.gaussian import Diagonal
from bayflower.maths.tilted import trapezoid
from bayflower.stacked import meanlayer, products

F64 = torch.float64
FEATURES, DIM, WIDE, OUTPUTS = 6, 4, 3, 10
EPSILON, STRENGTH, NODES = 0.1, 0.01, 65
RATE = 0.3


def inputs(dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Return x, weight, bias, mask, shift, precision, the layers and the target of three clients;
    one has two samples, one has none.
    """
    make = torch.Generator().manual_seed(3)

    def draw(*shape: int, at: float = 0.0, size: float = 1.0) -> torch.Tensor:
        return at + size * torch.randn(3, *shape, generator=make, dtype=F64)

    layers = [
        *(draw(DIM, WIDE), draw(DIM, WIDE, at=-3), draw(WIDE), draw(WIDE, at=-2)),
        *(draw(WIDE, OUTPUTS), draw(WIDE, OUTPUTS, at=-3), draw(OUTPUTS), draw(OUTPUTS, at=-2)),
    ]
    mask = torch.ones(3, 5, dtype=F64)
    mask[1, 2:], mask[2] = 0, 0
    cavity = draw(DIM), 1 + draw(DIM).abs()
    layer = draw(5, FEATURES), draw(FEATURES, DIM), draw(DIM), mask
    return [one.to(dtype) for one in (*layer, *cavity, *layers, draw(OUTPUTS, size=0.3))]


def with_form(*tensors):
    return FromFeatures.apply(*tensors, EPSILON, STRENGTH, NODES)[0]


def without(*tensors):
    x, weight, bias, mask, *others = tensors
    f = meanlayer.plain(x, weight, bias, mask)
    return propagation.plain(f, *others, EPSILON, STRENGTH, NODES)


LEARNED = (0, 1, 2, *range(LAYER + 2, TENSORS))


@pytest.mark.parametrize("stacked", [False, True])
def test_value_and_slopes_are_those_of_the_layer_and_the_regulariser(stacked):
    def length(fn):
        return grad_and_value(lambda *tensors: fn(*tensors).sin(), argnums=LEARNED)

    if stacked:
        got, want = (vmap(length(fn))(*inputs()) for fn in (with_form, without))
    else:
        got, want = (length(fn)(*(one[0] for one in inputs())) for fn in (with_form, without))
    torch.testing.assert_close(got, want)
    assert all(float(one.norm()) > 0 for one in want[0])


def test_a_step_of_plain_descent_uses_it(monkeypatch):
    """Its gradients are those without it, and nothing else uses it."""
    calls = []
    found = fromfeatures.stacked_values
    monkeypatch.setattr(
        fromfeatures, "stacked_values", lambda *args: calls.append(1) or found(*args)
    )
    for place in (meanlayer, fromfeatures):
        monkeypatch.setattr(place, "has_form", lambda *args: True)
    x, weight, bias, mask, shift, precision, *layers, target = inputs(torch.float32)
    names = propagation.NAMES
    params = {"f": weight, "b": bias, "head": target, **dict(zip(names, layers, strict=True))}

    def loss(params, x, mask, shift, precision):
        own = {name: params[name] for name in names}
        layer, cavity = (params["f"], params["b"]), Diagonal(precision, shift)
        known = (cavity, own, params["head"], trapezoid, EPSILON, STRENGTH)
        return regularised(x, layer, mask, *known)

    step = vmap(grad_and_value(loss))
    others = (x, mask, shift, precision)
    want = step(params, *others)
    assert not calls
    with products.products(params) as left:
        got = step(params, *others)
    assert calls
    assert not left.found  # on a CPU they are written
    torch.testing.assert_close(got, want)
