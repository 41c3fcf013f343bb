"""The GPU kernel in Triton that shortens changes of stacked clients. Only imported where a CUDA
device and Triton are there; `shorter.py` has the same with torch's functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers of a program


@triton.jit
def _shorter(leaf, start, factor, out, length, MOVED: tl.constexpr, SIZE: tl.constexpr):
    """out[a, i] = start[i] + factor[a]·(leaf[a, i] − start[i]), or leaf[a, i] where factor[a] is 1
    or more.
    """
    a = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = i < length
    found = tl.load(leaf + a * length + i, mask=inside)
    by = tl.load(factor + a)
    if by < 1:
        near = by.to(tl.float32)
        if MOVED:
            zero = tl.load(start + i, mask=inside)
            way = found - zero
            # from the nearer end, as torch does, so that both ends are exact
            found = tl.where(near < 0.5, zero + near * way, found - way * (1 - near))
        else:
            found = near * found
    tl.store(out + a * length + i, found, mask=inside)


def shorter(leaf: Tensor, start: Tensor | None, factor: Tensor) -> Tensor:
    """Return what `shorter.shorter` does, of a contiguous leaf (A, …) in float32."""
    out = torch.empty_like(leaf)
    clients = len(leaf)
    if not leaf.numel():
        return out
    length = leaf.numel() // clients
    _shorter[(clients, triton.cdiv(length, BLOCK))](
        *(leaf, leaf if start is None else start, factor.contiguous(), out, length),
        MOVED=start is not None,
        SIZE=BLOCK,
        num_warps=8,
    )
    return out
