"""GPU kernels in Triton for many small networks at once: patches of images, their inverse, and pooling.

A stack of images is (A, B, C, H, W): clients, samples, channels, rows, columns, in any memory order. Patches are the columns of
matrices, one for every sample or one for all samples of a client (`whole`), whichever makes the better product. Only imported
where a CUDA device and Triton are there; `batched.py` has the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _patches(x, cols, sa, sb, sc, sh, sw, samples, ca, cb, ck, used, padded, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             OUT_H: tl.constexpr, OUT_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
             SIZE: tl.constexpr):  # fmt: skip
    """cols[a, b, (c, i, j), (p, q)] = x[a, b, c, p·stride + i − pad, q·stride + j − pad]; then a row of ones, then zeros."""
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
def _image(cols, x, channels, samples, ca, cb, ck, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
           KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, SUM: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
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
            value += tl.load(cols + a * ca + (b * cb + row * ck + p * OUT_W + q), mask=inside, other=0.0)
    tl.store(x + (program.to(tl.int64) * samples * (ROWS * COLUMNS) + n), value, mask=good)


@triton.jit
def _pool(x, out, index, sa, su, sv, sh, sw, outer, inner, SLOPE: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr, KH: tl.constexpr,
          KW: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """out = the largest of each window, index = which; in the order (a, u, v, p, q), u and v samples and channels or vice versa."""
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
        best, where = tl.where(better, value, best), tl.where(better, tl.full((SIZE,), k, tl.int8), where)
    place = program.to(tl.int64) * inner * (OUT_H * OUT_W) + n
    where = tl.where(best > 0, where, where + KH * KW).to(tl.int8)  # the upper half: the slope below 0 applies
    tl.store(out + place, tl.where(best > 0, best, best * SLOPE), mask=good)
    tl.store(index + place, where, mask=good)


@triton.jit
def _unpool(g, index, x, sa, su, sv, sh, sw, outer, inner, SLOPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            OUT_H: tl.constexpr, OUT_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """x = g where the window's largest element was, else 0; elements in the order (a, u, v, h, w)."""
    program = tl.program_id(0)
    a, u = (program // outer).to(tl.int64), program % outer
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    v, h, w = n // (ROWS * COLUMNS), (n // COLUMNS) % ROWS, n % COLUMNS
    good = v < inner
    p, q = h // KH, w // KW
    inside = good & (p < OUT_H) & (q < OUT_W)
    chosen = tl.load(index + program.to(tl.int64) * inner * (OUT_H * OUT_W) + (v * OUT_H + p) * OUT_W + q, mask=inside, other=-1)
    value = tl.load(g + a * sa + (u * su + v * sv + p * sh + q * sw), mask=inside, other=0.0)
    own = (h % KH) * KW + w % KW
    value = tl.where(chosen == own, value, tl.where(chosen == own + KH * KW, value * SLOPE, 0.0))
    tl.store(x + program.to(tl.int64) * inner * (ROWS * COLUMNS) + n, value, mask=good)


def sum_type(x: Tensor) -> tl.dtype:
    """Return the type that sums of such numbers are kept in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def out_size(shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int) -> tuple[int, int]:
    """Return rows and columns of a convolution's output."""
    return (shape[-2] + 2 * pad - size[0]) // stride + 1, (shape[-1] + 2 * pad - size[1]) // stride + 1


def strides(samples: int, rows: int, area: int, whole: bool) -> tuple[int, int, int]:
    """Return the steps from client to client, sample to sample and row to row of patch matrices."""
    return (rows * samples * area, area, samples * area) if whole else (samples * rows * area, rows * area, area)


def patches(x: Tensor, size: tuple[int, int], stride: int, pad: int, rows: int, whole: bool) -> Tensor:
    """Return (A, rows, B·P·Q) if `whole`, else (A·B, rows, P·Q): rows (c, i, j), then ones, then zeros; x (A, B, C, H, W)."""
    clients, samples, channels = x.shape[:3]
    out_h, out_w = out_size(tuple(x.shape), size, stride, pad)
    area = out_h * out_w
    cols = x.new_empty((clients, rows, samples * area) if whole else (clients * samples, rows, area))
    grid = (clients * rows, triton.cdiv(samples * area, BLOCK))
    _patches[grid](x, cols, *x.stride(), samples, *strides(samples, rows, area, whole), channels * size[0] * size[1], rows,
                   ROWS=x.shape[3], COLUMNS=x.shape[4], OUT_H=out_h, OUT_W=out_w, KH=size[0], KW=size[1], STRIDE=stride, PAD=pad,
                   SIZE=BLOCK)  # fmt: skip
    return cols


def image(cols: Tensor, shape: tuple[int, ...], size: tuple[int, int], stride: int, pad: int, whole: bool) -> Tensor:
    """Return the stack of images (A, B, C, H, W) of `shape` whose patches add up from `cols`: the transpose of `patches`."""
    clients, samples, channels, height, width = shape
    out_h, out_w = out_size(shape, size, stride, pad)
    x = cols.new_empty(clients, channels, samples, height, width)
    grid = (clients * channels, triton.cdiv(samples * height * width, BLOCK))
    _image[grid](cols, x, channels, samples, *strides(samples, cols.shape[1], out_h * out_w, whole), ROWS=height, COLUMNS=width,
                 OUT_H=out_h, OUT_W=out_w, KH=size[0], KW=size[1], STRIDE=stride, PAD=pad, SUM=sum_type(cols), SIZE=BLOCK)  # fmt: skip
    return x.transpose(1, 2)


def pool(x: Tensor, size: tuple[int, int], slope: float) -> tuple[Tensor, Tensor]:
    """Return (the largest of each window, times `slope` below 0; which of the window it was), in the memory order of x."""
    swap = by_channel(x)
    view = x.transpose(1, 2) if swap else x
    out = x.new_empty(*view.shape[:3], x.shape[3] // size[0], x.shape[4] // size[1])
    index = torch.empty_like(out, dtype=torch.int8)
    clients, outer, inner, high, wide = out.shape
    grid = (clients * outer, triton.cdiv(inner * high * wide, BLOCK))
    _pool[grid](view, out, index, *view.stride(), outer, inner, SLOPE=slope, OUT_H=high, OUT_W=wide, KH=size[0], KW=size[1], SIZE=BLOCK)
    return (out.transpose(1, 2), index.transpose(1, 2)) if swap else (out, index)


def unpool(g: Tensor, index: Tensor, shape: tuple[int, ...], size: tuple[int, int], slope: float) -> Tensor:
    """Return the stack of images of `shape` with g where the largest elements were, in the memory order of `index`."""
    swap = by_channel(index)
    where, g = (index.transpose(1, 2), g.transpose(1, 2)) if swap else (index, g)
    where = where.contiguous()
    clients, outer, inner, high, wide = where.shape
    x = g.new_empty(clients, outer, inner, *shape[3:])
    grid = (clients * outer, triton.cdiv(inner * shape[3] * shape[4], BLOCK))
    _unpool[grid](g, where, x, *g.stride(), outer, inner, SLOPE=slope, ROWS=shape[3], COLUMNS=shape[4], OUT_H=high, OUT_W=wide,
                  KH=size[0], KW=size[1], SIZE=BLOCK)  # fmt: skip
    return x.transpose(1, 2) if swap else x


def by_channel(x: Tensor) -> bool:
    """Return whether the memory holds channel after channel, and in each the samples."""
    return x.stride(2) > x.stride(1)


@triton.jit
def _nll(logits, y, out, classes, WIDTH: tl.constexpr):
    """out[n] = log Σ exp(logits[n]) − logits[n, y[n]]."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    row = tl.load(logits + n * classes + c, mask=c < classes, other=float("-inf"))
    top = tl.max(row, 0)
    own = tl.load(logits + n * classes + tl.load(y + n))
    tl.store(out + n, tl.log(tl.sum(tl.exp(row - top), 0)) + top - own)


@triton.jit
def _nll_slope(logits, y, g, out, classes, WIDTH: tl.constexpr):
    """out[n] = g[n]·(softmax(logits[n]) − 1 at y[n])."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    row = tl.load(logits + n * classes + c, mask=c < classes, other=float("-inf"))
    power = tl.exp(row - tl.max(row, 0))
    slope = tl.load(g + n) * (power / tl.sum(power, 0) - tl.where(c == tl.load(y + n), 1.0, 0.0))
    tl.store(out + n * classes + c, slope, mask=c < classes)


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Return −log softmax(logits)_y for logits (…, C), y (…)."""
    logits, y = logits.contiguous(), y.contiguous()
    out = logits.new_empty(y.shape)
    _nll[(y.numel(),)](logits, y, out, logits.shape[-1], WIDTH=triton.next_power_of_2(logits.shape[-1]), num_warps=1)
    return out


def nll_slope(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return g·(softmax(logits) − 1_y)."""
    logits, y, g = logits.contiguous(), y.contiguous(), g.contiguous()
    out = torch.empty_like(logits)
    _nll_slope[(y.numel(),)](logits, y, g, out, logits.shape[-1], WIDTH=triton.next_power_of_2(logits.shape[-1]), num_warps=1)
    return out


@triton.jit
def _mean_nll(logits, y, mask, out, samples, classes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[a] = Σ_n mask[a, n]·(log Σ exp(logits[a, n]) − logits[a, n, y[a, n]]) / max(Σ_n mask[a, n], 1)."""
    a = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    good = n < samples
    table = tl.load(logits + (a * samples + n[:, None]) * classes + c[None, :], mask=good[:, None] & (c[None, :] < classes), other=-1e30)
    top = tl.max(table, 1)
    own = tl.load(logits + (a * samples + n) * classes + tl.load(y + a * samples + n, mask=good, other=0), mask=good, other=0.0)
    weight = tl.load(mask + a * samples + n, mask=good, other=0.0)
    each = tl.log(tl.sum(tl.exp(table - top[:, None]), 1)) + top - own
    total = tl.sum(tl.where(weight > 0, each * weight, 0.0), 0)
    tl.store(out + a, total / tl.maximum(tl.sum(weight, 0), 1.0))


def mean_nll(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of −log softmax(logits)_y where the mask is 1, for logits (…, B, C), y and mask (…, B)."""
    rows, width = triton.next_power_of_2(logits.shape[-2]), triton.next_power_of_2(logits.shape[-1])
    if rows * width > 2**14:  # too much for one program
        return (nll(logits, y) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    logits, y, mask = logits.contiguous(), y.contiguous(), mask.contiguous()
    out = logits.new_empty(logits.shape[:-2])
    _mean_nll[(max(out.numel(), 1),)](logits, y, mask, out, *logits.shape[-2:], ROWS=rows, WIDTH=width)
    return out


@triton.jit
def _pull(z, centres, known, y, mask, out, slope, per_centres, per_known, samples, dim, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[a] = Σ_n w_n·Σ_j (z_nj − centre_yj)²/dim, slope = 2·w_n·(z_nj − centre_yj)/dim, w_n = mask_n·known_y/max(Σ mask, 1)."""
    a = tl.program_id(0).to(tl.int64)
    lanes, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    number = tl.sum(tl.zeros([ROWS], mask.dtype.element_ty), 0)
    for start in range(0, samples, ROWS):
        n = start + lanes
        number += tl.sum(tl.load(mask + a * samples + n, mask=n < samples, other=0.0), 0)
    total = tl.sum(tl.zeros([ROWS], z.dtype.element_ty), 0)
    for start in range(0, samples, ROWS):
        n = start + lanes
        good = n < samples
        label = tl.load(y + a * samples + n, mask=good, other=0)
        sure = tl.load(known + a * per_known + label, mask=good, other=0).to(z.dtype.element_ty)
        weight = tl.load(mask + a * samples + n, mask=good, other=0.0) * sure / (tl.maximum(number, 1.0) * dim)
        inside = good[:, None] & (d[None, :] < dim)
        place = (a * samples + n[:, None]) * dim + d[None, :]
        centre = tl.load(centres + a * per_centres + label[:, None] * dim + d[None, :], mask=inside, other=0.0)
        distance = tl.where(weight[:, None] > 0, tl.load(z + place, mask=inside, other=0.0) - centre, 0.0)
        total += tl.sum(tl.sum(distance * distance, 1) * weight, 0)
        tl.store(slope + place, 2 * weight[:, None] * distance, mask=inside)
    tl.store(out + a, total)


def pull(z: Tensor, centres: Tensor, known: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the mean of known_y · mean_j (z_j − centre_yj)² (A,), its gradient (A, B, D)); centres and known may be repeated over A."""
    z, y, mask = z.contiguous(), y.contiguous(), mask.contiguous()
    centres, known = (x if x.stride(0) == 0 and x[0].is_contiguous() else x.contiguous() for x in (centres, known))
    clients, samples, dim = z.shape
    out, slope = z.new_empty(clients), torch.empty_like(z)
    width = triton.next_power_of_2(dim)
    rows = max(1, min(triton.next_power_of_2(samples), 2**13 // width))
    _pull[(max(clients, 1),)](z, centres, known, y, mask, out, slope, centres.stride(0), known.stride(0), samples, dim, ROWS=rows,
                              WIDTH=width, num_warps=8)  # fmt: skip
    return out, slope


@triton.jit
def _norm(x, mask, weight, bias, y, mean, variance, xa, xb, xc, ya, yb, yc, channels, samples, EPS: tl.constexpr, AREA: tl.constexpr,
          SAMPLES: tl.constexpr, SUM: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The formulas of `masked.py` for one channel of one client: once over x for m and v, once more for y."""
    a, c = (tl.program_id(0) // channels).to(tl.int64), (tl.program_id(0) % channels).to(tl.int64)
    lanes, rows = tl.arange(0, SIZE), tl.arange(0, SAMPLES)
    x, y = x + a * xa + c * xc, y + a * ya + c * yc
    count = tl.maximum(tl.sum(tl.load(mask + a * samples + rows, mask=rows < samples, other=0.0).to(SUM), 0) * AREA, 1.0)
    shift = tl.load(x).to(SUM)  # a number like the others, so that the difference of squares loses nothing
    one, two = tl.zeros((SIZE,), dtype=SUM), tl.zeros((SIZE,), dtype=SUM)
    for start in range(0, samples * AREA, SIZE):
        n = start + lanes
        b = n // AREA
        real = tl.load(mask + a * samples + b, mask=b < samples, other=0.0)
        value = tl.load(x + b * xb + n % AREA, mask=real > 0, other=0.0).to(SUM) - shift
        value = tl.where(real > 0, value, 0.0)
        one += value
        two += value * value
    near = tl.sum(one, 0) / count
    spread = tl.maximum(tl.sum(two, 0) / count - near * near, 0.0)
    middle = shift + near
    tl.store(mean + a * channels + c, middle)
    tl.store(variance + a * channels + c, spread)
    scale = tl.load(weight + a * channels + c).to(SUM) / tl.sqrt(spread + EPS)
    offset = tl.load(bias + a * channels + c).to(SUM)
    for start in range(0, samples * AREA, SIZE):
        n = start + lanes
        b = n // AREA
        value = tl.load(x + b * xb + n % AREA, mask=b < samples, other=0.0).to(SUM)
        tl.store(y + b * yb + n % AREA, (value - middle) * scale + offset, mask=b < samples)


@triton.jit
def _norm_slopes(g, x, mask, weight, mean, variance, to_x, to_weight, to_bias, ga, gb, gc, xa, xb, xc, ta, tb, tc, channels, samples,
                 EPS: tl.constexpr, AREA: tl.constexpr, SAMPLES: tl.constexpr, SUM: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The gradients for one channel of one client: once over g and x for the sums, once more for the gradient of x."""
    a, c = (tl.program_id(0) // channels).to(tl.int64), (tl.program_id(0) % channels).to(tl.int64)
    lanes, rows = tl.arange(0, SIZE), tl.arange(0, SAMPLES)
    g, x, to_x = g + a * ga + c * gc, x + a * xa + c * xc, to_x + a * ta + c * tc
    count = tl.maximum(tl.sum(tl.load(mask + a * samples + rows, mask=rows < samples, other=0.0).to(SUM), 0) * AREA, 1.0)
    middle = tl.load(mean + a * channels + c).to(SUM)
    scale = 1.0 / tl.sqrt(tl.load(variance + a * channels + c).to(SUM) + EPS)
    one, two = tl.zeros((SIZE,), dtype=SUM), tl.zeros((SIZE,), dtype=SUM)
    for start in range(0, samples * AREA, SIZE):
        n = start + lanes
        b = n // AREA
        slope = tl.load(g + b * gb + n % AREA, mask=b < samples, other=0.0).to(SUM)
        value = tl.load(x + b * xb + n % AREA, mask=b < samples, other=0.0).to(SUM)
        one += slope
        two += slope * ((value - middle) * scale)
    total, product = tl.sum(one, 0), tl.sum(two, 0)
    tl.store(to_bias + a * channels + c, total)
    tl.store(to_weight + a * channels + c, product)
    factor = tl.load(weight + a * channels + c).to(SUM) * scale
    for start in range(0, samples * AREA, SIZE):
        n = start + lanes
        b = n // AREA
        slope = tl.load(g + b * gb + n % AREA, mask=b < samples, other=0.0).to(SUM)
        value = tl.load(x + b * xb + n % AREA, mask=b < samples, other=0.0).to(SUM)
        share = tl.load(mask + a * samples + b, mask=b < samples, other=0.0).to(SUM) / count
        found = factor * (slope - share * (total + (value - middle) * scale * product))
        tl.store(to_x + b * tb + n % AREA, found, mask=b < samples)


def norm(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, m, v) of `masked.py`, x (A, B, C, H, W) in any memory order, y in the same."""
    x, mask, weight, bias = by_image(x), mask.contiguous(), weight.contiguous(), bias.contiguous()
    y, mean, variance = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    clients, samples, channels = x.shape[:3]
    _norm[(max(clients * channels, 1),)](x, mask, weight, bias, y, mean, variance, *x.stride()[:3], *y.stride()[:3], channels, samples,
                                         EPS=eps, **sizes(x))  # fmt: skip
    return y, mean, variance


def norm_slopes(
    g: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `norm` with respect to x, weight and bias."""
    g, x, mask, weight = by_image(g), by_image(x), mask.contiguous(), weight.contiguous()
    to_x, to_weight, to_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    clients, samples, channels = x.shape[:3]
    _norm_slopes[(max(clients * channels, 1),)](g, x, mask, weight, mean.contiguous(), variance.contiguous(), to_x, to_weight, to_bias,
                                                *g.stride()[:3], *x.stride()[:3], *to_x.stride()[:3], channels, samples,
                                                EPS=eps, **sizes(x))  # fmt: skip
    return to_x, to_weight, to_bias


def by_image(x: Tensor) -> Tensor:
    """Return x (A, B, C, H, W) with each image in one piece of memory."""
    return x if x.stride(4) == 1 and x.stride(3) == x.shape[4] else x.contiguous()


def sizes(x: Tensor) -> dict[str, object]:
    """Return what the kernels of normalisation are compiled for."""
    area = x.shape[3] * x.shape[4]
    return {"AREA": area, "SAMPLES": triton.next_power_of_2(x.shape[1]), "SUM": sum_type(x),
            "SIZE": min(4096, triton.next_power_of_2(x.shape[1] * area)), "num_warps": 8}  # fmt: skip
