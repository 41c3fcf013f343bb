"""GPU kernels in Triton for variational dropout of a linear layer of many clients at once.

Only imported where a CUDA device and Triton are there; `spreads.py` has the formulas, and the same
in plain torch. Each tensor has its own distance from a client to the next: what clients share need
not be repeated, and the first rows of a larger tensor need not be copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _log1p(x):
    """log(1 + x) for x ≥ 0, without the rounding of 1 + x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def _cut(total, LIMIT: tl.constexpr):
    """The number within ±LIMIT; what is not a number stays so."""
    return tl.where(total < -LIMIT, -LIMIT, tl.where(total > LIMIT, LIMIT, total))


@triton.jit
def _spread(
    start,
    step,
    theta,
    dropped,
    parts,
    variance,
    per_start,
    per_step,
    per_theta,
    per_dropped,
    number,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """parts[a, b] = the block's share of the mean KL, variance = exp(l)·theta²."""
    a = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = k < number
    total = tl.load(start + a * per_start + k, mask=there, other=0.0)
    total += tl.load(step + a * per_step + k, mask=there, other=0.0)
    log_alpha = _cut(total, LIMIT)
    mean = tl.load(theta + a * per_theta + k, mask=there, other=0.0)
    kl = tl.where(log_alpha < 0, -log_alpha, 0.0) + _log1p(tl.exp(-tl.abs(log_alpha)))
    counts = there
    if MASKED:
        counts = there & (tl.load(dropped + a * per_dropped + k, mask=there, other=1) == 0)
        mean = tl.where(counts, mean, 0.0)
    part = tl.sum(tl.where(counts, kl, 0.0), 0) / (2 * number)
    tl.store(parts + a * tl.num_programs(1) + tl.program_id(1), part)
    tl.store(variance + a * number + k, tl.exp(log_alpha) * mean * mean, mask=there)


@triton.jit
def _slope(
    start,
    step,
    theta,
    g,
    h,
    dropped,
    to_step,
    to_theta,
    per_start,
    per_step,
    per_theta,
    per_g,
    per_h,
    per_dropped,
    number,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """to_step = h·exp(l)·theta² − g/(2·number·(1 + exp(l))), 0 beyond the limits; to_theta =
    2·h·exp(l)·theta.
    """
    a = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = k < number
    total = tl.load(start + a * per_start + k, mask=there, other=0.0)
    total += tl.load(step + a * per_step + k, mask=there, other=0.0)
    alpha = tl.exp(_cut(total, LIMIT))
    mean = tl.load(theta + a * per_theta + k, mask=there, other=0.0)
    fall = tl.load(g + a * per_g) / (2 * number) / (1.0 + alpha)
    if MASKED:
        counts = tl.load(dropped + a * per_dropped + k, mask=there, other=1) == 0
        mean = tl.where(counts, mean, 0.0)
        fall = tl.where(counts, fall, 0.0)
    rise = tl.load(h + a * per_h + k, mask=there, other=0.0) * alpha * mean
    inside = (total >= -LIMIT) & (total <= LIMIT)
    tl.store(to_step + a * number + k, tl.where(inside, rise * mean - fall, 0.0), mask=there)
    tl.store(to_theta + a * number + k, 2 * rise, mask=there)


@triton.jit
def _disturbed(
    output,
    variance,
    noise,
    out,
    per_output,
    per_variance,
    per_noise,
    number,
    SIZE: tl.constexpr,
):
    """out = output + √variance·noise, where there is a variance."""
    a = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = k < number
    spread = tl.load(variance + a * per_variance + k, mask=there, other=0.0)
    root = tl.where(spread > 0, tl.sqrt(tl.where(spread > 0, spread, 1.0)), 0.0)
    found = tl.load(output + a * per_output + k, mask=there, other=0.0)
    found += root * tl.load(noise + a * per_noise + k, mask=there, other=0.0)
    tl.store(out + a * number + k, found, mask=there)


@triton.jit
def _disturbed_slope(
    g,
    variance,
    noise,
    out,
    per_g,
    per_variance,
    per_noise,
    number,
    SIZE: tl.constexpr,
):
    """out = g·noise / 2√variance, where there is a variance."""
    a = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = k < number
    spread = tl.load(variance + a * per_variance + k, mask=there, other=0.0)
    both = tl.load(g + a * per_g + k, mask=there, other=0.0)
    both *= tl.load(noise + a * per_noise + k, mask=there, other=0.0)
    root = tl.sqrt(tl.where(spread > 0, spread, 1.0))
    tl.store(out + a * number + k, tl.where(spread > 0, both / (2 * root), 0.0), mask=there)


@triton.jit
def _twice_product(x, g, out, per_x, per_g, number, SIZE: tl.constexpr):
    """out = 2·x·g."""
    a = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = k < number
    found = 2 * tl.load(x + a * per_x + k, mask=there, other=0.0)
    found *= tl.load(g + a * per_g + k, mask=there, other=0.0)
    tl.store(out + a * number + k, found, mask=there)


def rows(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return (the tensors, what is of a client in one piece; from a client to the next in each)."""
    found = tuple(one if one[0].is_contiguous() else one.contiguous() for one in tensors)
    return found, tuple(one.stride(0) for one in found)


def grid(clients: int, number: int) -> tuple[tuple[int, int], int]:
    """Return (the programs for so many numbers of each client, the numbers of one)."""
    size = min(triton.next_power_of_2(max(number, 1)), BLOCK)
    return (clients, triton.cdiv(max(number, 1), size)), size


def bits(like: Tensor, dropped: tuple[Tensor, ...]) -> Tensor:
    """Return the mask as bytes; without one, a tensor that nobody reads."""
    return dropped[0].view(torch.uint8) if dropped else like


def spread(
    limit: float, start: Tensor, step: Tensor, theta: Tensor, *dropped: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (mean KL (A,), variances (A, O, I)) of weights (A, O, I)."""
    known, apart = rows(start, step, theta, bits(start, dropped))
    number = theta[0].numel()
    programs, size = grid(len(theta), number)
    parts, variance = theta.new_empty(programs), theta.new_empty(theta.shape)
    _spread[programs](
        *(*known, parts, variance, *apart, number), LIMIT=limit, MASKED=bool(dropped), SIZE=size
    )
    return parts[:, 0] if programs[1] == 1 else parts.sum(1), variance


def slope(
    limit: float,
    start: Tensor,
    step: Tensor,
    theta: Tensor,
    g: Tensor,
    h: Tensor,
    *dropped: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to step and theta (A, O, I); g (A,), h (A, O, I)."""
    known, apart = rows(start, step, theta, g, h, bits(start, dropped))
    number = theta[0].numel()
    programs, size = grid(len(theta), number)
    to_step, to_theta = theta.new_empty(theta.shape), theta.new_empty(theta.shape)
    _slope[programs](
        *(*known, to_step, to_theta, *apart, number), LIMIT=limit, MASKED=bool(dropped), SIZE=size
    )
    return to_step, to_theta


def disturbed(output: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return output + √variance·noise, where there is a variance; all (A, B, O)."""
    known, apart = rows(output, variance, noise)
    programs, size = grid(len(output), output[0].numel())
    out = output.new_empty(output.shape)
    _disturbed[programs](*known, out, *apart, output[0].numel(), SIZE=size)
    return out


def disturbed_slope(g: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return g·noise / 2√variance, where there is a variance; all (A, B, O)."""
    known, apart = rows(g, variance, noise)
    programs, size = grid(len(g), g[0].numel())
    out = g.new_empty(g.shape)
    _disturbed_slope[programs](*known, out, *apart, g[0].numel(), SIZE=size)
    return out


def twice_product(x: Tensor, g: Tensor) -> Tensor:
    """Return 2·x·g, both (A, …)."""
    known, apart = rows(x, g)
    programs, size = grid(len(x), x[0].numel())
    out = x.new_empty(x.shape)
    _twice_product[programs](*known, out, *apart, x[0].numel(), SIZE=size)
    return out
