"""Formulas for the squared gradients of single samples: of Linear, Conv2d and BatchNorm layers, and
of which layers of a network they hold.

A network may use a layer's weights outside of it, too, or have a hook that changes what the layer
gives. No look at its layers tells, so each formula is tried on a few samples against their
gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..networks.mixing import LARGE, NEAR, alike
from ..networks.model import Model
from ..networks.parts import cast, persistent
from ..tree import Tensors
from .gradients import vjp

log = logging.getLogger("bayflower")
Rule = Callable[[nn.Module, Tensors, Tensors, Tensor, Tensor], Tensors]
FEW = 4  # samples on which formulas are tried


class Tap(NamedTuple):
    """A layer whose curvature has a formula: its path and the shape
    of its output for one sample.
    """

    path: str
    shape: tuple[int, ...]


class Passes(NamedTuple):
    """Which layers have a formula, and the parameters of all others."""

    taps: tuple[Tap, ...]
    others: tuple[str, ...]


def by_formulas(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, taps: tuple[Tap, ...]
) -> tuple[Tensor, Callable[[Tensor], Tensors]]:
    """Return (logits of x, a function of columns (C, B, K) that gives h of the layers with a
    formula).
    """
    real = next(iter(params.values()))  # inputs may be whole numbers
    probes = {tap.path: real.new_zeros(x.shape[0], *tap.shape) for tap in taps}

    def tapped(probes: Tensors) -> tuple[Tensor, Tensors]:
        return forward(model, params, buffers, x, probes)

    logits, pull, inputs = vjp(tapped, probes, has_aux=True)  # type: ignore[misc]
    layers = dict(model.module_for(train=False).named_modules())

    def squares(columns: Tensor) -> Tensors:
        found: Tensors = {}
        for path, grad in vmap(pull)(columns)[0].items() if probes else ():
            layer = layers[path]
            own, kept = (
                {name: known[join(path, name)] for name, _ in each(recurse=False)}
                for known, each in (
                    (params, layer.named_parameters),
                    (buffers, layer.named_buffers),
                )
            )
            given = RULES[type(layer)](layer, own, kept, inputs[path], grad)
            found |= {join(path, name): value for name, value in given.items()}
        return found

    return logits, squares


# -- formulas: input a (B, …) and gradients g (C, B, …) at the output give h by the layer's names
def linear(layer: nn.Module, own: Tensors, kept: Tensors, a: Tensor, g: Tensor) -> Tensors:
    """Return Σ (g ⊗ a)² = (Σ_c g²)ᵀ a²: no gradient is formed."""
    squares = g.square().sum(0)
    return named(own, squares.mT @ a.square(), squares.sum(0))


def convolution(layer: Any, own: Tensors, kept: Tensors, a: Tensor, g: Tensor) -> Tensors:
    """Return Σ (Σ_l g_l a_l)², l the positions of the output: one product of matrices a sample."""
    (high, wide), (down, across) = layer.padding, layer.stride
    tall, broad = layer.kernel_size
    views = (
        nn.functional.pad(a, (wide, wide, high, high))
        .unfold(2, tall, down)
        .unfold(3, broad, across)
    )
    # nn.functional.unfold, thrice as fast
    patches = views.permute(0, 1, 4, 5, 2, 3).reshape(a.shape[0], a.shape[1] * tall * broad, -1)
    columns, samples, maps = g.shape[:3]
    g = g.reshape(columns, samples, maps, -1)
    grads = g.movedim(0, 1).reshape(samples, columns * maps, -1) @ patches.mT
    # in place: it is the largest tensor of all
    weight = grads.reshape(samples * columns, maps, -1).pow_(2).sum(0)
    return named(own, weight.reshape(own["weight"].shape), g.sum(-1).square().sum((0, 1)))


def normalisation(layer: nn.Module, own: Tensors, kept: Tensors, a: Tensor, g: Tensor) -> Tensors:
    """Return Σ (Σ_l g_l â_l)² and Σ (Σ_l g_l)², â the
    input normalised by the running statistics.
    """
    around = (-1,) + (1,) * (a.ndim - 2)
    scale = (kept["running_var"] + layer.eps).rsqrt()  # type: ignore[operator]
    normal = (a - kept["running_mean"].reshape(around)) * scale.reshape(around)
    g = g.reshape(*g.shape[:3], -1)
    weight = torch.einsum("cbol,bol->cbo", g, normal.reshape(*normal.shape[:2], -1))
    return named(own, weight.square().sum((0, 1)), g.sum(-1).square().sum((0, 1)))


def named(own: Tensors, weight: Tensor, bias: Tensor) -> Tensors:
    """Return those of weight and bias that the layer has."""
    return {name: value for name, value in (("weight", weight), ("bias", bias)) if name in own}


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RULES: dict[type, Rule] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    **dict.fromkeys(NORMS, normalisation),
}


# -- which layers have a formula -----------------------------------------------------------------
def called(
    model: Model, shape: tuple[int, ...], whole: torch.dtype | None, device: torch.device
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the shapes of inputs and outputs by layer, for each call in a pass of two samples."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    module = model.module_for(train=False)
    params, buffers = (
        {name: value.detach().to(device) for name, value in tensors}
        for tensors in (module.named_parameters(), module.named_buffers())
    )
    dtype = next(iter(params.values())).dtype

    def note(path: str, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found.setdefault(path, []).append((tuple(x.shape), tuple(y.shape)))
        return y

    with hooked(model, note):
        x = torch.zeros(2, *shape, dtype=whole or dtype, device=device)
        model.forward(params, buffers, x, train=False)
    return found


@lru_cache(maxsize=16)
def make_plan(model: Model, shape: tuple[int, ...], whole: torch.dtype | None = None) -> Passes:
    """Return the plan for inputs of `shape`, of the dtype `whole` if they are whole numbers, from a
    pass of two samples without numbers: a layer used once, in a way the formulas know.
    """
    try:
        calls = called(model, shape, whole, torch.device("meta"))
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("device", "meta tensor")):
            raise
        # the network makes tensors of its own, such as a mask, where it finds numbers
        calls = called(model, shape, whole, torch.device("cpu"))
    owners: dict[int, list[str]] = {}
    for path, layer in model.module_for(train=False).named_modules():
        for name, value in layer.named_parameters(recurse=False):
            owners.setdefault(id(value), []).append(join(path, name))
    layers = dict(model.module_for(train=False).named_modules())
    taps = []
    for path, shapes in calls.items():
        lonely = all(
            len(owners[id(value)]) == 1 and value.requires_grad
            for value in layers[path].parameters(recurse=False)
        )
        if (
            lonely
            and len(shapes) == 1
            and shapes[0][0][0] == shapes[0][1][0] == 2
            and fits(layers[path], shapes[0][0])
        ):
            taps.append(Tap(path, shapes[0][1][1:]))
    covered = {
        join(tap.path, name): tap
        for tap in taps
        for name, _ in layers[tap.path].named_parameters(recurse=False)
    }
    wrong = {covered[name] for name in untrue(model, shape, whole, tuple(taps))}
    held = {name for name, tap in covered.items() if tap not in wrong}
    left = tuple(name for name in model.shapes if name not in held)
    return Passes(tuple(tap for tap in taps if tap not in wrong), left)


def untrue(
    model: Model, shape: tuple[int, ...], whole: torch.dtype | None, taps: tuple[Tap, ...]
) -> list[str]:
    """Return the parameters whose formula does not give the squares of the gradients, for a few
    made-up samples.
    """
    module = model.module_for(train=False)
    dtype = torch.float32 if model.num_parameters > LARGE else torch.float64
    x = waves(torch.empty(FEW, *shape, device="meta"))
    x = (x > 0).to(whole) if whole else x.to(dtype)
    params = {
        name: value.detach().to(dtype) + 0.1 * waves(value).to(dtype)
        for name, value in module.named_parameters()
        if name in model.shapes
    }
    buffers = {name: cast(value, dtype) for name, value in persistent(module).items()}
    model.fixed(next(iter(params.values())))

    def logits(params: Tensors, row: int) -> Tensor:
        return model.forward(params, buffers, x[row : row + 1], train=False)[0]

    try:
        given, squares = by_formulas(model, params, buffers, x, taps)
        column, plain = (
            waves(given).to(dtype),
            {name: torch.zeros_like(v) for name, v in params.items()},
        )
        found = squares(column[None])
        for row in range(FEW):
            _, pull = vjp(partial(logits, row=row), params)  # type: ignore[misc]
            for name, slope in pull(column[row : row + 1])[0].items():
                plain[name] += slope.square()
    except Exception:  # it takes no such sample; training says what is wrong
        log.debug("formulas of model %s could not be tried", model.name, exc_info=True)
        return []
    largest = max(float(value.max()) for value in plain.values())
    return [name for name, h in found.items() if not alike(plain[name], h, NEAR[dtype], largest)]


def waves(like: Tensor) -> Tensor:
    """Return numbers in the shape of `like` that are not 0 and no draw, from −1 to 1."""
    return torch.arange(1, like.numel() + 1).double().sin().reshape(like.shape)


def fits(layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether the formula of the layer's type holds for this one, with inputs of `shape`."""
    if not {"weight", "bias"}.issuperset(name for name, _ in layer.named_parameters(recurse=False)):
        return False  # its weights are computed of others (weight_norm, prune)
    if isinstance(layer, nn.Linear):
        return len(shape) == 2
    if isinstance(layer, nn.Conv2d):
        return (
            len(shape) == 4
            and (layer.groups, layer.dilation, layer.padding_mode) == (1, (1, 1), "zeros")
            and layer.padding not in ("same", "valid")
        )
    return isinstance(layer, NORMS) and layer.running_mean is not None and layer.affine


