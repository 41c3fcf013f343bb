"""The limits that the sizes of the last rounds' updates give: medians times a factor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tree import Tensors
from .parts import LEVEL, usual
from .suspects import claims_of

FEW = 4  # fewer clients say nothing of what is usual


def limits_of(sizes: Mapping[str, Sequence[Tensor]], factors: Mapping[str, float]) -> Tensors:
    """Return the limits that the sizes of some rounds give, by name."""
    seen = {name: joined(values) for name, values in sizes.items()}
    claims = [seen[name] for name in sorted(seen) if claims_of(name)]
    return {
        name: limit_of(name, values, factors.get(name, LEVEL), claims)
        for name, values in seen.items()
    }


def limit_of(name: str, values: Tensor, factor: float, claims: Sequence[Tensor]) -> Tensor:
    """Return the limit that the sizes of some clients give; infinity where too few say something.
    A claim that few others make is compared with all claims.
    """
    if name == "log_weight":
        middle = values.median() + math.log(LEVEL)
        return middle if len(values) >= FEW else torch.full_like(middle, math.inf)
    own = enough(values, factor)
    if not claims_of(name):
        return own
    return torch.where(own.isinf(), enough(joined(claims), factor), own)


def enough(values: Tensor, factor: float) -> Tensor:
    """Return the median of the positive numbers times `factor`; infinity if they are too few."""
    middle = factor * usual(values[:, None])[0]
    return torch.where((values > 0).sum() < FEW, torch.full_like(middle, math.inf), middle)


def joined(values: Sequence[Tensor]) -> Tensor:
    """Return the numbers of some clients."""
    return torch.cat([*values])
