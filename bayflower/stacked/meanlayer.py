"""The mean of a linear layer over the samples of a batch that count. On a GPU it is two kernels of
all clients, slopes included, in place of a dozen: the mean is taken before the product.

    symbol    here    shape
    x         x       (B, F)
    W, b      weight  (F, D), bias (D,)
    m         mask    (B,): 1 for samples that count

    f = Σ_i w_i (x_i W + b) = x̄ W + b Σ w,     x̄ = Σ_i w_i x_i,     w_i = m_i / max(Σ m, 1)

    ∂x_i = w_i W ∂f          ∂W = x̄ᵀ ∂f          ∂b = ∂f Σ w

Second derivatives are those of the plain formula. The mask is a constant. A step of plain gradient
descent takes ∂W and ∂b at its end, without writing them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp, vmap

from .batched import fronts, has_kernels, on_stacks
from .products import all_may_leave, first_derivative, left_own

MOST_OUTPUTS = 256


def layer_mean(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x W + b over the samples that count, (D,); 0 if there is none."""
    if not has_form(x, weight, bias, mask):
        return plain(x, weight, bias, mask)
    found, _ = LayerMean.apply(x, weight, bias, mask)
    return found  # type: ignore[no-any-return]


def layer_sum(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of x W + b over the samples that count, (D,)."""
    return ((x @ weight + bias) * mask[:, None]).sum(0)


def plain(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the mean by the plain formula."""
    return layer_sum(x, weight, bias, mask) / mask.sum().clamp(min=1)


def has_form(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> bool:
    """Return whether kernels exist for this layer: float32 on a GPU, few outputs."""
    exact = all(one.dtype == torch.float32 for one in (x, weight, bias, mask))
    return exact and has_kernels(x) and weight.shape[1] <= MOST_OUTPUTS


class LayerMean(Function):
    """(The layer's mean (D,), the inputs' mean (F,), which has no derivative)."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(one[0] for one in stacked_mean(*(one[None] for one in inputs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros in place of a gradient that nobody asks for
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 4
        may = all(ctx.needs_input_grad[1:3]) and first_derivative()
        slopes = LayerMeanStep if may else LayerMeanSlopes
        return (*slopes.apply(g, *ctx.saved_tensors), None)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return on_stacks(stacked_mean, fronts(inputs, dims, info)), (0, 0)


class LayerMeanSlopes(Function):
    """The gradients of `LayerMean` with respect to x, weight and bias, along g."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(one[0] for one in stacked_slopes(*(one[None] for one in inputs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *gg: Tensor) -> tuple[Any, ...]:
        *moving, mask = ctx.saved_tensors

        def slopes(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            return plain_slopes(g, x, weight, bias, mask)

        return (*vjp(slopes, *moving)[1](gg), None, None)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return on_stacks(stacked_slopes, fronts(inputs, dims, info)), (0, 0, 0)


class LayerMeanStep(LayerMeanSlopes):
    """`LayerMeanSlopes`, which leaves the gradients of weight and bias to the end of a step
    (`products.py`) if both are parameters of it.
    """

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return on_stacks(step_slopes, fronts(inputs, dims, info)), (0, 0, 0)


def plain_slopes(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of `plain` along g."""
    pull = vjp(lambda x, weight, bias: plain(x, weight, bias, mask), x, weight, bias)[1]
    found: tuple[Tensor, ...] = pull(g)
    return found


def stacked_mean(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `LayerMean` returns, with the clients' axis in front."""
    if has_kernels(x):
        from . import meankernels

        return meankernels.mean(x, weight, bias, mask)
    return vmap(plain)(x, weight, bias, mask), x.new_empty(len(x), 0)


def stacked_slopes(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, pooled: Tensor
) -> tuple[Tensor, ...]:
    """Return what `LayerMeanSlopes` returns, with the clients' axis in front."""
    if has_kernels(g):
        from . import meankernels

        return meankernels.slopes(g, weight, mask, pooled)
    found: tuple[Tensor, ...] = vmap(plain_slopes)(g, x, weight, bias, mask)
    return found


def step_slopes(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, pooled: Tensor
) -> tuple[Tensor, ...]:
    """Return what `stacked_slopes` does, or zeros for what was left to the step."""
    if not (has_kernels(g) and all_may_leave((weight, bias))):
        return stacked_slopes(g, x, weight, bias, mask, pooled)
    from . import meankernels

    g, mask, pooled = (one.contiguous() for one in (g, mask, pooled))
    descend = partial(meankernels.descend, g, mask, pooled, weight, bias)
    to_x = meankernels.slope_of_x(g, weight, mask)
    return to_x, *left_own(descend, (g, mask, pooled), (weight, bias))
