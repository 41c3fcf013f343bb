"""A linear layer's mean over a batch, with slopes of its own: against the plain formula, once and
twice differentiated.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

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
