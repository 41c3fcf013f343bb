"""Dropout of many networks at once as one GPU kernel in Triton, with the numbers of `chance.py`.

Written with torch's functions, a mask takes some fifteen kernels on whole numbers of 64 bits, more
than the network around it. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chance

BLOCK = 1024
MOST_AXES = 4  # of one client's tensor
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # a launch has no numbers of float64


@triton.jit
def _drop(
    x,
    out,
    keys,
    level,
    scale,
    total,
    sa,
    s0,
    s1,
    s2,
    s3,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out = x · scale where the bits of the place are at least `level`, else x · 0; two places of
    the last axis share 64 bits.
    """
    a = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    good = n < total
    i3, i2, i1, i0 = n % N3, (n // N3) % N2, (n // (N3 * N2)) % N1, n // (N3 * N2 * N1)
    z = i0.to(tl.int64) * C0 + i1.to(tl.int64) * C1 + i2.to(tl.int64) * C2
    z += (i3 // 2).to(tl.int64) * C3 + tl.load(keys + a)
    u = z.to(tl.uint64, bitcast=True)
    u = ((u ^ (u >> 30)).to(tl.int64, bitcast=True) * FIRST).to(tl.uint64, bitcast=True)
    u = ((u ^ (u >> 27)).to(tl.int64, bitcast=True) * SECOND).to(tl.uint64, bitcast=True)
    u = u ^ (u >> 31)
    half = tl.where(i3 % 2 == 1, u >> 32, u & 0xFFFFFFFF).to(tl.int64)
    place = a * sa + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3
    value = tl.load(x + place, mask=good, other=0.0)
    factor = tl.where(half >= level, scale, 0.0).to(x.dtype.element_ty)
    product = value.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + place, product.to(x.dtype.element_ty), mask=good)


def fits(x: Tensor) -> bool:
    """Return whether the kernel can do this tensor of one client."""
    return x.dtype in TYPES and 1 <= x.ndim <= MOST_AXES


def drops(x: Tensor, keys: Tensor, drop: float) -> Tensor:
    """Return x (A, …) with numbers dropped; keys (A,) are those of the call for each client."""
    shape = x.shape[1:]
    missing = MOST_AXES - len(shape)
    sizes = (1,) * missing + tuple(shape)
    factors = (0,) * missing + tuple(chance.constant(axis) for axis in range(len(shape)))
    if not dense(x):
        x = x.contiguous()
    out = torch.empty_like(x)
    steps = (x.stride(0), *(0,) * missing, *x.stride()[1:])
    total = shape.numel()
    _drop[(triton.cdiv(max(total, 1), BLOCK), len(x))](
        x,
        out,
        keys.contiguous(),
        min(round(drop * chance.HALF), chance.HALF),
        1 / (1 - drop) if drop < 1 else 0.0,
        total,
        *steps,
        *sizes[1:],
        *factors,
        FIRST=chance.FIRST,
        SECOND=chance.SECOND,
        SIZE=BLOCK,
    )
    return out


def dense(x: Tensor) -> bool:
    """Return whether the numbers fill their memory in some order, as a new tensor like x would."""
    expected = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size if size > 1 else 1
    return True
