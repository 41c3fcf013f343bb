"""BatchNorm that leaves padding out: the statistics of a padded batch are those of its real
samples, exactly.

torch's own layer would count the padding, so that clients with a short last batch could not be
stacked with others. Written with torch's functions, the layer and its derivative read the batch
some forty times; `Norm` has them as one kernel each on a GPU.

    symbol   here       meaning
    k_i      mask       1 where sample i is real, 0 where it is padding
    n        count      Σ k_i · positions of a sample
    m, v     mean, variance   Σ k_i x_i / n, Σ k_i (x_i − m)² / n
    x̂_i      normal     (x_i − m) / √(v + ε)
    y_i      out        w x̂_i + b, for padding too (something finite)
    ∂x_i     slopes     w (g_i − k_i/n · (Σ g + x̂_i Σ g x̂)) / √(v + ε)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import vjp

from ..errors import BayflowerError
from .batched import front, has_kernels, on_stacks
from .forms import give

MASKABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NEEDS_MASK = (
    "a stacked network with {} needs to know which samples are real: pass mask to Model.forward"
)
OTHER_ROWS = (
    "a BatchNorm gets {} rows for {} samples, so that it cannot be told which rows are padding"
)
# the mask of the batch that is passing through; a pass is one call in one thread
_masks: list[Tensor] = []


@contextmanager
def real_samples(mask: Tensor | None) -> Iterator[None]:
    """Say which samples (B,) of the batch inside are real."""
    if mask is None:
        yield
        return
    _masks.append(mask)
    try:
        yield
    finally:
        _masks.pop()


def normalise(self: nn.modules.batchnorm._BatchNorm, input: Tensor) -> Tensor:
    """Return torch's BatchNorm in training mode over the real samples; padding comes out as
    something finite.
    """
    x = input
    if not (self.training or self.running_mean is None):
        if x.is_cuda:
            assert self.running_mean is not None
            assert self.running_var is not None
            return settled(x, self.running_mean, self.running_var, self.weight, self.bias, self.eps)
        return type(self).forward(self, x)
    if not _masks:
        raise BayflowerError(NEEDS_MASK.format("BatchNorm"))
    if x.shape[0] != _masks[-1].shape[0]:
        raise RuntimeError(OTHER_ROWS.format(x.shape[0], _masks[-1].shape[0]))
    weight, bias = (
        (self.weight, self.bias)
        if self.affine
        else (x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]))
    )
    mask = _masks[-1].to(weight.dtype)
    out, mean, variance = Norm.apply(x, mask, weight, bias, self.eps)
    count = mask.sum() * (x[0, 0].numel() if x.ndim > 2 else 1)
    remember(self, mean.detach(), variance.detach(), count)
    return out  # type: ignore[no-any-return]


def remember(
    layer: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, count: Tensor
) -> None:
    """Update the layer's running statistics, the variance without bias, as torch does."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    rate: Any = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if rate is None:
            rate = 1 / layer.num_batches_tracked.to(mean.dtype)
    layer.running_mean.copy_(layer.running_mean + rate * (mean - layer.running_mean))
    layer.running_var.copy_(
        layer.running_var + rate * (variance * count / (count - 1).clamp(min=1) - layer.running_var)
    )


