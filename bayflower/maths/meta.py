"""Meta-gradients: of the loss *after* some steps of gradient descent, exactly or without second
derivatives.

MAML, PerFedAvg and MetaVD share these. One step of a client takes two groups of samples, *support*
(0) and *query* (1):

    theta' = theta − l ∇_theta L(theta; support)        (`steps` times)
    F(theta) = L(theta'; query)

    ∇F = Π (I − l ∇²L(theta_i; support)) ∇L(theta'; query)           the product over the points
                                                                     theta_i on the way, the last
                                                                     one first

`second_order` differentiates through the way. `hessian_free` walks it back with ∇²L v ≈ (∇L(theta +
d v) − ∇L(theta − d v)) / 2d. Parameters that move but are not `inner` (MetaVD's log alpha) are
constant on the way; their gradient has the mixed derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..stacked import chance
from ..stacked.rewriting import used
from ..tree import Tensors
from .gradients import grad, grad_and_value

# (parameters, buffers, group) → (loss, buffers after the pass)
Loss = Callable[[Tensors, Tensors, int], tuple[Tensor, Tensors]]
SUPPORT, QUERY = 0, 1


class Way(NamedTuple):
    """How a client adapts: the parameters that move, the rate and number of steps."""

    inner: tuple[str, ...]
    rate: float
    steps: int = 1


def descend(loss: Loss, params: Tensors, buffers: Tensors, way: Way) -> tuple[Tensors, Tensors]:
    """Return (parameters, buffers) after one step theta − l ∇_theta L(theta; support)."""

    def support(part: Tensors) -> tuple[Tensor, Tensors]:
        return loss({**params, **part}, buffers, SUPPORT)

    slopes, after = grad(support, has_aux=True)({name: params[name] for name in way.inner})
    return {
        **params,
        **{name: params[name] - way.rate * slope for name, slope in slopes.items()},
    }, after


def second_order(
    loss: Loss, params: Tensors, buffers: Tensors, way: Way
) -> tuple[Tensors, Tensors, Tensor]:
    """Return (∇F for all `params`, the buffers, F), differentiated through every inner step."""

    def adapted(params: Tensors) -> tuple[Tensor, Tensors]:
        inside = buffers
        with used("twice"):  # torch's own attention, for one, has no second derivative
            for _ in range(way.steps):
                params, inside = descend(loss, params, inside, way)
            return loss(params, inside, QUERY)

    grads, (value, after) = grad_and_value(adapted, has_aux=True)(params)
    return grads, after, value


def hessian_free(
    loss: Loss, params: Tensors, buffers: Tensors, way: Way, delta: float
) -> tuple[Tensors, Tensors, Tensor]:
    """Return (∇F for all `params`, the buffers, F) with products of the Hessian by central
    differences of length `delta`.
    """
    points, begun = [(params, buffers)], []
    for _ in range(way.steps):
        begun.append(chance.passes())
        points.append(descend(loss, *points[-1], way))
    last, inside = points.pop()
    grads, (value, after) = grad_and_value(
        lambda moving: loss(moving, inside, QUERY), has_aux=True
    )(last)
    for (point, here), number in zip(reversed(points), reversed(begun), strict=True):
        length = torch.stack([grads[name].square().sum() for name in way.inner]).sum().sqrt()
        scale = delta / torch.where(length > 0, length, torch.ones_like(length))

        def slope(
            sign: float,
            point: Tensors = point,
            here: Tensors = here,
            scale: Tensor = scale,
            to: Tensors = grads,
            number: int = number,
        ) -> Tensors:
            there = {**point, **{name: point[name] + sign * scale * to[name] for name in way.inner}}
            with chance.again(number):  # dropout as at the point: a difference of one function
                found: Tensors = grad(lambda moving: loss(moving, here, SUPPORT)[0])(there)
            return found

        above, below = slope(1.0), slope(-1.0)
        grads = {
            name: value - way.rate * (above[name] - below[name]) / (2 * scale)
            for name, value in grads.items()
        }
    return grads, after, value
