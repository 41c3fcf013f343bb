"""A GPU kernel in Triton for the gradient of a convolution's input with a large window: a program
computes 2×2 pixels at a time, which share what they read.

    ∂x[c, m, t] = Σ_uv Σ_o w[o, c, i, j] ∂out[o, n]

m = (b, h, v) is a square of four pixels t = (t_h, t_w), and n = (b, p, q) with p = 2h + pad − KH +
1 + u. A square sees (KH + 1)·(KW + 1) places; place u is row i = t_h + KH − 1 − u of the window of
pixel t, if there is such a row, and columns alike. Strides are 1. `convkernels.py` has the symbols
and the same for small windows. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .batched import window
from .convkernels import facts, flat_places
from .routes import Tile


@triton.jit
def _part(w, acc, slopes, i, j, m, o, channels, outputs, KH, KW, PRECISION: tl.constexpr):
    """acc plus what one place gives to one of the four pixels."""
    if (i >= 0) & (i < KH) & (j >= 0) & (j < KW):
        weights = tl.load(
            w + ((i * KW + j) * channels + m[:, None]) * outputs + o[None, :],
            mask=(m < channels)[:, None] & (o < outputs)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights, slopes, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _input(
    g,
    w,
    out,
    ga,
    gb,
    go,
    total,
    samples,
    outputs,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[a, c, b, h, v] for a block of channels and of squares; w is (A, i·j, C, O)."""
    a = tl.program_id(2).to(tl.int64)
    high, wide = (ROWS + 1) // 2, (COLUMNS + 1) // 2
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, h, v = n // (high * wide), 2 * ((n // wide) % high), 2 * (n % wide)
    g += a * ga
    w += a * (KH * KW) * channels * outputs
    real = n < total
    a00 = tl.zeros((BM, BN), dtype=tl.float32)
    a01 = tl.zeros((BM, BN), dtype=tl.float32)
    a10 = tl.zeros((BM, BN), dtype=tl.float32)
    a11 = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, outputs, BK):
        o = start + tl.arange(0, BK)
        for step in range((KH + 1) * (KW + 1)):
            u, z = step // (KW + 1), step % (KW + 1)
            p, q = h + (PAD - KH + 1) + u, v + (PAD - KW + 1) + z
            inside = real & (p >= 0) & (q >= 0) & (p < OUT_H) & (q < OUT_W)
            slopes = tl.load(
                g + o[:, None] * go + (b * gb + p * OUT_W + q)[None, :],
                mask=(o < outputs)[:, None] & inside[None, :],
                other=0.0,
            )
            i, j = KH - 1 - u, KW - 1 - z
            a00 = _part(w, a00, slopes, i, j, m, o, channels, outputs, KH, KW, PRECISION)
            a01 = _part(w, a01, slopes, i, j + 1, m, o, channels, outputs, KH, KW, PRECISION)
            a10 = _part(w, a10, slopes, i + 1, j, m, o, channels, outputs, KH, KW, PRECISION)
            a11 = _part(w, a11, slopes, i + 1, j + 1, m, o, channels, outputs, KH, KW, PRECISION)
    kind = out.dtype.element_ty
    spot = (a * channels + m[:, None]) * samples * (ROWS * COLUMNS)
    spot += (b * (ROWS * COLUMNS) + h * COLUMNS + v)[None, :]
    good = (m < channels)[:, None] & real[None, :]
    right, below = (v + 1 < COLUMNS)[None, :], (h + 1 < ROWS)[None, :]
    tl.store(out + spot, a00.to(kind), mask=good)
    tl.store(out + spot + 1, a01.to(kind), mask=good & right)
    tl.store(out + spot + COLUMNS, a10.to(kind), mask=good & below)
    tl.store(out + spot + COLUMNS + 1, a11.to(kind), mask=good & right & below)


def input_slope(g: Tensor, weight: Tensor, shape: tuple[int, ...], pad: int, tile: Tile) -> Tensor:
    """Return (A, B, C, H, W) of `shape`, in memory (A, C, B, H, W)."""
    g = flat_places(g)
    clients, samples, outputs, high, wide = g.shape
    channels, size = shape[2], window(weight)
    turned = weight.flatten(3).permute(0, 3, 2, 1).contiguous()
    out = g.new_empty(clients, channels, samples, *shape[3:])
    total = samples * ((shape[3] + 1) // 2) * ((shape[4] + 1) // 2)
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(channels, tile.rows), clients)
    _input[grid](
        *(g, turned, out, *g.stride()[:3], total, samples, outputs, channels),
        **facts(shape, (high, wide), size, 1, pad),
        **tile.options(),
    )
    return out.transpose(1, 2)
