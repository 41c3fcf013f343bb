"""Intervals of numbers by split conformal prediction, from histograms of scores that add up.

    r = |y − mean| / scale      of a held-out sample, by the predictive distribution of the model
    u = −log r                  its score, counted in the bins of `conformal`, (finer by STRETCH)

An interval is mean ± factor·scale. The factor of a level is r of rank (n + 1)·level among the
held-out samples: then new samples that are like them lie inside with probability `level`, whatever
their distribution. A client with fewer than ENOUGH held-out samples fills its histogram up with
everyone's (calibration=shrunk). Factors are known for the levels 1 to 99 %. Where the samples are
too few for a level, the factor goes on in the shape of the likelihood's own quantiles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..tasks import Task
from ..tasks.numbers import Gaussian
from .conformal import BINS, ENOUGH, SPAN, WIDTH, bins

LEVELS = tuple(k / 100 for k in range(1, 100))
STRETCH = SPAN / math.log(1e4)  # r from 1e-4 to 1e4 fills the bins
SMALLEST = 1e-300


def has_factors(task: Task) -> bool:
    """Return whether the intervals of a task can be scaled: those of numbers."""
    return isinstance(task, Gaussian)


def histogram(prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return how often scores fell into each bin, int64 (BINS,); runs under vmap."""
    scale = prediction[..., 1].double().sqrt()
    r = (y.double() - prediction[..., 0].double()).abs() / scale
    place = bins(-STRETCH * r.clamp(min=SMALLEST).log())
    flat = torch.zeros(BINS, dtype=torch.int64, device=prediction.device)
    return flat.scatter_add(0, place, (mask != 0).long())


def factors(own: Tensor, total: Tensor, how: str) -> Tensor:
    """Return the factor of each of LEVELS, float64; ∞ where there are too few samples.

    `how`: client (own scores), global (everyone's), shrunk (own, filled up with everyone's to
    ENOUGH samples, and between two scores instead of at the lower one).
    """
    mine, everyone = own.double().cpu(), total.double().cpu()
    counts = everyone if how == "global" else mine
    if how == "shrunk":
        missing = (ENOUGH - mine.sum()).clamp(min=0)
        counts = mine + missing * everyone / everyone.sum().clamp(min=1)
    number = float(counts.sum())
    places = counts.nonzero()[:, 0].flip(0)  # small r first
    if not len(places):
        return torch.full((len(LEVELS),), torch.inf, dtype=torch.float64)
    mass = counts[places]
    wanted = (number + 1) * torch.tensor(LEVELS, dtype=torch.float64)
    if how == "shrunk":
        ranks = mass.cumsum(0) - mass / 2 + 0.5
        at = interpolated(wanted, ranks, places.double())
    else:
        after = (mass.cumsum(0)[None] < torch.ceil(wanted - 1e-9)[:, None] - 1e-9).sum(1)
        at = places[after.clamp(max=len(places) - 1)].double()
    found = torch.exp((SPAN - at.floor() * WIDTH) / STRETCH)  # the bin's end of large r
    return torch.where(wanted <= number + 1e-9, found, torch.inf)


def interpolated(x: Tensor, known: Tensor, values: Tensor) -> Tensor:
    """Return the piecewise linear function through (known, values) at x, constant outside."""
    right = torch.searchsorted(known, x).clamp(1, max(len(known) - 1, 1))
    if len(known) == 1:
        return values.expand(len(x))
    low, high = known[right - 1], known[right]
    share = ((x - low) / (high - low)).clamp(0, 1)
    return values[right - 1] * (1 - share) + values[right] * share


def factor_at(task: Task, known: Tensor | None, level: float) -> float | None:
    """Return the factor of any level in (0, 1); None if no level's factor is known."""
    if known is None or not has_factors(task):
        return None
    finite = torch.isfinite(known)
    if not bool(finite.any()):
        return None
    levels = torch.tensor(LEVELS, dtype=torch.float64)[finite.cpu()]
    own = known[finite].double().cpu()
    nearest = float(levels[int((levels - level).abs().argmin())])
    if float(levels[0]) <= level <= float(levels[-1]):
        at = torch.tensor([level], dtype=torch.float64)
        return float(interpolated(at, levels, own)[0])
    edge = float(own[0] if level < nearest else own[-1])
    return edge * width(task, level) / width(task, nearest)


def width(task: Task, level: float) -> float:
    """Return half the width of the likelihood's own interval in units of its scale."""
    assert isinstance(task, Gaussian)
    return task.standard_quantile(0.5 + level / 2)


def interval(
    task: Task, prediction: Tensor, level: float, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the lower and upper end of each prediction's central interval; with factors, of the
    conformal one.
    """
    factor = factor_at(task, known, level)
    if factor is None:
        low, high = 0.5 - level / 2, 0.5 + level / 2
        return task.quantile(prediction, low), task.quantile(prediction, high)
    half = factor * prediction[..., 1].sqrt()
    return prediction[..., 0] - half, prediction[..., 0] + half
