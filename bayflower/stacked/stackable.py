"""Modules whose layers have a form made for stacks of networks (`batched.py`): the same names and
types, the same numbers up to rounding, whatever a network does with its layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from . import filled, routes
from .batched import Conv, Size, padded
from .direct import WINDOW, Direct, DirectPool, Last
from .forms import give, has, is_plain
from .lastpool import BentPool, LastWeight
from .linear import Linear
from .masked import normalise
from .pooling import Pool
from .square import SquarePool

# their outputs are new tensors, which nobody else has
MAKERS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)


class Step(NamedTuple):
    """A layer of a Sequential. With a slope those after it are part of it: what is below 0 is
    multiplied by it, and a convolution pools its output.
    """

    layer: Any
    slope: float | None = None

    def run(self, x: Any) -> Any:
        """Return what the layer and those that are part of it make of x."""
        return self.layer(x) if self.slope is None else self.layer.forward(x, self.slope)


# -- forms of layers: each takes the place of a layer's `forward`, so that it stays what it is -----
def convolve(self: nn.Conv2d, input: Tensor, slope: float | None = None) -> Tensor:
    """Return torch's convolution, as a product of matrices; with a slope the 2×2 pooling after it,
    too.
    """
    if input.ndim != 4:
        return pooled(nn.Conv2d.forward(self, input), slope)
    x, low = input, in_bfloat16(input)
    size, pad = tuple(self.kernel_size), int(self.padding[0])
    weight, bias = self.weight, self.bias
    if slope is not None and bias is not None and routes.square(x, weight, self.stride[0]):
        return SquarePool.apply(x, weight, bias, pad, slope, low)[0]  # type: ignore[no-any-return]
    x = x.bfloat16() if low else x  # as torch's own layers do
    if routes.grouped(x, self.out_channels, size, pad):
        weight = LastWeight.apply(weight, x.dtype)
        found = functional.conv2d(Last.apply(x), weight, None, self.stride, self.padding)
        if bias is None:
            return pooled(found, slope)
        if slope is None:
            return found + bias.to(x.dtype)[:, None, None]
        return BentPool.apply(found, bias, slope)[0]  # type: ignore[no-any-return]
    if routes.direct(x, self.out_channels, size):
        if low:
            weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
        if slope is not None and bias is not None:
            facts = (self.stride[0], pad, slope)
            return DirectPool.apply(x, weight, bias, *facts)[0]  # type: ignore[no-any-return]
        return pooled(Direct.apply(x, weight, bias, self.stride[0], pad), slope)
    rows = padded(weight[0].numel(), 8 if low else 4)
    bias = bias if bias is not None else weight.new_zeros(weight.shape[0])
    filler = weight.new_zeros(weight.shape[0], rows - weight[0].numel() - 1)
    weights = torch.cat([weight.flatten(1), bias[:, None], filler], 1)
    weights = weights.bfloat16() if low else weights
    return pooled(Conv.apply(x, weights, size, self.stride[0], pad)[0], slope)


def pooled(x: Tensor, slope: float | None) -> Tensor:
    """Return x after the 2×2 pooling that belongs to a convolution, if there is a slope."""
    if slope is None:
        return x
    if x.ndim != 4:
        return functional.leaky_relu(functional.max_pool2d(x, WINDOW), slope)
    return Pool.apply(x, WINDOW, slope)[0]  # type: ignore[no-any-return]


def pool(self: nn.MaxPool2d, input: Tensor, slope: float = 1.0) -> Tensor:
    """Return torch's pooling with windows side by side, and the activation before it: `slope` times
    what is below 0 (1: none).
    """
    if input.ndim != 4:
        out: Tensor = nn.MaxPool2d.forward(self, input)
        return out if slope == 1.0 else functional.leaky_relu(out, slope)
    return Pool.apply(input, pair(self.kernel_size), slope)[0]  # type: ignore[no-any-return]


def linear(self: nn.Linear, input: Tensor, slope: float = 1.0) -> Tensor:
    """Return torch's linear layer, and the activation after it: `slope` times what is below 0
    (1: none).
    """
    if routes.linear(input, self.weight):
        out = Linear.apply(input, self.weight, self.bias, slope, in_bfloat16(input))
        return out if slope == 1.0 else filled.own(out)  # with an activation it keeps its output
    out = nn.Linear.forward(self, input)
    return out if slope == 1.0 else functional.leaky_relu(out, slope)


def chain(self: nn.Sequential, input: Any) -> Any:
    """Return what the layers make of the input one after the other, some of them at once."""
    if _has_any_global_hook():
        return nn.Sequential.forward(self, input)
    for step in steps(self):
        input = step.run(input)
    return input


def in_bfloat16(x: Tensor) -> bool:
    """Return whether autocast is on for `x`; Bayflower only uses it with bfloat16."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def pair(size: int | tuple[int, ...]) -> Size:
    """Return a size in both directions."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def for_stacks(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose layers have a faster form for stacks of networks, where
    there is one.

    Nothing else about the layers changes: they stay where they are, of the same type, and whoever
    calls one of them gets its own output. Only a Sequential that is called as a whole takes some of
    its layers at once (`steps`).
    """
    module = copy.deepcopy(module)
    for part in module.modules():
        if type(part) is nn.Conv2d and plain_conv(part):
            give(part, convolve)
        elif type(part) is nn.MaxPool2d and plain_pool(part):
            give(part, pool)
        elif type(part) is nn.Linear and module.training:
            give(part, linear)
        elif isinstance(part, nn.Sequential) and plain_chain(type(part)):
            give(part, chain)
    return module


