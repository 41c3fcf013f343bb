"""What stands in the place of the head in a personal model that is more than the user's network.

The head must be one Linear layer. A top takes its place and its features z (B, D):

    kind        tensors                                     what it computes
    gate        0.scale, 0.shift (D,)                       1(ReLU(z · scale + shift))
    split       0.context (D,), 0.weight (2D, D), 0.bias,   1([r z, (1 − r) z]), r = σ((a − b)/τ),
                0.norm, 0.normbias (2D,)                    (a, b) = ReLU(LayerNorm(A (z · v) + t))
    processes   features (N, D), side, omega (R, N),        log p of Gaussian processes at the nodes
                signs (R, K), counts (K,)                   of a tree (processes.py)

1 is a Linear layer (1.weight, 1.bias), so that what is uncertain about a last layer is known of it
as of any other. A network with its top is exported as one network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from ..networks.model import Model
from ..tree import Tensors
from . import processes

# kinds whose probabilities are means over a posterior already, and what a card says of that
INSIDE = {"processes": "The variance of its Gaussian processes is in its probabilities already."}
DERIVED = 2**27  # numbers of the matrices that are made once; beyond, in every pass


class Top(NamedTuple):
    """A kind, and its settings in JSON types."""

    kind: str
    settings: Mapping[str, float] = {}


class Gate(nn.Module):
    """ReLU(z · scale + shift), both constant."""

    scale: Tensor
    shift: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, z: Tensor) -> Tensor:
        """Return (B, D)."""
        return torch.relu(z.flatten(1) * self.scale + self.shift)


class Split(nn.Module):
    """[r z, (1 − r) z], where a small network gives the shares r."""

    context: Tensor
    weight: Tensor
    bias: Tensor
    norm: Tensor
    normbias: Tensor

    def __init__(self, width: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.register_buffer("context", torch.zeros(width))
        self.register_buffer("weight", torch.zeros(2 * width, width))
        for name in ("bias", "norm", "normbias"):
            self.register_buffer(name, torch.zeros(2 * width))

    def forward(self, z: Tensor) -> Tensor:
        """Return (B, 2D)."""
        z = z.flatten(1)
        out = (z * self.context) @ self.weight.mT + self.bias
        found = torch.relu(layer_norm(out, out.shape[-1:], self.norm, self.normbias))
        first, second = found.unflatten(-1, (2, z.shape[-1])).unbind(1)
        share = torch.sigmoid((first - second) / self.temperature)
        return torch.cat([share * z, (1 - share) * z], -1)


class Processes(nn.Module):
    """Log-probabilities of Gaussian processes on `samples` known features, in float64."""

    features: Tensor
    side: Tensor
    omega: Tensor
    signs: Tensor
    counts: Tensor
    weights: Tensor | None
    inverse: Tensor | None

    def __init__(self, width: int, classes: int, samples: int, kernel: processes.Kernel) -> None:
        super().__init__()
        self.kernel, nodes = kernel, classes - 1
        self.register_buffer("features", torch.zeros(samples, width))
        self.register_buffer("side", torch.zeros(nodes, samples))
        self.register_buffer("omega", torch.zeros(nodes, samples))
        self.register_buffer("signs", torch.zeros(nodes, classes))
        self.register_buffer("counts", torch.zeros(classes))
        self.register_buffer("weights", None, persistent=False)
        self.register_buffer("inverse", None, persistent=False)

    def derive(self) -> None:
        """Make the matrices of predictions once, where they are not too many numbers."""
        if self.omega.shape[0] * self.omega.shape[1] ** 2 > DERIVED:
            return
        found = processes.derived(self.kernel, self.features, self.side, self.omega)
        self.weights, self.inverse = found

    def forward(self, z: Tensor) -> Tensor:
        """Return log p (B, K)."""
        known = processes.Known(self.features, self.side, self.omega, self.signs, self.counts)
        made = None
        if self.weights is not None and self.inverse is not None:
            made = self.weights, self.inverse
        found = processes.probabilities(self.kernel, known, z.flatten(1), made)
        return found.log().to(z.dtype)


def put(network: nn.Module, head: str, top: Top, samples: int = 1) -> nn.Module:
    """Return the network with a top in the place of its head."""
    old: Any = network.get_submodule(head)
    width, outputs, has_bias = old.in_features, old.out_features, old.bias is not None
    if top.kind == "processes":
        kernel = processes.Kernel(*(top.settings[name] for name in ("scale", "length", "jitter")))
        new: nn.Module = Processes(width, max(outputs, 2), samples, kernel)
    elif top.kind == "split":
        first = Split(width, top.settings["temperature"])
        new = nn.Sequential(first, nn.Linear(2 * width, outputs, bias=has_bias))
    else:
        new = nn.Sequential(Gate(width), nn.Linear(width, outputs, bias=has_bias))
    network.set_submodule(head, new)
    return network


def derive(network: nn.Module) -> nn.Module:
    """Return the network, ready to predict many times."""
    for part in network.modules():
        if isinstance(part, Processes):
            part.derive()
    return network


def samples_of(state: Mapping[str, Tensor], head: str) -> int:
    """Return the number of samples that a saved top knows."""
    name = f"{head}.features"
    return len(state[name]) if name in state else 1


class Topped(Model):
    """The user's network with a top; its numbers are those that `ClientHalf.topped` gives."""

    def __init__(self, model: Model, top: Top) -> None:
        self.plain, self.top, self.place = model, top, model.head
        super().__init__(
            partial(made, model.factory, model.head, top),
            model.num_classes,
            model.name,
            model.head if top.kind == "processes" else f"{model.head}.0",
            model.task,
        )
        self.recipe, self.layout = model.recipe, model.layout

    def module(self, params: Tensors, buffers: Tensors) -> nn.Module:
        """Return a new module that holds these numbers, ready to predict."""
        samples = samples_of(buffers, self.place)
        self.factory = partial(made, self.plain.factory, self.place, self.top, samples)
        return derive(super().module(params, buffers))


def made(factory: Callable[[], nn.Module], head: str, top: Top, samples: int = 1) -> nn.Module:
    """Return a new network with a top."""
    return put(factory(), head, top, samples)


def rest_of(model: Model, known: Tensors) -> Tensors:
    """Return the parameters before the head."""
    return {name: known[name] for name in model.shapes if name not in model.head_names}


def linear(head: str, weight: Tensor, bias: Tensor | None) -> Tensors:
    """Return a top's Linear layer by name."""
    found = {f"{head}.1.weight": weight}
    return found if bias is None else {**found, f"{head}.1.bias": bias}
