"""GPU kernels in Triton for convolutions of many networks at once, without a matrix of patches: a
program multiplies a block of weights with pixels that it reads where they are.

    forward   out[o, n] = Σ_k w[o, k] x[k, n] + bias[o]       k = (c, i, j), n = (b, p, q)
    weights   ∂w[o, k]  = Σ_n ∂out[o, n] x[k, n]              the bias is one more k, with x = 1
    input     ∂x[c, m]  = Σ_ij Σ_o w[o, c, i, j] ∂out[o, n]   m = (b, h, w), n where (i, j) puts it

x[k, n] is the pixel (b, c, p·stride + i − pad, q·stride + j − pad). A stack of images is (A, B, C,
H, W): clients, samples, channels, rows, columns. Products are those of tensor cores: TF32 of
float32, or bfloat16; sums are float32. Each sum may be split into parts of `chunk` terms that
programs of their own add up; `partkernels.py` adds the parts. Only imported where a CUDA device and
Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batched import Size, window
from .kernels import out_size
from .partkernels import added, added_apart
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
    PRECISION: tl.constexpr,
):
    """out[a, s, o, n], the s-th part of the sum, for a block of outputs and of places."""
    number = tl.program_id(2)
    a, s = (number // splits).to(tl.int64), number % splits
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, p, q = n // (OUT_H * OUT_W), (n // OUT_W) % OUT_H, n % OUT_W
    top, left = p * STRIDE - PAD, q * STRIDE - PAD
    x += a * sa
    w += a * outputs * used
    place = b * sb + top * sh + left * sw
    known, real = m < outputs, n < total
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(s * chunk, tl.minimum((s + 1) * chunk, used), BK):
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
    if BIAS:
        more = tl.load(bias + a * outputs + m, mask=known, other=0.0)
        acc += more[:, None].to(tl.float32)
    tl.store(
        out + ((a * splits + s) * outputs + m[:, None]) * total + n[None, :],
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
    APART: tl.constexpr,
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
    """out[a, s, o, k]: the sum over the s-th part of all places. The bias is the last k of a row;
    where there is one part only, it goes to `to_bias`.
    """
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
        acc = tl.dot(slopes, tl.trans(pixels), acc, input_precision=PRECISION)
    row = (a * splits + s) * outputs + m[:, None]
    found = acc.to(out.dtype.element_ty)
    wide = used + 1 if BIAS and not APART else used
    tl.store(out + row * wide + k[None, :], found, mask=known[:, None] & (k < wide)[None, :])
    if BIAS and APART:
        tl.store(to_bias + row + 0 * k[None, :], found, mask=known[:, None] & (k == used)[None, :])


@triton.jit
def _input(
    g,
    w,
    out,
    ga,
    gb,
    go,
    total,
    chunk,
    splits,
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
    """out[a, s, c, m], the s-th part of the sum, for a block of channels and of pixels.

    w is (A, i·j, C, O).
    """
    number = tl.program_id(2)
    a, s = (number // splits).to(tl.int64), number % splits
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    b, h, v = n // (ROWS * COLUMNS), (n // COLUMNS) % ROWS, n % COLUMNS
    g += a * ga
    w += a * (KH * KW) * channels * outputs
    known, real = m < channels, n < total
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    per = tl.cdiv(outputs, BK)
    for step in range(s * chunk, tl.minimum((s + 1) * chunk, KH * KW * per)):
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
        acc = tl.dot(weights, slopes, acc, input_precision=PRECISION)
    tl.store(
        out + ((a * splits + s) * channels + m[:, None]) * total + n[None, :],
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


def shared(length: int, splits: int, depth: int = 1) -> tuple[int, int]:
    """Return how many terms of a sum of `length` a part has, a multiple of `depth`, and how many
    parts that makes.
    """
    chunk = triton.cdiv(triton.cdiv(length, splits), depth) * depth
    return chunk, triton.cdiv(length, chunk)


def forward_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int, tile: Tile, splits: int
) -> Tensor:
    """Return the parts (A, S, O, B, P, Q) of the output; one part has the bias in it and the type
    of x, more than one neither.
    """
    clients, samples = x.shape[:2]
    outputs, used, size = weight.shape[1], weight[0, 0].numel(), window(weight)
    high, wide = out_size(tuple(x.shape), size, stride, pad)
    total = samples * high * wide
    chunk, splits = shared(used, splits, tile.depth)
    bias = bias if splits == 1 else None
    kind = x.dtype if splits == 1 else torch.float32
    out = x.new_empty(clients, splits, outputs, samples, high, wide, dtype=kind)
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(outputs, tile.rows), clients * splits)
    _forward[grid](
        *(x, weight.contiguous(), x if bias is None else bias.contiguous(), out),
        *(*x.stride(), total, chunk, splits, outputs, used),
        BIAS=bias is not None,
        **facts(tuple(x.shape), (high, wide), size, stride, pad),
        **tile.options(),
    )
    return out


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int, tile: Tile, splits: int
) -> Tensor:
    """Return (A, B, O, P, Q), in memory (A, O, B, P, Q), of weight (A, O, C, I, J) and bias (A,
    O).
    """
    parts = forward_parts(x, weight, bias, stride, pad, tile, splits)
    if parts.shape[1] == 1:
        return parts[:, 0].transpose(1, 2)
    found = added(parts.flatten(3), None if bias is None else bias.contiguous(), x.dtype)
    return found.view(len(x), *parts.shape[2:]).transpose(1, 2)


def weights_slope(
    x: Tensor, g: Tensor, size: Size, stride: int, pad: int, bias: bool, tile: Tile, splits: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (A, O, C, I, J) and bias (A, O), the second empty without
    `bias`.
    """
    parts, to_bias = weights_parts(x, g, size, stride, pad, bias, tile, splits)
    return weights_whole(parts, to_bias, bias, (x.shape[2], *size))


