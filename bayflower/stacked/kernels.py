"""GPU kernels in Triton for many small networks at once: patches of images, their inverse, and
pooling.

A stack of images is (A, B, C, H, W): clients, samples, channels, rows, columns, in any memory
order. Patches are the columns of matrices, one for every sample or one for all samples of a client
(`whole`), whichever makes the better product. Only imported where a CUDA device and Triton are
there; `batched.py` has the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _patches(
    x,
    cols,
    sa,
    sb,
    sc,
    sh,
    sw,
    samples,
    ca,
    cb,
    ck,
    used,
    padded,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    SIZE: tl.constexpr,
):
    """cols[a, b, (c, i, j), (p, q)] = x[a, b, c, p·stride + i − pad, q·stride + j − pad]; then a
    row of ones, then zeros.
    """
    program = tl.program_id(0)
    a, k = (program // padded).to(tl.int64), program % padded
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    c, i, j = k // (KH * KW), (k // KW) % KH, k % KW
    b, p, q = n // (OUT_H * OUT_W), (n // OUT_W) % OUT_H, n % OUT_W
    good = b < samples
    h, w = p * STRIDE + i - PAD, q * STRIDE + j - PAD
    inside = good & (k < used) & (h >= 0) & (h < ROWS) & (w >= 0) & (w < COLUMNS)
    value = tl.load(x + a * sa + (b * sb + c * sc + h * sh + w * sw), mask=inside, other=0.0)
    value = tl.where(k == used, 1.0, value)
    tl.store(cols + a * ca + (b * cb + k * ck + p * OUT_W + q), value, mask=good)


@triton.jit
def _image(
    cols,
    x,
    channels,
    samples,
    ca,
    cb,
    ck,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    SUM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """x[a, c, b, h, w] = Σ of the entries of cols that `_patches` would read from there."""
    program = tl.program_id(0)
    a, c = (program // channels).to(tl.int64), program % channels
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    b, h, w = n // (ROWS * COLUMNS), (n // COLUMNS) % ROWS, n % COLUMNS
    good = b < samples
    value = tl.zeros((SIZE,), dtype=SUM)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            p, q = h + PAD - i, w + PAD - j
            inside = good & (p >= 0) & (q >= 0) & (p % STRIDE == 0) & (q % STRIDE == 0)
            p, q = p // STRIDE, q // STRIDE
            inside = inside & (p < OUT_H) & (q < OUT_W)
            row = c * (KH * KW) + i * KW + j
            value += tl.load(
                cols + a * ca + (b * cb + row * ck + p * OUT_W + q), mask=inside, other=0.0
            )
    tl.store(x + (program.to(tl.int64) * samples * (ROWS * COLUMNS) + n), value, mask=good)


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


def sum_type(x: Tensor) -> tl.dtype:
    """Return the type that sums of such numbers are kept in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def out_size(
    shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int
) -> tuple[int, int]:
    """Return rows and columns of a convolution's output."""
    return (shape[-2] + 2 * pad - size[0]) // stride + 1, (
        shape[-1] + 2 * pad - size[1]
    ) // stride + 1


def strides(samples: int, rows: int, area: int, whole: bool) -> tuple[int, int, int]:
    """Return the steps from client to client, sample to sample and row to row of patch matrices."""
    return (
        (rows * samples * area, area, samples * area)
        if whole
        else (samples * rows * area, rows * area, area)
    )


def patches(
    x: Tensor, size: tuple[int, int], stride: int, pad: int, rows: int, whole: bool
) -> Tensor:
    """Return (A, rows, B·P·Q) if `whole`, else (A·B, rows, P·Q): rows (c, i, j), then ones, then
    zeros; x (A, B, C, H, W).
    """
    clients, samples, channels = x.shape[:3]
    out_h, out_w = out_size(tuple(x.shape), size, stride, pad)
    area = out_h * out_w
    cols = x.new_empty(
        (clients, rows, samples * area) if whole else (clients * samples, rows, area)
    )
    grid = (clients * rows, triton.cdiv(samples * area, BLOCK))
    _patches[grid](
        x,
        cols,
        *x.stride(),
        samples,
        *strides(samples, rows, area, whole),
        channels * size[0] * size[1],
        rows,
        ROWS=x.shape[3],
        COLUMNS=x.shape[4],
        OUT_H=out_h,
        OUT_W=out_w,
        KH=size[0],
        KW=size[1],
        STRIDE=stride,
        PAD=pad,
        SIZE=BLOCK,
    )
    return cols


def image(
    cols: Tensor, shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int, whole: bool
) -> Tensor:
    """Return the stack of images (A, B, C, H, W) of `shape` whose patches add up from `cols`: the
    transpose of `patches`.
    """
    clients, samples, channels, height, width = shape
    out_h, out_w = out_size(shape, size, stride, pad)
    x = cols.new_empty(clients, channels, samples, height, width)
    grid = (clients * channels, triton.cdiv(samples * height * width, BLOCK))
    _image[grid](
        cols,
        x,
        channels,
        samples,
        *strides(samples, cols.shape[1], out_h * out_w, whole),
        ROWS=height,
        COLUMNS=width,
        OUT_H=out_h,
        OUT_W=out_w,
        KH=size[0],
        KW=size[1],
        STRIDE=stride,
        PAD=pad,
        SUM=sum_type(cols),
        SIZE=BLOCK,
    )
    return x.transpose(1, 2)


def pool(x: Tensor, size: tuple[int, int], slope: float) -> tuple[Tensor, Tensor]:
    """Return (the largest of each window, times `slope` below 0; which of the window it was), in
    the memory order of x.
    """
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
