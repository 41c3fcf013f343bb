"""Layers for stacks of networks: under `torch.func.vmap` with weights of their own for every
client, one product of matrices each.

torch turns a convolution with per-client weights into a grouped convolution, which GPUs do slowly.
Here it is patches × weights, for all clients in one batched product. Everything is differentiable
any number of times (MAML needs two): the three maps of a convolution (output, input gradient,
weight gradient) and the two of a pooling (pick, scatter) are closed under differentiation.
`stackable.py` puts them into modules; the numbers are those of torch's layers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from .routes import has_kernels as has_kernels

Size = tuple[int, int]


def padded(rows: int, multiple: int = 4) -> int:
    """Return the rows of a patch matrix: one more for the bias, then up to a multiple of 16 bytes,
    which products of matrices like.
    """
    return -(-(rows + 1) // multiple) * multiple


def out_size(x: Tensor, size: Size, stride: int, pad: int) -> Size:
    """Return rows and columns of a convolution's output."""
    return (x.shape[-2] + 2 * pad - size[0]) // stride + 1, (
        x.shape[-1] + 2 * pad - size[1]
    ) // stride + 1


def is_whole(outputs: int, area: int) -> bool:
    """Return whether one product for all samples of a client is better than one a sample, which
    needs a copy of the weights for each.
    """
    return 8 * outputs > area


def patches(x: Tensor, size: Size, stride: int, pad: int, rows: int, whole: bool) -> Tensor:
    """Return (A, rows, B·P·Q) if `whole`, else (A·B, rows, P·Q), of x (A, B, C, H, W): patches, a
    row of ones, rows of zeros.
    """
    if has_kernels(x):
        from . import kernels

        return kernels.patches(x, size, stride, pad, rows, whole)
    clients, samples = x.shape[:2]
    cols = functional.unfold(
        x.reshape(clients * samples, *x.shape[2:]), size, padding=pad, stride=stride
    )
    if whole:
        cols = (
            cols.reshape(clients, samples, cols.shape[1], -1)
            .transpose(1, 2)
            .reshape(clients, cols.shape[1], -1)
        )
    ones, zeros = (
        torch.ones_like(cols[:, :1]),
        cols.new_zeros(cols.shape[0], rows - cols.shape[1] - 1, cols.shape[2]),
    )
    return torch.cat([cols, ones, zeros], 1)


def image(
    cols: Tensor, shape: tuple[int, ...], size: Size, stride: int, pad: int, whole: bool
) -> Tensor:
    """Return (A, B, C, H, W) of `shape`: the transpose of `patches`."""
    if has_kernels(cols):
        from . import kernels

        return kernels.image(cols, shape, size, stride, pad, whole)
    clients, samples, channels = shape[:3]
    used = channels * size[0] * size[1]
    part = cols[:, :used]
    if whole:
        part = (
            part.reshape(clients, used, samples, -1)
            .transpose(1, 2)
            .reshape(clients * samples, used, -1)
        )
    return functional.fold(part, tuple(shape[3:]), size, padding=pad, stride=stride).reshape(shape)