def weights_parts(
    x: Tensor,
    g: Tensor,
    size: Size,
    stride: int,
    pad: int,
    bias: bool,
    tile: Tile,
    splits: int,
    joined: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `weights_room` makes, filled."""
    g = flat_places(g)
    clients, samples, outputs, high, wide = g.shape
    total, used = samples * high * wide, x.shape[2] * size[0] * size[1]
    chunk, splits = shared(total, splits, tile.depth)
    parts, to_bias = weights_room(g, used, bias, splits, joined)
    columns = triton.cdiv(used + bias, tile.columns)
    grid = (columns, triton.cdiv(outputs, tile.rows), clients * splits)
    _weights[grid](
        *(x, g, parts, to_bias, *x.stride(), *g.stride()[:3]),
        *(total, chunk, splits, outputs, used),
        BIAS=bias,
        APART=splits == 1 and not joined,
        **facts(tuple(x.shape), (high, wide), size, stride, pad),
        **tile.options(),
    )
    return parts, to_bias


def weights_room(
    g: Tensor, used: int, bias: bool, splits: int, joined: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the tensors that the gradients of weight and bias are written to: parts with the bias
    at the end of each row, or a whole with the bias apart, unless it is to be `joined`.
    """
    clients, _, outputs = g.shape[:3]
    if splits > 1 or joined:
        parts = g.new_empty(clients, splits, outputs, used + bias, dtype=torch.float32)
        return parts, g.new_empty(clients, 0)
    return g.new_empty(clients, 1, outputs, used), g.new_empty(clients, outputs if bias else 0)


def weights_whole(
    parts: Tensor, to_bias: Tensor, bias: bool, inputs: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the gradients from what was written to them; `inputs` are all sizes of a weight but
    its outputs.
    """
    clients, splits, outputs = parts.shape[:3]
    found = parts
    if splits > 1 and bias:
        found, to_bias = added_apart(parts, to_bias.dtype)
    elif splits > 1:
        found = added(parts, None, to_bias.dtype)
    return found.view(clients, outputs, *inputs), to_bias


def input_slope(
    g: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    stride: int,
    pad: int,
    tile: Tile,
    splits: int,
) -> Tensor:
    """Return (A, B, C, H, W) of `shape`, in memory (A, C, B, H, W)."""
    g = flat_places(g)
    clients, samples, outputs, high, wide = g.shape
    channels, size = shape[2], window(weight)
    turned = weight.flatten(3).permute(0, 3, 2, 1).contiguous()
    steps = size[0] * size[1] * triton.cdiv(outputs, tile.depth)
    chunk, splits = shared(steps, splits)
    kind = g.dtype if splits == 1 else torch.float32
    out = g.new_empty(clients, splits, channels, samples, *shape[3:], dtype=kind)
    total = samples * shape[3] * shape[4]
    grid = (triton.cdiv(total, tile.columns), triton.cdiv(channels, tile.rows), clients * splits)
    _input[grid](
        *(g, turned, out, *g.stride()[:3], total, chunk, splits, outputs, channels),
        **facts(shape, (high, wide), size, stride, pad),
        **tile.options(),
    )
    whole = out[:, 0]
    if splits > 1:
        whole = added(out.flatten(3), None, g.dtype).view(whole.shape)
    return whole.transpose(1, 2)
