"""FedNP's regulariser for stacks: its function with slopes of its own against the plain formula
differentiated by torch, once and twice, under vmap and without.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from bayflower.maths import npn, propagation
from bayflower.maths.gaussian import Diagonal
from bayflower.maths.propagation import NAMES, Regulariser, plain, regulariser
from bayflower.maths.tilted import make_slopes, nodes_of, trapezoid

F64 = torch.float64
SETTINGS = (0.2, 0.7, 65)  # ε, weight, nodes


def inputs(clients: int, dim: int = 3, wide: int = 4, outputs: int = 5) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    f, shift, target = (
        torch.randn(clients, size, generator=make, dtype=F64) for size in (dim, dim, outputs)
    )
    layers = []
    for rows, columns in ((dim, wide), (wide, outputs)):
        for shape in ((rows, columns), (rows, columns), (columns,), (columns,)):
            layers.append(torch.randn(clients, *shape, generator=make, dtype=F64))
    return [2 * f, shift, 1 + shift.abs(), *layers, target]


def with_form(*tensors):
    return Regulariser.apply(*tensors, *SETTINGS)[0]


def without(*tensors):
    return plain(*tensors, *SETTINGS)


def test_the_plain_formula_is_the_two_divergences():
    f, shift, precision, *layers, target = (one[0] for one in inputs(1))
    named = dict(zip(NAMES, layers, strict=True))
    cavity = Diagonal(precision, shift)
    z = propagation.tilted(f, cavity, trapezoid)
    q = npn.forward(named, npn.Gauss(z.mean, z.variance))
    want = npn.kl_theta(q, target, 0.2) + npn.kl_z(z.mean, z.variance)
    got = regulariser(f, cavity, named, target, trapezoid, 0.2, 0.7)
    assert torch.equal(got, 0.7 * want)
    assert torch.equal(got, without(f, shift, precision, *layers, target))


@pytest.mark.parametrize("stacked", [False, True])
def test_slopes_are_those_of_the_plain_formula(stacked):
    places = (0, *range(3, 12))
    one, two = (grad(fn, argnums=places) for fn in (with_form, without))
    if stacked:
        got, want = (vmap(fn)(*inputs(3)) for fn in (one, two))
    else:
        got, want = (fn(*(value[0] for value in inputs(1))) for fn in (one, two))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert float(b.norm()) > 0


def test_second_slopes_are_those_of_the_plain_formula():
    def length(fn):
        def of(f, weight, target, *others):
            shift, precision, *layers = others
            tensors = (shift, precision, weight, *layers, target)
            found = grad(fn, argnums=(0, 3, 11))(f, *tensors)
            return sum(value.square().sum() for value in found)

        return vmap(grad(of, argnums=(0, 1, 2)))

    f, shift, precision, weight, *layers, target = inputs(3)
    order = (f, weight, target, shift, precision, *layers)
    for a, b in zip(length(with_form)(*order), length(without)(*order), strict=True):
        torch.testing.assert_close(a, b)
        assert float(b.norm()) > 0


def test_what_all_clients_share_may_have_no_axis_of_clients():
    tensors = inputs(3)
    tensors[1], tensors[2] = tensors[1][0], tensors[2][0]
    dims = (0, None, None, *(0,) * 9)
    got, want = (vmap(grad(fn), in_dims=dims)(*tensors) for fn in (with_form, without))
    torch.testing.assert_close(got, want)


def test_only_the_trapezoid_rule_has_nodes():
    assert nodes_of(make_slopes("trapezoid")) == 65
    assert nodes_of(make_slopes("quadrature", 9)) == 9
    assert [nodes_of(make_slopes(name)) for name in ("thm2", "logz", "probit")] == [None] * 3
