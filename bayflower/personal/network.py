"""The network of a personal model with everything around it: raw inputs to calibrated
probabilities, prediction sets and measures of doubt.

What surrounds the network is in extras.safetensors, by these names:

    input/median, mean, std         how raw rows are prepared
    posterior/NAME, scale           of the posterior in use (maths/laplace.py), and its scale
    affine/temperature, bias, floor  calibration of the log-probabilities (calibration/curves.py)
    doubt/plain                     present: doubt is that of the network itself
    sets/lowest                     the lowest bin that a set takes in (calibration/conformal.py)
    classes/means, …                Gaussians of the training features, for the distance
    alarms/NAME                     threshold of each measure
    held/right, wrong               held-out predictions by doubt (calibration/trust.py)

A name that is absent changes nothing: a point model has none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import conformal, curves
from ..files.atomic import below
from ..maths import laplace
from ..networks.parts import called
from ..rounds.deciding import ALARMS
from ..rounds.uncertain import doubts
from ..tree import Tensors

NARROW = ("posterior/in",)  # large, and single precision is enough


class Ready(nn.Module):
    """The network with its inputs' preparation and its uncertainty. `kind` is that of the posterior
    in use ("" = the point), `layer` the last layer, None if its inputs are not needed. `measures`
    are the alarms' measures that are given out.
    """

    def __init__(
        self,
        network: nn.Module,
        extras: Tensors | None = None,
        kind: str = "",
        layer: str | None = None,
        measures: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.network, self.kind, self.layer = network, kind, layer
        self.measures = tuple(name for name in ALARMS if name in measures)
        self.names = sorted(extras or {})
        for number, name in enumerate(self.names):
            self.register_buffer(f"extra_{number}", (extras or {})[name])
        self.parts = {name.split("/")[0] for name in self.names}
        self.drawn: list[str] = []
        if kind == "sampled":
            self._draw(dict(network.named_parameters()))

    def _draw(self, params: dict[str, nn.Parameter]) -> None:
        """Keep the fixed draws of the weights, (J, …) of each parameter."""
        std = below(self.extras(), "posterior")
        self.drawn = sorted(name for name in std if name != "scale")
        for number, name in enumerate(self.drawn):
            mean = params[name].detach()
            noise = laplace.weight_draws(tuple(mean.shape), number).to(mean)
            drawn = mean + std[name].to(mean.dtype) * noise
            self.register_buffer(f"drawn_{number}", drawn, persistent=False)

    def extras(self) -> Tensors:
        """Return what surrounds the network, by name."""
        known: Any = self._buffers
        return {name: known[f"extra_{number}"] for number, name in enumerate(self.names)}

    def forward(self, x: Tensor) -> Tensors:
        """Return what the model says of raw inputs: `outputs`."""
        return self.outputs(self.prepared(x))

    def prepared(self, x: Tensor) -> Tensor:
        """Return the inputs as the network was trained on them."""
        if "input" not in self.parts:
            return x
        known = below(self.extras(), "input")
        wide = x.to(torch.float64)
        wide = torch.where(torch.isnan(wide), known["median"], wide)
        return ((wide - known["mean"]) / known["std"]).to(x.dtype)

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return the calibrated log-probabilities (N, K) of prepared inputs, float64."""
        logits, features = self.last(x)
        extras = self.extras()
        return calibrated(logits, self.offsets(x, logits, features, extras), extras)

    def outputs(self, x: Tensor) -> Tensors:
        """Return what the model says of prepared inputs, by name: probabilities (calibrated) and
        those of the point (N, K), doubt, entropy and the other measures (N,), and where there are
        thresholds for them sets (N, K) and alarms (N, measures), both bool.
        """
        logits, features = self.last(x)
        extras = self.extras()
        offsets = self.offsets(x, logits, features, extras)
        shown = calibrated(logits, offsets, extras)
        probabilities = shown.exp()
        entropy, information = doubts(logits, offsets, *affine(extras))
        point = curves.log_softmax(logits.double()).exp()
        found = {
            "probabilities": probabilities,
            "point": point,
            "doubt": 1 - (point if "doubt" in self.parts else probabilities).amax(-1),
            "entropy": entropy,
        }
        if "information" in self.measures:
            found["information"] = information
        if "classes" in self.parts and features is not None:
            classes = laplace.Classes(**below(extras, "classes"))
            found["distance"] = laplace.distance(features, classes)
        if "sets" in self.parts:
            found["sets"] = conformal.sets(shown, extras["sets/lowest"])
        if self.measures:
            above = [found[name] > extras[f"alarms/{name}"] for name in self.measures]
            found["alarms"] = torch.stack(above, -1)
        return found

    def last(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (logits, what the last layer got). A network may write into its input."""
        x = x.clone()
        if self.layer is None:
            return self.network(x), None
        seen: list[Tensor] = []

        def look(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
            seen.append((*args, *named.values())[0])

        layer = self.network.get_submodule(self.layer)
        handle = layer.register_forward_hook(look, with_kwargs=True)
        try:
            logits = self.network(x)
        finally:
            handle.remove()
        return logits, seen[0]

    def offsets(
        self, x: Tensor, logits: Tensor, features: Tensor | None, extras: Tensors
    ) -> Tensor:
        """Return the offsets (J, N, C) of the logits that the posterior in use gives, at its scale;
        zero for the point.
        """
        if not self.kind:
            return torch.zeros_like(logits, dtype=torch.float64)[None]
        tensors = below(extras, "posterior")
        scale = tensors.pop("scale")
        drawn = None
        if self.kind == "sampled":
            known: Any = self._buffers
            each = {name: known[f"drawn_{number}"] for number, name in enumerate(self.drawn)}
            drawn = torch.stack(
                [
                    called(self.network, {n: v[place] for n, v in each.items()}, x.clone())
                    for place in range(laplace.WEIGHT_DRAWS)
                ]
            )
        else:
            assert features is not None
            tensors = {name: value.double() for name, value in tensors.items()}
            if laplace.inputs_of(self.kind, tensors, logits.shape[-1]) > features.shape[1]:
                # the bias is uncertain too
                features = torch.cat([features, torch.ones_like(features[:, :1])], -1)
        return scale * laplace.offsets(self.kind, tensors, logits, features, drawn)


def affine(extras: Tensors) -> tuple[Tensor, Tensor]:
    """Return (temperature, bias) of the affine scaling; (1, 0) where there is none."""
    if "affine/temperature" in extras:
        return extras["affine/temperature"], extras["affine/bias"]
    return torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)


def calibrated(logits: Tensor, offsets: Tensor, extras: Tensors) -> Tensor:
    """Return the calibrated log-probabilities (N, K), float64."""
    found = curves.scaled(curves.predictive(logits, offsets), *affine(extras))
    return curves.doubtful(found, extras["affine/floor"]) if "affine/floor" in extras else found
