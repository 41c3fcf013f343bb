"""The diagonal of a network's curvature, summed over samples: exact, by per-sample gradients, for
clients alone or stacked.

    symbol     here               meaning
    f          logits             (B, K) outputs of the network
    p          probabilities      of the classes, under the model itself
    S          columns            (C, B, K): Σ_c S_c S_cᵀ is the Hessian of −log p(y|f) in f
    h          result             by parameter: Σ_samples Σ_c ((∂f/∂w)ᵀ S_c)²

Kinds of curvature

    fisher     S_c = √p_c (e_c − p), one column a class (one logit: √(p(1−p)), one column): the
               expectation of squared gradients over the model's own labels. It is the diagonal of
               the generalised Gauss-Newton matrix, and of the Hessian itself where the output is
               piecewise linear in each single weight (ReLU, LeakyReLU, max-pooling, BatchNorm in
               evaluation mode).
    sketch     S = Σ_c ±√p_c (e_c − p), one column with signs that differ from sample to sample: its
               square is that of `fisher` plus products of two classes, which cancel on average over
               signs. A tenth of the work for ten classes; the error falls as 1/√samples.
    empirical  S = e_y − p, one column: squared gradients at the true labels. The work of `sketch`,
               and not the Hessian.

Squares must be taken sample by sample. In a Linear, Conv2d or BatchNorm layer a sample's gradient
is a product of the layer's input and the gradient at its output, so one backward pass to the
outputs, for all columns at once, is enough: Linear layers never form a gradient, convolutions form
them one layer at a time. Every other layer, and one that is used twice, gets per-sample gradients
by `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..errors import ConfigError
from ..networks.model import Batch, Model
from ..stacked.rewriting import used
from ..tree import Tensors
from .gradients import are_plain, vjp

Kind = Literal["fisher", "sketch", "empirical"]
Rule = Callable[[nn.Module, Tensors, Tensors, Tensor, Tensor], Tensors]


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


def diagonal(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind = "fisher"
) -> Tensors:
    """Return h = Σ_samples Σ_c ((∂f/∂w)ᵀ S_c)² by parameter, in evaluation mode; masked samples
    contribute nothing.
    """
    check_alone(model)
    if are_plain():
        return one_after_another(model, params, buffers, batch, kind)
    with used("mapped"):  # samples are mapped, of clients alone too
        return found(model, params, buffers, batch, kind)


def check_alone(model: Model) -> None:
    """Raise if a sample has no curvature of its own."""
    if model.manner.mixes_in_tests:
        raise ConfigError(
            f"curvature is a sum over samples, but in model {model.name or 'given'} a sample's "
            "outputs depend on the other samples of its batch; use a method without curvature"
        )


def one_after_another(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind
) -> Tensors:
    """Return h as it is defined, from one gradient a sample and column: for networks that can be
    differentiated by plain autograd alone.
    """
    result = {name: torch.zeros_like(value) for name, value in params.items()}
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        for place in range(batch.x.shape[0]):
            x, y, mask = (part[place : place + 1] for part in batch)
            logits, _ = model.forward(leaves, buffers, x, train=False)
            columns = columns_of(model, logits.detach(), Batch(x, y, mask), kind)
            for column in columns:
                slopes = torch.autograd.grad(
                    logits,
                    list(leaves.values()),
                    column,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for name, slope in zip(leaves, slopes, strict=True):
                    result[name] += slope.square()
    return result


def columns_of(model: Model, logits: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Return the columns S of a batch; those of masked samples are 0."""
    if model.task.classes:
        return factor(logits, batch.y, kind) * batch.mask[:, None]
    return model.task.factor(logits, batch.y, batch.mask) * batch.mask[:, None]


