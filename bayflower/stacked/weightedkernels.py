"""The GPU kernel in Triton for weighted sums over stacked clients. Only imported where a CUDA
device and Triton are there; `weighted.py` has the same with torch's functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, AHEAD = 512, 4  # columns of a program, and clients that it reads at once


@triton.jit
def _weighted(weight, stack, out, clients, length, SIZE: tl.constexpr, AHEAD: tl.constexpr):
    """out[i] = Σ_k weight[k]·stack[k, i] in float64."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    some = tl.arange(0, AHEAD)
    total = tl.zeros((SIZE,), tl.float64)
    for start in range(0, clients, AHEAD):
        k = start + some
        inside = (k < clients)[:, None] & (i < length)[None, :]
        rows = tl.load(stack + k[:, None] * length + i[None, :], mask=inside, other=0.0)
        by = tl.load(weight + k, mask=k < clients, other=0.0)
        total += tl.sum(rows.to(tl.float64) * by[:, None], 0)
    tl.store(out + i, total, mask=i < length)


def weighted_sum(weight: Tensor, stack: Tensor) -> Tensor:
    """Return Σ_k weight_k·stack_k in float64, of weight (C,) in float64 and stack (C, …)."""
    clients, length = len(stack), stack[0].numel()
    out = torch.empty(stack.shape[1:], dtype=torch.float64, device=stack.device)
    _weighted[(triton.cdiv(length, BLOCK),)](
        weight.contiguous(), stack, out, clients, length, SIZE=BLOCK, AHEAD=AHEAD
    )
    return out
