"""Gaussians in natural parameters against dense matrices, torch.distributions and quadrature."""

from __future__ import annotations

import pytest
import torch
from gaussians import LowRank, from_moments, is_proper
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.func import grad, vmap

from bayflower.maths.gaussian import (
    Diagonal,
    damp,
    kl,
    product,
    quotient,
    solve_guessing,
    solve_precision,
    solve_without_waiting,
)
from bayflower.maths.guesses import guessing


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(seed: int, size: int = 4) -> Diagonal:
    return from_moments(randn(size, seed=seed), randn(size, seed=seed + 100).exp())


def log_density(g: Diagonal, x: Tensor) -> Tensor:
    """Return log of the density that is not normalised, (len(x),), for a Gaussian of one
    coordinate.
    """
    return -0.5 * g.precision * x**2 + g.shift * x


GRID = torch.linspace(-40, 40, 400_001, dtype=torch.float64)


def normalised(g: Diagonal) -> Tensor:
    density = log_density(g, GRID).exp()
    return density / torch.trapezoid(density, GRID)


def test_moments_by_quadrature() -> None:
    g = Diagonal(
        torch.tensor([0.7], dtype=torch.float64), torch.tensor([-1.3], dtype=torch.float64)
    )
    density = normalised(g)
    mean = torch.trapezoid(density * GRID, GRID)
    torch.testing.assert_close(g.mean()[0], mean)
    torch.testing.assert_close(g.variance()[0], torch.trapezoid(density * (GRID - mean) ** 2, GRID))
    again = from_moments(g.mean(), g.variance())
    torch.testing.assert_close(again, g)


def test_product_and_quotient_by_quadrature() -> None:
    a, b, c = (gaussian(seed, 1) for seed in (1, 2, 3))
    density = normalised(a) * normalised(b) * normalised(c)
    torch.testing.assert_close(
        normalised(product(a, b, c)), density / torch.trapezoid(density, GRID)
    )
    torch.testing.assert_close(product(a), a)
    torch.testing.assert_close(quotient(product(a, b, c), b), product(a, c))


def test_damping_is_a_geometric_mean() -> None:
    old, new = gaussian(1, 1), gaussian(2, 1)
    want = normalised(old) ** 0.7 * normalised(new) ** 0.3
    torch.testing.assert_close(normalised(damp(old, new, 0.3)), want / torch.trapezoid(want, GRID))
    assert damp(old, new, 1) is new
    for rate in (0.0, 1.4, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"rate must be in \(0, 1\]"):
            damp(old, new, rate)


def test_kl() -> None:
    p, q = gaussian(1), gaussian(2)
    want = kl_divergence(
        Normal(p.mean(), p.variance().sqrt()), Normal(q.mean(), q.variance().sqrt())
    ).sum()
    torch.testing.assert_close(kl(p, q), want)
    p, q = gaussian(3, 1), gaussian(4, 1)
    f, g = normalised(p), normalised(q)
    log_ratio = f.clamp(min=1e-300).log() - g.clamp(min=1e-300).log()
    torch.testing.assert_close(kl(p, q), torch.trapezoid(f * log_ratio, GRID))
    assert kl(p, p) == 0
    near = from_moments(p.mean(), p.variance() * (1 + 1e-7))
    # no cancellation
    torch.testing.assert_close(
        kl(p, near), torch.tensor(0.25e-14, dtype=torch.float64), rtol=1e-5, atol=0.0
    )


