"""FedNP's regulariser for stacks: its function with slopes of its own against the plain formula
differentiated by torch, once and twice, under vmap and without. A client's new factor, number by
number.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch.func import grad, vmap

from bayflower.maths import npn, propagation
from bayflower.maths.gaussian import Diagonal
from bayflower.maths.propagation import NAMES, Regulariser, new_factor, plain, regulariser
from bayflower.maths.tilted import make_slopes, nodes_of, trapezoid
from bayflower.tree import stack, take, to

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


def factor_by_hand(f, cavity, own, damping):
    """Of one number: a sum over a million points, then a step from the old factor."""
    precision, shift = cavity
    mean, std = shift / precision, precision**-0.5
    f = max(min(f, 5 / std), -5 / std)
    z = torch.linspace(mean - 12 * std, mean + 12 * std, 1_000_001, dtype=F64)
    density = (-0.5 * ((z - mean) / std).square()).exp() * torch.sigmoid(f * z)
    z_mean = float((density * z).sum() / density.sum())
    z_var = float((density * (z - z_mean).square()).sum() / density.sum())
    site = 1 / z_var - precision, z_mean / z_var - shift
    return [old + damping * (new - old) for old, new in zip(own, site, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_new_factor_is_the_damped_quotient_of_tilted_and_cavity(device, stacked, monkeypatch):
    """Five times with other numbers: a GPU records it in the second, and must not overwrite what it
    gave before.
    """
    if stacked and device == "cpu":
        monkeypatch.setattr(propagation, "has_kernels", lambda f: True)
        monkeypatch.setattr(propagation, "factor_nodes", lambda *_: None)
    make, damping, found = torch.Generator().manual_seed(2), 0.3, []
    for _ in range(5):
        f, shift, old_shift = (torch.randn(3, 4, generator=make, dtype=F64) for _ in range(3))
        precision, old = (torch.rand(3, 4, generator=make, dtype=F64) for _ in range(2))
        f[1, 2], f[2] = 40.0, float("nan")  # far beyond the limit; nothing known of a client
        cavity, own = Diagonal(1 + precision, shift), Diagonal(old, old_shift)

        def of(f, cavity, own):
            return new_factor(f, cavity, own, trapezoid, damping)

        given = to((f, cavity, own), device)
        if stacked:
            change, after = vmap(of)(*given)
        else:
            change, after = stack([of(*take(given, k)) for k in range(3)])
        found.append((f, cavity, own, change, after))
    for f, cavity, own, change, after in found:
        for name in Diagonal._fields:
            start, moved, end = (getattr(one, name).cpu() for one in (own, change, after))
            assert torch.equal(end, start + moved)
            assert not moved[2].any()
        for k in range(2):
            for d in range(4):
                numbers = [[float(one[k, d]) for one in both] for both in (cavity, own)]
                want = factor_by_hand(float(f[k, d]), *numbers, damping)
                got = [float(one[k, d]) for one in after]
                near = 5e-3 if (k, d) == (1, 2) else 1e-6  # 65 points are few for so steep a site
                assert got == pytest.approx(want, rel=near, abs=1e-6), (k, d)
