"""FedNP's regulariser of a batch's features: f is the mean of a linear layer, and the regulariser
pulls on the layers and on the features through f.

In a step of plain gradient descent on a GPU, two kernels give the value and the slope of f, and one
the slope of the features; the slope of f is never multiplied out, and the gradients of all weights
are taken at the step's end (`stacked/products.py`). Elsewhere it is `layer_mean` and `regulariser`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.func import vmap

from ..stacked import meanlayer
from ..stacked.batched import fronts, has_kernels, on_stacks
from ..stacked.products import all_may_leave, first_derivative, left_own
from ..tree import Tensors
from . import propagation
from .gaussian import Diagonal
from .propagation import INPUTS, NAMES, SAVED, SETTINGS, has_form, regulariser
from .tilted import Slopes, nodes_of

LAYER = 4  # x, weight, bias, mask
TENSORS = LAYER + INPUTS - 1  # all inputs of the regulariser but f
FACTS = 1 + SETTINGS  # whether slopes may be left to the step, and the settings
OUTPUTS = 2 + SAVED  # the value, the mean of x, and what the regulariser hands to its slopes


def regularised(
    x: Tensor,
    layer: tuple[Tensor, Tensor],
    mask: Tensor,
    cavity: Diagonal,
    layers: Tensors,
    target: Tensor,
    slopes: Slopes,
    epsilon: float,
    strength: float,
) -> Tensor:
    """Return `regulariser` of f = the mean of x W + b over the samples that count."""
    weight, bias = layer
    one_step = first_derivative() and meanlayer.has_form(x, weight, bias, mask)
    if not (one_step and has_form(bias, layers, target, slopes)):  # the bias has the form of f
        f = meanlayer.layer_mean(x, weight, bias, mask)
        return regulariser(f, cavity, layers, target, slopes, epsilon, strength)
    others = (cavity.shift, cavity.precision, *(layers[name] for name in NAMES), target)
    settings = (epsilon, strength, nodes_of(slopes))
    value, *_ = FromFeatures.apply(x, weight, bias, mask, *others, *settings)
    return value  # type: ignore[no-any-return]


class FromFeatures(Function):
    """(The regulariser of features, the mean of x, and what slopes need) of the layer, the other
    inputs and the settings; only the first has a derivative, and no second one.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        tensors = (one[None] for one in inputs[:TENSORS])
        return tuple(one[0] for one in stacked_values(*tensors, *inputs[TENSORS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros in place of gradients that nobody asks for
        ctx.settings = inputs[TENSORS:]
        ctx.save_for_backward(*inputs[:TENSORS], *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * (TENSORS + SETTINGS)
        needed = ctx.needs_input_grad
        may = all((*needed[1:3], *needed[LAYER + 2 : TENSORS]))
        to_x, to_weight, to_bias, *others = FromFeaturesSlopes.apply(
            g, *ctx.saved_tensors, may, *ctx.settings
        )
        return (to_x, to_weight, to_bias, None, None, None, *others, *(None,) * SETTINGS)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:TENSORS], dims[:TENSORS], info)
        return on_stacks(stacked_values, tensors, *inputs[TENSORS:]), (0,) * OUTPUTS


class FromFeaturesSlopes(Function):
    """The gradients of `FromFeatures` with respect to x, the layer, the layers and the target,
    times g. If they `may`, all but that of x are left to the step.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        tensors = (one[None] for one in inputs[:-FACTS])
        return tuple(one[0] for one in stacked_slopes(*tensors, *inputs[-FACTS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:-FACTS], dims[:-FACTS], info)
        found = on_stacks(stacked_slopes, tensors, *inputs[-FACTS:])
        return found, (0,) * len(found)


def stacked_values(*inputs: Any) -> tuple[Tensor, ...]:
    """Return what `FromFeatures` returns, with the clients' axis in front."""
    layer, others, settings = inputs[:LAYER], inputs[LAYER:TENSORS], inputs[TENSORS:]
    if has_kernels(layer[0]):
        from ..stacked import featurekernels

        return featurekernels.values(layer, others, *settings)
    x, _, _, mask = layer
    pooled = (mask[..., None] * x).sum(1) / mask.sum(1).clamp(min=1)[:, None]
    f = vmap(meanlayer.plain)(*layer)
    found, *saved = propagation.stacked_values(f, *others, *settings)
    return found, pooled, *saved


def stacked_slopes(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return what `FromFeaturesSlopes` returns, with the clients' axis in front."""
    layer, others = inputs[:LAYER], inputs[LAYER:TENSORS]
    (pooled, *saved), (may, *settings) = inputs[TENSORS:-FACTS], inputs[-FACTS:]
    _, weight, bias, mask = layer
    weights, known = others[2:], (g, (bias, *others), tuple(saved), *settings[:2])
    if not has_kernels(g):
        f = vmap(meanlayer.plain)(*layer)
        to_f, *rest = propagation.stacked_slopes(g, f, *others, *saved, *settings)
        return (*meanlayer.stacked_slopes(to_f, layer[0], weight, bias, mask, pooled), *rest)
    from ..stacked import meankernels, propagationcalls

    if not (may and all_may_leave((weight, bias, *weights))):
        to_f, *rest = propagationcalls.slopes(*known)
        return (*meankernels.slopes(to_f, weight, mask, pooled), *rest)
    unit = saved[0]
    first = partial(meankernels.descend, unit, mask, pooled, weight, bias, scale=g)
    of_layer = left_own(first, (g, unit, mask, pooled), (weight, bias))
    last = partial(propagationcalls.descend, *known)
    rest = left_own(last, (g, bias, *others, *saved), weights)
    return meankernels.slope_of_x(unit, weight, mask, g), *of_layer, *rest
