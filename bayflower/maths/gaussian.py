"""Gaussians in natural parameters: multiplying densities is adding tensors, dividing is
subtracting.

    symbol    here         meaning
    Λ, λ      precision    inverse covariance
    H, η      shift        precision × mean
    α         ridge        precision in the directions in which nothing was seen

Everything is a pure function of tensors and runs under `torch.func.vmap`. A factor may have a
negative precision (a quotient of two Gaussians can); only a *moment* of such a factor does not
exist, and asking for one is an error. Under vmap values cannot be looked at, so there the caller
asks `is_proper` and decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Diagonal(NamedTuple):
    """exp(−½ Σ precision·x² + Σ shift·x): independent coordinates, tensors of one shape."""

    precision: Tensor
    shift: Tensor

    @staticmethod
    def from_moments(mean: Tensor, variance: Tensor) -> Diagonal:
        """Return the Gaussian with this mean and variance."""
        precision = 1 / positive("variance", variance)
        return Diagonal(precision, precision * mean)

    def mean(self) -> Tensor:
        """Return shift / precision."""
        return self.shift / positive("precision", self.precision)

    def variance(self) -> Tensor:
        """Return 1 / precision."""
        return 1 / positive("precision", self.precision)


def is_proper(g: Diagonal) -> Tensor:
    """Return, as a 0-d bool tensor, whether `g` can be normalised: every precision positive and
    finite.
    """
    return ((g.precision > 0) & g.precision.isfinite() & g.shift.isfinite()).all()


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


class LowRank(NamedTuple):
    """The precision matrix V diag(weight) Vᵀ + ridge·I; columns of V are orthonormal, or zero where
    their weight is 0.
    """

    basis: Tensor  # V, (D, r)
    weight: Tensor  # (r,)
    ridge: Tensor  # 0-d

    def rank(self) -> Tensor:
        """Return how many weights are in use, as a 0-d int64 tensor."""
        return (self.weight != 0).sum()

    def apply(self, v: Tensor) -> Tensor:
        """Return (V diag(weight) Vᵀ + ridge·I) v for v of shape (..., D), without forming the
        matrix.
        """
        return (v @ self.basis * self.weight) @ self.basis.mT + self.ridge * v

    def dense(self) -> Tensor:
        """Return the matrix itself, (D, D)."""
        identity = torch.eye(self.basis.shape[0], dtype=self.basis.dtype, device=self.basis.device)
        return (self.basis * self.weight) @ self.basis.mT + self.ridge * identity

    @staticmethod
    def from_samples(
        z: Tensor, mask: Tensor, alpha: float | Tensor, cut: float | None = None
    ) -> tuple[LowRank, Tensor]:
        """Return (Σ† + α·I, mean) of the samples z (Z, D) that the mask (Z,) marks with 1; Σ
        divides by their number.

        A pseudo-inverse is not continuous: a variance of 1e-6 gives precision 1e6, and 0 gives 0,
        so rounding noise must not pass for variance. Eigenvalues are therefore taken from the
        smaller of the Gram matrix C Cᵀ/n (Z, Z) and the covariance CᵀC/n (D, D), C the centred
        samples, and kept only if larger than `cut` times the largest one (default 1e-5 in float32,
        1e-10 in float64) and larger than the rounding of z itself can produce. The others have
        weight 0, so that shapes depend on nothing but the shape of z: r = min(Z, D). No sample or
        one sample: rank 0.
        """
        mask = mask.to(z.dtype)
        count = mask.sum().clamp(min=1)
        z = z * mask[:, None]
        mean = z.sum(0) / count
        centred = (z - mean) * mask[:, None]
        info = torch.finfo(z.dtype)
        cut = (1e-10 if z.dtype == torch.float64 else 1e-5) if cut is None else cut
        noise = z.shape[1] * (4 * info.eps * z.abs().amax()) ** 2
        gram = z.shape[0] <= z.shape[1]
        values, vectors = torch.linalg.eigh(
            (centred @ centred.mT if gram else centred.mT @ centred) / count
        )
        keep = values > torch.maximum(cut * values[-1], noise).clamp(min=info.tiny)
        # so that no gradient or value divides by 0
        safe = torch.where(keep, values, torch.ones_like(values))
        basis = centred.mT @ vectors / (count * safe).sqrt() if gram else vectors
        ridge = torch.as_tensor(alpha, dtype=z.dtype, device=z.device)
        return LowRank(basis * keep, keep / safe, ridge), mean


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
    factor, info = torch.linalg.cholesky_ex(torch.cat([precision, precision + ridge]))
    half = torch.linalg.solve_triangular(factor, torch.cat([shift, shift])[..., None], upper=False)
    means = torch.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]
    plain, ridged = torch.where(info[:, None] == 0, means, torch.nan).chunk(2)
    return torch.where(info[: len(plain), None] == 0, plain, ridged)


def positive(name: str, x: Tensor) -> Tensor:
    """Return `x` if all of it is positive, else raise; under vmap, where it cannot be looked at,
    return `x` as it is.
    """
    seen = visible(x)
    if seen is not None and not bool((seen > 0).all()):
        raise ValueError(
            f"{name} must be positive to have moments, smallest is {seen.min().item():.6g}; see "
            "is_proper"
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
