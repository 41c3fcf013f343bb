"""GPU kernels in Triton for a convolution of few channels and the 2×2 pooling after it, which read
each pixel once per window of the pooling: the four places of the window see parts of one square.

    y[d, m]   = x[c, 2p + i − pad, 2q + j − pad]            d = (c, i, j), i ≤ KH, j ≤ KW
    W_t[o, d] = w[o, c, i − t//2, j − t%2], or 0 outside    t: the four places
    out       = bent(max over t of Σ_d W_t[o, d] y[d, m] + bias[o])
    ∂w[o, k]  = Σ_t ∂W_t[o, d(k, t)],  ∂W_t[o, d] = Σ_m ∂out[o, m] [index[o, m] names t] y[d, m]

`convpoolkernels.py` has the other symbols, and makes the same numbers if all are finite. A pixel
that is not spoils all four places of its window, and where the largest is not a number, any may be
named. The stride is 1. With `low`, pixels and weights are float32 in memory, and bfloat16 in
products. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import Size, window
from .convkernels import shared, weights_room, weights_whole
from .convpoolkernels import facts
from .routes import BLOCKS, fits, parts, pitch, pixels_of
from .routes import MOST_PIXELS as MOST


class Square(NamedTuple):
    """The block that a program computes: outputs, and windows at once; warps and stages of the
    pipeline; how many blocks of windows it goes through, forward; the most registers of a thread.
    """

    outputs: int
    windows: int
    warps: int = 4
    stages: int = 2
    turns: int = 1
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Return them as a launch takes them, but the turns."""
        return {
            "BM": self.outputs,
            "BN": self.windows,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


def power(number: int) -> int:
    """Return the next power of two from 16, the least side of a product, to 64."""
    return min(max(1 << (number - 1).bit_length(), 16), MOST)


def square_ahead(clients: int, outputs: int, total: int, exact: bool) -> Square:
    """Return the block of the forward kernel for `total` windows a client; `exact`: of products
    with float32's digits, which take more registers. Weights are placed once for all turns, so
    there are as many as still leave programs for the whole device.
    """
    block = Square(power(outputs), 64, warps=8 if exact else 4, stages=1)
    blocks = clients * -(-outputs // block.outputs) * -(-total // block.windows)
    return block._replace(turns=min(max(blocks // (2 * BLOCKS), 1), 4))


def square_weights(clients: int, outputs: int, total: int, exact: bool) -> tuple[Square, int]:
    """Return the block of the weights' kernel, and into how many parts its sum is split."""
    block = Square(min(power(outputs), 32), 64, warps=8 if exact else 4, stages=1)
    blocks = clients * -(-outputs // block.outputs)
    return block, parts(blocks, BLOCKS, total, 2 * block.windows)


@triton.jit
def _placed(w, m, d, outputs, KIND, CHANNELS, KH, KW, PITCH, T):
    """W_t[d, o]: the weights where place T of a window has them in the square."""
    c, i, j = d // ((KH + 1) * PITCH), (d // PITCH) % (KH + 1) - T // 2, d % PITCH - T % 2
    fine = (c < CHANNELS) & (i >= 0) & (i < KH) & (j >= 0) & (j < KW)
    spot = m[:, None] * (CHANNELS * KH * KW) + ((c * KH + i) * KW + j)[None, :]
    weights = tl.load(w + spot, mask=(m < outputs)[:, None] & fine[None, :], other=0.0)
    return tl.trans(weights.to(KIND))


@triton.jit
def _square(
    x, n, d, sb, total, SC, SH, SW, CHANNELS, ROWS, COLUMNS, HIGH, WIDE, KH, KW, PITCH, PAD
):
    """y[n, d], the pixels of the windows' squares, and a column of ones after them."""
    c, i, j = d // ((KH + 1) * PITCH), (d // PITCH) % (KH + 1), (2 * d // 2) % PITCH
    # doubled and halved, pixels of a row are not known as neighbours: threads go along windows
    b, p, q = n // (HIGH * WIDE), (n // WIDE) % HIGH, n % WIDE
    top, left = 2 * p - PAD, 2 * q - PAD
    inside = (n < total)[:, None] & ((c < CHANNELS) & (j <= KW))[None, :]
    if PAD > 0:
        h, v = top[:, None] + i[None, :], left[:, None] + j[None, :]
        inside = inside & (h >= 0) & (h < ROWS) & (v >= 0) & (v < COLUMNS)
    spot = (b * sb + top * SH + left * SW)[:, None] + (c * SC + i * SH + j * SW)[None, :]
    ones = (d == CHANNELS * (KH + 1) * PITCH).to(tl.float32).to(x.dtype.element_ty)
    return tl.load(x + spot, mask=inside, other=ones[None, :])


@triton.jit
def _better(best, where, value, T):
    """The larger of two and its place: the first of equals, and what is not a number first."""
    where = tl.where(value <= best, where, T)  # one comparison; it is T if either is not a number
    return tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL), where


@triton.jit(do_not_specialize=["clients", "turns"])
def _pooled_square(
    x,
    w,
    bias,
    out,
    index,
    sa,
    sb,
    total,
    outputs,
    clients,
    turns,
    BIAS: tl.constexpr,
    LAST: tl.constexpr,
    SLOPE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SC: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PITCH: tl.constexpr,
    PAD: tl.constexpr,
    SQUARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out and index [a, o, m] for a block of outputs and some of windows; with LAST [m, a, o]."""
    a = tl.program_id(2).to(tl.int64)
    m, d = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, SQUARE)
    x += a * sa
    w += a * outputs * (CHANNELS * KH * KW)
    w0 = _placed(w, m, d, outputs, KIND, CHANNELS, KH, KW, PITCH, 0)
    w1 = _placed(w, m, d, outputs, KIND, CHANNELS, KH, KW, PITCH, 1)
    w2 = _placed(w, m, d, outputs, KIND, CHANNELS, KH, KW, PITCH, 2)
    w3 = _placed(w, m, d, outputs, KIND, CHANNELS, KH, KW, PITCH, 3)
    known = (m < outputs)[None, :]
    if BIAS:
        more = tl.load(bias + a * outputs + m, mask=m < outputs, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) * turns
    for step in range(first, tl.minimum(first + turns, tl.cdiv(total, BN))):
        n = step * BN + tl.arange(0, BN)
        y = _square(
            x, n, d, sb, total, SC, SH, SW, CHANNELS, ROWS, COLUMNS, HIGH, WIDE, KH, KW, PITCH, PAD
        )
        y = y.to(KIND)
        best = tl.dot(y, w0, input_precision=PRECISION)
        where = tl.zeros((BN, BM), dtype=tl.int32)
        best, where = _better(best, where, tl.dot(y, w1, input_precision=PRECISION), 1)
        best, where = _better(best, where, tl.dot(y, w2, input_precision=PRECISION), 2)
        best, where = _better(best, where, tl.dot(y, w3, input_precision=PRECISION), 3)
        if BIAS:
            best += more
        if LAST:
            spot = (n[:, None].to(tl.int64) * clients + a) * outputs + m[None, :]
        else:
            spot = (a * outputs + m[None, :]) * total + n[:, None]
        good = known & (n < total)[:, None]
        bent = tl.where(best > 0, best, best * SLOPE)
        tl.store(out + spot, bent.to(out.dtype.element_ty), mask=good)
        tl.store(index + spot, tl.where(best > 0, where, where + 4).to(tl.int8), mask=good)


@triton.jit
def _back(found, k, CHANNELS, KH, KW, PITCH, T):
    """What place T found for weight k: found[d, o] where W_t[o, d] is w[o, k]; then the ones."""
    c, i, j = k // (KH * KW), (k // KW) % KH + T // 2, k % KW + T % 2
    d = tl.minimum((c * (KH + 1) + i) * PITCH + j, CHANNELS * (KH + 1) * PITCH)
    d = tl.where(c < CHANNELS, d, tl.minimum(CHANNELS * (KH + 1) * PITCH, found.shape[0] - 1))
    return tl.gather(found, tl.broadcast_to(d[:, None], found.shape), 0)


@triton.jit(do_not_specialize=["chunk", "splits"])
def _weights_square(
    x,
    g,
    index,
    out,
    to_bias,
    sa,
    sb,
    ga,
    gb,
    go,
    gh,
    gw,
    ia,
    ib,
    io,
    ih,
    iw,
    total,
    chunk,
    splits,
    outputs,
    BIAS: tl.constexpr,
    APART: tl.constexpr,
    SLOPE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SC: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PITCH: tl.constexpr,
    PAD: tl.constexpr,
    SQUARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out[a, s, o, k]: the sum over the s-th part of all windows; the bias as in `_weights`."""
    a, s = (tl.program_id(1) // splits).to(tl.int64), tl.program_id(1) % splits
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, SQUARE)
    x += a * sa
    g += a * ga
    index += a * ia
    known = (m < outputs)[None, :]
    acc0 = tl.zeros((SQUARE, BM), dtype=tl.float32)
    acc1 = tl.zeros((SQUARE, BM), dtype=tl.float32)
    acc2 = tl.zeros((SQUARE, BM), dtype=tl.float32)
    acc3 = tl.zeros((SQUARE, BM), dtype=tl.float32)
    whole = tl.zeros((BM,), dtype=tl.float32)
    for start in range(s * chunk, tl.minimum((s + 1) * chunk, total), BN):
        n = start + tl.arange(0, BN)
        b, p, q = n // (HIGH * WIDE), (n // WIDE) % HIGH, n % WIDE
        there = known & (n < total)[:, None]
        spot = (b * gb + p * gh + q * gw)[:, None] + m[None, :] * go
        slopes = tl.load(g + spot, mask=there, other=0.0).to(tl.float32)
        spot = (b * ib + p * ih + q * iw)[:, None] + m[None, :] * io
        which = tl.load(index + spot, mask=there, other=0)
        if SLOPE != 0:  # otherwise what is from 4 on names no place
            slopes, which = tl.where(which < 4, slopes, slopes * SLOPE), which & 3
        slopes = slopes.to(KIND)
        none = tl.zeros_like(slopes)
        y = _square(
            x, n, d, sb, total, SC, SH, SW, CHANNELS, ROWS, COLUMNS, HIGH, WIDE, KH, KW, PITCH, PAD
        )
        y = tl.trans(y.to(KIND))
        acc0 = tl.dot(y, tl.where(which == 0, slopes, none), acc0, input_precision=PRECISION)
        acc1 = tl.dot(y, tl.where(which == 1, slopes, none), acc1, input_precision=PRECISION)
        acc2 = tl.dot(y, tl.where(which == 2, slopes, none), acc2, input_precision=PRECISION)
        acc3 = tl.dot(y, tl.where(which == 3, slopes, none), acc3, input_precision=PRECISION)
        if BIAS and SQUARE == CHANNELS * (KH + 1) * PITCH:  # no row of ones
            whole += tl.sum(tl.where(which < 4, slopes, none).to(tl.float32), 0)
    k = d
    found = _back(acc0, k, CHANNELS, KH, KW, PITCH, 0) + _back(acc1, k, CHANNELS, KH, KW, PITCH, 1)
    found += _back(acc2, k, CHANNELS, KH, KW, PITCH, 2) + _back(acc3, k, CHANNELS, KH, KW, PITCH, 3)
    used: tl.constexpr = CHANNELS * KH * KW
    if BIAS and SQUARE == CHANNELS * (KH + 1) * PITCH:  # no row of ones
        found = tl.where((k == used)[:, None], whole[None, :], found)
    found = found.to(out.dtype.element_ty)
    row = (a * splits + s) * outputs + m[None, :]
    length = used + 1 if BIAS and not APART else used
    tl.store(out + row * length + k[:, None], found, mask=known & (k < length)[:, None])
    if BIAS and APART:
        tl.store(to_bias + row + 0 * k[:, None], found, mask=known & (k == used)[:, None])


def constants(x: Tensor, size: Size, pad: int, low: bool, precision: str) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    known: dict[str, Any] = facts(x, size, 1, pad)
    del known["STRIDE"]
    return known | {
        "CHANNELS": x.shape[2],
        "PITCH": pitch(size[1]),
        "SC": x.stride(2),
        "SH": x.stride(3),
        "SW": x.stride(4),
        "SQUARE": power(pixels_of(x.shape[2], size) + 1),
        "KIND": tl.bfloat16 if low or x.dtype == torch.bfloat16 else tl.float32,
        "PRECISION": precision,
    }


def pooled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: int,
    slope: float,
    last: bool,
    block: Square,
    low: bool = False,
    precision: str = "tf32",
) -> tuple[Tensor, Tensor]:
    """Return (out, index), each (A, B, O, P, Q), in memory (A, O, B, P, Q), or (B, P, Q, A, O) if
    `last`; weight (A, O, C, I, J), bias (A, O). With `low`, out is bfloat16.
    """
    clients, samples = x.shape[:2]
    outputs, size = weight.shape[1], window(weight)
    assert fits(x.shape[2], size, stride)
    known = constants(x, size, pad, low, precision)
    high, wide = known["HIGH"], known["WIDE"]
    shape = (samples, high, wide, clients, outputs) if last else (clients, outputs, samples)
    kind = torch.bfloat16 if low else x.dtype
    out = x.new_empty(shape if last else (*shape, high, wide), dtype=kind)
    index = torch.empty_like(out, dtype=torch.int8)
    total = samples * high * wide
    programs = triton.cdiv(triton.cdiv(total, block.windows), block.turns)
    _pooled_square[(programs, triton.cdiv(outputs, block.outputs), clients)](
        *(x, weight.contiguous(), x if bias is None else bias.contiguous(), out, index),
        *(*x.stride()[:2], total, outputs, clients, block.turns),
        BIAS=bias is not None,
        LAST=last,
        SLOPE=slope,
        **known,
        **block.options(),
    )
    order = (3, 0, 4, 1, 2) if last else (0, 2, 1, 3, 4)
    return out.permute(order), index.permute(order)


def pooled_weights(
    x: Tensor,
    g: Tensor,
    index: Tensor,
    size: Size,
    stride: int,
    pad: int,
    slope: float,
    bias: bool,
    block: Square,
    splits: int,
    low: bool = False,
    precision: str = "tf32",
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, the second empty without `bias`, from that of what
    was pooled. They have x's type.
    """
    facts = (size, stride, pad, slope, bias, block, splits, low, precision)
    found, to_bias = weights_parts(x, g, index, *facts)
    return weights_whole(found, to_bias, bias, (x.shape[2], *size))


def weights_parts(
    x: Tensor,
    g: Tensor,
    index: Tensor,
    size: Size,
    stride: int,
    pad: int,
    slope: float,
    bias: bool,
    block: Square,
    splits: int,
    low: bool = False,
    precision: str = "tf32",
    joined: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `weights_room` makes, filled."""
    clients, samples, outputs, high, wide = g.shape
    assert fits(x.shape[2], size, stride)
    total, used = samples * high * wide, x.shape[2] * size[0] * size[1]
    chunk, splits = shared(total, splits, block.windows)
    found, to_bias = weights_room(x.new_empty(()).expand(g.shape), used, bias, splits, joined)
    _weights_square[(triton.cdiv(outputs, block.outputs), clients * splits)](
        *(x, g, index, found, to_bias, *x.stride()[:2], *g.stride(), *index.stride()),
        *(total, chunk, splits, outputs),
        BIAS=bias,
        APART=splits == 1 and not joined,
        SLOPE=slope,
        **constants(x, size, pad, low, precision),
        **block.options(),
    )
    return found, to_bias
