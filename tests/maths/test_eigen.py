"""Eigenvectors and pseudo-inverses of many symmetric matrices, against one dense decomposition
each.
"""

from __future__ import annotations

import pytest
import torch

from bayflower.maths.classwise import centre, class_factors, factors, roots
from bayflower.maths.eigen import eigh, largest, pseudo_inverse

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


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


def test_roots_and_factors_have_the_same_sum():
    """Two ways to the pseudo-inverse of a covariance: orthonormal vectors, and rows without
    eigenvectors.
    """
    z = torch.randn(4, 60, 90) @ torch.diag(10 ** -torch.linspace(0, 3, 90))
    real = torch.arange(60) < torch.tensor([60, 41, 2, 1])[:, None]
    parts = centre(z, real)
    vectors, precision = factors(*parts, 1e-5, True, 1e-38)
    rows, weight, rank = roots(*parts, 1e-5, 1e-38)
    for i in range(4):
        want = vectors[i].mT @ (precision[i, :, None] * vectors[i])
        got = rows[i].mT @ (weight[i, :, None] * rows[i])
        assert int(rank[i]) == int((precision[i] != 0).sum())
        assert float((got - want).norm()) <= 1e-7 * float(want.norm())


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
