"""Functions of torch in plain operations, for stacks of networks and for second derivatives, where
torch's own have no such form or a slow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import attention, randomly, recurrent


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Return the sum, mean or largest of the rows that each bag (B, N) names; padding is in no
    bag.
    """
    if input.ndim != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if padding_idx is None:
        if mode == "max":
            return rows.max(1).values
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    real = (input != padding_idx % weight.shape[0])[..., None]
    if mode == "max":
        found = rows.masked_fill(~real, -math.inf).max(1).values
        return found.masked_fill(~real.any(1), 0.0)
    total = rows.masked_fill(~real, 0.0).sum(1)
    return total if mode == "sum" else total / real.sum(1).clamp(min=1)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / ‖v‖, the norm over all axes but `dim` (all axes for −1)."""
    axes = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(axes, keepdim=dim != -1).sqrt())


def normalize(
    x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Any:
    """Return x / ‖x‖ written into `out` (spectral norm remembers its vectors so)."""
    if out is None:
        return NotImplemented
    return out.copy_(x / x.norm(p, dim, keepdim=True).clamp_min(eps))


def rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Return x, below 0 times the middle of the slopes, where none is drawn."""
    if training:
        return randomly.rrelu(x, lower, upper, training, inplace)
    return randomly.given(x, functional.leaky_relu(x, (lower + upper) / 2), inplace)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x, below 0 times the weight of its channel."""
    if weight.numel() > 1 and x.ndim > 2:
        weight = weight.reshape(-1, *(1,) * (x.ndim - 2))
    return torch.where(x > 0, x, weight * x)


def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """Return x / 6 + 1/2, cut to [0, 1]."""
    return randomly.given(x, (x / 6 + 0.5).clamp(0, 1), inplace)


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Any:
    """Return the mean of each channel, where that is asked for."""
    return x.mean((-2, -1), keepdim=True) if output_size in (1, (1, 1), [1, 1]) else NotImplemented


def as_wide(norm: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a norm of inputs in the dtype of its weights, as autocast does it on a GPU: in a stack
    on a CPU two dtypes have no derivative.
    """

    def wide(x: Tensor, size: Any, weight: Tensor | None = None, *rest: Any, **more: Any) -> Any:
        if weight is None or x.dtype == weight.dtype:
            return NotImplemented
        return norm(x.to(weight.dtype), size, weight, *rest, **more)

    return wide


def rms_norm(x: Tensor, size: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """Return x / √(mean x² + eps) times the weight, on a GPU: torch's kernel there has no form for
    stacks and would run client by client.
    """
    if not x.is_cuda:
        return as_wide(functional.rms_norm)(x, size, weight, eps)
    wide = x if weight is None else x.to(weight.dtype)
    mean = wide.square().mean([-1 - axis for axis in range(len(size))], keepdim=True)
    found = wide * torch.rsqrt(mean + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return found if weight is None else found * weight


def one_hot(x: Tensor, num_classes: int = -1) -> Any:
    """Return 1 where the last axis is the number in x, else 0; torch's own reads the numbers."""
    if num_classes < 1:
        return NotImplemented
    return x.new_zeros(*x.shape, num_classes).scatter(-1, x.unsqueeze(-1), 1)


def cdist(x: Tensor, other: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """Return the distance of each row of x from each row of another. The derivative of torch's own
    is wrong when it is mapped over slopes alone (per-sample curvature), and has no derivative.
    """
    return torch.linalg.vector_norm(x.unsqueeze(-2) - other.unsqueeze(-3), p, -1)


def view(x: Tensor, *shape: Any, **named: Any) -> Any:
    """Return x in another shape. A layer of a stack may lay its output out in another order than
    torch's own layer does, and then the numbers are copied.
    """
    try:
        return Tensor.view(x, *shape, **named)
    except RuntimeError:
        if named or isinstance(shape[0], torch.dtype):
            raise
        return x.reshape(*shape)


def view_as(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the shape of another tensor; see `view`."""
    return view(x, other.shape)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **recurrent.functions(only_random=False),
    **recurrent.cells(),
    functional.scaled_dot_product_attention: attention.scaled_dot_product,
    functional.multi_head_attention_forward: attention.multi_head,
    functional.adaptive_avg_pool2d: adaptive_avg_pool2d,
    functional.embedding_bag: embedding_bag,
    functional.hardsigmoid: hardsigmoid,
    functional.normalize: normalize,
    functional.one_hot: one_hot,
    functional.group_norm: as_wide(functional.group_norm),
    functional.layer_norm: as_wide(functional.layer_norm),
    functional.prelu: prelu,
    functional.rms_norm: rms_norm,
    functional.rrelu: rrelu,
    torch.cdist: cdist,
    torch._weight_norm: weight_norm,
    Tensor.view: view,
    Tensor.view_as: view_as,
}


def multi_head_without_weights(*args: Any, **named: Any) -> Any:
    """Return what multi-head attention does where torch takes a kernel without a second
    derivative.
    """
    weighted = named.get("need_weights", args[15] if len(args) > 15 else True)
    return NotImplemented if weighted else attention.multi_head(*args, **named)


def on_gpus(ours: Callable[..., Any], random: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent network of ours for GPUs, where torch's has no second derivative, and
    where numbers are drawn.
    """
    return lambda x, *rest: (ours if x.is_cuda else random)(x, *rest)


RANDOM = recurrent.functions(only_random=True)
# what torch cannot differentiate twice; its second derivative of a norm of weights is wrong
TWICE: dict[Any, Callable[..., Any]] = {
    **{
        name: on_gpus(ours, RANDOM[name])
        for name, ours in recurrent.functions(only_random=False).items()
    },
    functional.scaled_dot_product_attention: attention.scaled_dot_product,
    functional.multi_head_attention_forward: multi_head_without_weights,
    functional.embedding_bag: embedding_bag,
    functional.hardsigmoid: hardsigmoid,
    torch._weight_norm: weight_norm,
    torch.cdist: cdist,
    **recurrent.cells(),
}