def found(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind = "fisher"
) -> Tensors:
    """Return what `diagonal` does, from functions that can be mapped over samples."""
    whole = None if batch.x.is_floating_point() else batch.x.dtype
    plan = make_plan(model, tuple(batch.x.shape[1:]), whole)
    real = next(iter(params.values()))  # inputs may be whole numbers
    probes = {tap.path: real.new_zeros(batch.x.shape[0], *tap.shape) for tap in plan.taps}

    def tapped(probes: Tensors) -> tuple[Tensor, Tensors]:
        return forward(model, params, buffers, batch.x, probes)

    logits, pull, inputs = vjp(tapped, probes, has_aux=True)  # type: ignore[misc]
    columns = columns_of(model, logits, batch, kind)
    layers = dict(model.module_for(train=False).named_modules())
    result: Tensors = {}
    for path, grad in vmap(pull)(columns)[0].items() if probes else ():
        layer = layers[path]
        own = {name: params[join(path, name)] for name, _ in layer.named_parameters(recurse=False)}
        kept = {name: buffers[join(path, name)] for name, _ in layer.named_buffers(recurse=False)}
        result |= {
            join(path, name): value
            for name, value in RULES[type(layer)](layer, own, kept, inputs[path], grad).items()
        }
    if plan.others:
        result |= by_sample(model, params, buffers, batch.x, columns, plan.others)
    return {name: result[name] for name in params}


def at_once(model: Model, batch_size: int, kind: Kind) -> int:
    """Return of how many samples to ask the curvature together: below twice a training step's
    memory, but not one by one.
    """
    check_alone(model)
    columns = model.num_classes if kind == "fisher" and model.num_classes > 2 else 1
    # where a step is small, so are eight samples
    return max(min(batch_size // 2, 3 * batch_size // (2 * columns)), min(8, batch_size))


def factor(logits: Tensor, y: Tensor, kind: Kind) -> Tensor:
    """Return the columns S, (C, B, K)."""
    if logits.shape[-1] == 1:
        p = torch.sigmoid(logits)
        return (
            (y[:, None] - p)[None]
            if kind == "empirical"
            else (p * torch.sigmoid(-logits)).sqrt()[None]
        )
    p = torch.softmax(logits, dim=-1)
    one = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    if kind == "empirical":
        return (one[y] - p)[None]
    if kind == "sketch":
        weight = signs(p) * p.sqrt()
        return (weight - p * weight.sum(-1, keepdim=True))[None]
    return p.mT.sqrt()[..., None] * (one[:, None] - p)


def signs(like: Tensor) -> Tensor:
    """Return 1 and −1 in the shape of `like`, (B, K): mixed bits of the place's number, the same
    every time, made where they are used.
    """
    number = torch.arange(like.shape[-2] * like.shape[-1], device=like.device).reshape(
        like.shape[-2:]
    )
    for factor, shift in ((0x045D9F3B, 16), (0x045D9F3B, 15)):
        number = ((number + 1) * factor) & 0x7FFFFFFF
        number = number ^ (number >> shift)
    return (1 - 2 * (number & 1)).to(like.dtype)


def by_sample(
    model: Model,
    params: Tensors,
    buffers: Tensors,
    x: Tensor,
    columns: Tensor,
    names: tuple[str, ...],
) -> Tensors:
    """Return h of the parameters `names` the plain way: the gradient of every column of every
    sample.
    """

    def one(x: Tensor, columns: Tensor) -> Tensors:
        def logits(some: Tensors) -> Tensor:
            return model.forward({**params, **some}, buffers, x[None], train=False)[0][0]

        _, pull = vjp(logits, {name: params[name] for name in names})  # type: ignore[misc]
        return {name: grad.square().sum(0) for name, grad in vmap(pull)(columns)[0].items()}

    return {name: value.sum(0) for name, value in vmap(one, in_dims=(0, 1))(x, columns).items()}


# -- formulas: input a (B, …) and gradients g (C, B, …) at the output give h by the layer's own na
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
        join(tap.path, name)
        for tap in taps
        for name, _ in layers[tap.path].named_parameters(recurse=False)
    }
    return Passes(tuple(taps), tuple(name for name in model.shapes if name not in covered))


def fits(layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether the formula of the layer's type holds for this one, with inputs of `shape`."""
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
                        lambda layer, x, y, path=path: self.act(path, layer, x[0], y)
                    )
                )  # type: ignore[misc]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def join(path: str, name: str) -> str:
    """Return the full name of a layer's parameter or buffer."""
    return f"{path}.{name}" if path else name
