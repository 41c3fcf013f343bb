"""A linear layer of stacks of networks, with the activation after it: one GPU kernel ahead and two
back for all clients, in place of three and four.

    bent(x Wᵀ + b), bent(v) = v where v > 0, else slope·v       slope 1: no activation

    symbol   here         shape of one client
    x        x            (B, K)
    W, b     weight, bias (O, K), (O,)
    s        –            (B, O): ∂out where out > 0, else slope·∂out

    ∂W = sᵀ x          ∂b = Σ s          ∂x = s W

Second derivatives are those of the plain formula. On a GPU only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import routes
from .batched import front, fronts, on_stacks
from .products import Product, first_derivative, left, may_leave, slopes


class Linear(Function):
    """bent(x Wᵀ + b): x (B, K), weight (O, K), bias (O,) or None → (B, O). `low`: in bfloat16."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float, low: bool) -> Tensor:
        return ahead(x[None], weight[None], bias if bias is None else bias[None], slope, low)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.slope, ctx.low = inputs
        # without an activation the slopes do not need the output, which others may write into
        ctx.save_for_backward(x, weight, bias, *(() if ctx.slope == 1.0 else (output,)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight, bias, *kept = ctx.saved_tensors
        out, facts = kept[0] if kept else g, (ctx.slope, ctx.low)  # of g only the shape is read
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = LinearInput.apply(g, out, weight, x.dtype, *facts)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            both = ctx.needs_input_grad[1] and (bias is None or ctx.needs_input_grad[2])
            may = both and first_derivative()
            to_weight, to_bias = LinearWeight.apply(x, g, out, weight, bias, may, *facts)
        return to_x, to_weight, None if bias is None else to_bias, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        if dims[1] is None and dims[2] is None:  # one layer for all: they are further samples
            x = front(inputs[0], dims[0], info.batch_size)
            return Linear.apply(x.flatten(0, 1), *inputs[1:]).unflatten(0, x.shape[:2]), 0
        x, weight, bias = fronts(inputs[:3], dims[:3], info)
        if bias is None:
            return on_stacks(without_bias, (x, weight), *inputs[3:]), 0
        return on_stacks(ahead, (x, weight, bias), *inputs[3:]), 0


class LinearInput(Function):
    """The gradient of `Linear` with respect to x, linear in g and in the weights."""

    @staticmethod
    def forward(g: Tensor, out: Tensor, weight: Tensor, *facts: Any) -> Tensor:
        return to_input(g[None], out[None], weight[None], *facts)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, out, weight, _, ctx.slope, _ = inputs
        ctx.save_for_backward(g, out, weight)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        g, out, weight = ctx.saved_tensors
        along = slopes(out, ctx.slope)
        gg = gg.to(weight.dtype)
        to_g = (along * (gg @ weight.mT)).to(g.dtype)
        to_weight = (along * g).to(weight.dtype).mT @ gg
        return to_g, None, to_weight, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        if dims[2] is None:  # one layer for all: they are further samples
            g, out = fronts(inputs[:2], dims[:2], info)
            found = LinearInput.apply(g.flatten(0, 1), out.flatten(0, 1), *inputs[2:])
            return found.unflatten(0, g.shape[:2]), 0
        return on_stacks(to_input, fronts(inputs[:3], dims[:3], info), *inputs[3:]), 0


class LinearWeight(Function):
    """The gradients of `Linear` with respect to weight and bias, linear in x and in g; without
    `bias` the second is empty. If it `may`, it leaves the product to the step (`products.py`).
    """

    @staticmethod
    def forward(
        x: Tensor, g: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None, *facts: Any
    ) -> tuple[Tensor, Tensor]:
        own = (bias if bias is None else bias[None], *facts)
        to_weight, to_bias = to_weights(x[None], g[None], out[None], weight[None], *own)
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, out, _, bias, _, ctx.slope, _ = inputs
        ctx.bias = bias is not None
        ctx.save_for_backward(x, g, out)

    @staticmethod
    def backward(ctx: Any, gg: Tensor, gg_bias: Tensor) -> tuple[Any, ...]:
        x, g, out = ctx.saved_tensors
        along = slopes(out, ctx.slope)
        to_x = ((along * g).to(gg.dtype) @ gg).to(x.dtype)
        to_g = x.to(gg.dtype) @ gg.mT
        to_g = to_g + gg_bias if ctx.bias else to_g
        return to_x, (along * to_g).to(g.dtype), *(None,) * 6

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        if dims[3] is None:  # a gradient for each sample of one layer
            weight, bias, _, *facts = inputs[3:]
            known = (bias is not None, weight.dtype, *facts)
            return on_stacks(anew, fronts(inputs[:3], dims[:3], info), *known), (0, 0)
        *tensors, bias = fronts(inputs[:5], dims[:5], info)
        if bias is None:
            return on_stacks(to_weight_alone, tuple(tensors), *inputs[5:]), (0, 0)
        return on_stacks(to_weights, (*tensors, bias), *inputs[5:]), (0, 0)


# -- the functions of stacks: the clients' axis is in front of every tensor ------------------------
def ahead(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float, low: bool) -> Tensor:
    """Return the output."""
    if routes.narrow(weight, low):
        from . import linearkernels

        return linearkernels.ahead(x, weight, bias, slope, low)
    out = x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)
    return torch.where(out > 0, out, slope * out)


def without_bias(x: Tensor, weight: Tensor, slope: float, low: bool) -> Tensor:
    """Return the output of a layer without bias."""
    return ahead(x, weight, None, slope, low)


def to_input(
    g: Tensor, out: Tensor, weight: Tensor, dtype: torch.dtype, slope: float, low: bool
) -> Tensor:
    """Return the gradient of the input."""
    if routes.narrow(weight, low):
        from . import linearkernels

        return linearkernels.input_slope(g, out, weight, slope, dtype, low)
    return (slopes(out, slope) * g) @ weight


def to_weights(
    x: Tensor,
    g: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    may: bool,
    slope: float,
    low: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    if may and may_leave(weight, bias):
        return left(Product(x, g, out, weight, bias, slope, low))
    return anew(x, g, out, bias is not None, weight.dtype, slope, low)


def anew(
    x: Tensor, g: Tensor, out: Tensor, bias: bool, dtype: torch.dtype, slope: float, low: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    if routes.has_kernels(x):
        from . import linearkernels

        return linearkernels.weights_slope(x, g, out, bias, dtype, slope, low)
    bent = slopes(out, slope) * g
    return bent.mT @ x, bent.sum(1) if bias else bent.new_empty(len(bent), 0)


def to_weight_alone(
    x: Tensor, g: Tensor, out: Tensor, weight: Tensor, *facts: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the weight of a layer without bias."""
    return to_weights(x, g, out, weight, None, *facts)