def forward(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, probes: Tensors
) -> tuple[Tensor, Tensors]:
    """Return (logits, the input of each tapped layer); a probe is added to the layer's output, so
    its gradient is that output's.
    """
    inputs: Tensors = {}

    def tap(path: str, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if path not in probes:
            return y
        inputs[path] = x
        return (affine(layer, x) if isinstance(layer, NORMS) else y) + probes[path]

    with hooked(model, tap):
        logits, _ = model.forward(params, buffers, x, train=False)
    return logits, inputs


def affine(layer: Any, x: Tensor) -> Tensor:
    """Return what BatchNorm gives in evaluation mode, as one product and one sum: torch's own way
    back costs three times as much.
    """
    around = (-1,) + (1,) * (x.ndim - 2)
    scale = layer.weight * (layer.running_var + layer.eps).rsqrt()
    return x * scale.reshape(around) + (layer.bias - layer.running_mean * scale).reshape(around)


class hooked:  # noqa: N801 (reads as a verb in a with statement)
    """While it lasts, `act(path, layer, input, output)` replaces the output of every layer that has
    a formula.
    """

    def __init__(
        self, model: Model, act: Callable[[str, nn.Module, Tensor, Tensor], Tensor]
    ) -> None:
        self.model, self.act = model, act
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for path, layer in self.model.module_for(train=False).named_modules():
            if type(layer) in RULES:
                self.handles.append(
                    layer.register_forward_hook(
                        lambda layer, args, named, y, path=path: self.act(
                            path, layer, (*args, *named.values())[0], y
                        ),
                        with_kwargs=True,
                    )
                )  # type: ignore[misc]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def join(path: str, name: str) -> str:
    """Return the full name of a layer's parameter or buffer."""
    return f"{path}.{name}" if path else name
