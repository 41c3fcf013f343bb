"""Classes: softmax of one logit a class, or one logit for two classes. The arithmetic of every
other part of this package that speaks of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import metrics
from .task import Task, over_gaussian


@dataclass(frozen=True)
class Classification(Task):
    """One of `size` classes; a network with one output has one logit for two classes."""

    size: int
    single: bool = False  # whether two classes have one logit

    name = "classification"
    classes = True
    whole = True
    curve = ("accuracy", "balanced_accuracy_mean", "nll")

    @property
    def network(self) -> int:
        """Return one logit a class, or one."""
        return 1 if self.single else self.size

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return the cross entropy."""
        if out.shape[-1] == 1:
            return nn.functional.binary_cross_entropy_with_logits(
                out[..., 0], y.to(out.dtype), reduction="none"
            )
        return nn.functional.cross_entropy(out, y, reduction="none")

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return diag(p) − p pᵀ; p(1 − p) for one logit."""
        if out.shape[-1] == 1:
            return (torch.sigmoid(out) * torch.sigmoid(-out))[..., None]
        p = torch.softmax(out, -1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]

    def predict(self, out: Tensor) -> Tensor:
        """Return class probabilities (B, C)."""
        if out.shape[-1] == 1:
            return torch.cat([torch.sigmoid(-out), torch.sigmoid(out)], dim=-1)
        return torch.softmax(out, dim=-1)

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the probabilities."""
        return prediction

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a class drawn for each sample."""
        return torch.multinomial(prediction, 1, generator=generator)[..., 0]

    def zero(self) -> metrics.Tally:
        """Return the tally of no samples."""
        return metrics.zero(self.size)

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> metrics.Tally:
        """Return the tally of class probabilities."""
        return metrics.tally(prediction, y, mask)

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        return metrics.possible(tally)

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result."""
        return metrics.summarise(tallies)


@dataclass(frozen=True)
class Ordinal(Classification):
    """Classes in an order: cumulative logits with one score and `size` − 1 cut points.

    θ_1 = c, θ_k = θ_{k−1} + exp(g_k);  P(y ≤ k) = σ(θ_k − f);  f = out[0], (c, g) = out[1:]
    """

    name = "ordinal"
    classes = False

    @property
    def network(self) -> int:
        """Return one score."""
        return 1

    def extra(self) -> tuple[float, ...]:
        """Return cut points that make all classes equally likely at score 0."""
        share = torch.arange(1, self.size, dtype=torch.float64) / self.size
        cuts = torch.logit(share)
        return (float(cuts[0]), *(cuts.diff().log().tolist()))

    def bounds(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return (θ_{k−1} − f, θ_k − f) of every class (B, K), with −∞ and ∞ as ±1e4."""
        gaps = torch.cat([out[..., 1:2], out[..., 2:].exp()], -1)
        cuts = gaps.cumsum(-1) - out[..., :1]
        edge = torch.full_like(cuts[..., :1], 1e4)
        return torch.cat([-edge, cuts], -1), torch.cat([cuts, edge], -1)

    def log_probabilities(self, out: Tensor) -> Tensor:
        """Return log(σ(b) − σ(a)) = log σ(b) + log σ(−a) + log(1 − e^{a−b}) of every class."""
        low, high = self.bounds(out)
        logs = nn.functional.logsigmoid
        return logs(high) + logs(-low) + torch.log(-torch.expm1(low - high))

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log P(class)."""
        return -self.log_probabilities(out).gather(-1, y[..., None])[..., 0]

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return Σ_k p_k s_k s_kᵀ for the slopes s_k = ∂ log p_k / ∂f, in closed form."""
        low, high = self.bounds(out)
        p = self.log_probabilities(out).exp()
        a, b = (torch.sigmoid(edge) * torch.sigmoid(-edge) for edge in (low, high))  # densities
        count = self.size - 1
        gaps = torch.cat([torch.ones_like(out[..., 1:2]), out[..., 2:].exp()], -1)  # ∂θ/∂(c, g)
        # ∂θ_k/∂(c, g_j) = gap_j for j ≤ k
        steps = torch.tril(torch.ones(count, count, dtype=out.dtype, device=out.device))
        cuts = torch.cat(
            [
                -torch.ones_like(out[..., :1]).expand(*out.shape[:-1], count)[..., None],
                steps * gaps[..., None, :],
            ],
            -1,
        )  # (B, K−1, outputs)
        none = torch.zeros_like(cuts[..., :1, :])
        upper, lower = torch.cat([cuts, none], -2), torch.cat([none, cuts], -2)
        slope = (b[..., None] * upper - a[..., None] * lower) / p[..., None].sqrt()
        return slope.mT @ slope

    def predict(self, out: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        return self.log_probabilities(out).exp()

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return the mean probabilities over a Gaussian score, by Gauss–Hermite quadrature."""

        def moved(score: Tensor) -> Tensor:
            return self.predict(torch.cat([score, out[..., 1:]], -1))

        return over_gaussian(moved, out[..., :1], variance[..., :1])

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Return the lowest class whose cumulative probability reaches `share`."""
        return (prediction.cumsum(-1) < share).sum(-1).clamp(max=self.size - 1)
