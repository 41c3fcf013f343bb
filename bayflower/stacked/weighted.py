"""Weighted sums over stacked clients in float64; on a GPU the stack is not copied in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .routes import has_kernels

LARGE = 2**16  # numbers of a stack; for fewer, torch's own functions are as fast


def weighted_sum(weight: Tensor, stack: Tensor) -> Tensor:
    """Return Σ_k weight_k·stack_k in float64, of weight (C,) and stack (C, …)."""
    large = stack.numel() >= LARGE and stack.dtype == torch.float32 and stack.is_contiguous()
    if large and has_kernels(stack) and weight.dtype == torch.float64:
        from . import weightedkernels

        return weightedkernels.weighted_sum(weight, stack.detach())
    return torch.tensordot(weight, stack.double(), 1)
