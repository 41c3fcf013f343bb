"""GPU kernels in Triton for BatchNorm that leaves padding out; `masked.py` has the formulas.

Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import sum_type


@triton.jit
def _norm(
    x,
    mask,
    weight,
    bias,
    y,
    mean,
    variance,
    xa,
    xb,
    xc,
    ya,
    yb,
    yc,
    channels,
    samples,
    EPS: tl.constexpr,
    AREA: tl.constexpr,
    SAMPLES: tl.constexpr,
    SUM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The formulas of `masked.py` for one channel of one client: once over x for m and v, once more
    for y.
    """
    a, c = (tl.program_id(0) // channels).to(tl.int64), (tl.program_id(0) % channels).to(tl.int64)
    lanes, rows = tl.arange(0, SIZE), tl.arange(0, SAMPLES)
    x, y = x + a * xa + c * xc, y + a * ya + c * yc
    count = tl.maximum(
        tl.sum(tl.load(mask + a * samples + rows, mask=rows < samples, other=0.0).to(SUM), 0)
        * AREA,
        1.0,
    )
    # a number like the others, so that the difference of squares loses nothing
    shift = tl.load(x).to(SUM)
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
def _norm_slopes(
    g,
    x,
    mask,
    weight,
    mean,
    variance,
    to_x,
    to_weight,
    to_bias,
    ga,
    gb,
    gc,
    xa,
    xb,
    xc,
    ta,
    tb,
    tc,
    channels,
    samples,
    EPS: tl.constexpr,
    AREA: tl.constexpr,
    SAMPLES: tl.constexpr,
    SUM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The gradients for one channel of one client: once over g and x for the sums, once more for
    the gradient of x.
    """
    a, c = (tl.program_id(0) // channels).to(tl.int64), (tl.program_id(0) % channels).to(tl.int64)
    lanes, rows = tl.arange(0, SIZE), tl.arange(0, SAMPLES)
    g, x, to_x = g + a * ga + c * gc, x + a * xa + c * xc, to_x + a * ta + c * tc
    count = tl.maximum(
        tl.sum(tl.load(mask + a * samples + rows, mask=rows < samples, other=0.0).to(SUM), 0)
        * AREA,
        1.0,
    )
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


def norm(
    x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, m, v) of `masked.py`, x (A, B, C, H, W) in any memory order, y in the same."""
    x, mask, weight, bias = by_image(x), mask.contiguous(), weight.contiguous(), bias.contiguous()
    y, mean, variance = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    clients, samples, channels = x.shape[:3]
    _norm[(max(clients * channels, 1),)](
        x,
        mask,
        weight,
        bias,
        y,
        mean,
        variance,
        *x.stride()[:3],
        *y.stride()[:3],
        channels,
        samples,
        EPS=eps,
        **sizes(x),
    )
    return y, mean, variance


def norm_slopes(
    g: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `norm` with respect to x, weight and bias."""
    g, x, mask, weight = by_image(g), by_image(x), mask.contiguous(), weight.contiguous()
    to_x, to_weight, to_bias = (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
    )
    clients, samples, channels = x.shape[:3]
    _norm_slopes[(max(clients * channels, 1),)](
        g,
        x,
        mask,
        weight,
        mean.contiguous(),
        variance.contiguous(),
        to_x,
        to_weight,
        to_bias,
        *g.stride()[:3],
        *x.stride()[:3],
        *to_x.stride()[:3],
        channels,
        samples,
        EPS=eps,
        **sizes(x),
    )
    return to_x, to_weight, to_bias


def by_image(x: Tensor) -> Tensor:
    """Return x (A, B, C, H, W) with each image in one piece of memory."""
    return x if x.stride(4) == 1 and x.stride(3) == x.shape[4] else x.contiguous()


def sizes(x: Tensor) -> dict[str, object]:
    """Return what the kernels of normalisation are compiled for."""
    area = x.shape[3] * x.shape[4]
    return {
        "AREA": area,
        "SAMPLES": triton.next_power_of_2(x.shape[1]),
        "SUM": sum_type(x),
        "SIZE": min(4096, triton.next_power_of_2(x.shape[1] * area)),
        "num_warps": 8,
    }
