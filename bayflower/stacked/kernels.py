"""GPU kernels in Triton for many small networks at once: patches of images and their inverse.

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
