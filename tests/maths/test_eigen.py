"""Eigenvectors and pseudo-inverses of many symmetric matrices, against one dense decomposition
each.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from bayflower.maths import classwise, manyclasses
from bayflower.maths.classmessages import ranks
from bayflower.maths.classwise import class_factors
from bayflower.maths.eigen import eigh, largest, pseudo_inverse


def decaying(groups: int, size: int, decades: float, device: str = "cpu") -> torch.Tensor:
    """Return positive definite matrices whose eigenvalues fall over so many decades."""
    draw = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(groups, size, size, generator=draw, dtype=torch.float64)).Q
    values = 7.0 * 10 ** (-decades * torch.rand(groups, size, generator=draw, dtype=torch.float64))
    return ((basis * values[:, None]) @ basis.mT).to(device)


def dense(matrix: torch.Tensor, cut: float, floor: float) -> tuple[torch.Tensor, int]:
    """Return (the pseudo-inverse above the cut, its rank), by one decomposition."""
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > max(cut * float(values[-1]), floor)
    return (vectors[:, keep] / values[keep]) @ vectors[:, keep].mT, int(keep.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "decades"), [(3, 2.0), (40, 9.0), (130, 12.0), (200, 6.0)])
def test_the_pseudo_inverse_is_that_of_the_eigenvalues_above_the_cut(size, decades, device):
    batch = decaying(5, size, decades, device)
    batch[1] = 0  # nothing there
    batch[2, size // 2 :] = batch[2, :, size // 2 :] = 0  # padding
    floor = torch.tensor(
        [0.0, 1e-30, 0.0, 0.0, float(batch[4].diagonal().mean()) / 50],
        dtype=torch.float64,
        device=device,
    )
    inverse, rank = pseudo_inverse(batch, 1e-5, floor)
    assert rank[1] == 0
    assert not bool(inverse[1].any())
    for i in (0, 2, 3, 4):
        want, count = dense(batch[i], 1e-5, float(floor[i]))
        assert int(rank[i]) == count
        assert float((inverse[i] - want).norm() / want.norm()) < 1e-8


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_eigenvalue(device):
    batch = torch.cat(
        [decaying(4, 90, 8.0, device), torch.eye(90, dtype=torch.float64, device=device)[None] * 3]
    )
    assert torch.allclose(largest(batch), torch.linalg.eigvalsh(batch)[:, -1], rtol=1e-6)
    assert largest(torch.zeros(1, 4, 4, dtype=torch.float64, device=device)) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 20, 70, 300])
def test_eigenvectors(size, dtype, device):
    batch = decaying(6, size, 3.0, device).to(dtype)
    values, vectors = eigh(batch)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-11
    assert float(((vectors * values[:, None]) @ vectors.mT - batch).abs().max()) < tolerance
    assert float(values.diff(dim=1).clamp(max=0).abs().max() if size > 1 else 0) < tolerance


@pytest.mark.parametrize("dim", [90, 20])
def test_many_factors_have_the_sums_of_those_of_one_client(dim, monkeypatch):
    """Vectors or other rows, of samples × samples or D × D: what a GPU does for many clients."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(3, 80, dim, generator=draw) @ torch.diag(10 ** -torch.linspace(0, 3, dim))
    y = torch.randint(0, 4, (3, 80), generator=draw).clamp(max=1) + 1
    y[0, :5], y[2, :1] = 0, 3
    mask = (torch.rand(3, 80, generator=draw) < 0.9).float()
    for middle in (1, 128):
        monkeypatch.setattr(manyclasses, "MIDDLE", middle)
        pieces = classwise.plan(y, mask, 4, dim, 2)
        basis, weight, counted = manyclasses.many_factors(z, pieces, 1e-5)
        for c in range(3):
            one = class_factors(z[c], y[c], mask[c], 4, 1e-5, 2)
            assert torch.equal(ranks(counted[c], y[c], 4), ranks(one[2], y[c], 4))
            assert not bool(weight[c, mask[c] == 0].any())
            for k in range(4):
                own = y[c] == k
                want, got = (
                    b[own].double().mT @ (w[own, None].double() * b[own].double())
                    for b, w in (one[:2], (basis[c], weight[c]))
                )
                assert float((got - want).norm()) <= 1e-4 * float(want.norm())
                if middle == 128:  # eigenvectors, in the same places
                    assert torch.allclose(weight[c, own], one[1][own], rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_stacks_on_a_gpu_give_the_sums_and_ranks_of_a_cpu():
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(3, 700, 64, generator=draw) @ torch.diag(10 ** -torch.linspace(0, 2.6, 64))
    y = torch.randint(0, 3, (3, 700), generator=draw)
    y[:, :400] = 0
    mask = (torch.rand(3, 700, generator=draw) < 0.9).float()
    stacked = torch.func.vmap(lambda z, y, m: class_factors(z, y, m, 3))
    here, there = (
        stacked(z, y, mask),
        [part.cpu() for part in stacked(z.cuda(), y.cuda(), mask.cuda())],
    )
    for c in range(3):
        for k in range(3):
            rows = y[c] == k
            want, got = (
                b[c, rows].double().mT @ (w[c, rows, None].double() * b[c, rows].double())
                for b, w, _ in (here, there)
            )
            assert float((got - want).norm() / want.norm()) < 1e-4
            assert int(here[2][c, rows].sum()) == int(there[2][c, rows].sum())
