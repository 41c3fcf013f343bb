"""Weighted sums over stacked clients in float64; on a GPU the stack is not copied in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tree import Tensors
from .routes import has_kernels

LARGE = 2**16  # numbers of a stack; for fewer, torch's own functions are as fast


def weighted_sum(weight: Tensor, stack: Tensor) -> Tensor:
    """Return Σ_k weight_k·stack_k in float64, of weight (C,) and stack (C, …)."""
    large = stack.numel() >= LARGE and stack.dtype == torch.float32 and stack.is_contiguous()
    if large and has_kernels(stack) and weight.dtype == torch.float64:
        from . import weightedkernels

        return weightedkernels.weighted_sum(weight, stack.detach())
    return torch.tensordot(weight, stack.double(), 1)


def weighted_sums(weight: Tensor, stacks: Tensors) -> Tensors:
    """Return the weighted sums by name; those of small stacks at once, since a GPU takes longer to
    start their kernels than to run them.
    """
    kinds: dict[torch.dtype, list[str]] = {}
    for name, stack in stacks.items():
        if has_kernels(stack) and 0 < stack.numel() < LARGE:
            kinds.setdefault(stack.dtype, []).append(name)
    found: Tensors = {}
    for names in kinds.values():
        some = [stacks[name] for name in names]
        found |= zip(names, side_by_side(weight, some), strict=True)
    return {
        name: found[name] if name in found else weighted_sum(weight, stack)
        for name, stack in stacks.items()
    }


def side_by_side(weight: Tensor, stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the weighted sums of stacks of one dtype, by one sum over rows that hold them all."""
    rows = torch.cat([stack.reshape(len(stack), -1) for stack in stacks], 1)
    lengths = [stack[0].numel() for stack in stacks]
    parts = weighted_sum(weight, rows).split(lengths)
    return [part.view(stack.shape[1:]) for part, stack in zip(parts, stacks, strict=True)]