def settled(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return what BatchNorm gives in evaluation mode, computed in float32 or the inputs' own kind
    if that is wider. On a GPU torch's own asks inputs for their layout in memory, which fails in
    vmap.
    """
    kind, around = torch.promote_types(x.dtype, torch.float32), (-1,) + (1,) * (x.ndim - 2)
    scale = (variance.to(kind) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(kind)
    out = (x.to(kind) - mean.to(kind).reshape(around)) * scale.reshape(around)
    if bias is not None:
        out = out + bias.to(kind).reshape(around)
    return out.to(x.dtype)


def normalise_each(self: nn.modules.instancenorm._InstanceNorm, input: Tensor) -> Tensor:
    """Return torch's InstanceNorm, whose running statistics are the mean over the real samples."""
    x, norm, affine = input, nn.functional.instance_norm, (self.weight, self.bias)
    assert self.running_mean is not None
    assert self.running_var is not None
    if not self.training:
        if x.is_cuda:
            return settled(x, self.running_mean, self.running_var, *affine, self.eps)
        return norm(x, self.running_mean, self.running_var, *affine, False, eps=self.eps)
    if not _masks:
        raise BayflowerError(NEEDS_MASK.format("InstanceNorm"))
    mask = _masks[-1].to(x.dtype)[:, None]
    axes, area = tuple(range(2, x.ndim)), x[0, 0].numel()
    with torch.no_grad():
        variance, mean = torch.var_mean(x, axes, correction=1 if area > 1 else 0)
        for kept, found in ((self.running_mean, mean), (self.running_var, variance)):
            now = (found * mask).sum(0) / mask.sum().clamp(min=1)
            kept.copy_(kept + (self.momentum or 0.0) * (now - kept))
    return norm(x, None, None, *affine, eps=self.eps)


def mask_norms(module: nn.Module) -> nn.Module:
    """Return the module, in which every layer that counts samples has got a form that leaves
    padding out.
    """
    for part in module.modules():
        if type(part) in MASKABLE:
            give(part, normalise)
        elif type(part) in INSTANCES and part.track_running_stats:
            give(part, normalise_each)
    return module


class Norm(Function):
    """(y, m, v) of x (B, C, …), the mask (B,), w and b (C,); m and v have no derivative, as they
    only become running statistics.
    """

    @staticmethod
    def forward(
        x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, variance = stacked_norm(x[None], mask[None], weight[None], bias[None], eps)
        return out[0], mean[0], variance[0]

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        x, mask, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mask, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 5
        to_x, to_weight, to_bias = Slopes.apply(g, *ctx.saved_tensors, ctx.eps)
        return to_x, None, to_weight, to_bias, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tensors = tuple(
            front(one, dim, info.batch_size) for one, dim in zip(inputs[:4], dims, strict=False)
        )
        return on_stacks(stacked_norm, tensors, inputs[4]), (0, 0, 0)


class Slopes(Function):
    """The gradients of `Norm` with respect to x, w and b; its own derivative is that of the plain
    formula, m and v included.
    """

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        mask: Tensor,
        weight: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
    ) -> tuple[Tensor, ...]:
        found = stacked_slopes(
            g[None], x[None], mask[None], weight[None], mean[None], variance[None], eps
        )
        return tuple(one[0] for one in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        g, x, mask, weight, _, _, ctx.eps = inputs
        ctx.save_for_backward(g, x, mask, weight)

    @staticmethod
    def backward(ctx: Any, *gg: Tensor) -> tuple[Any, ...]:
        g, x, mask, weight = ctx.saved_tensors

        def plain(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            mean, variance = moments(x[None], mask[None])
            return tuple(
                one[0]
                for one in slopes(
                    g[None], x[None], mask[None], weight[None], mean, variance, ctx.eps
                )
            )

        _, pull = vjp(plain, g, x, weight)  # type: ignore[misc]
        to_g, to_x, to_weight = pull(gg)
        return to_g, to_x, None, to_weight, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tensors = tuple(
            front(one, dim, info.batch_size) for one, dim in zip(inputs[:6], dims, strict=False)
        )
        return on_stacks(stacked_slopes, tensors, inputs[6]), (0, 0, 0)


def stacked_norm(
    x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, m, v) of x (A, B, C, …), mask (A, B), weight and bias (A, C); sums in the weights'
    dtype, y in that of x.
    """
    if has_kernels(x) and x.ndim == 5:
        from . import normkernels

        return normkernels.norm(x, mask, weight, bias, eps)
    mean, variance = moments(x.to(weight.dtype), mask)
    normal = (x - around(mean, x)) * around(torch.rsqrt(variance + eps), x)
    return (normal * around(weight, x) + around(bias, x)).to(x.dtype), mean, variance


def stacked_slopes(
    g: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias."""
    if has_kernels(x) and x.ndim == 5:
        from . import normkernels

        return normkernels.norm_slopes(g, x, mask, weight, mean, variance, eps)
    return slopes(g, x, mask, weight, mean, variance, eps)


def slopes(
    g: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by the formula of the module's table."""
    axes = [axis for axis in range(x.ndim) if axis not in (0, 2)]
    scale = torch.rsqrt(variance + eps)
    normal = (x - around(mean, x)) * around(scale, x)
    g = g.to(weight.dtype)
    to_bias, to_weight = g.sum(axes), (g * normal).sum(axes)
    share = (mask / counts(x, mask)[:, None]).reshape(*mask.shape, *(1,) * (x.ndim - 2))
    to_x = around(weight * scale, x) * (
        g - share * (around(to_bias, x) + normal * around(to_weight, x))
    )
    return to_x.to(x.dtype), to_weight, to_bias


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and v (A, C) of x (A, B, C, …)."""
    axes = [axis for axis in range(x.ndim) if axis not in (0, 2)]
    real = mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
    count = counts(x, mask)[:, None]
    mean = (x * real).sum(axes) / count
    return mean, ((x - around(mean, x)).square() * real).sum(axes) / count


def counts(x: Tensor, mask: Tensor) -> Tensor:
    """Return n (A,), at least 1: a client without real samples gets numbers, which nobody uses."""
    return (mask.sum(1) * (x[0, 0, 0].numel() if x.ndim > 3 else 1)).clamp(min=1)


def around(values: Tensor, x: Tensor) -> Tensor:
    """Return values (A, C) in a shape that goes with x (A, B, C, …)."""
    return values.reshape(len(values), 1, -1, *(1,) * (x.ndim - 3))