def test_improper_factors_are_fine_until_a_moment_is_asked() -> None:
    a, b = gaussian(1), gaussian(2)
    cavity = quotient(a, product(a, b))
    assert not is_proper(cavity)
    assert is_proper(a)
    for ask in (cavity.mean, cavity.variance, lambda: kl(cavity, a), lambda: kl(a, cavity)):
        with pytest.raises(ValueError, match=r"precision .*must be positive"):
            ask()
    with pytest.raises(ValueError, match="variance must be positive"):
        from_moments(torch.zeros(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="at least one"):
        product()


def test_diagonal_under_vmap_and_grad() -> None:
    stack = [gaussian(seed) for seed in range(5)]
    ps = Diagonal(torch.stack([g.precision for g in stack]), torch.stack([g.shift for g in stack]))
    q = gaussian(9)
    torch.testing.assert_close(vmap(lambda p: kl(p, q))(ps), torch.stack([kl(p, q) for p in stack]))
    torch.testing.assert_close(vmap(lambda p: p.mean())(ps), torch.stack([p.mean() for p in stack]))
    improper = Diagonal(ps.precision.clone().index_fill_(0, torch.tensor([3]), -1.0), ps.shift)
    assert vmap(is_proper)(improper).tolist() == [True, True, True, False, True]
    vmap(lambda p: p.variance())(improper)  # values cannot be looked at here: no error
    by_hand = 0.5 * (1 / stack[0].precision - 1 / q.precision + (stack[0].mean() - q.mean()) ** 2)
    by_grad = grad(lambda precision: kl(stack[0], Diagonal(precision, precision * q.mean())))(
        q.precision
    )
    torch.testing.assert_close(by_grad, by_hand)


# -- low rank ------------------------------------------------------------------------------------


def dense_oracle(z: Tensor, alpha: float, rtol: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Return (pinv of the covariance + alpha I, mean), the slow way."""
    mean = z.mean(0)
    covariance = sum(
        (torch.outer(row - mean, row - mean) for row in z),
        torch.zeros(z.shape[1], z.shape[1], dtype=z.dtype),
    ) / len(z)
    return torch.linalg.pinv(covariance, rtol=rtol, hermitian=True) + alpha * torch.eye(
        z.shape[1], dtype=z.dtype
    ), mean


@pytest.mark.parametrize(
    ("samples", "dim", "rank"),
    [(1, 6, 0), (2, 6, 1), (4, 6, 3), (6, 6, 5), (7, 6, 6), (30, 6, 6), (5, 1, 1)],
)
def test_low_rank_equals_pseudo_inverse(samples: int, dim: int, rank: int) -> None:
    z = randn(samples, dim, seed=samples) * 0.3 + 2
    got, mean = LowRank.from_samples(z, torch.ones(samples), 0.7)
    want, want_mean = dense_oracle(z, 0.7)
    assert int(got.rank()) == rank
    assert got.basis.shape == (dim, min(samples, dim))
    torch.testing.assert_close(mean, want_mean)
    torch.testing.assert_close(got.dense(), want, rtol=1e-9, atol=1e-9)
    v = randn(3, dim, seed=5)
    torch.testing.assert_close(got.apply(v), v @ want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.apply(v[0]), want @ v[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        got.basis.mT @ got.basis, torch.diag((got.weight != 0).double()), rtol=1e-9, atol=1e-9
    )


def test_low_rank_data_in_a_subspace() -> None:
    z = randn(20, 2, seed=1) @ randn(2, 8, seed=2) + 5
    got, _ = LowRank.from_samples(z, torch.ones(20), 1.0)
    assert int(got.rank()) == 2
    torch.testing.assert_close(got.dense(), dense_oracle(z, 1.0)[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_noise_is_no_variance(dtype: torch.dtype) -> None:
    # equal samples: their mean is rounded, so the centred ones are not quite 0
    z = (randn(1, 512, seed=1) * 3).to(dtype).expand(35, -1)
    got, _ = LowRank.from_samples(z, torch.ones(35), 1.0)
    assert int(got.rank()) == 0
    torch.testing.assert_close(got.dense(), torch.eye(512, dtype=dtype))


def test_float32_is_close_to_float64() -> None:
    z = randn(35, 512, seed=3)
    exact, _ = LowRank.from_samples(z, torch.ones(35), 1.0)
    single, _ = LowRank.from_samples(z.float(), torch.ones(35), 1.0)
    assert int(single.rank()) == int(exact.rank()) == 34
    assert torch.linalg.matrix_norm(
        single.dense().double() - exact.dense()
    ) < 1e-5 * torch.linalg.matrix_norm(exact.dense())


@pytest.mark.parametrize(("samples", "dim"), [(9, 12), (12, 5)])
def test_low_rank_under_vmap_with_unequal_masks(samples: int, dim: int) -> None:
    counts = [0, 1, 2, 5, samples]
    z = randn(len(counts), samples, dim, seed=7)
    mask = torch.stack(
        [torch.randperm(samples, generator=torch.Generator().manual_seed(n)) < n for n in counts]
    ).double()
    got, mean = vmap(lambda z, mask: LowRank.from_samples(z, mask, 0.5))(z, mask)
    dense = vmap(lambda g: g.dense(), in_dims=(LowRank(0, 0, 0),))(got)
    for i, n in enumerate(counts):
        if n == 0:
            want, want_mean = (
                0.5 * torch.eye(dim, dtype=torch.float64),
                torch.zeros(dim, dtype=torch.float64),
            )
        else:
            want, want_mean = dense_oracle(z[i][mask[i] > 0], 0.5)
        torch.testing.assert_close(dense[i], want, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(mean[i], want_mean)


def test_solve_precision() -> None:
    a = randn(3, 5, 5, seed=1)
    precision, shift = a @ a.mT + torch.eye(5, dtype=torch.float64), randn(3, 5, seed=2)
    want = torch.stack([torch.linalg.inv(p) @ s for p, s in zip(precision, shift, strict=True)])
    torch.testing.assert_close(solve_precision(precision, shift), want)
    torch.testing.assert_close(vmap(solve_precision)(precision, shift), want)
    precision[1] -= 100 * torch.eye(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="matrix 1 of 3"):
        solve_precision(precision, shift)


def test_means_without_waiting_are_those_of_cholesky() -> None:
    draw = torch.Generator().manual_seed(3)
    root = torch.randn(3, 8, 8, generator=draw, dtype=torch.float64)
    precision, shift = (
        root @ root.mT + torch.eye(8, dtype=torch.float64),
        torch.randn(3, 8, generator=draw, dtype=torch.float64),
    )
    assert torch.allclose(
        solve_without_waiting(precision, shift), solve_precision(precision, shift), rtol=1e-12
    )
    with guessing() as guessed:
        hoped = solve_guessing(precision, shift)
    assert torch.allclose(hoped, solve_precision(precision, shift), rtol=1e-12)
    flat = torch.zeros(8, 8, dtype=torch.float64)
    flat[0, 0], flat[1, 1] = 1.0, -1e-16  # indefinite by rounding alone
    assert bool(solve_without_waiting(flat[None], shift[:1]).isfinite().all())
    with guessing() as wrong:
        solve_guessing(flat[None], shift[:1])
    assert [bool(truth) for truth in (*guessed, *wrong)] == [True, False]
    ridged = solve_without_waiting(flat[None], shift[:1])
    assert torch.equal(solve_guessing(flat[None], shift[:1]), ridged)
    assert bool(solve_without_waiting(-flat[None], shift[:1]).isnan().all())
