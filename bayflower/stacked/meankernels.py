"""GPU kernels in Triton for a linear layer's mean over the samples of a batch, of many networks at
once; `meanlayer.py` has the formulas.

Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILE = 2**12  # numbers that a program holds at once
FEW = 64  # outputs up to which the mean's program has registers for twice as many


@triton.jit
def _mean_of(
    a,
    x,
    weight,
    bias,
    mask,
    pooled,
    samples,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """pooled[a, k] = Σ_b mask_b x[a, b, k] / max(Σ mask, 1); the value is pooled W + b Σ mask /
    max(Σ mask, 1).
    """
    lanes, k, d = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, D)
    number = tl.sum(tl.zeros((ROWS,), tl.float32), 0)
    for start in range(0, samples, ROWS):
        b = start + lanes
        number += tl.sum(tl.load(mask + a * samples + b, mask=b < samples, other=0.0), 0)
    most = tl.maximum(number, 1.0)
    total = tl.load(bias + a * outputs + d, mask=d < outputs, other=0.0) * (number / most)
    for begin in range(0, inputs, WIDTH):
        c = begin + k
        inside = (c < inputs)[:, None] & (d < outputs)[None, :]
        place = (a * inputs + c[:, None]) * outputs + d[None, :]
        layer = tl.load(weight + place, mask=inside, other=0.0)  # on its way while x is added up
        column = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, samples, ROWS):
            b = start + lanes
            real = tl.load(mask + a * samples + b, mask=b < samples, other=0.0)
            within = (b < samples)[:, None] & (c < inputs)[None, :]
            where = (a * samples + b[:, None]) * inputs + c[None, :]
            column += tl.sum(real[:, None] * tl.load(x + where, mask=within, other=0.0), 0)
        column = column / most
        tl.store(pooled + a * inputs + c, column, mask=c < inputs)
        total += tl.sum(column[:, None] * layer, 0)
    return total


@triton.jit
def _mean(
    x,
    weight,
    bias,
    mask,
    out,
    pooled,
    samples,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """out[a] = the value of `_mean_of`."""
    a, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    found = _mean_of(a, x, weight, bias, mask, pooled, samples, inputs, outputs, ROWS, WIDTH, D)
    tl.store(out + a * outputs + d, found, mask=d < outputs)


@triton.jit
def _slope(g, scale, a, outputs, D: tl.constexpr, SCALED: tl.constexpr):
    """g[a], times scale[a] if there is one."""
    d = tl.arange(0, D)
    found = tl.load(g + a * outputs + d, mask=d < outputs, other=0.0)
    return found * tl.load(scale + a) if SCALED else found


@triton.jit
def _mean_slopes(
    g,
    scale,
    weight,
    mask,
    pooled,
    to_x,
    to_weight,
    to_bias,
    samples,
    inputs,
    outputs,
    blocks,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    ONLY_X: tl.constexpr,
):
    """The gradients of `_mean` for some of a client's inputs; the first program also has that of
    the bias. ONLY_X: that of x alone. SCALED: g times scale takes the place of g.
    """
    a, j = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    lanes, d = tl.arange(0, ROWS), tl.arange(0, D)
    c = j * WIDTH + tl.arange(0, WIDTH)
    slope = _slope(g, scale, a, outputs, D, SCALED)
    inside = (c < inputs)[:, None] & (d < outputs)[None, :]
    place = (a * inputs + c[:, None]) * outputs + d[None, :]
    along = tl.sum(tl.load(weight + place, mask=inside, other=0.0) * slope[None, :], 1)
    number = tl.sum(tl.zeros((ROWS,), tl.float32), 0)
    for start in range(0, samples, ROWS):
        b = start + lanes
        number += tl.sum(tl.load(mask + a * samples + b, mask=b < samples, other=0.0), 0)
    most = tl.maximum(number, 1.0)
    if not ONLY_X:
        column = tl.load(pooled + a * inputs + c, mask=c < inputs, other=0.0)
        tl.store(to_weight + place, column[:, None] * slope[None, :], mask=inside)
        if j == 0:
            tl.store(to_bias + a * outputs + d, slope * (number / most), mask=d < outputs)
    for start in range(0, samples, ROWS):
        b = start + lanes
        share = tl.load(mask + a * samples + b, mask=b < samples, other=0.0) / most
        within = (b < samples)[:, None] & (c < inputs)[None, :]
        where = (a * samples + b[:, None]) * inputs + c[None, :]
        tl.store(to_x + where, share[:, None] * along[None, :], mask=within)


@triton.jit
def _descend(
    g,
    scale,
    mask,
    pooled,
    weight,
    bias,
    samples,
    inputs,
    outputs,
    blocks,
    rate,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    SCALED: tl.constexpr,
):
    """weight[a] −= rate · pooled[a]ᵀ g[a] for some of a client's inputs; the first program also has
    bias[a] −= rate · g[a] Σ mask / max(Σ mask, 1). SCALED: as in `_mean_slopes`.
    """
    a, j = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    lanes, d = tl.arange(0, ROWS), tl.arange(0, D)
    c = j * WIDTH + tl.arange(0, WIDTH)
    inside = (c < inputs)[:, None] & (d < outputs)[None, :]
    place = weight + (a * inputs + c[:, None]) * outputs + d[None, :]
    before = tl.load(place, mask=inside, other=0.0)
    slope = rate * _slope(g, scale, a, outputs, D, SCALED)
    column = tl.load(pooled + a * inputs + c, mask=c < inputs, other=0.0)
    tl.store(place, before - column[:, None] * slope[None, :], mask=inside)
    if j == 0:
        number = tl.sum(tl.zeros((ROWS,), tl.float32), 0)
        for start in range(0, samples, ROWS):
            b = start + lanes
            number += tl.sum(tl.load(mask + a * samples + b, mask=b < samples, other=0.0), 0)
        end = bias + a * outputs + d
        before_bias = tl.load(end, mask=d < outputs, other=0.0)
        share = number / tl.maximum(number, 1.0)
        tl.store(end, before_bias - slope * share, mask=d < outputs)


def mean(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the layer's mean (A, D), the inputs' mean (A, F)), with A in front of each tensor."""
    x, weight, bias, mask = (one.contiguous() for one in (x, weight, bias, mask))
    clients, samples, inputs = x.shape
    outputs = weight.shape[-1]
    out, pooled = torch.empty_like(bias), x.new_empty(clients, inputs)
    _mean[(clients,)](
        *(x, weight, bias, mask, out, pooled, samples, inputs, outputs),
        **sizes(samples, inputs, outputs, most(outputs)),
    )
    return out, pooled


