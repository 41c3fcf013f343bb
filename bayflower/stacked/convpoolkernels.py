"""GPU kernels in Triton for a convolution and the pooling after it, of many networks at once: the
large picture between the two is never written, forward or backward.

    out[o, m]   = bent(max over the places t of window m of Σ_k w[o, k] x[k, n(m, t)] + bias[o])
    index[o, m] = which t it was, plus 4 where the slope below 0 applies
    ∂w[o, k]    = Σ_m Σ_t ∂out[o, m] [index[o, m] names t] x[k, n(m, t)]

Windows are 2×2 and side by side. `convkernels.py` has the symbols, `pooling.py` the plain form.
Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import Size, window
from .convkernels import shared, weights_room, weights_whole
from .kernels import out_size
from .routes import Tile


@triton.jit
def _pooled(
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
    clients,
    BIAS: tl.constexpr,
    LAST: tl.constexpr,
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
    """out and index [a, o, m] for a block of outputs and of windows; with LAST [m, a, o]."""
    a = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, p, q = n // (HIGH * WIDE), (n // WIDE) % HIGH, n % WIDE
    x += a * sa
    w += a * outputs * used
    known, real = m < outputs, n < total
    best = tl.zeros((BM, BN), dtype=tl.float32)
    where = tl.zeros((BM, BN), dtype=tl.int32)
    for t in tl.static_range(4):
        top, left = (2 * p + t // 2) * STRIDE - PAD, (2 * q + t % 2) * STRIDE - PAD
        place = b * sb + top * sh + left * sw
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
        if t == 0:
            best = acc
        else:
            better = (acc > best) | (acc != acc)
            best, where = tl.where(better, acc, best), tl.where(better, t, where)
    if BIAS:
        best += tl.load(bias + a * outputs + m, mask=known, other=0.0).to(tl.float32)[:, None]
    if LAST:
        spot = (n[None, :].to(tl.int64) * clients + a) * outputs + m[:, None]
    else:
        spot = (a * outputs + m[:, None]) * total + n[None, :]
    good = known[:, None] & real[None, :]
    bent = tl.where(best > 0, best, best * SLOPE)
    tl.store(out + spot, bent.to(out.dtype.element_ty), mask=good)
    tl.store(index + spot, tl.where(best > 0, where, where + 4).to(tl.int8), mask=good)


@triton.jit
def _pooled_weights(
    x,
    g,
    index,
    out,
    to_bias,
    sa,
    sb,
    sc,
    sh,
    sw,
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
    used,
    BIAS: tl.constexpr,
    APART: tl.constexpr,
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
    """out[a, s, o, k]: the sum over the s-th part of all windows; the bias as in `_weights`."""
    number = tl.program_id(2)
    a, s = (number // splits).to(tl.int64), number % splits
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    c, i, j = k // (KH * KW), (k // KW) % KH, k % KW
    x += a * sa
    g += a * ga
    index += a * ia
    entry = c * sc + i * sh + j * sw
    known = m < outputs
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(s * chunk, tl.minimum((s + 1) * chunk, total), BK):
        n = start + tl.arange(0, BK)
        real = n < total
        b, p, q = n // (HIGH * WIDE), (n // WIDE) % HIGH, n % WIDE
        there = known[:, None] & real[None, :]
        spot = (b * gb + p * gh + q * gw)[None, :]
        slopes = tl.load(g + m[:, None] * go + spot, mask=there, other=0.0)
        spot = (b * ib + p * ih + q * iw)[None, :]
        which = tl.load(index + m[:, None] * io + spot, mask=there, other=0)
        slopes = tl.where(which < 4, slopes, slopes * SLOPE).to(x.dtype.element_ty)
        for t in tl.static_range(4):
            top, left = (2 * p + t // 2) * STRIDE - PAD, (2 * q + t % 2) * STRIDE - PAD
            inside = (k < used)[:, None] & real[None, :]
            if PAD > 0:
                h, v = top[None, :] + i[:, None], left[None, :] + j[:, None]
                inside = inside & (h >= 0) & (h < ROWS) & (v >= 0) & (v < COLUMNS)
            place = b * sb + top * sh + left * sw
            pixels = tl.load(x + entry[:, None] + place[None, :], mask=inside, other=0.0)
            if BIAS:
                pixels = tl.where((k == used)[:, None] & real[None, :], 1.0, pixels)
                pixels = pixels.to(x.dtype.element_ty)
            mine = tl.where(which % 4 == t, slopes, 0.0).to(x.dtype.element_ty)
            acc = tl.dot(mine, tl.trans(pixels), acc, input_precision=PRECISION)
    row = (a * splits + s) * outputs + m[:, None]
    found = acc.to(out.dtype.element_ty)
    length = used + 1 if BIAS and not APART else used
    tl.store(out + row * length + k[None, :], found, mask=known[:, None] & (k < length)[None, :])
    if BIAS and APART:
        tl.store(to_bias + row + 0 * k[None, :], found, mask=known[:, None] & (k == used)[None, :])


def facts(x: Tensor, size: Size, stride: int, pad: int) -> dict[str, int]:
    """Return the sizes that a kernel is compiled for; HIGH and WIDE are those after pooling."""
    high, wide = out_size(tuple(x.shape), size, stride, pad)
    return {
        "ROWS": x.shape[3],
        "COLUMNS": x.shape[4],
        "HIGH": high // 2,
        "WIDE": wide // 2,
        "KH": size[0],
        "KW": size[1],
        "STRIDE": stride,
        "PAD": pad,
    }


def pooled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: int,
    slope: float,
    last: bool,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """Return (out, index), each (A, B, O, P, Q), in memory (A, O, B, P, Q), or (B, P, Q, A, O) if
    `last`; weight (A, O, C, I, J), bias (A, O).
    """
    clients, samples = x.shape[:2]
    outputs, used = weight.shape[1], weight[0, 0].numel()
    known = facts(x, window(weight), stride, pad)
    high, wide = known["HIGH"], known["WIDE"]
    shape = (samples, high, wide, clients, outputs) if last else (clients, outputs, samples)
    out = x.new_empty(shape if last else (*shape, high, wide))
    index = torch.empty_like(out, dtype=torch.int8)
    total = samples * high * wide
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(outputs, tile.rows), clients)
    _pooled[grid](
        *(x, weight.contiguous(), x if bias is None else bias.contiguous(), out, index),
        *(*x.stride(), total, outputs, used, clients),
        BIAS=bias is not None,
        LAST=last,
        SLOPE=slope,
        **known,
        **tile.options(),
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
    tile: Tile,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, the second empty without `bias`, from that of what
    was pooled.
    """
    clients, samples, outputs, high, wide = g.shape
    total, used = samples * high * wide, x.shape[2] * size[0] * size[1]
    chunk, splits = shared(total, splits, tile.depth)
    parts, to_bias = weights_room(g, used, bias, splits)
    columns = triton.cdiv(used + bias, tile.columns)
    grid = (columns, triton.cdiv(outputs, tile.rows), clients * splits)
    _pooled_weights[grid](
        *(x, g, index, parts, to_bias, *x.stride(), *g.stride(), *index.stride()),
        *(total, chunk, splits, outputs, used),
        BIAS=bias,
        APART=splits == 1,
        SLOPE=slope,
        **facts(x, size, stride, pad),
        **tile.options(),
    )
    return weights_whole(parts, to_bias, bias, (x.shape[2], *size))
