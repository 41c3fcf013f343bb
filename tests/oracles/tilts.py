"""Sites from tilted moments, the direct way."""

from __future__ import annotations

import torch
from torch import Tensor

from bayflower.maths.gaussian import Diagonal


def project_variance(variance: Tensor, cavity_var: Tensor, f: Tensor) -> Tensor:
    """Return a tilted variance clipped to [z_{s,-k} / (1 + f² z_{s,-k}/4), z_{s,-k}], which is 0 ≤
    λ ≤ f²/4 (E-N5).
    """
    return torch.minimum(
        torch.maximum(variance, cavity_var / (1 + f.square() * cavity_var / 4)), cavity_var
    )


def site_from_moments(
    mean: Tensor, variance: Tensor, cavity_mean: Tensor, cavity_var: Tensor
) -> Diagonal:
    """Return tilted / cavity from moments; (0, 0) where that has a negative precision or is not
    finite (E-N5).
    """
    precision, shift = 1 / variance - 1 / cavity_var, mean / variance - cavity_mean / cavity_var
    good = (precision >= 0) & precision.isfinite() & shift.isfinite()
    zero = torch.zeros_like(precision)
    return Diagonal(torch.where(good, precision, zero), torch.where(good, shift, zero))