def slopes(
    g: Tensor, weight: Tensor, mask: Tensor, pooled: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x (A, B, F), weight and bias."""
    g, weight, mask, pooled = (one.contiguous() for one in (g, weight, mask, pooled))
    to_weight, to_bias = torch.empty_like(weight), torch.empty_like(g)
    return run_slopes(g, None, weight, mask, pooled, to_weight, to_bias), to_weight, to_bias


def slope_of_x(g: Tensor, weight: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the gradient with respect to x alone, times `scale` (A,) if it is given."""
    g, weight, mask = (one.contiguous() for one in (g, weight, mask))
    return run_slopes(g, scale, weight, mask, g, weight, g, only_x=True)  # the last are not used


def run_slopes(
    g: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    mask: Tensor,
    pooled: Tensor,
    to_weight: Tensor,
    to_bias: Tensor,
    only_x: bool = False,
) -> Tensor:
    """Return the gradient with respect to x, and write the others unless `only_x`."""
    (clients, samples), (inputs, outputs) = mask.shape, weight.shape[1:]
    tile, blocks = narrow(samples, inputs, outputs)
    to_x = g.new_empty(clients, samples, inputs)
    _mean_slopes[(clients * blocks,)](
        *(g, g if scale is None else scale.contiguous(), weight, mask, pooled),
        *(to_x, to_weight, to_bias, samples, inputs, outputs, blocks),
        SCALED=scale is not None,
        ONLY_X=only_x,
        **tile,
    )
    return to_x


def descend(
    g: Tensor,
    mask: Tensor,
    pooled: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: float,
    scale: Tensor | None = None,
) -> None:
    """Subtract `rate` times the gradients from weight (A, F, D) and bias (A, D), in place; times
    `scale` (A,) if it is given.
    """
    g, mask, pooled = (one.contiguous() for one in (g, mask, pooled))
    (clients, samples), (inputs, outputs) = mask.shape, weight.shape[1:]
    tile, blocks = narrow(samples, inputs, outputs)
    _descend[(clients * blocks,)](
        *(g, g if scale is None else scale.contiguous(), mask, pooled, weight, bias),
        *(samples, inputs, outputs, blocks, rate),
        SCALED=scale is not None,
        **tile,
    )


def most(outputs: int) -> int:
    """Return how many numbers the mean's program holds at once."""
    return 2 * MOST_TILE if outputs <= FEW else MOST_TILE


def narrow(samples: int, inputs: int, outputs: int) -> tuple[dict[str, int], int]:
    """Return what kernels of many programs are compiled for, and how many a client has."""
    tile = sizes(samples, inputs, outputs)
    tile["WIDTH"] = min(tile["WIDTH"], 64)
    return tile, -(-inputs // tile["WIDTH"])


def sizes(samples: int, inputs: int, outputs: int, most: int = MOST_TILE) -> dict[str, int]:
    """Return what the kernels are compiled for."""
    rows, d = min(64, triton.next_power_of_2(samples)), triton.next_power_of_2(outputs)
    width = min(triton.next_power_of_2(inputs), most // max(rows, d))
    return {"ROWS": rows, "WIDTH": width, "D": d, "num_warps": 8}
