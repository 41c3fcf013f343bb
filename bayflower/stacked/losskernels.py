"""GPU kernels in Triton for losses of many networks at once.

Only imported where a CUDA device and Triton are there; `losses.py` has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    _nll[(y.numel(),)](
        logits,
        y,
        out,
        logits.shape[-1],
        WIDTH=triton.next_power_of_2(logits.shape[-1]),
        num_warps=1,
    )
    return out


def nll_slope(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return g·(softmax(logits) − 1_y)."""
    logits, y, g = logits.contiguous(), y.contiguous(), g.contiguous()
    out = torch.empty_like(logits)
    _nll_slope[(y.numel(),)](
        logits,
        y,
        g,
        out,
        logits.shape[-1],
        WIDTH=triton.next_power_of_2(logits.shape[-1]),
        num_warps=1,
    )
    return out


@triton.jit
def _mean_nll(logits, y, mask, out, samples, classes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[a] = Σ_n mask[a, n]·(log Σ exp(logits[a, n]) − logits[a, n, y[a, n]]) / max(Σ_n mask[a,
    n], 1).
    """
    a = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    good = n < samples
    table = tl.load(
        logits + (a * samples + n[:, None]) * classes + c[None, :],
        mask=good[:, None] & (c[None, :] < classes),
        other=-1e30,
    )
    top = tl.max(table, 1)
    own = tl.load(
        logits + (a * samples + n) * classes + tl.load(y + a * samples + n, mask=good, other=0),
        mask=good,
        other=0.0,
    )
    weight = tl.load(mask + a * samples + n, mask=good, other=0.0)
    each = tl.log(tl.sum(tl.exp(table - top[:, None]), 1)) + top - own
    total = tl.sum(tl.where(weight > 0, each * weight, 0.0), 0)
    tl.store(out + a, total / tl.maximum(tl.sum(weight, 0), 1.0))


def mean_nll(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of −log softmax(logits)_y where the mask is 1, for logits (…, B, C), y and
    mask (…, B).
    """
    rows, width = triton.next_power_of_2(logits.shape[-2]), triton.next_power_of_2(logits.shape[-1])
    if rows * width > 2**14:  # too much for one program
        return (nll(logits, y) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    logits, y, mask = logits.contiguous(), y.contiguous(), mask.contiguous()
    out = logits.new_empty(logits.shape[:-2])
    _mean_nll[(max(out.numel(), 1),)](
        logits, y, mask, out, *logits.shape[-2:], ROWS=rows, WIDTH=width
    )
    return out


@triton.jit
def _mean_nll_slope(
    logits, y, mask, g, out, samples, classes, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out[a, n] = mask[a, n]·g[a] / max(Σ_n mask[a, n], 1) · (softmax(logits[a, n]) − 1 at y[a,
    n]).
    """
    a = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    good = n < samples
    place = (a * samples + n[:, None]) * classes + c[None, :]
    inside = good[:, None] & (c[None, :] < classes)
    table = tl.load(logits + place, mask=inside, other=-1e30)
    power = tl.exp(table - tl.max(table, 1)[:, None])
    weight = tl.load(mask + a * samples + n, mask=good, other=0.0)
    label = tl.load(y + a * samples + n, mask=good, other=0)
    scale = weight * (tl.load(g + a) / tl.maximum(tl.sum(weight, 0), 1.0))
    hot = tl.where(c[None, :] == label[:, None], 1.0, 0.0)
    slope = scale[:, None] * (power / tl.sum(power, 1)[:, None] - hot)
    tl.store(out + place, slope, mask=inside)


def mean_nll_slope(logits: Tensor, y: Tensor, mask: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of `mean_nll` times g (…)."""
    rows, width = triton.next_power_of_2(logits.shape[-2]), triton.next_power_of_2(logits.shape[-1])
    if rows * width > 2**14:
        return nll_slope(logits, y, mask * (g / mask.sum(-1).clamp(min=1))[..., None])
    logits, y, mask, g = (part.contiguous() for part in (logits, y, mask, g))
    out = torch.empty_like(logits)
    _mean_nll_slope[(max(g.numel(), 1),)](
        logits, y, mask, g, out, *logits.shape[-2:], ROWS=rows, WIDTH=width
    )
    return out


@triton.jit
def _pull(
    z,
    centres,
    strength,
    y,
    mask,
    base,
    out,
    slope,
    per_centres,
    per_strength,
    samples,
    dim,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[a] = base[a] + Σ_n w_n·Σ_j (z_nj − centre_yj)²/dim, slope = 2·w_n·(z_nj − centre_yj)/dim,
    w_n = mask_n·strength_y/max(Σ mask, 1).
    """
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
        sure = tl.load(strength + a * per_strength + label, mask=good, other=0).to(
            z.dtype.element_ty
        )
        weight = (
            tl.load(mask + a * samples + n, mask=good, other=0.0)
            * sure
            / (tl.maximum(number, 1.0) * dim)
        )
        inside = good[:, None] & (d[None, :] < dim)
        place = (a * samples + n[:, None]) * dim + d[None, :]
        centre = tl.load(
            centres + a * per_centres + label[:, None] * dim + d[None, :], mask=inside, other=0.0
        )
        distance = tl.where(
            weight[:, None] > 0, tl.load(z + place, mask=inside, other=0.0) - centre, 0.0
        )
        total += tl.sum(tl.sum(distance * distance, 1) * weight, 0)
        tl.store(slope + place, 2 * weight[:, None] * distance, mask=inside)
    tl.store(out + a, tl.load(base + a) + total)


def pull(
    z: Tensor, centres: Tensor, strength: Tensor, y: Tensor, mask: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (start plus the mean of strength_y · mean_j (z_j − centre_yj)² (A,), its gradient (A,
    B, D)); centres and strength may be repeated over A.
    """
    z, y, mask, start = (x.contiguous() for x in (z, y, mask, start))
    centres, strength = (
        x if x.stride(0) == 0 and x[0].is_contiguous() else x.contiguous()
        for x in (centres, strength)
    )
    clients, samples, dim = z.shape
    out, slope = torch.empty_like(start), torch.empty_like(z)
    width = triton.next_power_of_2(dim)
    rows = max(1, min(triton.next_power_of_2(samples), 2**13 // width))
    _pull[(max(clients, 1),)](
        z,
        centres,
        strength,
        y,
        mask,
        start,
        out,
        slope,
        centres.stride(0),
        strength.stride(0),
        samples,
        dim,
        ROWS=rows,
        WIDTH=width,
        num_warps=8,
    )
    return out, slope
