"""Modules whose layers have a form made for stacks of networks (`batched.py`): the same names, the
same numbers up to rounding.
"""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import routes
from .batched import Conv, Size, padded
from .direct import WINDOW, Direct, DirectPool, Last
from .lastpool import BentPool, LastWeight
from .linear import Linear
from .pooling import Pool
from .square import SquarePool


class StackedConv2d(nn.Conv2d):
    """torch's convolution, as a product of matrices, and the 2×2 pooling after it if that has
    become part of it: `slope` is the pooling's.
    """

    slope: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        low, slope = in_bfloat16(x), None if self._forward_hooks else self.slope
        size, pad = tuple(self.kernel_size), int(self.padding[0])
        weight, bias = self.weight, self.bias
        if slope is not None and bias is not None and routes.square(x, weight, self.stride[0]):
            return SquarePool.apply(x, weight, bias, pad, slope, low)[0]  # type: ignore[no-any-return]
        x = x.bfloat16() if low else x  # as torch's own layers do
        if routes.grouped(x, self.out_channels, size, pad):
            weight = LastWeight.apply(weight, x.dtype)
            found = functional.conv2d(Last.apply(x), weight, None, self.stride, self.padding)
            if bias is None:
                return self.pooled(found)
            if slope is None:
                return found + bias.to(x.dtype)[:, None, None]
            return BentPool.apply(found, bias, slope)[0]  # type: ignore[no-any-return]
        if routes.direct(x, self.out_channels, size):
            if low:
                weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
            if slope is not None and bias is not None:
                facts = (self.stride[0], pad, slope)
                return DirectPool.apply(x, weight, bias, *facts)[0]  # type: ignore[no-any-return]
            return self.pooled(Direct.apply(x, weight, bias, self.stride[0], pad))
        rows = padded(weight[0].numel(), 8 if low else 4)
        bias = bias if bias is not None else weight.new_zeros(weight.shape[0])
        filler = weight.new_zeros(weight.shape[0], rows - weight[0].numel() - 1)
        weights = torch.cat([weight.flatten(1), bias[:, None], filler], 1)
        weights = weights.bfloat16() if low else weights
        return self.pooled(Conv.apply(x, weights, size, self.stride[0], pad)[0])

    def pooled(self, x: Tensor) -> Tensor:
        """Return x after the pooling that belongs to the layer."""
        slope = None if self._forward_hooks else self.slope
        return x if slope is None else Pool.apply(x, WINDOW, slope)[0]


class StackedMaxPool2d(nn.MaxPool2d):
    """torch's pooling with windows side by side, and the activation before it: `slope` times what
    is below 0 (1: none).
    """

    slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Pool.apply(x, pair(self.kernel_size), self.slope)[0]  # type: ignore[no-any-return]


class StackedLinear(nn.Linear):
    """torch's linear layer, and the activation after it if that has become part of it: `slope` is
    the activation's below 0 (1: none).
    """

    slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        low, slope = in_bfloat16(x), 1.0 if self._forward_hooks else self.slope
        if routes.linear(x, self.weight):
            facts = (self.bias, slope, low)
            return Linear.apply(x, self.weight, *facts)  # type: ignore[no-any-return]
        out = super().forward(x)
        return out if slope == 1.0 else functional.leaky_relu(out, slope)


class After(nn.Module):
    """An activation or a pooling that has become part of the layer before it, unless a hook wants
    to see what the layer itself gives.
    """

    def __init__(self, layer: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.layers = (layer,)  # not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) if self.layers[0]._forward_hooks else x  # type: ignore[no-any-return]


def in_bfloat16(x: Tensor) -> bool:
    """Return whether autocast is on for `x`; Bayflower only uses it with bfloat16."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def pair(size: int | tuple[int, ...]) -> Size:
    """Return a size in both directions."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def for_stacks(module: nn.Module) -> nn.Module:
    """Return a copy of the module with the layers replaced that have a faster form for stacks of
    networks.

    An increasing activation and the maximum of a window may change places, exactly; then there is a
    quarter of it left to do, and ReLU and LeakyReLU become part of the pooling. The pooling becomes
    part of a convolution right before it, unless somebody looks at what the convolution gives.
    """
    module = copy.deepcopy(module)
    for part in module.modules():
        if type(part) is nn.Conv2d and plain_conv(part):
            part.__class__ = StackedConv2d
        elif type(part) is nn.MaxPool2d and plain_pool(part):
            part.__class__ = StackedMaxPool2d
        elif type(part) is nn.Linear and module.training:
            part.__class__ = StackedLinear
    for part in module.modules():
        if isinstance(part, nn.Sequential):
            change_places(part)
            join(part)
    return module


def join(layers: nn.Sequential) -> None:
    """Make each 2×2 pooling a part of the convolution before it, and each piecewise linear
    activation of the linear layer before it.
    """
    known = [(name, part) for name, part in layers.named_children() if not empty(part)]
    for (_, first), (name, part) in itertools.pairwise(known):
        if isinstance(first, StackedConv2d) and isinstance(part, StackedMaxPool2d):
            if pair(part.kernel_size) == WINDOW:
                first.slope = part.slope
                layers._modules[name] = After(first, part)
        elif isinstance(first, StackedLinear) and (slope := slope_below(part)) is not None:
            first.slope = slope
            layers._modules[name] = After(first, part)


def empty(layer: nn.Module) -> bool:
    """Return whether a layer gives what it gets."""
    return type(layer) is nn.Identity


def change_places(layers: nn.Sequential) -> None:
    """Put each activation that comes before a pooling after it, or into it."""
    names, known = list(layers._modules), list(layers.children())
    for i in range(len(known) - 1):
        activation, pooling = known[i], known[i + 1]
        slope = slope_below(activation)
        if type(pooling) is StackedMaxPool2d and slope is not None and pooling.slope == 1.0:
            pooling.slope = slope
            layers._modules[names[i]] = known[i] = nn.Identity()
        elif increasing(activation) and type(pooling) in (nn.MaxPool2d, StackedMaxPool2d):
            layers._modules[names[i]], layers._modules[names[i + 1]] = pooling, activation
            known[i], known[i + 1] = pooling, activation


def slope_below(layer: nn.Module) -> float | None:
    """Return what a piecewise linear activation multiplies negative numbers with; None for another
    layer.
    """
    if type(layer) is nn.ReLU:
        return 0.0
    return (
        layer.negative_slope if type(layer) is nn.LeakyReLU and layer.negative_slope > 0 else None
    )


def plain_conv(layer: nn.Conv2d) -> bool:
    """Return whether the convolution is of the kind `Conv` does."""
    even = (
        layer.stride[0] == layer.stride[1]
        and not isinstance(layer.padding, str)
        and layer.padding[0] == layer.padding[1]
    )
    return (
        even
        and layer.groups == 1
        and tuple(layer.dilation) == (1, 1)
        and layer.padding_mode == "zeros"
    )


def plain_pool(layer: nn.MaxPool2d) -> bool:
    """Return whether the pooling has windows side by side."""
    same = (
        pair(layer.stride) == pair(layer.kernel_size)
        and pair(layer.padding) == (0, 0)
        and pair(layer.dilation) == (1, 1)
    )
    return same and not layer.ceil_mode and not layer.return_indices


def increasing(layer: nn.Module) -> bool:
    """Return whether the activation never falls and has no parameters: the largest stays the
    largest.
    """
    return isinstance(layer, (nn.ReLU, nn.Tanh, nn.Sigmoid)) or (
        isinstance(layer, nn.LeakyReLU) and layer.negative_slope > 0
    )
