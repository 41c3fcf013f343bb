"""FedNP's regulariser: KL_θ + KL_z of a tilted Gaussian and of what a natural-parameter network
makes of it. On a GPU it is three kernels of all clients, slopes included, in place of some three
hundred.

    symbol          here             shape
    f_k             f                (D,)
    λ, η            cavity           (D,) each: precision and shift, usually in float64
    W, b            layers           (D, H), (H,), (H, P), (P,), each a mean and a variance's ρ
    θ_i             target           (P,)
    ε, λ            epsilon, weight  ()

    regulariser = weight (KL_θ(NPN(z), θ) + KL_z(z)),   z = cavity × σ(f z)

With e = ∂c/∂f, u = 1 − σ(c), E the mean under the tilted weights and h = (u − g1)² − u (1 − u),

    ∂g1/∂f = E[(e u − E[e u]) (u − g1) − e u (1 − u)]
    ∂g2/∂f = E[(e u − E[e u]) (h − g2) − (4 u − 2 g1 − 1) e u (1 − u)]

and all else is the chain rule (`stacked/propagationkernels.py`). The cavity is a constant there.
Second derivatives are those of the plain formula.

A client's new factor of p(z) is here, too (`new_factor`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp, vmap

from ..stacked.batched import fronts, has_kernels, on_stacks
from ..stacked.products import all_may_leave, first_derivative, left_own
from ..stacked.recorded import kept, recorded
from ..tree import Tensors
from . import npn
from .gaussian import Diagonal, damp
from .tilted import Slopes, Tilted, bounded, nodes_of, quadrature, tilt

NAMES = tuple(
    f"{layer}.{kind}.{part}"
    for layer in npn.LAYERS
    for kind in ("weight", "bias")
    for part in ("mean", "rho")
)
INPUTS = 3 + len(NAMES) + 1  # f, shift and precision of the cavity, the layers, the target
SETTINGS = 3  # ε, the weight, the number of nodes
FACTORS = 5  # tensors that a new factor is made of
SAVED = 4  # what the value's kernels hand to the slopes: that of f first


def regulariser(
    f: Tensor,
    cavity: Diagonal,
    layers: Tensors,
    target: Tensor,
    slopes: Slopes,
    epsilon: float,
    weight: float,
) -> Tensor:
    """Return weight (KL_θ + KL_z); `slopes` is the back-end of the tilted moments."""
    if not has_form(f, layers, target, slopes):
        return weight * divergence(f, cavity, layers, target, slopes, epsilon)
    inputs = (f, cavity.shift, cavity.precision, *(layers[name] for name in NAMES), target)
    value, *_ = Regulariser.apply(*inputs, epsilon, weight, nodes_of(slopes))
    return value  # type: ignore[no-any-return]


def divergence(
    f: Tensor, cavity: Diagonal, layers: Tensors, target: Tensor, slopes: Slopes, epsilon: float
) -> Tensor:
    """Return KL_θ + KL_z by the plain formula."""
    z = tilted(f, cavity, slopes)
    network = npn.forward(layers, npn.Gauss(z.mean, z.variance))
    return npn.kl_theta(network, target, epsilon) + npn.kl_z(z.mean, z.variance)


def tilted(f: Tensor, cavity: Diagonal, slopes: Slopes) -> Tilted:
    """Return cavity × σ(f z), in the dtype of f, which is clipped."""
    mean, var = (
        value.to(f.dtype) for value in (cavity.shift / cavity.precision, 1 / cavity.precision)
    )
    return tilt(mean, var, bounded(f, var), slopes)


def new_factor(
    f: Tensor, cavity: Diagonal, own: Diagonal, slopes: Slopes, damping: float
) -> tuple[Diagonal, Diagonal]:
    """Return (the change of a client's factor, the factor after it): damped, from `own` towards
    tilted / cavity. Where that is not finite, nothing changes.
    """
    if not has_kernels(f):
        return plain_factor(f, cavity, own, slopes, damping)
    inputs = (f, *cavity, *own)
    found = Factor.apply(*inputs, slopes, damping)
    return Diagonal(*found[:2]), Diagonal(*found[2:])


def plain_factor(
    f: Tensor, cavity: Diagonal, own: Diagonal, slopes: Slopes, damping: float
) -> tuple[Diagonal, Diagonal]:
    """Return what `new_factor` does, by the plain formula."""
    new = damp(own, tilted(f, cavity, slopes).site, damping)
    good = new.precision.isfinite() & new.shift.isfinite()
    zero = torch.zeros_like(new.shift)
    change = Diagonal(*(torch.where(good, a - b, zero) for a, b in zip(new, own, strict=True)))
    # as the server's ledger does it, to the bit
    return change, Diagonal(*(a + b for a, b in zip(own, change, strict=True)))


def has_form(f: Tensor, layers: Tensors, target: Tensor, slopes: Slopes) -> bool:
    """Return whether kernels exist for this regulariser: float32 on a GPU, moments by the
    trapezoid rule, a small first layer.
    """
    nodes = nodes_of(slopes)
    every = (f, target, *layers.values())
    if nodes is None or not has_kernels(f) or any(one.dtype != torch.float32 for one in every):
        return False
    from ..stacked import propagationcalls

    return propagationcalls.fits(f.shape[0], layers["1.bias.mean"].shape[0], nodes)


class Factor(Function):
    """(Precision and shift of the change, those of the factor after it) of f, the cavity and the
    factor before, each as precision and shift, and the settings. It has no derivative.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        tensors = tuple(one[None] for one in inputs[:FACTORS])
        return tuple(one[0] for one in stacked_factors(*tensors, *inputs[FACTORS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:FACTORS], dims[:FACTORS], info)
        return on_stacks(stacked_factors, tensors, *inputs[FACTORS:]), (0,) * 4


def stacked_factors(*inputs: Any) -> tuple[Tensor, ...]:
    """Return what `Factor` returns, with the clients' axis in front; on a GPU one kernel, or some
    hundred small ones in one recording, whose results are copied out of it.
    """
    tensors, (slopes, damping) = inputs[:FACTORS], inputs[FACTORS:]
    if (nodes := factor_nodes(tensors, slopes)) is None:
        return kept(recorded(factors_of, tensors, slopes, damping))
    from ..stacked import factorkernels

    return factorkernels.factors(tensors, nodes, damping)


def factor_nodes(tensors: tuple[Tensor, ...], slopes: Slopes) -> int | None:
    """Return the nodes that a kernel of new factors takes, None where there is no such kernel: one
    is there for float64 on a GPU and moments by the trapezoid rule.
    """
    nodes = nodes_of(slopes)
    exact = all(one.dtype == torch.float64 for one in tensors)
    if nodes is None or not (exact and has_kernels(tensors[0])):
        return None
    from ..stacked import propagationcalls

    return nodes if propagationcalls.fits(tensors[0].shape[1], 1, nodes) else None


def factors_of(*inputs: Any) -> tuple[Tensor, ...]:
    """Return what `Factor` returns, with the clients' axis in front, by the plain formula."""
    tensors, settings = inputs[:FACTORS], inputs[FACTORS:]

    def one(f: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
        change, after = plain_factor(f, Diagonal(*numbers[:2]), Diagonal(*numbers[2:]), *settings)
        return (*change, *after)

    found: tuple[Tensor, ...] = vmap(one)(*tensors)
    return found


class Regulariser(Function):
    """(The regulariser, its slope in f, and three tensors that its other slopes need) of the inputs
    and settings; only the first has a derivative.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        tensors = (one[None] for one in inputs[:INPUTS])
        return tuple(one[0] for one in stacked_values(*tensors, *inputs[INPUTS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros in place of gradients that nobody asks for
        ctx.settings = inputs[INPUTS:]
        ctx.save_for_backward(*inputs[:INPUTS], *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if g is None:
            return (None,) * (INPUTS + SETTINGS)
        may = all(ctx.needs_input_grad[3:INPUTS]) and first_derivative()
        slopes = RegulariserStep if may else RegulariserSlopes
        to_f, *others = slopes.apply(g, *ctx.saved_tensors, *ctx.settings)
        return (to_f, None, None, *others, *(None,) * SETTINGS)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:INPUTS], dims[:INPUTS], info)
        return on_stacks(stacked_values, tensors, *inputs[INPUTS:]), (0,) * (1 + SAVED)


class RegulariserSlopes(Function):
    """The gradients of `Regulariser` with respect to f, the layers and the target, times g."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        tensors = (one[None] for one in inputs[:-SETTINGS])
        return tuple(one[0] for one in stacked_slopes(*tensors, *inputs[-SETTINGS:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[-SETTINGS:]
        ctx.save_for_backward(*inputs[: INPUTS + 1])

    @staticmethod
    def backward(ctx: Any, *gg: Tensor) -> tuple[Any, ...]:
        def slopes(g: Tensor, *inputs: Tensor) -> Any:
            return plain_slopes(g, *inputs, *ctx.settings)

        _, pull = vjp(slopes, *ctx.saved_tensors)  # type: ignore[misc]
        g, f, _, _, *others = pull(gg)
        return (g, f, None, None, *others, *(None,) * (SAVED + SETTINGS))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:-SETTINGS], dims[:-SETTINGS], info)
        return on_stacks(stacked_slopes, tensors, *inputs[-SETTINGS:]), (0,) * (INPUTS - 2)


class RegulariserStep(RegulariserSlopes):
    """`RegulariserSlopes`, which leaves all but the gradient of f to the end of a step
    (`stacked/products.py`) if layers and target are parameters of it.
    """

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        tensors = fronts(inputs[:-SETTINGS], dims[:-SETTINGS], info)
        return on_stacks(step_slopes, tensors, *inputs[-SETTINGS:]), (0,) * (INPUTS - 2)


def plain(*inputs: Any) -> Tensor:
    """Return the regulariser of one client, as `Regulariser` takes its inputs."""
    f, shift, precision, *layers, target, epsilon, weight, nodes = inputs
    by_name = dict(zip(NAMES, layers, strict=True))
    cavity = Diagonal(precision, shift)
    kl: Tensor = divergence(f, cavity, by_name, target, quadrature(nodes), epsilon)
    return weight * kl


def plain_slopes(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of `plain` with respect to f, the layers and the target, times g."""
    settings = inputs[INPUTS:]
    to_f, _, _, *others = vjp(lambda *some: plain(*some, *settings), *inputs[:INPUTS])[1](g)
    return (to_f, *others)


def stacked_values(*inputs: Any) -> tuple[Tensor, ...]:
    """Return what `Regulariser` returns, with the clients' axis in front."""
    tensors, settings = inputs[:INPUTS], inputs[INPUTS:]
    if has_kernels(tensors[0]):
        from ..stacked import propagationcalls

        return propagationcalls.values(tensors, *settings)
    found = vmap(lambda *one: plain(*one, *settings))(*tensors)
    return found, *(found.new_empty(len(found), 0) for _ in range(SAVED))


def stacked_slopes(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return what `RegulariserSlopes` returns, with the clients' axis in front."""
    tensors, saved, settings = inputs[:INPUTS], inputs[INPUTS:-SETTINGS], inputs[-SETTINGS:]
    if has_kernels(g):
        from ..stacked import propagationcalls

        return propagationcalls.slopes(g, tensors, saved, *settings[:2])
    found: tuple[Tensor, ...] = vmap(lambda g, *one: plain_slopes(g, *one, *settings))(g, *tensors)
    return found


def step_slopes(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return what `stacked_slopes` does, or zeros for what was left to the step."""
    tensors, saved, settings = inputs[:INPUTS], inputs[INPUTS:-SETTINGS], inputs[-SETTINGS:]
    weights = tensors[3:]
    if not (has_kernels(g) and all_may_leave(weights)):
        return stacked_slopes(g, *inputs)
    from ..stacked import propagationcalls

    descend = partial(propagationcalls.descend, g, tensors, saved, *settings[:2])
    others = left_own(descend, (g, *tensors, *saved), weights)
    return propagationcalls.slope_of_f(g, saved), *others
