"""What variational dropout of a linear layer adds to a training step, for stacks of clients in a
few GPU kernels: torch takes some sixty small ones under vmap, more than the rest of the step.

    total     start + step       log alpha before its limits
    l         total within ±limit
    KL        ½ log(1 + exp(−l)) of each weight, 0 where it is dropped
    variance  exp(l)·theta²      of each weight, 0 where it is dropped

`maths/dropout.py` has the same formulas for the CPU, where torch's own gradients are used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from .batched import fronts, has_kernels, on_stacks


class Spread(Function):
    """(The mean KL (), the variances (O, I)) of weights: start, step and theta (O, I), perhaps
    also which are dropped (O, I), bool.
    """

    @staticmethod
    def forward(limit: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        kl, variance = spreads(limit, *(one[None] for one in tensors))
        return kl[0], variance[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.limit, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Any, ...]:
        start, step, theta, *dropped = ctx.saved_tensors
        to_step, to_theta = SpreadSlope.apply(ctx.limit, start, step, theta, g, h, *dropped)
        return None, to_step, to_step, to_theta, *(None for _ in dropped)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], limit: float, *tensors: Tensor) -> tuple[Any, Any]:
        return on_stacks(partial(spreads, limit), fronts(tensors, dims[1:], info)), (0, 0)


class SpreadSlope(Function):
    """The gradients of the above with respect to step and theta, itself differentiable; g () is
    that of the mean KL, h (O, I) that of the variances.
    """

    @staticmethod
    def forward(limit: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        to_step, to_theta = slopes(limit, *(one[None] for one in tensors))
        return to_step[0], to_theta[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.limit, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, u: Tensor, v: Tensor) -> tuple[Any, ...]:
        start, step, theta, g, h, *dropped = ctx.saved_tensors
        log_alpha, inside = within(start + step, ctx.limit)
        theta, kept = keep(theta, *dropped), keep(torch.ones_like(theta), *dropped)
        alpha, rest = log_alpha.exp(), torch.sigmoid(-log_alpha)  # rest = 1/(1 + alpha)
        u = torch.where(inside, u, 0.0)
        share = kept / theta.numel()
        bend = u * (h * alpha * theta.square() + g * share * rest * (1 - rest) / 2)
        to_step = torch.where(inside, bend + 2 * v * h * alpha * theta, 0.0)
        to_theta = 2 * h * alpha * (u * theta + v * kept)
        to_g = -(u * rest * share).sum() / 2
        to_h = alpha * theta * (u * theta + 2 * v)
        return None, to_step, to_step, to_theta, to_g, to_h, *(None for _ in dropped)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], limit: float, *tensors: Tensor) -> tuple[Any, Any]:
        return on_stacks(partial(slopes, limit), fronts(tensors, dims[1:], info)), (0, 0)


class Disturbed(Function):
    """output + √variance·noise, where there is a variance; all (B, O). Constant in the noise."""

    @staticmethod
    def forward(output: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        return draws(output[None], variance[None], noise[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return g, DisturbedSlope.apply(g, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return on_stacks(draws, fronts(inputs, dims, info)), 0


class DisturbedSlope(Function):
    """g·noise / 2√variance, where there is a variance: the gradient of the above, itself
    differentiable.
    """

    @staticmethod
    def forward(g: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        return draw_slopes(g[None], variance[None], noise[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Any, ...]:
        g, variance, noise = ctx.saved_tensors
        some = variance > 0
        safe = torch.where(some, variance, 1.0)
        part = torch.where(some, u * noise / (2 * safe.sqrt()), 0.0)
        return part, -part * g / (2 * safe), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return on_stacks(draw_slopes, fronts(inputs, dims, info)), 0


class Square(Function):
    """x²."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return TwiceProduct.apply(*ctx.saved_tensors, g)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Any]:
        return x.square(), dims[0]


