"""GPU kernels in Triton for max-pooling of many networks at once, in three memory orders: sample by
sample, channel by channel, or place by place with clients and channels side by side.

A stack of images is (A, B, C, H, W): clients, samples, channels, rows, columns. Only imported where
a CUDA device and Triton are there; `pooling.py` has the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import as_last
from .partkernels import added

BLOCK = 512
BLOCKS = 264  # programs that fill the device twice
LAST = 1024  # numbers of images with clients and channels side by side, at once
MANY, COLUMNS = 64, 64  # rows and columns that are added at once


@triton.jit
def _pool(
    x,
    out,
    index,
    sa,
    su,
    sv,
    sh,
    sw,
    outer,
    inner,
    SLOPE: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out = the largest of each window, index = which; in the order (a, u, v, p, q), u and v
    samples and channels or vice versa.
    """
    program = tl.program_id(0)
    a, u = (program // outer).to(tl.int64), program % outer
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    v, p, q = n // (OUT_H * OUT_W), (n // OUT_W) % OUT_H, n % OUT_W
    good = v < inner
    base = x + a * sa + (u * su + v * sv + p * KH * sh + q * KW * sw)
    best = tl.load(base, mask=good, other=0.0)
    where = tl.zeros((SIZE,), dtype=tl.int8)
    for k in tl.static_range(1, KH * KW):
        value = tl.load(base + (k // KW) * sh + (k % KW) * sw, mask=good, other=0.0)
        better = (value > best) | (value != value)
        best, where = (
            tl.where(better, value, best),
            tl.where(better, tl.full((SIZE,), k, tl.int8), where),
        )
    place = program.to(tl.int64) * inner * (OUT_H * OUT_W) + n
    # the upper half: the slope below 0 applies
    where = tl.where(best > 0, where, where + KH * KW).to(tl.int8)
    tl.store(out + place, tl.where(best > 0, best, best * SLOPE), mask=good)
    tl.store(index + place, where, mask=good)


@triton.jit
def _unpool(
    g,
    index,
    x,
    sa,
    su,
    sv,
    sh,
    sw,
    outer,
    inner,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """x = g where the window's largest element was, else 0; elements in
    the order (a, u, v, h, w).
    """
    program = tl.program_id(0)
    a, u = (program // outer).to(tl.int64), program % outer
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    v, h, w = n // (ROWS * COLUMNS), (n // COLUMNS) % ROWS, n % COLUMNS
    good = v < inner
    p, q = h // KH, w // KW
    inside = good & (p < OUT_H) & (q < OUT_W)
    chosen = tl.load(
        index + program.to(tl.int64) * inner * (OUT_H * OUT_W) + (v * OUT_H + p) * OUT_W + q,
        mask=inside,
        other=-1,
    )
    value = tl.load(g + a * sa + (u * su + v * sv + p * sh + q * sw), mask=inside, other=0.0)
    own = (h % KH) * KW + w % KW
    value = tl.where(chosen == own, value, tl.where(chosen == own + KH * KW, value * SLOPE, 0.0))
    tl.store(x + program.to(tl.int64) * inner * (ROWS * COLUMNS) + n, value, mask=good)


@triton.jit
def _pool_last(
    x,
    bias,
    out,
    index,
    sb,
    sh,
    sw,
    across,
    total,
    BIAS: tl.constexpr,
    SLOPE: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The same in the order (b, p, q, a, c): `across` are clients times channels. With BIAS it is
    added to the largest.
    """
    n = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    good = n < total
    spot, c = n // across, n % across
    b, p, q = spot // (OUT_H * OUT_W), (spot // OUT_W) % OUT_H, spot % OUT_W
    base = x + b * sb + p * KH * sh + q * KW * sw + c
    best = tl.load(base, mask=good, other=0.0)
    where = tl.zeros((SIZE,), dtype=tl.int8)
    for k in tl.static_range(1, KH * KW):
        value = tl.load(base + (k // KW) * sh + (k % KW) * sw, mask=good, other=0.0)
        better = (value > best) | (value != value)
        best, where = (
            tl.where(better, value, best),
            tl.where(better, tl.full((SIZE,), k, tl.int8), where),
        )
    if BIAS:
        best = best.to(tl.float32) + tl.load(bias + c, mask=good, other=0.0)
    where = tl.where(best > 0, where, where + KH * KW).to(tl.int8)
    bent = tl.where(best > 0, best, best * SLOPE).to(out.dtype.element_ty)
    tl.store(out + n, bent, mask=good)
    tl.store(index + n, where, mask=good)


@triton.jit
def _bent_sum(
    g,
    index,
    out,
    gb,
    gh,
    gw,
    across,
    rows,
    chunk,
    AREA: tl.constexpr,
    SLOPE: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    MANY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out[s, n] = Σ over the s-th part of the rows (b, p, q) of g, times SLOPE where index says."""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    s = tl.program_id(1)
    total = tl.zeros((MANY, SIZE), dtype=tl.float32)
    for start in range(s * chunk, tl.minimum((s + 1) * chunk, rows), MANY):
        r = start + tl.arange(0, MANY)
        b, p, q = r // (OUT_H * OUT_W), (r // OUT_W) % OUT_H, r % OUT_W
        inside = (r < tl.minimum((s + 1) * chunk, rows))[:, None] & (n < across)[None, :]
        spot = (b * gb + p * gh + q * gw)[:, None] + n[None, :]
        value = tl.load(g + spot, mask=inside, other=0.0).to(tl.float32)
        which = tl.load(index + r[:, None] * across + n[None, :], mask=inside, other=0)
        total += tl.where(which < AREA, value, value * SLOPE)
    tl.store(out + s * across + n, tl.sum(total, 0), mask=n < across)


@triton.jit
def _unpool_last(
    g,
    index,
    x,
    across,
    total,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The same in the order (b, h, w, a, c), window by window; those at the edge may have no
    largest, or not all places.
    """
    high, wide = (ROWS + KH - 1) // KH, (COLUMNS + KW - 1) // KW
    n = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    good = n < total
    spot, c = n // across, n % across
    b, p, q = spot // (high * wide), (spot // wide) % high, spot % wide
    inside = good & (p < OUT_H) & (q < OUT_W)
    place = ((b * OUT_H + p) * OUT_W + q) * across + c
    chosen = tl.load(index + place, mask=inside, other=-1)
    value = tl.load(g + place, mask=inside, other=0.0)
    value = tl.where(chosen < KH * KW, value, (value * SLOPE).to(value.dtype))
    chosen = chosen % (KH * KW)
    for k in tl.static_range(KH * KW):
        h, w = p * KH + k // KW, q * KW + k % KW
        there = good & (h < ROWS) & (w < COLUMNS)
        one = tl.where(inside & (chosen == k), value, 0.0).to(value.dtype)
        tl.store(x + ((b * ROWS + h) * COLUMNS + w) * across + c, one, mask=there)


def pool(x: Tensor, size: tuple[int, int], slope: float) -> tuple[Tensor, Tensor]:
    """Return (the largest of each window, times `slope` below 0; which of the window it was), in
    the memory order of x.
    """
    if is_last(x):
        return pool_last(x, size, slope)
    swap = by_channel(x)
    view = x.transpose(1, 2) if swap else x
    out = x.new_empty(*view.shape[:3], x.shape[3] // size[0], x.shape[4] // size[1])
    index = torch.empty_like(out, dtype=torch.int8)
    clients, outer, inner, high, wide = out.shape
    grid = (clients * outer, triton.cdiv(inner * high * wide, BLOCK))
    _pool[grid](
        view,
        out,
        index,
        *view.stride(),
        outer,
        inner,
        SLOPE=slope,
        OUT_H=high,
        OUT_W=wide,
        KH=size[0],
        KW=size[1],
        SIZE=BLOCK,
    )
    return (out.transpose(1, 2), index.transpose(1, 2)) if swap else (out, index)


def unpool(
    g: Tensor, index: Tensor, shape: tuple[int, ...], size: tuple[int, int], slope: float
) -> Tensor:
    """Return the stack of images of `shape` with g where the largest elements were, in the memory
    order of `index`.
    """
    if is_last(index):
        return unpool_last(g, index, shape, size, slope)
    swap = by_channel(index)
    where, g = (index.transpose(1, 2), g.transpose(1, 2)) if swap else (index, g)
    where = where.contiguous()
    clients, outer, inner, high, wide = where.shape
    x = g.new_empty(clients, outer, inner, *shape[3:])
    grid = (clients * outer, triton.cdiv(inner * shape[3] * shape[4], BLOCK))
    _unpool[grid](
        g,
        where,
        x,
        *g.stride(),
        outer,
        inner,
        SLOPE=slope,
        ROWS=shape[3],
        COLUMNS=shape[4],
        OUT_H=high,
        OUT_W=wide,
        KH=size[0],
        KW=size[1],
        SIZE=BLOCK,
    )
    return x.transpose(1, 2) if swap else x


def by_channel(x: Tensor) -> bool:
    """Return whether the memory holds channel after channel, and in each the samples."""
    return x.stride(2) > x.stride(1)


def is_last(x: Tensor) -> bool:
    """Return whether the memory holds (b, h, w, a, c): clients and channels side by side."""
    clients, _, channels, high, wide = x.shape
    across = clients * channels
    steps = (channels, high * wide * across, 1, wide * across, across)
    return channels > 1 and all(
        step == wanted or size == 1
        for step, wanted, size in zip(x.stride(), steps, x.shape, strict=True)
    )


def pool_last(
    x: Tensor, size: tuple[int, int], slope: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `pool` does, for images whose clients and channels are side by side; the bias (A,
    C) is added to the largest.
    """
    x = x if is_last(x) else as_last(x)
    clients, samples, channels = x.shape[:3]
    high, wide, across = x.shape[3] // size[0], x.shape[4] // size[1], clients * channels
    out = x.new_empty(samples, high, wide, clients, channels)
    index = torch.empty_like(out, dtype=torch.int8)
    total = samples * high * wide * across
    _pool_last[(triton.cdiv(total, LAST),)](
        *(x, x if bias is None else bias.contiguous(), out, index),
        *(x.stride(1), x.stride(3), x.stride(4), across, total),
        BIAS=bias is not None,
        SLOPE=slope,
        OUT_H=high,
        OUT_W=wide,
        KH=size[0],
        KW=size[1],
        SIZE=LAST,
    )
    return out.permute(3, 0, 4, 1, 2), index.permute(3, 0, 4, 1, 2)


def unpool_last(
    g: Tensor, index: Tensor, shape: tuple[int, ...], size: tuple[int, int], slope: float
) -> Tensor:
    """Return what `unpool` does, for images whose clients and channels are side by side."""
    clients, samples, channels, high, wide = index.shape
    across = clients * channels
    g = g if is_last(g) else as_last(g)
    x = g.new_empty(samples, shape[3], shape[4], clients, channels)
    windows = triton.cdiv(shape[3], size[0]) * triton.cdiv(shape[4], size[1])
    total = samples * windows * across
    _unpool_last[(triton.cdiv(total, LAST),)](
        *(g, index, x, across, total),
        SLOPE=slope,
        ROWS=shape[3],
        COLUMNS=shape[4],
        OUT_H=high,
        OUT_W=wide,
        KH=size[0],
        KW=size[1],
        SIZE=LAST,
    )
    return x.permute(3, 0, 4, 1, 2)


def bent_sum(g: Tensor, index: Tensor, area: int, slope: float, kind: torch.dtype) -> Tensor:
    """Return Σ over samples and places of g (A, B, C, P, Q), times the slope where it applies: (A,
    C). `index` is side by side in memory.
    """
    clients, samples, channels, high, wide = g.shape
    g = g if is_last(g) else as_last(g)
    across, rows = clients * channels, samples * high * wide
    blocks = triton.cdiv(across, COLUMNS)
    splits = max(1, min(BLOCKS // blocks, rows // MANY))
    chunk = triton.cdiv(triton.cdiv(rows, splits), MANY) * MANY
    parts = g.new_empty(triton.cdiv(rows, chunk), across, dtype=torch.float32)
    _bent_sum[(blocks, len(parts))](
        *(g, index, parts, g.stride(1), g.stride(3), g.stride(4), across, rows, chunk),
        AREA=area,
        SLOPE=slope,
        OUT_H=high,
        OUT_W=wide,
        MANY=MANY,
        SIZE=COLUMNS,
    )
    found = parts if len(parts) == 1 else added(parts[None, :, None], None, kind)
    return found.to(kind).view(clients, channels)
