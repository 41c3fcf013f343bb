"""The network of a personal model of numbers, counts or ordered classes with everything around it:
raw inputs to the mean, the interval and the predictive distribution.

Beside `input/…` and `posterior/…` (network.py), extras.safetensors has

    interval/factors    by level, of conformal intervals (calibration/intervals.py), if there are
    interval/factor     of the interval that programs give, if targets are numbers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..files.atomic import below
from ..maths import laplace
from ..networks.parts import called
from ..tasks import EXTRA, Task
from ..tree import Tensors
from .network import Ready


class ReadyNumbers(Ready):
    """The network with its inputs' preparation and its predictive distribution."""

    def __init__(
        self,
        network: nn.Module,
        extras: Tensors | None,
        kind: str,
        layer: str | None,
        task: Task,
        level: float,
    ) -> None:
        super().__init__(network, extras, kind, layer)
        self.task, self.level = task, level
        self.said = f"{task!r} {level}"  # tells programs of different tasks apart

    def parameters_of(self, x: Tensor) -> Tensor:
        """Return the parameters of the predictive distribution of prepared inputs, float64."""
        out, features = self.last(x)
        size = out.shape[-1]
        if EXTRA in dict(self.network.named_parameters(recurse=False)):
            extra = self.network.get_parameter(EXTRA)
            out = torch.cat([out, extra.expand(out.shape[0], -1)], -1)
        wide = out.double()
        if not self.kind:
            return self.task.predict(wide)
        tensors = below(self.extras(), "posterior")
        if self.kind == "sampled":
            variance = (self.sampled(x) - wide[:, :size]).square().mean(0)
        else:
            assert features is not None
            if laplace.inputs_of(self.kind, tensors, size) > features.shape[1]:
                # the bias is uncertain too
                features = torch.cat([features, torch.ones_like(features[:, :1])], -1)
            variance = laplace.variances(self.kind, tensors, features)
        return self.task.widened(wide, variance)

    def sampled(self, x: Tensor) -> Tensor:
        """Return the network's outputs for the fixed draws of its weights (J, N, C)."""
        known: Any = self._buffers
        each = {name: known[f"drawn_{number}"] for number, name in enumerate(self.drawn)}
        found = [
            called(self.network, {n: v[place] for n, v in each.items()}, x.clone())
            for place in range(laplace.WEIGHT_DRAWS)
        ]
        return torch.stack(found).double()

    def outputs(self, x: Tensor) -> Tensors:
        """Return what the model says of prepared inputs, by name: the mean (N,) or probabilities
        (N, K), the ends of the interval (N,), and the parameters of the distribution.
        """
        found = self.parameters_of(x)
        said = {"probabilities": found} if self.task.whole else {"mean": self.task.mean(found)}
        extras = self.extras()
        if "interval/factor" in extras:
            half = extras["interval/factor"] * found[..., 1].sqrt()
            said |= {"lower": said["mean"] - half, "upper": said["mean"] + half}
        elif has_quantiles(self.task):
            for name, sign in (("lower", -1), ("upper", 1)):
                end = self.task.quantile(found, 0.5 + sign * self.level / 2)
                said[name] = end if self.task.whole else end.double()
        return said if self.task.whole else {**said, "parameters": found}


def has_quantiles(task: Task) -> bool:
    """Return whether a task has intervals."""
    return type(task).quantile is not Task.quantile
