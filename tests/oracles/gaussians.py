"""Gaussians as tests build them: from moments, of low rank, and whether they can be normalised."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayflower.maths.gaussian import Diagonal, positive


def from_moments(mean: Tensor, variance: Tensor) -> Diagonal:
    """Return the Gaussian with this mean and variance."""
    precision = 1 / positive("variance", variance)
    return Diagonal(precision, precision * mean)


def is_proper(g: Diagonal) -> Tensor:
    """Return, as a 0-d bool tensor, whether `g` can be normalised: every precision positive and
    finite.
    """
    return ((g.precision > 0) & g.precision.isfinite() & g.shift.isfinite()).all()


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
