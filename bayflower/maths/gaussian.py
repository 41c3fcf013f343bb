"""Gaussians in natural parameters: multiplying densities is adding tensors, dividing is
subtracting.

    symbol    here         meaning
    Λ, λ      precision    inverse covariance
    H, η      shift        precision × mean

Everything is a pure function of tensors and runs under `torch.func.vmap`. A factor may have a
negative precision (a quotient of two Gaussians can); only a *moment* of such a factor does not
exist, and asking for one is an error. Under vmap values cannot be looked at, so there nothing is
checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..stacked.recorded import recorded
from .guesses import holds
from .triangles import inverse_of_lower


class Diagonal(NamedTuple):
    """exp(−½ Σ precision·x² + Σ shift·x): independent coordinates, tensors of one shape."""

    precision: Tensor
    shift: Tensor

    def mean(self) -> Tensor:
        """Return shift / precision."""
        return self.shift / positive("precision", self.precision)

    def variance(self) -> Tensor:
        """Return 1 / precision."""
        return 1 / positive("precision", self.precision)


def product(*factors: Diagonal) -> Diagonal:
    """Return Π factors, not normalised: natural parameters add."""
    if not factors:
        raise ValueError("product needs at least one factor, got none")
    precision, shift = factors[0]
    for factor in factors[1:]:
        precision, shift = precision + factor.precision, shift + factor.shift
    return Diagonal(precision, shift)


def quotient(total: Diagonal, factor: Diagonal) -> Diagonal:
    """Return total / factor, the cavity that is left when `factor` is taken out; it need not be
    proper.
    """
    return Diagonal(total.precision - factor.precision, total.shift - factor.shift)


def damp(old: Diagonal, new: Diagonal, rate: float) -> Diagonal:
    """Return old^(1−rate) · new^rate: a step of `rate` in natural parameters; 1 is `new` itself, to
    the bit.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}; 1 means no damping")
    if rate == 1:
        return new
    return Diagonal(*(a + rate * (b - a) for a, b in zip(old, new, strict=True)))


def kl(p: Diagonal, q: Diagonal) -> Tensor:
    """Return KL(p ‖ q) = ½ Σ [λ_q/λ_p − 1 − log(λ_q/λ_p) + λ_q (μ_p − μ_q)²], summed over the
    coordinates.
    """
    ratio = q.precision / positive("precision of p", p.precision)
    distance = p.shift / p.precision - q.shift / positive("precision of q", q.precision)
    # near 1, ratio − 1 has no error: accurate for p near q
    return 0.5 * ((ratio - 1) - ratio.log() + q.precision * distance**2).sum()


def solve_precision(precision: Tensor, shift: Tensor) -> Tensor:
    """Return the means precision⁻¹ shift, (K, D), of K Gaussians with precision (K, D, D) and shift
    (K, D), by Cholesky.
    """
    factor, info = torch.linalg.cholesky_ex(precision)
    bad = visible(info != 0)
    if bad is not None and bool(bad.any()):
        where = bad.reshape(-1).nonzero()[0].item()
        raise ValueError(
            f"precision must be positive definite to have a mean, but matrix {where} of "
            f"{bad.numel()} is not; add a ridge"
        )
    return torch.cholesky_solve(shift[..., None], factor)[..., 0]


def solve_unchecked(precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the means, (K, D), which are right where the next is 0; for each matrix, 0 if it is
    positive definite).
    """
    factor, info = torch.linalg.cholesky_ex(precision)
    inverse = inverse_of_lower(factor)
    return (inverse.mT @ (inverse @ shift[..., None]))[..., 0], info


def solve_guessing(precision: Tensor, shift: Tensor) -> Tensor:
    """Return what `solve_without_waiting` does, with half its work: the guess is that all matrices
    are positive definite (`guesses.py`).
    """
    means, info = recorded(solve_unchecked, (precision, shift))
    return means if holds((info == 0).all()) else solve_without_waiting(precision, shift)


def solve_without_waiting(precision: Tensor, shift: Tensor) -> Tensor:
    """Return what `solve_precision` does without looking at the matrices, so that a GPU need not be
    waited for.

    A matrix that rounding has made indefinite gets a ridge of 1e-12 times its mean variance; if
    that does not help, the mean is NaN.
    """
    scale = precision.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    ridge = (
        1e-12
        * scale
        * torch.eye(precision.shape[1], dtype=precision.dtype, device=precision.device)
    )
    both = torch.cat([precision, precision + ridge])
    means, info = solve_unchecked(both, torch.cat([shift, shift]))
    exact, ridged = torch.where(info[:, None] == 0, means, torch.nan).chunk(2)
    return torch.where(info[: len(exact), None] == 0, exact, ridged)


def solve_clamped(precision: Tensor, shift: Tensor, least: float) -> Tensor:
    """Return what `solve_precision` does, with eigenvalues of at least `least`."""
    values, vectors = torch.linalg.eigh(precision)
    return torch.einsum("gij,gj,gkj,gk->gi", vectors, 1 / values.clamp(min=least), vectors, shift)


def positive(name: str, x: Tensor) -> Tensor:
    """Return `x` if all of it is positive, else raise; under vmap, where it cannot be looked at,
    return `x` as it is.
    """
    seen = visible(x)
    if seen is not None and not bool((seen > 0).all()):
        raise ValueError(
            f"{name} must be positive to have moments, smallest is {seen.min().item():.6g}"
        )
    return x


def visible(x: Tensor) -> Tensor | None:
    """Return `x` if its values can be looked at; None inside `torch.func.vmap`, a compiled function
    or the capture of a CUDA graph.
    """
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        bool(x.detach().reshape(-1)[:1].any())
    except RuntimeError:  # vmap refuses data-dependent control flow
        return None
    return x
