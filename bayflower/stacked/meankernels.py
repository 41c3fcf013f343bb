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
    """pooled[a, k] = Σ_b mask_b x[a, b, k] / max(Σ mask, 1), out[a] = pooled W + b Σ mask / max(Σ
    mask, 1).
    """
    a = tl.program_id(0).to(tl.int64)
    lanes, k, d = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, D)
    number = tl.sum(tl.zeros((ROWS,), tl.float32), 0)
    for start in range(0, samples, ROWS):
        b = start + lanes
        number += tl.sum(tl.load(mask + a * samples + b, mask=b < samples, other=0.0), 0)
    most = tl.maximum(number, 1.0)
    total = tl.load(bias + a * outputs + d, mask=d < outputs, other=0.0) * (number / most)
    for begin in range(0, inputs, WIDTH):
        c = begin + k
        column = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, samples, ROWS):
            b = start + lanes
            real = tl.load(mask + a * samples + b, mask=b < samples, other=0.0)
            inside = (b < samples)[:, None] & (c < inputs)[None, :]
            place = (a * samples + b[:, None]) * inputs + c[None, :]
            column += tl.sum(real[:, None] * tl.load(x + place, mask=inside, other=0.0), 0)
        column = column / most
        tl.store(pooled + a * inputs + c, column, mask=c < inputs)
        inside = (c < inputs)[:, None] & (d < outputs)[None, :]
        place = (a * inputs + c[:, None]) * outputs + d[None, :]
        total += tl.sum(column[:, None] * tl.load(weight + place, mask=inside, other=0.0), 0)
    tl.store(out + a * outputs + d, total, mask=d < outputs)


@triton.jit
def _mean_slopes(
    g,
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
):
    """The gradients of `_mean` for some of a client's inputs; the first program also has that of
    the bias.
    """
    a, j = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    lanes, d = tl.arange(0, ROWS), tl.arange(0, D)
    c = j * WIDTH + tl.arange(0, WIDTH)
    slope = tl.load(g + a * outputs + d, mask=d < outputs, other=0.0)
    column = tl.load(pooled + a * inputs + c, mask=c < inputs, other=0.0)
    inside = (c < inputs)[:, None] & (d < outputs)[None, :]
    place = (a * inputs + c[:, None]) * outputs + d[None, :]
    along = tl.sum(tl.load(weight + place, mask=inside, other=0.0) * slope[None, :], 1)
    tl.store(to_weight + place, column[:, None] * slope[None, :], mask=inside)
    number = tl.sum(tl.zeros((ROWS,), tl.float32), 0)
    for start in range(0, samples, ROWS):
        b = start + lanes
        number += tl.sum(tl.load(mask + a * samples + b, mask=b < samples, other=0.0), 0)
    most = tl.maximum(number, 1.0)
    if j == 0:
        tl.store(to_bias + a * outputs + d, slope * (number / most), mask=d < outputs)
    for start in range(0, samples, ROWS):
        b = start + lanes
        share = tl.load(mask + a * samples + b, mask=b < samples, other=0.0) / most
        within = (b < samples)[:, None] & (c < inputs)[None, :]
        where = (a * samples + b[:, None]) * inputs + c[None, :]
        tl.store(to_x + where, share[:, None] * along[None, :], mask=within)


def mean(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the layer's mean (A, D), the inputs' mean (A, F)), with A in front of each tensor."""
    x, weight, bias, mask = (one.contiguous() for one in (x, weight, bias, mask))
    clients, samples, inputs = x.shape
    out, pooled = torch.empty_like(bias), x.new_empty(clients, inputs)
    _mean[(clients,)](
        *(x, weight, bias, mask, out, pooled),
        *(samples, inputs, weight.shape[-1]),
        **sizes(samples, inputs, weight.shape[-1]),
    )
    return out, pooled


def slopes(
    g: Tensor, weight: Tensor, mask: Tensor, pooled: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x (A, B, F), weight and bias."""
    g, weight, mask, pooled = (one.contiguous() for one in (g, weight, mask, pooled))
    (clients, samples), (inputs, outputs) = mask.shape, weight.shape[1:]
    tile = sizes(samples, inputs, outputs)
    tile["WIDTH"] = min(tile["WIDTH"], 64)  # more programs
    blocks = -(-inputs // tile["WIDTH"])
    to_x, to_weight, to_bias = g.new_empty(*mask.shape, inputs), *map(torch.empty_like, (weight, g))
    _mean_slopes[(clients * blocks,)](
        *(g, weight, mask, pooled, to_x, to_weight, to_bias),
        *(samples, inputs, outputs, blocks),
        **tile,
    )
    return to_x, to_weight, to_bias


def sizes(samples: int, inputs: int, outputs: int) -> dict[str, int]:
    """Return what the kernels are compiled for."""
    rows, d = min(64, triton.next_power_of_2(samples)), triton.next_power_of_2(outputs)
    width = min(triton.next_power_of_2(inputs), MOST_TILE // max(rows, d))
    return {"ROWS": rows, "WIDTH": width, "D": d, "num_warps": 8}