class TwiceProduct(Function):
    """2·x·g: the gradient of the above, itself differentiable."""

    @staticmethod
    def forward(x: Tensor, g: Tensor) -> Tensor:
        return twice_products(x[None], g[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        return TwiceProduct.apply(g, u), TwiceProduct.apply(x, u)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return on_stacks(twice_products, fronts(inputs, dims, info)), 0


class Scaled(Function):
    """x, whose gradient is multiplied by a rate."""

    @staticmethod
    def forward(x: Tensor, rate: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rate = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return ctx.rate * g, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, rate: float) -> tuple[Tensor, Any]:
        return x.view_as(x), dims[0]


def spread(
    start: Tensor, step: Tensor, theta: Tensor, limit: float, dropped: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the mean KL (), the variances (O, I)) of weights. float32 must have the limit's
    digits.
    """
    mask = () if dropped is None else (dropped,)
    return Spread.apply(limit, start, step, theta, *mask)  # type: ignore[no-any-return]


def disturbed(output: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return output + √variance·noise, where there is a variance."""
    return Disturbed.apply(output, variance, noise)  # type: ignore[no-any-return]


def square(x: Tensor) -> Tensor:
    """Return x²."""
    return Square.apply(x)  # type: ignore[no-any-return]


def scaled(x: Tensor, rate: float) -> Tensor:
    """Return x, whose gradient is multiplied by `rate`."""
    return Scaled.apply(x, rate)  # type: ignore[no-any-return]


def within(total: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return (the numbers cut to ±limit, which of them move with their number)."""
    return total.clamp(-limit, limit), total.abs() <= limit


def keep(x: Tensor, *dropped: Tensor) -> Tensor:
    """Return x, 0 where it is dropped."""
    return x.masked_fill(dropped[0], 0) if dropped else x


def spreads(
    limit: float, start: Tensor, step: Tensor, theta: Tensor, *dropped: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (mean KL (A,), variances (A, O, I)), with A in front of every tensor."""
    if has_kernels(theta):
        from . import spreadkernels

        return spreadkernels.spread(limit, start, step, theta, *dropped)
    log_alpha, _ = within(start + step, limit)
    kl = keep(functional.softplus(-log_alpha) / 2, *dropped)
    return kl.mean((1, 2)), log_alpha.exp() * keep(theta, *dropped).square()


def slopes(
    limit: float,
    start: Tensor,
    step: Tensor,
    theta: Tensor,
    g: Tensor,
    h: Tensor,
    *dropped: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to step and theta, with A in front of every tensor."""
    if has_kernels(theta):
        from . import spreadkernels

        return spreadkernels.slope(limit, start, step, theta, g, h, *dropped)
    log_alpha, inside = within(start + step, limit)
    theta, alpha = keep(theta, *dropped), log_alpha.exp()
    fall = keep(torch.sigmoid(-log_alpha), *dropped) * (g / (2 * theta[0].numel()))[:, None, None]
    to_step = torch.where(inside, h * alpha * theta.square() - fall, 0.0)
    return to_step, 2 * h * alpha * theta


def draws(output: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return output + √variance·noise, with A in front of every tensor."""
    if has_kernels(output):
        from . import spreadkernels

        return spreadkernels.disturbed(output, variance, noise)
    some = variance > 0
    return output + torch.where(some, torch.where(some, variance, 1.0).sqrt(), 0.0) * noise


def draw_slopes(g: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return g·noise / 2√variance, with A in front of every tensor."""
    if has_kernels(g):
        from . import spreadkernels

        return spreadkernels.disturbed_slope(g, variance, noise)
    some = variance > 0
    return torch.where(some, g * noise / (2 * torch.where(some, variance, 1.0).sqrt()), 0.0)


def twice_products(x: Tensor, g: Tensor) -> Tensor:
    """Return 2·x·g, with A in front of both."""
    if has_kernels(x):
        from . import spreadkernels

        return spreadkernels.twice_product(x, g)
    return 2 * x * g