def front(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    """Return the tensor with the clients' axis in front, repeated where it had none."""
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def fronts(tensors: tuple[Any, ...], dims: tuple[Any, ...], info: Any) -> tuple[Any, ...]:
    """Return the tensors with the clients' axis in front; None stays None."""
    return tuple(
        None if one is None else front(one, dim, info.batch_size)
        for one, dim in zip(tensors, dims, strict=True)
    )


def as_last(x: Tensor) -> Tensor:
    """Return x (A, B, C, H, W) with clients and channels side by side in memory: (B, H, W, A,
    C).
    """
    return x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


def window(weight: Tensor) -> Size:
    """Return rows and columns of the window of weights (…, I, J)."""
    return weight.shape[-2], weight.shape[-1]


def on_stacks(fn: Callable[..., Any], tensors: tuple[Tensor, ...], *settings: Any) -> Any:
    """Return fn(*tensors, *settings), the clients' axis in front of the tensors, perhaps with more
    axes hidden by an outer vmap.
    """
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return Merged.apply(fn, settings, *tensors)  # a kernel cannot look into such tensors
    return fn(*tensors, *settings)


class Merged(Function):
    """`fn` of stacks, mapped over further axes: they become one with the clients'. It has no
    derivative.
    """

    @staticmethod
    def forward(fn: Callable[..., Any], settings: tuple[Any, ...], *tensors: Tensor) -> Any:
        return fn(*tensors, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        fn: Callable[..., Any],
        settings: tuple[Any, ...],
        *tensors: Tensor,
    ) -> tuple[Any, Any]:
        some = [
            front(tensor, dim, info.batch_size)
            for tensor, dim in zip(tensors, dims[2:], strict=True)
        ]
        found = on_stacks(fn, tuple(tensor.flatten(0, 1) for tensor in some), *settings)
        outer = some[0].shape[:2]
        if isinstance(found, tuple):
            return tuple(part.unflatten(0, outer) for part in found), (0,) * len(found)
        return found.unflatten(0, outer), 0


class Conv(Function):
    """weights (O, R) × patches of x (B, C, H, W) → (B, O, P, Q), and the patches; the weights'
    columns are (c, i, j), the bias, zeros.
    """

    @staticmethod
    def forward(
        x: Tensor, weights: Tensor, size: Size, stride: int, pad: int
    ) -> tuple[Tensor, Tensor]:
        out, cols = stacked_conv(x[None], weights[None], size, stride, pad)
        return out[0], cols[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weights, ctx.size, ctx.stride, ctx.pad = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros in place of a gradient of the patches
        ctx.save_for_backward(x, weights, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 5
        x, weights, cols = ctx.saved_tensors
        facts = (ctx.size, ctx.stride, ctx.pad)
        to_x = (
            ConvInput.apply(g, weights, tuple(x.shape), *facts) if ctx.needs_input_grad[0] else None
        )
        to_weights = (
            ConvWeights.apply(x, g, cols, weights.shape[-1], *facts)
            if ctx.needs_input_grad[1]
            else None
        )
        return to_x, to_weights, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        x: Tensor,
        weights: Tensor,
        size: Size,
        stride: int,
        pad: int,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x, weights = front(x, dims[0], info.batch_size), front(weights, dims[1], info.batch_size)
        return on_stacks(stacked_conv, (x, weights), size, stride, pad), (0, 0)


class ConvInput(Function):
    """The gradient of `Conv` with respect to x, linear in g (B, O, P, Q) and in the weights;
    `shape` is that of x.
    """

    @staticmethod
    def forward(
        g: Tensor, weights: Tensor, shape: tuple[int, ...], size: Size, stride: int, pad: int
    ) -> Tensor:
        return stacked_input(g[None], weights[None], shape, size, stride, pad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weights, _, ctx.size, ctx.stride, ctx.pad = inputs
        ctx.save_for_backward(g, weights)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        g, weights = ctx.saved_tensors
        facts = (ctx.size, ctx.stride, ctx.pad)
        linear = no_bias(weights, gg.shape[-3], ctx.size)
        to_g = Conv.apply(gg, linear, *facts)[0] if ctx.needs_input_grad[0] else None
        to_weights = None
        if ctx.needs_input_grad[1]:
            to_weights = no_bias(
                ConvWeights.apply(gg, g, None, weights.shape[-1], *facts), gg.shape[-3], ctx.size
            )
        return to_g, to_weights, None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        g: Tensor,
        weights: Tensor,
        shape: tuple[int, ...],
        size: Size,
        stride: int,
        pad: int,
    ) -> tuple[Tensor, int]:
        g, weights = front(g, dims[0], info.batch_size), front(weights, dims[1], info.batch_size)
        return on_stacks(stacked_input, (g, weights), shape, size, stride, pad), 0


class ConvWeights(Function):
    """The gradient of `Conv` with respect to the weights (O, R), linear in x and in g; `cols` are
    the patches of x, or None.
    """

    @staticmethod
    def forward(
        x: Tensor, g: Tensor, cols: Tensor | None, rows: int, size: Size, stride: int, pad: int
    ) -> Tensor:
        return stacked_weights(
            x[None], g[None], None if cols is None else cols[None], rows, size, stride, pad
        )[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, g, _, _, ctx.size, ctx.stride, ctx.pad = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
        x, g = ctx.saved_tensors
        facts = (ctx.size, ctx.stride, ctx.pad)
        to_x = ConvInput.apply(g, gg, tuple(x.shape), *facts) if ctx.needs_input_grad[0] else None
        to_g = Conv.apply(x, gg, *facts)[0] if ctx.needs_input_grad[1] else None
        return to_x, to_g, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        x: Tensor,
        g: Tensor,
        cols: Tensor | None,
        rows: int,
        size: Size,
        stride: int,
        pad: int,
    ) -> tuple[Tensor, int]:
        x, g = front(x, dims[0], info.batch_size), front(g, dims[1], info.batch_size)
        cols = None if cols is None else front(cols, dims[2], info.batch_size)
        if cols is None:
            return on_stacks(stacked_weights_anew, (x, g), rows, size, stride, pad), 0
        return on_stacks(stacked_weights, (x, g, cols), rows, size, stride, pad), 0


def stacked_conv(
    x: Tensor, weights: Tensor, size: Size, stride: int, pad: int
) -> tuple[Tensor, Tensor]:
    """Return ((A, B, O, P, Q) in either memory order, the patches with A in front)."""
    clients, samples, outputs = *x.shape[:2], weights.shape[1]
    high, wide = out_size(x, size, stride, pad)
    whole = is_whole(outputs, high * wide)
    cols = patches(x, size, stride, pad, weights.shape[-1], whole)
    out = torch.bmm(weights if whole else repeat(weights, samples), cols)
    if whole:
        return out.view(clients, outputs, samples, high, wide).transpose(1, 2), cols
    return out.view(clients, samples, outputs, high, wide), cols.view(
        clients, samples, *cols.shape[1:]
    )


def stacked_input(
    g: Tensor, weights: Tensor, shape: tuple[int, ...], size: Size, stride: int, pad: int
) -> Tensor:
    """Return the gradient with respect to x, (A, B, C, H, W), of which `shape` is all but A."""
    samples, outputs, high, wide = g.shape[1:]
    whole = is_whole(outputs, high * wide)
    cols = torch.bmm((weights if whole else repeat(weights, samples)).mT, columns(g, whole))
    return image(cols, (len(g), *shape), size, stride, pad, whole)


def stacked_weights(
    x: Tensor, g: Tensor, cols: Tensor | None, rows: int, size: Size, stride: int, pad: int
) -> Tensor:
    """Return the gradient with respect to the weights, (A, O, rows)."""
    clients, samples, outputs, high, wide = g.shape
    whole = is_whole(outputs, high * wide)
    if cols is None:
        cols = patches(x, size, stride, pad, rows, whole)
    found = torch.bmm(columns(g, whole), cols.reshape(-1, *cols.shape[-2:]).mT)
    return found if whole else found.view(clients, samples, outputs, rows).sum(1)


def stacked_weights_anew(
    x: Tensor, g: Tensor, rows: int, size: Size, stride: int, pad: int
) -> Tensor:
    """Return the gradient with respect to the weights, the patches not known."""
    return stacked_weights(x, g, None, rows, size, stride, pad)


def repeat(weights: Tensor, samples: int) -> Tensor:
    """Return (A·B, O, R): the weights of each client once for each of its samples."""
    return weights[:, None].expand(-1, samples, -1, -1).reshape(-1, *weights.shape[1:])


def columns(g: Tensor, whole: bool) -> Tensor:
    """Return (A, O, B·P·Q) if `whole`, else (A·B, O, P·Q), of g (A, B, O, P, Q); a view if its
    memory order is right.
    """
    clients, samples, outputs = g.shape[:3]
    if whole:
        return g.transpose(1, 2).reshape(clients, outputs, -1)
    return g.reshape(clients * samples, outputs, -1)


def no_bias(weights: Tensor, channels: int, size: Size) -> Tensor:
    """Return the weights with the bias and what follows set to zero."""
    used = channels * size[0] * size[1]
    return functional.pad(weights[..., :used], (0, weights.shape[-1] - used))
