"""Inverses of triangular matrices by products: equal to a solver's, for every size."""

from __future__ import annotations

import pytest
import torch

from bayflower.maths.triangles import BLOCK, inverse_of_lower


@pytest.mark.parametrize("size", [1, 2, 3, 17, BLOCK, BLOCK + 1, 2 * BLOCK, 130, 200, 300])
def test_a_product_with_the_matrix_is_one(size):
    make = torch.Generator().manual_seed(size)
    half = torch.randn(3, size, size + 4, generator=make, dtype=torch.float64)
    factor = torch.linalg.cholesky(half @ half.mT)
    found = inverse_of_lower(factor)
    want = torch.linalg.solve_triangular(
        factor, torch.eye(size).double().expand(3, -1, -1), upper=False
    )
    assert found.shape == factor.shape
    assert float((found - want).norm()) <= 1e-12 * float(want.norm())
    assert not found.triu(1).any()


def test_what_is_above_the_diagonal_is_not_looked_at():
    factor = torch.randn(2, 150, 150, dtype=torch.float64) + 150 * torch.eye(150).double()
    assert torch.equal(inverse_of_lower(factor.tril()), inverse_of_lower(factor))


def test_badly_conditioned_factors_keep_the_digits_of_a_solver():
    """A solver loses 1e-16 times the condition; products must not lose much more."""
    make = torch.Generator().manual_seed(1)
    turn, _ = torch.linalg.qr(torch.randn(300, 300, generator=make, dtype=torch.float64))
    matrix = turn @ torch.diag(torch.logspace(0, -9, 300, dtype=torch.float64)) @ turn.mT
    factor = torch.linalg.cholesky((matrix + matrix.mT) / 2)[None]
    right = torch.randn(1, 300, 1, generator=make, dtype=torch.float64)
    root = inverse_of_lower(factor)
    found = root.mT @ (root @ right)
    want = torch.cholesky_solve(right, factor)
    assert float((found - want).norm()) <= 1e-6 * float(want.norm())
    assert float((factor @ (factor.mT @ found) - right).norm()) <= 1e-4 * float(right.norm())
