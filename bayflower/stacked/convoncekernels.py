"""GPU kernels in Triton for a convolution and the 2×2 pooling after it, where the four places of a
window are side by side in a block: each weight, and each sum, is read once.

`convpoolkernels.py` has the formulas and goes through the four places one after the other, which
takes fewer registers for bfloat16 and more for float32. Only imported where a CUDA device and
Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import window
from .convpoolkernels import facts
from .routes import Tile


@triton.jit
def _larger(value, which, other, its):
    """The larger of two and which it is: the first of equals, and what is not a number first."""
    better = (other > value) | ((other == value) & (its < which))
    better = better | ((other != other) & (value == value))
    return tl.where(better, other, value), tl.where(better, its, which)


@triton.jit
def _pooled_once(
    x,
    w,
    bias,
    out,
    index,
    sa,
    sb,
    sc,
    sh,
    sw,
    total,
    outputs,
    used,
    BIAS: tl.constexpr,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[a, b, o, p, q] and index[a, o, b, p, q] for a block of outputs and of windows."""
    a = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    t, b, p, q = n % 4, n // (4 * HIGH * WIDE), (n // (4 * WIDE)) % HIGH, (n // 4) % WIDE
    top, left = (2 * p + t // 2) * STRIDE - PAD, (2 * q + t % 2) * STRIDE - PAD
    x += a * sa
    w += a * outputs * used
    place = b * sb + top * sh + left * sw
    known, real = m < outputs, n < 4 * total
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, used, BK):
        k = start + tl.arange(0, BK)
        c, i, j = k // (KH * KW), (k // KW) % KH, k % KW
        weights = tl.load(
            w + m[:, None] * used + k[None, :],
            mask=known[:, None] & (k < used)[None, :],
            other=0.0,
        )
        inside = (k < used)[:, None] & real[None, :]
        if PAD > 0:
            h, v = top[None, :] + i[:, None], left[None, :] + j[:, None]
            inside = inside & (h >= 0) & (h < ROWS) & (v >= 0) & (v < COLUMNS)
        pixels = tl.load(
            x + (c * sc + i * sh + j * sw)[:, None] + place[None, :], mask=inside, other=0.0
        )
        acc = tl.dot(weights, pixels, acc, input_precision=PRECISION)
    table = tl.reshape(acc, (BM, BN // 4, 4))
    which = tl.zeros((BM, BN // 4, 4), dtype=tl.int32) + tl.arange(0, 4)[None, None, :]
    best, where = tl.reduce((table, which), 2, _larger)
    if BIAS:
        best += tl.load(bias + a * outputs + m, mask=known, other=0.0).to(tl.float32)[:, None]
    r = tl.program_id(0) * (BN // 4) + tl.arange(0, BN // 4)
    good = known[:, None] & (r < total)[None, :]
    b, spot = r // (HIGH * WIDE), r % (HIGH * WIDE)
    to = a * outputs * total + m[:, None] * (HIGH * WIDE)
    to += (b * outputs * (HIGH * WIDE) + spot)[None, :]
    bent = tl.where(best > 0, best, best * SLOPE)
    tl.store(out + to, bent.to(out.dtype.element_ty), mask=good)
    to = (a * outputs + m[:, None]) * total + r[None, :]
    tl.store(index + to, tl.where(best > 0, where, where + 4).to(tl.int8), mask=good)


def pooled_once(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int, slope: float, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return (out, index), each (A, B, O, P, Q), in memory (A, B, O, P, Q) and (A, O, B, P, Q)."""
    clients, samples = x.shape[:2]
    outputs, used = weight.shape[1], weight[0, 0].numel()
    known = facts(x, window(weight), stride, pad)
    high, wide = known["HIGH"], known["WIDE"]
    out = x.new_empty(clients, samples, outputs, high, wide)
    index = x.new_empty(clients, outputs, samples, high, wide, dtype=torch.int8)
    total = samples * high * wide
    grid = (triton.cdiv(4 * total, tile.columns), triton.cdiv(outputs, tile.rows), clients)
    _pooled_once[grid](
        *(x, weight.contiguous(), x if bias is None else bias.contiguous(), out, index),
        *(*x.stride(), total, outputs, used),
        BIAS=bias is not None,
        SLOPE=slope,
        **known,
        **tile.options(),
    )
    return out, index.transpose(1, 2)
