"""Counts: a Poisson or a negative binomial distribution with the network's output as log mean.

μ = exp(f),  f = out[0];  r = exp(a),  a = out[1]: the size of the negative binomial, which all
samples share. Variance: μ (Poisson), μ + μ²/r (negative binomial).

I_ff = μ (Poisson), μ r / (μ + r);  I_fa = 0
I_aa = r² (Σ_{j≥0} P(Y > j) / (r + j)² − μ / (r (r + μ)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import measures
from .measures import LEVELS, Judged
from .task import Task

LARGEST_SIZE = 1e9  # of a negative binomial distribution: then it is a Poisson distribution
MOST = 1024  # counts up to this are told apart in scores and intervals


@dataclass(frozen=True)
class Poisson(Task):
    """A count with a Poisson distribution. Prediction: (mean,)."""

    name = "counts"
    curve = ("rmse", "nll", "deviance")

    @property
    def network(self) -> int:
        """Return the log mean."""
        return 1

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(y)."""
        return self.point_nll(out[..., 0], self.log_size(out), y.to(out.dtype))

    def log_size(self, out: Tensor) -> Tensor | None:
        """Return a; None for the Poisson distribution."""
        return None

    def point_nll(self, f: Tensor, a: Tensor | None, y: Tensor) -> Tensor:
        """Return −log p(y) at log mean f; with a log size a of the negative binomial."""
        if a is not None:
            return negative_binomial(f, a, y)
        return f.exp() - y * f + torch.lgamma(y + 1)

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return μ."""
        return out.exp()[..., None]

    def predict(self, out: Tensor) -> Tensor:
        """Return the mean."""
        return out.exp()

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return (mean, size) of the negative binomial distribution with the mean and variance of
        the counts whose log mean is Gaussian: a rate μ with E μ = e^{f + v/2}, E μ² = e^{2f + 2v}.
        """
        f, v = out[..., 0], variance[..., 0].to(out.dtype)
        mean, second = torch.exp(f + v / 2), torch.exp(2 * f + 2 * v)
        over = torch.expm1(v) * mean.square()  # variance of the rate
        if (a := self.log_size(out)) is not None:
            over = over + second * torch.exp(-a)
        size = mean.square() / over.clamp(min=1e-12)
        return torch.stack([mean, size.clamp(max=LARGEST_SIZE)], -1)

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the mean."""
        return prediction[..., 0]

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Return the smallest count whose distribution function reaches `share`, up to MOST."""
        return (self.distribution(prediction) < share).sum(-1)

    def distribution(self, prediction: Tensor) -> Tensor:
        """Return F(0), …, F(MOST) (B, MOST + 1), float64."""
        known = prediction.double().clamp(min=1e-300)
        before = torch.arange(MOST, dtype=torch.float64, device=prediction.device)
        mean = known[..., :1]
        # log p(k + 1) − log p(k), so that no logarithm of a Gamma function is needed
        if prediction.shape[-1] > 1:
            size = known[..., 1:2]
            first = -size * torch.log1p(mean / size)
            steps = torch.log(before + size) + torch.log(mean / (mean + size))
        else:
            first, steps = -mean, mean.log()
        steps = steps - torch.log(before + 1)
        logs = torch.cat([first, first + steps.cumsum(-1)], -1)
        return logs.exp().cumsum(-1).clamp(max=1.0)

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a count for each prediction."""
        if prediction.shape[-1] > 1:
            return self.through(prediction, generator)
        return torch.poisson(prediction[..., 0], generator=generator)

    def through(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a count for each prediction, through the distribution function."""
        share = torch.rand(prediction.shape[:-1], generator=generator, dtype=torch.float64)
        return (self.distribution(prediction) < share[..., None]).sum(-1).to(prediction.dtype)

    # -- metrics -----------------------------------------------------------------------------------
    def zero(self) -> measures.Numbers:
        """Return the tally of no samples."""
        return measures.zero()

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> measures.Numbers:
        """Return the tally. F(y) of the PIT is the middle of its step."""
        known = torch.nan_to_num(prediction.double(), nan=0.0).clamp(min=1e-300)
        y, mean, logs = y.double(), known[..., 0], known.log()
        size = logs[..., 1] if known.shape[-1] > 1 else None
        below = self.distribution(known)
        nll = self.point_nll(logs[..., 0], size, y)
        best = self.point_nll(y.clamp(min=1e-300).log(), size, y)
        steps = torch.arange(MOST + 1, device=y.device)
        at = y.long().clamp(0, MOST)
        upper = below.gather(-1, at[:, None])[:, 0]
        lower = torch.where(at > 0, below.gather(-1, (at - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        ends = [
            tuple((below < 0.5 + sign * level / 2).sum(-1) for sign in (-1, 1)) for level in LEVELS
        ]
        one = Judged(
            (y - mean).square(),
            (y - (below < 0.5).sum(-1)).abs(),
            nll,
            (below - (steps >= y[:, None]).double()).square().sum(-1),
            2 * (nll - best),
            torch.stack([(low <= y) & (y <= high) for low, high in ends], -1),
            torch.stack([(high - low).double() for low, high in ends], -1),
            (lower + upper) / 2,
        )
        return measures.summed(one, mask)

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        return measures.possible(tally)

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result."""
        return measures.summarise(tallies, 1.0, counts=True)


def negative_binomial(f: Tensor, a: Tensor, y: Tensor) -> Tensor:
    """Return −log p(y) at log mean f and log size a."""
    r, both = a.exp(), torch.logaddexp(f, a)
    choose = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
    return -choose - r * (a - both) - y * (f - both)


@dataclass(frozen=True)
class NegativeBinomial(Poisson):
    """A count that varies more than a Poisson's. Prediction: (mean, size)."""

    def extra(self) -> tuple[float, ...]:
        """Return the log size."""
        return (0.0,)

    def log_size(self, out: Tensor) -> Tensor:
        """Return a."""
        return out[..., 1]

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return I, which is diagonal; the sum for a goes up to MOST."""
        mean, size = out[..., 0].exp(), out[..., 1].exp()
        over = 1 - self.distribution(self.predict(out)).to(out.dtype)
        places = torch.arange(MOST + 1, dtype=out.dtype, device=out.device)
        series = (over / (size[..., None] + places).square()).sum(-1)
        spread = size.square() * (series - mean / (size * (size + mean)))
        return torch.diag_embed(torch.stack([mean * size / (mean + size), spread.clamp(min=0)], -1))

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a Poisson count whose rate is drawn from a Gamma distribution, through the
        distribution function.
        """
        return self.through(prediction, generator)
