"""Regression: a Gaussian or Student's t around the network's output, and its noise.

    z = (y − location) / scale          the target as the network sees it
    f = out[0] (mean of z), s = out[1] (log of the noise's scale in units of z)

    Gaussian   −log p = ½ log 2π + s + ½ r²,  r = (z − f) e^{−s};     I = diag(e^{−2s}, 2)
    Student    −log p = c(ν) + s + ½ (ν + 1) log(1 + r²/ν)
               I = diag((ν + 1)/(ν + 3) e^{−2s}, 2ν/(ν + 3))

The noise is known (no s: it is a constant), a parameter of its own (all samples share it, `extra`),
each client's own, or a second output of the network. Location and scale come from everyone's sums
(n, Σ y, Σ y²). A client's own noise is the mode under a prior that is worth one sample of the
targets' variance, from the residuals r_i of its training samples:

    e^{2s} = (1 + Σ w_i r_i²) / (1 + n),  w_i = 1, or of Student's t (ν + 1) / (ν + r_i² e^{−2s})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from . import measures
from .measures import LEVELS, Judged
from .task import Task

Noise = Literal["known", "global", "client", "input"]
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
EM_STEPS = 50  # for the own noise of a client, of Student's t


@dataclass(frozen=True)
class Gaussian(Task):
    """A number with Gaussian noise."""

    noise: Noise = "global"
    noise_std: float = 1.0  # of known noise, in the target's units
    location: float = 0.0
    scale: float = 1.0

    name = "regression"
    curve = ("rmse", "nll", "crps")

    @property
    def network(self) -> int:
        """Return the mean, and the log of the noise if it depends on the input."""
        return 2 if self.noise == "input" else 1

    def extra(self) -> tuple[float, ...]:
        """Return the log of a shared noise, at first as wide as the targets."""
        return (0.0,) if self.noise in ("global", "client") else ()

    @property
    def extra_stays(self) -> bool:
        """Return whether each client has a noise of its own."""
        return self.noise == "client"

    def own_extra(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return s (1,) of a client from the residuals of its training samples."""
        squares = ((y - prediction[..., 0]) / self.scale).square() * mask
        return 0.5 * self.own_variance(squares, mask).log()[None]

    def own_variance(self, squares: Tensor, mask: Tensor) -> Tensor:
        """Return e^{2s} from squared residuals."""
        return (1 + squares.sum()) / (1 + mask.sum())

    def extra_prior(self, extra: Tensor) -> Tensor:
        """Return −log p of one sample that lies everyone's standard deviation from its mean: so the
        noise of a client with fewer samples than parameters does not collapse.
        """
        return (extra + self.standard_nll(torch.exp(-extra))).sum()

    # -- parts -------------------------------------------------------------------------------------
    def log_scale(self, out: Tensor) -> Tensor:
        """Return s (B,)."""
        if self.noise == "known":
            return torch.full_like(out[..., 0], math.log(self.noise_std / self.scale))
        return out[..., 1]

    def standard(self, y: Tensor) -> Tensor:
        """Return z."""
        return (y - self.location) / self.scale

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(z)."""
        s = self.log_scale(out)
        r = (self.standard(y) - out[..., 0]) * torch.exp(-s)
        return HALF_LOG_2PI + s + 0.5 * r.square()

    def information(self) -> tuple[float, float]:
        """Return the factors of I: of e^{−2s} for the mean, and for s."""
        return 1.0, 2.0

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return I, which is diagonal."""
        first, second = self.information()
        mean = first * torch.exp(-2 * self.log_scale(out))
        if self.outputs == 1:
            return mean[..., None, None]
        return torch.diag_embed(torch.stack([mean, torch.full_like(mean, second)], -1))

    # -- prediction: (location, scale²) ------------------------------------------------------------
    def predict(self, out: Tensor) -> Tensor:
        """Return (mean, squared scale) of the target."""
        return self.widened(out, torch.zeros_like(out[..., : self.network]))

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return the same with the variance of the network's mean added."""
        s = self.log_scale(out)
        noise = torch.exp(2 * s) + variance[..., 0]
        return torch.stack([self.location + self.scale * out[..., 0], self.scale**2 * noise], -1)

    def mixed(self, predictions: Tensor) -> Tensor:
        """Return the Gaussian with the mean and variance of the mixture."""
        mean = predictions[..., 0].mean(0)
        spread = (predictions[..., 0] - mean).square().mean(0)
        return torch.stack([mean, predictions[..., 1].mean(0) + spread], -1)

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the mean."""
        return prediction[..., 0]

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Return the quantile: location + scale × that of the standard distribution."""
        return prediction[..., 0] + prediction[..., 1].sqrt() * self.standard_quantile(share)

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a draw for each prediction."""
        return prediction[..., 0] + prediction[..., 1].sqrt() * self.standard_draw(
            prediction[..., 0], generator
        )

    # -- the standard distribution -----------------------------------------------------------------
    def standard_quantile(self, share: float) -> float:
        """Return the quantile of the standard distribution."""
        return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))

    def standard_draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return draws from it in the shape of `like`."""
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def standard_cdf(self, r: Tensor) -> Tensor:
        """Return its distribution function."""
        return torch.special.ndtr(r)

    def standard_nll(self, r: Tensor) -> Tensor:
        """Return minus its log density."""
        return HALF_LOG_2PI + 0.5 * r.square()

    def standard_crps(self, r: Tensor) -> Tensor:
        """Return r (2F(r) − 1) + 2f(r) − 1/√π."""
        density = torch.exp(-self.standard_nll(r))
        return r * (2 * self.standard_cdf(r) - 1) + 2 * density - 1 / math.sqrt(math.pi)

    # -- metrics -----------------------------------------------------------------------------------
    def zero(self) -> measures.Numbers:
        """Return the tally of no samples."""
        return measures.zero()

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> measures.Numbers:
        """Return the tally, in float64; lengths in units of the scale."""
        mean, scale = prediction[..., 0].double(), prediction[..., 1].double().sqrt()
        error = y.double() - mean
        r = error / scale
        wide = [self.standard_quantile(0.5 + level / 2) for level in LEVELS]
        spread = scale[:, None] * torch.tensor(wide, dtype=torch.float64, device=y.device)
        one = Judged(
            (error / self.scale).square(),
            (error / self.scale).abs(),
            self.standard_nll(r) + scale.log(),
            scale / self.scale * self.standard_crps(r),
            torch.zeros_like(r),
            error.abs()[:, None] <= spread,
            2 * spread / self.scale,
            self.standard_cdf(r),
        )
        return measures.summed(one, mask)

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        return measures.possible(tally)

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result."""
        return measures.summarise(tallies, self.scale, counts=False)


@dataclass(frozen=True)
class StudentT(Gaussian):
    """A number with noise of Student's t distribution; `dof` is a whole number from 3."""

    dof: int = 4

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(z)."""
        s = self.log_scale(out)
        r = (self.standard(y) - out[..., 0]) * torch.exp(-s)
        return s + self.standard_nll(r)

    def own_variance(self, squares: Tensor, mask: Tensor) -> Tensor:
        """Return e^{2s} from squared residuals, by EM."""
        found = super().own_variance(squares, mask)
        for _ in range(EM_STEPS):
            weights = (self.dof + 1) / (self.dof + squares / found)
            found = (1 + (weights * squares).sum()) / (1 + mask.sum())
        return found

    def information(self) -> tuple[float, float]:
        """Return the factors of I."""
        return (self.dof + 1) / (self.dof + 3), 2 * self.dof / (self.dof + 3)

    def standard_nll(self, r: Tensor) -> Tensor:
        """Return minus the log density."""
        v = self.dof
        constant = math.lgamma(v / 2) - math.lgamma((v + 1) / 2) + 0.5 * math.log(v * math.pi)
        return constant + 0.5 * (v + 1) * torch.log1p(r.square() / v)

    def standard_cdf(self, r: Tensor) -> Tensor:
        """Return the distribution function, a finite sum for whole ν (Abramowitz and Stegun
        26.7.3 and 26.7.4).
        """
        v = self.dof
        cos2 = 1 / (1 + r.square() / v)
        sine, cos = r / math.sqrt(v) * cos2.sqrt(), cos2.sqrt()
        odd = v % 2
        term = cos if odd else torch.ones_like(r)
        total = term if v > 1 else torch.zeros_like(r)
        for k in range(2 + odd, v - 1, 2):
            term = term * cos2 * ((k - 1) / k)
            total = total + term
        found = sine * total
        if odd:
            found = (2 / math.pi) * (torch.atan(r / math.sqrt(v)) + found)
        return 0.5 * (1 + found)

    def standard_quantile(self, share: float) -> float:
        """Return the quantile, by bisection."""
        return student_quantile(self.dof, share)

    def standard_draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return draws: a normal over the root of a mean of ν squared normals."""
        shape = (self.dof + 1, *like.shape)
        some = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return some[0] / some[1:].square().mean(0).sqrt()

    def standard_crps(self, r: Tensor) -> Tensor:
        """Return the score in closed form (Jordan, Krüger and Lerch 2019)."""
        v = self.dof
        density = torch.exp(-self.standard_nll(r))
        beta = math.exp(
            math.lgamma(0.5)
            + math.lgamma(v - 0.5)
            - math.lgamma(v)
            - 2 * (math.lgamma(0.5) + math.lgamma(v / 2) - math.lgamma((v + 1) / 2))
        )
        return (
            r * (2 * self.standard_cdf(r) - 1)
            + 2 * density * (v + r.square()) / (v - 1)
            - 2 * math.sqrt(v) / (v - 1) * beta
        )


@lru_cache(maxsize=64)
def student_quantile(dof: int, share: float) -> float:
    """Return the quantile of Student's t distribution."""
    task = StudentT(dof=dof)
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        below = float(task.standard_cdf(torch.tensor(middle, dtype=torch.float64))) < share
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


# -- everyone's moments --------------------------------------------------------------------------
def moments(y: Iterable[float]) -> tuple[float, float, float]:
    """Return (n, Σ y, Σ y²) of one client's training targets; those of several are added."""
    known = [float(one) for one in y]
    return float(len(known)), math.fsum(known), math.fsum(one * one for one in known)


def standardising(parts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return (mean, standard deviation) of everyone's targets from the clients' sums, in any
    order; a standard deviation of 1 if all targets are equal.
    """
    number, first, second = (math.fsum(column) for column in zip(*parts, strict=True))
    mean = first / number
    variance = second / number - mean**2
    least = 1e-12 * max(mean**2, 1e-30)
    return mean, math.sqrt(variance) if variance > least else 1.0
