"""Normal numbers of many clients as one GPU kernel in Triton, those of `data/batches.py`.

Written with torch's functions they take some forty-five kernels on numbers of 64 bits, as long as
half a step of a small network. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chance

BLOCK = 512


@triton.jit
def _mixed(z, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The bits of z (int64) thoroughly mixed, as numbers without a sign."""
    u = z.to(tl.uint64, bitcast=True)
    u = ((u ^ (u >> 30)).to(tl.int64, bitcast=True) * FIRST).to(tl.uint64, bitcast=True)
    u = ((u ^ (u >> 27)).to(tl.int64, bitcast=True) * SECOND).to(tl.uint64, bitcast=True)
    return u ^ (u >> 31)


@triton.jit
def _normal(
    out,
    keys,
    step,
    total,
    TURN: tl.constexpr,
    UNIT: tl.constexpr,
    GAMMA: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out[a, n] = √(−2 log u) cos(2π v), where u and v are hashes of key a, the step, n and
    n + total.
    """
    a = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    key = _mixed(tl.load(keys + a), FIRST, SECOND).to(tl.int64, bitcast=True)
    begin = _mixed(key + tl.load(step) * GAMMA, FIRST, SECOND).to(tl.int64, bitcast=True)
    place = n.to(tl.int64) + 1
    first = (_mixed(begin + place * GAMMA, FIRST, SECOND) >> 11).to(tl.float64)
    second = (_mixed(begin + (place + total) * GAMMA, FIRST, SECOND) >> 11).to(tl.float64)
    u, v = (first + 1) * UNIT, second * UNIT
    turn = tl.full([1], TURN, tl.float64)  # a bare number would be one of 32 bits
    value = tl.sqrt(-2 * tl.log(u)) * tl.cos(turn * v)
    tl.store(out + a * total + n, value.to(out.dtype.element_ty), mask=n < total)


def normals(keys: Tensor, step: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers (A, *shape) of keys (A,) in a step ()."""
    total = math.prod(shape)
    out = torch.empty((len(keys), *shape), dtype=dtype, device=keys.device)
    if out.numel():
        _normal[(triton.cdiv(total, BLOCK), len(keys))](
            out,
            keys.contiguous(),
            step,
            total,
            TURN=2 * math.pi,
            UNIT=2.0**-53,
            GAMMA=chance.GAMMA,
            FIRST=chance.FIRST,
            SECOND=chance.SECOND,
            SIZE=BLOCK,
        )
    return out
