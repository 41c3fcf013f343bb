"""Convolutions of few channels with the 2×2 pooling after them, for stacks of networks, by the
kernels that read each pixel once (`convsquarekernels.py`). On a GPU only.

    SquarePool     x, weight, bias → what is pooled, which element it was
    SquareWeight   x, ∂pooled → ∂weight, ∂bias

Second derivatives are those of the functions in `direct.py`. The stride is 1. `low`: x and weights
may be float32, and products are of bfloat16, as is what is pooled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import routes
from .batched import Size, fronts, on_stacks, window
from .direct import WINDOW, Direct, DirectInput, before
from .pooling import Pick, Scatter
from .products import first_derivative, left_parts, may_leave


class SquarePool(Function):
    """Pool(convolution of x (B, C, H, W) by weight (O, C, I, J) and bias (O,)), (B, O, P, Q)."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, pad: int, slope: float, low: bool
    ) -> tuple[Tensor, Tensor]:
        out, index = pooled(x[None], weight[None], bias[None], pad, slope, low)
        return out[0], index[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, ctx.pad, ctx.slope, ctx.low = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 6
        x, weight, bias, index = ctx.saved_tensors
        may = all(ctx.needs_input_grad[1:3]) and first_derivative()
        facts = (window(weight), ctx.pad, ctx.slope, ctx.low, may)
        # these first: a step goes on beside them
        to_weight, to_bias = SquareWeight.apply(x, g, index, weight, bias, *facts)
        to_x = None
        if ctx.needs_input_grad[0]:
            spread = Scatter.apply(g, index, before(x, weight, 1, ctx.pad), WINDOW, ctx.slope)
            like = weight.to(g.dtype)
            to_x = DirectInput.apply(spread, like, tuple(x.shape), 1, ctx.pad).to(x.dtype)
        return to_x, to_weight, to_bias, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(pooled, fronts(inputs[:3], dims[:3], info), *inputs[3:]), (0, 0)


class SquareWeight(Function):
    """The gradients of `SquarePool` with respect to weight and bias, linear in x and in g. If it
    `may`, it leaves the parts of its sums to the step (`products.py`).
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        to_weight, to_bias = pooled_weights(*(one[None] for one in inputs[:5]), *inputs[5:])
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, index, _, _, _, ctx.pad, ctx.slope, *_ = inputs
        ctx.save_for_backward(x, g, index)

    @staticmethod
    def backward(ctx: Any, gg: Tensor, gg_bias: Tensor) -> tuple[Any, ...]:
        x, g, index = ctx.saved_tensors
        to_x = to_g = None
        if ctx.needs_input_grad[0]:
            spread = Scatter.apply(g, index, before(x, gg, 1, ctx.pad), WINDOW, ctx.slope)
            to_x = DirectInput.apply(spread, gg.to(g.dtype), tuple(x.shape), 1, ctx.pad)
            to_x = to_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            own = (one.to(g.dtype) for one in (x, gg, gg_bias))
            to_g = Pick.apply(Direct.apply(*own, 1, ctx.pad), index, WINDOW, ctx.slope)
        return to_x, to_g, *(None,) * 8

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(pooled_weights, fronts(inputs[:5], dims[:5], info), *inputs[5:]), (0, 0)


# -- the functions of stacks: the clients' axis is in front of every tensor ------------------------
def pooled(
    x: Tensor, weight: Tensor, bias: Tensor, pad: int, slope: float, low: bool
) -> tuple[Tensor, Tensor]:
    """Return (what is pooled, which element it was), each (A, B, O, P, Q)."""
    from . import convsquarekernels

    clients, samples, _, rows, columns = x.shape
    size, outputs = window(weight), weight.shape[1]
    total = (
        samples * ((rows + 2 * pad - size[0] + 1) // 2) * ((columns + 2 * pad - size[1] + 1) // 2)
    )
    low = low or x.dtype == torch.bfloat16
    exact = not low and routes.precision() == "tf32x3"
    block = convsquarekernels.square_ahead(clients, outputs, total, exact)
    last = low and routes.likes_last(samples, outputs)
    facts = (1, pad, slope, last, block, low, routes.precision())
    return convsquarekernels.pooled(x, weight, bias, *facts)


def pooled_weights(
    x: Tensor,
    g: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: Tensor,
    size: Size,
    pad: int,
    slope: float,
    low: bool,
    may: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, in float32, from that of what was pooled; zeros if
    they were left to the step.
    """
    from . import convsquarekernels

    clients, samples, outputs, high, wide = g.shape
    low = low or g.dtype == torch.bfloat16
    exact = not low and routes.precision() == "tf32x3"
    how = convsquarekernels.square_weights(clients, outputs, samples * high * wide, exact)
    facts = (size, 1, pad, slope, True, *how, low, routes.precision())
    if may and may_leave(weight, bias):
        make = partial(convsquarekernels.weights_parts, x, g, index, *facts, joined=True)
        return left_parts(lambda: make()[0].float(), (x, g, index), weight, bias)
    to_weight, to_bias = convsquarekernels.pooled_weights(x, g, index, *facts)
    return to_weight.float(), to_bias.float()
