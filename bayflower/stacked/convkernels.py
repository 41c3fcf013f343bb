"""GPU kernels in Triton for convolutions of many networks at once, without a matrix of patches: a
program multiplies a block of weights with pixels that it reads where they are.

    forward   out[o, n] = Σ_k w[o, k] x[k, n] + bias[o]       k = (c, i, j), n = (b, p, q)
    weights   ∂w[o, k]  = Σ_n ∂out[o, n] x[k, n]              the bias is one more k, with x = 1
    input     ∂x[c, m]  = Σ_ij Σ_o w[o, c, i, j] ∂out[o, n]   m = (b, h, w), n where (i, j) puts it

x[k, n] is the pixel (b, c, p·stride + i − pad, q·stride + j − pad). A stack of images is (A, B, C,
H, W): clients, samples, channels, rows, columns. Products are those of tensor cores: TF32 of
float32, or bfloat16; sums are float32. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import Size, window
from .kernels import out_size
from .routes import Tile


@triton.jit
def _forward(
    x,
    w,
    bias,
    out,
    sa,
    sb,
    sc,
    sh,
    sw,
    total,
    outputs,
    used,
    BIAS: tl.constexpr,
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
):
    """out[a, o, n] for a block of outputs and of places."""
    a = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, p, q = n // (OUT_H * OUT_W), (n // OUT_W) % OUT_H, n % OUT_W
    top, left = p * STRIDE - PAD, q * STRIDE - PAD
    x += a * sa
    w += a * outputs * used
    place = b * sb + top * sh + left * sw
    known, real = m < outputs, n < total
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
        acc = tl.dot(weights, pixels, acc, input_precision="tf32")
    if BIAS:
        more = tl.load(bias + a * outputs + m, mask=known, other=0.0)
        acc += more[:, None].to(tl.float32)
    tl.store(
        out + (a * outputs + m[:, None]) * total + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=known[:, None] & real[None, :],
    )


@triton.jit
def _weights(
    x,
    g,
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
    total,
    chunk,
    splits,
    outputs,
    used,
    BIAS: tl.constexpr,
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
):
    """out[a, s, o, k]: the sum over the s-th part of all places."""
    number = tl.program_id(2)
    a, s = (number // splits).to(tl.int64), number % splits
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    c, i, j = k // (KH * KW), (k // KW) % KH, k % KW
    x += a * sa
    g += a * ga
    entry = c * sc + i * sh + j * sw
    known = m < outputs
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(s * chunk, tl.minimum((s + 1) * chunk, total), BK):
        n = start + tl.arange(0, BK)
        real = n < total
        b, p, q = n // (OUT_H * OUT_W), (n // OUT_W) % OUT_H, n % OUT_W
        slopes = tl.load(
            g + m[:, None] * go + (b * gb + p * OUT_W + q)[None, :],
            mask=known[:, None] & real[None, :],
            other=0.0,
        )
        top, left = p * STRIDE - PAD, q * STRIDE - PAD
        inside = (k < used)[:, None] & real[None, :]
        if PAD > 0:
            h, v = top[None, :] + i[:, None], left[None, :] + j[:, None]
            inside = inside & (h >= 0) & (h < ROWS) & (v >= 0) & (v < COLUMNS)
        place = b * sb + top * sh + left * sw
        pixels = tl.load(x + entry[:, None] + place[None, :], mask=inside, other=0.0)
        pixels = tl.where((k == used)[:, None] & real[None, :], 1.0, pixels).to(x.dtype.element_ty)
        acc = tl.dot(slopes, tl.trans(pixels), acc, input_precision="tf32")
    row = (a * splits + s) * outputs + m[:, None]
    tl.store(out + row * used + k[None, :], acc, mask=known[:, None] & (k < used)[None, :])
    if BIAS:
        tl.store(to_bias + row + 0 * k[None, :], acc, mask=known[:, None] & (k == used)[None, :])


@triton.jit
def _input(
    g,
    w,
    out,
    ga,
    gb,
    go,
    total,
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
):
    """out[a, c, m] for a block of channels and of pixels; w is (A, i·j, C, O)."""
    a = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, h, v = n // (ROWS * COLUMNS), (n // COLUMNS) % ROWS, n % COLUMNS
    g += a * ga
    w += a * (KH * KW) * channels * outputs
    known, real = m < channels, n < total
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    per = tl.cdiv(outputs, BK)
    for step in range(0, KH * KW * per):
        ij, o = step // per, (step % per) * BK + tl.arange(0, BK)
        p, q = h + PAD - ij // KW, v + PAD - ij % KW
        inside = real & (p >= 0) & (q >= 0)
        if STRIDE > 1:
            inside = inside & (p % STRIDE == 0) & (q % STRIDE == 0)
            p, q = p // STRIDE, q // STRIDE
        inside = inside & (p < OUT_H) & (q < OUT_W)
        weights = tl.load(
            w + (ij * channels + m[:, None]) * outputs + o[None, :],
            mask=known[:, None] & (o < outputs)[None, :],
            other=0.0,
        )
        slopes = tl.load(
            g + o[:, None] * go + (b * gb + p * OUT_W + q)[None, :],
            mask=(o < outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        acc = tl.dot(weights, slopes, acc, input_precision="tf32")
    tl.store(
        out + (a * channels + m[:, None]) * total + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=known[:, None] & real[None, :],
    )


def flat_places(g: Tensor) -> Tensor:
    """Return g (A, B, O, P, Q) with the places of a picture side by side in memory."""
    good = g.stride(-1) == 1 and g.stride(-2) == g.shape[-1]
    return g if good else g.contiguous()


def facts(shape: tuple[int, ...], out: Size, size: Size, stride: int, pad: int) -> dict[str, int]:
    """Return the sizes that a kernel is compiled for."""
    return {
        "ROWS": shape[3],
        "COLUMNS": shape[4],
        "OUT_H": out[0],
        "OUT_W": out[1],
        "KH": size[0],
        "KW": size[1],
        "STRIDE": stride,
        "PAD": pad,
    }


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int, tile: Tile
) -> Tensor:
    """Return (A, B, O, P, Q), in memory (A, O, B, P, Q), of weight (A, O, C, I, J) and bias (A,
    O).
    """
    clients, samples = x.shape[:2]
    outputs, used, size = weight.shape[1], weight[0, 0].numel(), window(weight)
    high, wide = out_size(tuple(x.shape), size, stride, pad)
    total = samples * high * wide
    out = x.new_empty(clients, outputs, samples, high, wide)
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(outputs, tile.rows), clients)
    _forward[grid](
        *(x, weight.contiguous(), x if bias is None else bias.contiguous(), out),
        *(*x.stride(), total, outputs, used),
        BIAS=bias is not None,
        **facts(tuple(x.shape), (high, wide), size, stride, pad),
        **tile.options(),
    )
    return out.transpose(1, 2)


def weights_slope(
    x: Tensor, g: Tensor, size: Size, stride: int, pad: int, bias: bool, tile: Tile, splits: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (A, O, C, I, J) and bias (A, O), the second empty without
    `bias`.
    """
    g = flat_places(g)
    clients, samples, outputs, high, wide = g.shape
    total, used = samples * high * wide, x.shape[2] * size[0] * size[1]
    chunk = triton.cdiv(triton.cdiv(total, splits), tile.depth) * tile.depth
    parts = g.new_empty(clients, splits, outputs, used, dtype=torch.float32)
    to_bias = g.new_empty(clients, splits, outputs if bias else 0, dtype=torch.float32)
    columns = triton.cdiv(used + bias, tile.columns)
    grid = (columns, triton.cdiv(outputs, tile.rows), clients * splits)
    _weights[grid](
        *(x, g, parts, to_bias, *x.stride(), *g.stride()[:3]),
        *(total, chunk, splits, outputs, used),
        BIAS=bias,
        **facts(tuple(x.shape), (high, wide), size, stride, pad),
        **tile.options(),
    )
    shape = (clients, outputs, x.shape[2], *size)
    return added(parts, g.dtype).view(shape), added(to_bias, g.dtype)


def added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the parts (A, S, …)."""
    return (parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)).to(dtype)


def input_slope(
    g: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, pad: int, tile: Tile
) -> Tensor:
    """Return (A, B, C, H, W) of `shape`, in memory (A, C, B, H, W)."""
    g = flat_places(g)
    clients, samples, outputs, high, wide = g.shape
    channels, size = shape[2], window(weight)
    turned = weight.flatten(3).permute(0, 3, 2, 1).contiguous()
    out = g.new_empty(clients, channels, samples, *shape[3:])
    total = samples * shape[3] * shape[4]
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(channels, tile.rows), clients)
    _input[grid](
        *(g, turned, out, *g.stride()[:3], total, outputs, channels),
        **facts(shape, (high, wide), size, stride, pad),
        **tile.options(),
    )
    return out.transpose(1, 2)
