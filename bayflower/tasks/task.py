"""What a task is: a likelihood, a predictive distribution, and the numbers that judge it.

A network gives `outputs` numbers a sample. The first `network` of them come from its last layer;
the others, `extra`, are parameters of their own that all samples share (a noise, cut points), added
behind them. All functions are pure, map over samples and run under vmap.

    f          out            (B, outputs)      what the network says, with the extra parameters
    y          y              (B, *target)      what was seen
               prediction     (B, ...)          parameters of the predictive distribution
    I          curvature      (B, outputs, outputs)

    I = E_y[∂² −log p(y|f) / ∂f²]       (Fisher information; its generalised Gauss–Newton matrix)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.polynomial.hermite import hermgauss
from torch import Tensor

NODES = 24  # of the quadrature over an uncertain output
EXTRA = "task_extra"  # the name of the extra parameters beside those of the network


def over_gaussian(change: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[change(f)] of a Gaussian f, each output by itself, by Gauss–Hermite quadrature."""
    nodes, weights = hermgauss(NODES)
    spread = (2 * variance.clamp(min=0)).sqrt().to(mean.dtype)
    total = torch.zeros_like(change(mean))
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        total = total + weight * change(mean + node * spread)
    return total


@dataclass(frozen=True)
class Task(ABC):
    """One kind of target. Two tasks with the same fields are equal."""

    name: ClassVar[str]  # as the setting `task` calls it
    classes: ClassVar[bool] = False  # True if a target is one of some classes
    coupled: ClassVar[bool] = False  # True if a sample's loss depends on the others of its batch
    tallies_training: ClassVar[bool] = False  # True if a test counts training samples too
    events: ClassVar[bool] = False  # True if it is about times to events or several labels
    shifts: ClassVar[bool] = False  # True if a constant added to all outputs changes nothing
    target: ClassVar[tuple[int, ...]] = ()  # shape of one target
    whole: ClassVar[bool] = False  # True if targets are whole numbers (int64)
    curve: ClassVar[tuple[str, ...]] = ("nll",)  # metrics shown after a round

    @property
    @abstractmethod
    def network(self) -> int:
        """Return how many numbers the network itself gives a sample."""

    def extra(self) -> tuple[float, ...]:
        """Return the initial values of the extra parameters; () if there are none."""
        return ()

    def extra_prior(self, extra: Tensor) -> Tensor:
        """Return minus the log prior of a client's own extra parameters, up to a constant; what it
        says is worth one sample. By default nothing.
        """
        return torch.zeros_like(extra).sum()

    @property
    def extra_stays(self) -> bool:
        """Return whether the extra parameters are each client's own and never leave it: then they
        are no parameters of the model, and `own_extra` computes them.
        """
        return False

    def own_extra(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return a client's own extra parameters from predictions of its training samples."""
        raise NotImplementedError(f"a task of {self.name} has no parameters of one client")

    @property
    def outputs(self) -> int:
        """Return the size of f."""
        return self.network + len(self.extra())

    # -- likelihood --------------------------------------------------------------------------------
    @abstractmethod
    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(y|f) of each sample (B,); of padding it may be any finite number."""

    @abstractmethod
    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return I of each sample (B, outputs, outputs), positive semi-definite."""

    def factor(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return columns S (outputs, B, outputs) with Σ_c S_c S_cᵀ = I, by default its Cholesky
        factor.
        """
        found = self.curvature(out, y, mask)
        some = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device)
        tiny = torch.finfo(found.dtype).eps * found.diagonal(dim1=-2, dim2=-1).amax(-1)
        root = torch.linalg.cholesky(found + (tiny + 1e-30)[..., None, None] * some)
        return root.movedim(-1, 0)

    # -- prediction --------------------------------------------------------------------------------
    @abstractmethod
    def predict(self, out: Tensor) -> Tensor:
        """Return the parameters of the predictive distribution, in the target's units."""

    def mixed(self, predictions: Tensor) -> Tensor:
        """Return the prediction that stands for the mean of several (J, B, ...)."""
        return predictions.mean(0)

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return the prediction where the network's outputs are uncertain: `variance` (B, network)
        of a Gaussian around them. By default the uncertainty is left out.
        """
        return self.predict(out)

    @abstractmethod
    def mean(self, prediction: Tensor) -> Tensor:
        """Return the expected target, or the probabilities of its values."""

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Return the value below which the target lies with probability `share`."""
        raise NotImplementedError(f"a task of {self.name} has no quantiles")

    @abstractmethod
    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return one draw of the target for each prediction."""

    # -- metrics -----------------------------------------------------------------------------------
    @abstractmethod
    def zero(self) -> Any:
        """Return the tally of no samples: a NamedTuple of sums."""

    @abstractmethod
    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Any:
        """Return the tally of the samples that the mask marks."""

    def tally_training(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Any:
        """Return what a test counts on training samples, as a tally that is added to the test's."""
        return self.zero()

    @abstractmethod
    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""

    @abstractmethod
    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result from the clients' tallies."""