def steps(layers: Iterable[nn.Module]) -> list[Step]:
    """Return what layers do that are called one after the other.

    An increasing activation and the maximum of a window may change places, exactly; then there is a
    quarter of it left to do, and ReLU and LeakyReLU become part of the pooling. A 2×2 pooling
    becomes part of a convolution right before it, and a piecewise linear activation of a linear
    layer. Layers with hooks stay for themselves.
    """
    found: list[Step] = []
    for step in exchanged([Step(layer) for layer in layers if not empty(layer)]):
        before, part = found[-1] if found else Step(None), step.layer
        if before.layer is None or before.slope is not None:
            found.append(step)
        elif has(before.layer, convolve) and has(part, pool) and pair(part.kernel_size) == WINDOW:
            found[-1] = Step(before.layer, 1.0 if step.slope is None else step.slope)
        elif has(before.layer, linear) and (slope := slope_below(part)) is not None:
            found[-1] = Step(before.layer, slope)
        else:
            found.append(step)
    return found


def exchanged(known: list[Step]) -> list[Step]:
    """Return the steps with each activation that comes before a pooling after it, or in it."""
    found: list[Step] = []
    for step in known:
        before = found[-1].layer if found and found[-1].slope is None else None
        if before is None or not whole_pool(step.layer) or not is_free(found):
            found.append(step)
        elif (slope := slope_below(before)) is not None and has(step.layer, pool):
            found[-1] = Step(step.layer, slope)
        elif increasing(before) and not filled.writes():  # it keeps its output
            found.insert(len(found) - 1, step)
        else:
            found.append(step)
    return found


def is_free(found: list[Step]) -> bool:
    """Return whether the last layer may be left out for now: it does not write into its input, or
    nobody else has that, as a layer has just made it.
    """
    if not getattr(found[-1].layer, "inplace", False):
        return True
    return len(found) > 1 and makes(found[-2].layer)


def makes(layer: nn.Module) -> bool:
    """Return whether a layer's output is a new tensor."""
    forms = (convolve, linear, normalise)
    return type(layer) in MAKERS and (is_plain(layer) or any(has(layer, one) for one in forms))


def empty(layer: nn.Module) -> bool:
    """Return whether a layer gives what it gets."""
    return type(layer) is nn.Identity and is_plain(layer)


def slope_below(layer: nn.Module) -> float | None:
    """Return what a piecewise linear activation multiplies negative numbers with; None for another
    layer.
    """
    if type(layer) is nn.ReLU and is_plain(layer):
        return 0.0
    leaky = type(layer) is nn.LeakyReLU and is_plain(layer) and layer.negative_slope > 0
    return layer.negative_slope if leaky else None  # type: ignore[return-value]


def plain_chain(kind: type[nn.Sequential]) -> bool:
    """Return whether a Sequential of this type calls its layers one after the other."""
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__


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


def whole_pool(layer: nn.Module) -> bool:
    """Return whether a layer is a pooling that gives the largest of each window, at least one place
    of which is in the image.
    """
    if has(layer, pool):
        return True
    plain = type(layer) is nn.MaxPool2d and is_plain(layer) and not layer.return_indices
    return plain and pair(layer.dilation) == (1, 1)  # type: ignore[arg-type]


def increasing(layer: nn.Module) -> bool:
    """Return whether the activation never falls and has no parameters: the largest stays the
    largest.
    """
    rises = type(layer) in (nn.Tanh, nn.Sigmoid) and is_plain(layer)
    return rises or slope_below(layer) is not None
