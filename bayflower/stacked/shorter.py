"""Changes of stacked clients, each shortened by its client's factor; on a GPU by a kernel that
reads and writes each number once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .routes import has_kernels


def shorter(leaf: Tensor, start: Tensor | None, factor: Tensor) -> Tensor:
    """Return start + factor_a·(leaf_a − start) of each client a, from leaf (A, …), start without
    that axis (None: 0) and factor (A,) in float64. A factor of 1 or more keeps the bits.
    """
    moved = start is None or (start.is_contiguous() and start.dtype == leaf.dtype)
    if has_kernels(leaf) and leaf.dtype == torch.float32 and leaf.is_contiguous() and moved:
        from . import shorterkernels

        return shorterkernels.shorter(leaf, start, factor)
    by = factor.reshape(-1, *[1] * (leaf.ndim - 1))
    zero = leaf.new_zeros(()) if start is None else start.to(leaf)
    return torch.where(by < 1, torch.lerp(zero, leaf, by.to(leaf.dtype)), leaf)
