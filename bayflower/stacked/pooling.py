"""Max-pooling of stacks of images, with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from .batched import Size, front, has_kernels, on_stacks


class Pool(Function):
    """The largest of each window of x (B, C, H, W), times `slope` below 0, and which it was (int8);
    windows side by side.

    Which: its place in the window, plus the size of the window where the slope applies.
    """

    @staticmethod
    def forward(x: Tensor, size: Size, slope: float) -> tuple[Tensor, Tensor]:
        out, index = stacked_pool(x[None], size, slope)
        return out[0], index[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.size, ctx.slope = inputs
        ctx.shape = tuple(x.shape)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return None, None, None
        return Scatter.apply(g, ctx.saved_tensors[0], ctx.shape, ctx.size, ctx.slope), None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, size: Size, slope: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return on_stacks(stacked_pool, (front(x, dims[0], info.batch_size),), size, slope), (0, 0)


class Scatter(Function):
    """g at the places `index` names, times the slope where it applies, zero elsewhere."""

    @staticmethod
    def forward(
        g: Tensor, index: Tensor, shape: tuple[int, ...], size: Size, slope: float
    ) -> Tensor:
        return stacked_scatter(g[None], index[None], shape, size, slope)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, _, ctx.size, ctx.slope = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        return Pick.apply(gg, ctx.saved_tensors[0], ctx.size, ctx.slope), None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        g: Tensor,
        index: Tensor,
        shape: tuple[int, ...],
        size: Size,
        slope: float,
    ) -> tuple[Tensor, int]:
        g, index = front(g, dims[0], info.batch_size), front(index, dims[1], info.batch_size)
        return on_stacks(stacked_scatter, (g, index), shape, size, slope), 0


class Pick(Function):
    """x at the places `index` names, times the slope where
    it applies: the transpose of `Scatter`.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, size: Size, slope: float) -> Tensor:
        return picked(x, index, size, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, index, ctx.size, ctx.slope = inputs
        ctx.shape = tuple(x.shape)
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return (
            Scatter.apply(g, ctx.saved_tensors[0], ctx.shape, ctx.size, ctx.slope),
            None,
            None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, index: Tensor, size: Size, slope: float
    ) -> tuple[Tensor, int]:
        return picked(
            front(x, dims[0], info.batch_size), front(index, dims[1], info.batch_size), size, slope
        ), 0


def windows(x: Tensor, size: Size) -> Tensor:
    """Return (…, P, Q, I·J) of x (…, H, W): the elements of each window."""
    high, wide = x.shape[-2] // size[0], x.shape[-1] // size[1]
    x = x[..., : high * size[0], : wide * size[1]].reshape(
        *x.shape[:-2], high, size[0], wide, size[1]
    )
    return x.transpose(-3, -2).reshape(*x.shape[:-4], high, wide, size[0] * size[1])


def picked(x: Tensor, index: Tensor, size: Size, slope: float) -> Tensor:
    """Return x at the places `index` names, times the slope where it applies."""
    area = size[0] * size[1]
    found = torch.gather(windows(x, size), -1, (index.long() % area)[..., None])[..., 0]
    return torch.where(index >= area, found * slope, found)


def stacked_pool(x: Tensor, size: Size, slope: float) -> tuple[Tensor, Tensor]:
    """Return (the largest of each window, times `slope` below 0; which it was) of x (A, B, C, H,
    W).
    """
    if has_kernels(x):
        from . import poolkernels

        return poolkernels.pool(x, size, slope)
    best, index = windows(x, size).max(-1)
    index = torch.where(best > 0, index, index + size[0] * size[1])
    return torch.where(best > 0, best, best * slope), index.to(torch.int8)


def stacked_scatter(
    g: Tensor, index: Tensor, shape: tuple[int, ...], size: Size, slope: float
) -> Tensor:
    """Return g at the places `index` names, in images (A, B, C, H, W), of which `shape` is all but
    A.
    """
    shape = (len(g), *shape)
    if has_kernels(g):
        from . import poolkernels

        return poolkernels.unpool(g, index, shape, size, slope)
    area = size[0] * size[1]
    g = torch.where(index >= area, g * slope, g)
    spread = g[..., None] * (index[..., None] % area == torch.arange(area, device=g.device))
    high, wide = g.shape[-2:]
    x = (
        spread.reshape(*g.shape, *size)
        .transpose(-3, -2)
        .reshape(*g.shape[:-2], high * size[0], wide * size[1])
    )
    return functional.pad(x, (0, shape[-1] - x.shape[-1], 0, shape[-2] - x.shape[-2]))
