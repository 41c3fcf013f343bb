"""Convolutions of stacks of networks by the kernels that need no patches, alone or with the 2×2
pooling after them, and the memory order of grouped convolutions. On a GPU only.

    Direct        x, weight, bias → out
    DirectInput   ∂out, weight → ∂x
    DirectWeight  x, ∂out → ∂weight, ∂bias
    DirectPool    x, weight, bias → what is pooled, which element it was
    PoolWeight    x, ∂pooled → ∂weight, ∂bias

The first three are closed under differentiation. `facts` are stride and padding, then what a
function needs besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from . import routes
from .batched import (
    Size,
    as_last,
    front,
    fronts,
    on_stacks,
    out_size,
    stacked_input,
    window,
)
from .pooling import Pick, Scatter
from .products import first_derivative, left_parts, may_leave

WINDOW = (2, 2)


class Direct(Function):
    """x (B, C, H, W), weight (O, C, I, J), bias (O,) or None → (B, O, P, Q)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int) -> Tensor:
        return ahead(x[None], weight[None], bias if bias is None else bias[None], stride, pad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *ctx.facts = inputs
        ctx.bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = DirectInput.apply(g, weight, tuple(x.shape), *ctx.facts)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            facts = (window(weight), *ctx.facts, ctx.bias)
            to_weight, to_bias = DirectWeight.apply(x, g, *facts)
        return to_x, to_weight, to_bias if ctx.bias else None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, weight, bias = fronts(inputs[:3], dims[:3], info)
        if bias is None:
            return on_stacks(without_bias, (x, weight), *inputs[3:]), 0
        return on_stacks(ahead, (x, weight, bias), *inputs[3:]), 0


class DirectInput(Function):
    """The gradient of `Direct` with respect to x, of `shape`."""

    @staticmethod
    def forward(g: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, pad: int) -> Tensor:
        return to_input(g[None], weight[None], shape, stride, pad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, _, *ctx.facts = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        g, weight = ctx.saved_tensors
        to_g = to_weight = None
        if ctx.needs_input_grad[0]:
            to_g = Direct.apply(gg, weight, None, *ctx.facts)
        if ctx.needs_input_grad[1]:
            to_weight = DirectWeight.apply(gg, g, window(weight), *ctx.facts, False)[0]
        return to_g, to_weight, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return on_stacks(to_input, fronts(inputs[:2], dims[:2], info), *inputs[2:]), 0


class DirectWeight(Function):
    """The gradients of `Direct` with respect to weight and bias; without `bias` the second is
    empty.
    """

    @staticmethod
    def forward(
        x: Tensor, g: Tensor, size: Size, stride: int, pad: int, bias: bool
    ) -> tuple[Tensor, Tensor]:
        to_weight, to_bias = to_weights(x[None], g[None], size, stride, pad, bias)
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, _, *ctx.facts, ctx.bias = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, gg: Tensor, gg_bias: Tensor) -> tuple[Any, ...]:
        x, g = ctx.saved_tensors
        to_x = to_g = None
        if ctx.needs_input_grad[0]:
            to_x = DirectInput.apply(g, gg, tuple(x.shape), *ctx.facts)
        if ctx.needs_input_grad[1]:
            to_g = Direct.apply(x, gg, gg_bias if ctx.bias else None, *ctx.facts)
        return to_x, to_g, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(to_weights, fronts(inputs[:2], dims[:2], info), *inputs[2:]), (0, 0)


class DirectStep(DirectWeight):
    """`DirectWeight`, which leaves the parts of its sums to the end of a step (`products.py`) if
    weight and bias are parameters of it.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, size: Size, stride: int, pad: int
    ) -> tuple[Tensor, Tensor]:
        to_weight, to_bias = to_weights(x[None], g[None], size, stride, pad, True)
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, _, _, _, *ctx.facts = inputs
        ctx.bias = True
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, gg: Tensor, gg_bias: Tensor) -> tuple[Any, ...]:
        return *DirectWeight.backward(ctx, gg, gg_bias), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(step_weights, fronts(inputs[:4], dims[:4], info), *inputs[4:]), (0, 0)


class DirectPool(Function):
    """Pool(Direct(x, weight, bias)), and which element of each window it was."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, stride: int, pad: int, slope: float
    ) -> tuple[Tensor, Tensor]:
        out, index = pooled(x[None], weight[None], bias[None], stride, pad, slope)
        return out[0], index[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, *ctx.facts, ctx.slope = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 6
        x, weight, bias, index = ctx.saved_tensors
        facts = (window(weight), *ctx.facts)
        to_x = None
        if not ctx.needs_input_grad[0] and routes.in_turn(x):
            return None, *PoolWeight.apply(x, g, index, *facts, ctx.slope), None, None, None
        spread = Scatter.apply(g, index, before(x, weight, *ctx.facts), WINDOW, ctx.slope)
        # these first: a step on a GPU goes on beside them
        if all(ctx.needs_input_grad[1:3]) and first_derivative():
            own = DirectStep.apply(x, spread, weight, bias, *facts)
        else:
            own = DirectWeight.apply(x, spread, *facts, True)
        if ctx.needs_input_grad[0]:
            to_x = DirectInput.apply(spread, weight, tuple(x.shape), *ctx.facts)
        return to_x, *own, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(pooled, fronts(inputs[:3], dims[:3], info), *inputs[3:]), (0, 0)


class PoolWeight(Function):
    """The gradients of `DirectPool` with respect to weight and bias, linear in x and in g."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, index: Tensor, *facts: Any) -> tuple[Tensor, Tensor]:
        to_weight, to_bias = pooled_weights(x[None], g[None], index[None], *facts)
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, index, _, *ctx.facts, ctx.slope = inputs
        ctx.save_for_backward(x, g, index)

    @staticmethod
    def backward(ctx: Any, gg: Tensor, gg_bias: Tensor) -> tuple[Any, ...]:
        x, g, index = ctx.saved_tensors
        to_x = to_g = None
        if ctx.needs_input_grad[0]:
            spread = Scatter.apply(g, index, before(x, gg, *ctx.facts), WINDOW, ctx.slope)
            to_x = DirectInput.apply(spread, gg, tuple(x.shape), *ctx.facts)
        if ctx.needs_input_grad[1]:
            whole = Direct.apply(x, gg, gg_bias, *ctx.facts)
            to_g = Pick.apply(whole, index, WINDOW, ctx.slope)
        return to_x, to_g, *(None,) * 5

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(pooled_weights, fronts(inputs[:3], dims[:3], info), *inputs[3:]), (0, 0)


class Last(Function):
    """x (B, C, H, W) with clients and channels side by side in memory; the same numbers."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return as_last(x[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]:
        return on_stacks(as_last, (front(x, dims[0], info.batch_size),)), 0


# -- the functions of stacks: the clients' axis is in front of every tensor ------------------------
def before(x: Tensor, weight: Tensor, stride: int, pad: int) -> tuple[int, ...]:
    """Return the shape (B, O, P, Q) of what is pooled."""
    return (x.shape[-4], weight.shape[-4], *out_size(x, window(weight), stride, pad))


def ahead(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int) -> Tensor:
    """Return the output."""
    from . import convkernels

    return convkernels.forward(x, weight, bias, stride, pad, *split(x, weight, stride, pad))


def split(x: Tensor, weight: Tensor, stride: int, pad: int) -> tuple[routes.Tile, int]:
    """Return the block that a program computes, and into how many parts its sum is split."""
    high, wide = out_size(x, window(weight), stride, pad)
    columns, used = x.shape[1] * high * wide, weight[0, 0].numel()
    return routes.wide_tile(weight.shape[1], columns, len(x), used)


def without_bias(x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
    """Return the output of a layer without bias."""
    return ahead(x, weight, None, stride, pad)


def to_input(g: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, pad: int) -> Tensor:
    """Return the gradient of the input, (A, *shape)."""
    if routes.implicit_input(window(weight)):
        from . import convkernels

        pixels, length = shape[0] * shape[2] * shape[3], weight[0, :, 0].numel()
        how = routes.wide_tile(shape[1], pixels, len(g), length)
        return convkernels.input_slope(g, weight, (len(g), *shape), stride, pad, *how)
    more = -weight[0, 0].numel() % (8 if g.dtype == torch.bfloat16 else 4)
    flat = weight.flatten(2)
    flat = functional.pad(flat, (0, more)) if more else flat
    return stacked_input(g, flat, shape, window(weight), stride, pad)


def to_weights(
    x: Tensor, g: Tensor, size: Size, stride: int, pad: int, bias: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    from . import convkernels

    how = weights_split(x, g, size, bias)
    return convkernels.weights_slope(x, g, size, stride, pad, bias, *how)


def step_weights(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, size: Size, stride: int, pad: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, or zeros if they were left to the step."""
    if not may_leave(weight, bias):
        return to_weights(x, g, size, stride, pad, True)
    from . import convkernels

    how, facts = weights_split(x, g, size, True), (size, stride, pad, True)
    return left_parts(
        lambda: convkernels.weights_parts(x, g, *facts, *how, True)[0], (x, g), weight, bias
    )


def weights_split(x: Tensor, g: Tensor, size: Size, bias: bool) -> tuple[routes.Tile, int]:
    """Return the block of the weights' gradient that a program computes, and into how many parts
    its sum is split.
    """
    clients, samples, outputs, high, wide = g.shape
    rows = x.shape[2] * size[0] * size[1] + bias
    return routes.weights_tile(outputs, rows, samples * high * wide, clients)


def pooled(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int, pad: int, slope: float
) -> tuple[Tensor, Tensor]:
    """Return (what is pooled, which element it was), each (A, B, O, P, Q)."""
    from . import convkernels, convoncekernels, convpoolkernels, partkernels

    if routes.in_turn(x):
        last = routes.likes_last(x.shape[1], weight.shape[1])
        tile = routes.pool_tile(weight.shape[1])
        return convpoolkernels.pooled(x, weight, bias, stride, pad, slope, last, tile)
    outputs, used = weight.shape[1], weight[0, 0].numel()
    high, wide = out_size(x, window(weight), stride, pad)
    if routes.at_once(outputs, x.shape[1] * high * wide, len(x), used):
        tile = routes.once_tile(outputs, used, len(x) * x.shape[1] * high * wide)
        return convoncekernels.pooled_once(x, weight, bias, stride, pad, slope, tile)
    bias, how = bias.contiguous(), split(x, weight, stride, pad)
    parts = convkernels.forward_parts(x, weight, bias, stride, pad, *how)
    whole = parts.shape[1] == 1
    return partkernels.pooled(parts, None if whole else bias, x.dtype, slope)


def pooled_weights(
    x: Tensor, g: Tensor, index: Tensor, size: Size, stride: int, pad: int, slope: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias from that of what was pooled."""
    from . import convpoolkernels

    how = weights_split(x, g, size, True)
    return convpoolkernels.pooled_weights(x, g, index, size, stride, pad, slope, True, *how)
