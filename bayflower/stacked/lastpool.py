"""What surrounds a grouped convolution of a stack, for images whose clients and channels are side
by side in memory. On a GPU only.

    LastWeight   weights in the type and the memory order that cuDNN wants, in one copy
    BentPool     x, bias → bent(largest of each 2×2 window + bias), which element it was
    BentSum      ∂out → ∂bias

bent(v) = v where v > 0, else slope·v. The bias comes after the largest, where a quarter is left to
do. All are closed under differentiation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .batched import front, fronts, on_stacks
from .direct import WINDOW, Last
from .pooling import Scatter
from .products import Turned, first_derivative, left, may_leave

AREA = WINDOW[0] * WINDOW[1]


class LastWeight(Function):
    """weight (O, C, I, J) of `kind` with the channels side by side in memory."""

    @staticmethod
    def forward(weight: Tensor, kind: torch.dtype) -> Tensor:
        return last_weight(weight[None], kind)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return FirstWeight.apply(g, ctx.saved_tensors[0], first_derivative()), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], weight: Tensor, kind: Any) -> tuple[Tensor, int]:
        return on_stacks(last_weight, (front(weight, dims[0], info.batch_size),), kind), 0


class FirstWeight(Function):
    """The transpose of `LastWeight`: torch's memory order. If it `may`, it leaves the gradient to
    the step (`products.py`).
    """

    @staticmethod
    def forward(g: Tensor, weight: Tensor, may: bool) -> Tensor:
        return first_weight(g[None], weight[None], may)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kind = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return LastWeight.apply(g, ctx.kind), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return on_stacks(first_weight, fronts(inputs[:2], dims[:2], info), *inputs[2:]), 0


class BentPool(Function):
    """bent(the largest of each window of x (B, C, H, W) + bias (C,)), and which it was, with 4 more
    where it is not above 0.
    """

    @staticmethod
    def forward(x: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        out, index = bent_pool(x[None], bias[None], slope)
        return out[0], index[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, bias, ctx.slope = inputs
        ctx.shape, ctx.kind = tuple(x.shape), bias.dtype
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return None, None, None
        (index,), g = ctx.saved_tensors, Last.apply(g)
        to_x = Scatter.apply(g, index, ctx.shape, WINDOW, ctx.slope)
        return to_x, BentSum.apply(g, index, ctx.slope, ctx.kind), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return on_stacks(bent_pool, fronts(inputs[:2], dims[:2], info), *inputs[2:]), (0, 0)


class BentSum(Function):
    """Σ over samples and windows of g (B, C, P, Q), times the slope where it applies: (C,)."""

    @staticmethod
    def forward(g: Tensor, index: Tensor, slope: float, kind: torch.dtype) -> Tensor:
        return bent_sum(g[None], index[None], slope, kind)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, index, ctx.slope, _ = inputs
        ctx.kind = g.dtype
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        along = torch.where(index >= AREA, ctx.slope, 1.0).to(ctx.kind)
        return gg.to(ctx.kind)[:, None, None] * along, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return on_stacks(bent_sum, fronts(inputs[:2], dims[:2], info), *inputs[2:]), 0


# -- the functions of stacks: the clients' axis is in front of every tensor ------------------------
def last_weight(weight: Tensor, kind: torch.dtype) -> Tensor:
    """Return weight (A, O, C, I, J) of `kind`, in memory (A, O, I, J, C)."""
    turned = weight.permute(0, 1, 3, 4, 2)
    return (
        torch.empty_like(turned, dtype=kind, memory_format=torch.contiguous_format)
        .copy_(turned)
        .permute(0, 1, 4, 2, 3)
    )


def first_weight(g: Tensor, weight: Tensor, may: bool) -> Tensor:
    """Return g (A, O, C, I, J) in the type and memory order of weights, or 0 if it was left."""
    if may and may_leave(weight, None):
        return left(Turned(g, weight))[0]
    return torch.empty_like(g, dtype=weight.dtype, memory_format=torch.contiguous_format).copy_(g)


def bent_pool(x: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return (what is pooled, which element it was), each (A, B, C, P, Q)."""
    from . import poolkernels

    return poolkernels.pool_last(x, WINDOW, slope, bias)


def bent_sum(g: Tensor, index: Tensor, slope: float, kind: torch.dtype) -> Tensor:
    """Return the gradient of the bias, (A, C)."""
    from . import poolkernels

    return poolkernels.bent_sum(g, index, AREA, slope, kind)
