"""What judges predictions, on each client's own test samples.

    NLL       mean of −log p(y)
    CRPS      of numbers ∫ (F − 1[y ≤ z])² dz of the Gaussian; of classes ½ Σ_c (p_c − 1[y = c])²,
              which for two classes is the CRPS of an outcome 0 or 1; of times the same integral up
              to the last edge, of a censored time up to it (Avati et al. 2020)
    covered   share of samples inside their 90 % statement; width: of the interval, or of the set
              in classes
    ECE       of classes: |confidence − accuracy| in ten bins; of numbers: mean of |covered − level|
              over the levels 10 %, …, 90 % of central intervals
    worst     mean NLL of the tenth of clients with the largest, at least one
    cost      of decisions (`sets.py`): mean cost a sample, by cost ratio. Who knows the outcome
              pays nothing, so this is the regret

Of times, covered, ECE and cost are about an event within the horizon, on the samples of which this
is known: an event by then, or a time beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtr

from ..calibration.conformal import ENOUGH, interval
from ..tasks import Task

LEVEL = 0.9
Z = 1.6448536269514722  # half the width of a Gaussian's central 90 %
BINS = 10
SMALLEST = 1e-12  # of a probability


class Judged(NamedTuple):
    """One client's test samples, each with its scores."""

    nll: np.ndarray
    crps: np.ndarray
    covered: np.ndarray  # bool, of those of which it is known
    width: np.ndarray
    confidence: np.ndarray  # classes and times: of the likeliest; numbers: F(y)
    right: np.ndarray
    costs: np.ndarray  # (ratios, N)


# -- each sample -----------------------------------------------------------------------------------
def nll(value: np.ndarray, y: np.ndarray, task: Task) -> np.ndarray:
    """Return −log p(y) of each sample."""
    if task.classes:
        return -np.log(value[np.arange(len(y)), y].clip(SMALLEST))
    if task.events:
        known: Any = task
        return known.test_nll(torch.as_tensor(value), torch.as_tensor(y)).numpy().clip(max=30.0)
    mean, variance = value[:, 0], value[:, 1]
    return 0.5 * (np.log(2 * math.pi * variance) + np.square(y - mean) / variance)


def crps(value: np.ndarray, y: np.ndarray, task: Task) -> np.ndarray:
    """Return the CRPS of each sample."""
    if task.classes:
        return 0.5 * np.square(value - np.eye(value.shape[1])[y]).sum(1)
    if task.events:
        return crps_of_times(value, y, np.array(task.edges))  # type: ignore[attr-defined]
    scale = np.sqrt(value[:, 1])
    r = (y - value[:, 0]) / scale
    density = np.exp(-0.5 * np.square(r)) / math.sqrt(2 * math.pi)
    return scale * (r * (2 * ndtr(r) - 1) + 2 * density - 1 / math.sqrt(math.pi))


def crps_of_times(curve: np.ndarray, y: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return ∫_0^t F² + [event] ∫_t^e (1 − F)², F linear between edges, in units of the last edge;
    each interval is cut at the time.
    """
    ends = np.concatenate([[0.0], edges])
    risk = 1 - np.concatenate([np.ones_like(curve[:, :1]), curve], 1)
    time, event = y[:, 0].clip(max=edges[-1]), (y[:, 1] > 0) & (y[:, 0] <= edges[-1])
    total = np.zeros(len(y))
    for k in range(len(edges)):
        low, high, a, b = ends[k], ends[k + 1], risk[:, k], risk[:, k + 1]
        cut = time.clip(low, high)
        middle = a + (b - a) * (cut - low) / (high - low)
        total += (cut - low) * squares(a, middle)
        total += event * (high - cut) * squares(1 - middle, 1 - b)
    return total / edges[-1]


def squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the mean of the square of a linear function from a to b."""
    return (a * a + a * b + b * b) / 3


def smallest_sets(probs: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Return for each sample the likeliest classes that together reach `level`, as bool (N, C)."""
    order = np.argsort(-probs, 1, kind="stable")
    ranked = np.take_along_axis(probs, order, 1)
    before = np.cumsum(ranked, 1) - ranked
    found = np.zeros(probs.shape, bool)
    np.put_along_axis(found, order, before < level - 1e-12, 1)
    return found


def cost_of_alarm(p: np.ndarray, event: np.ndarray, ratio: float) -> np.ndarray:
    """Return each sample's cost: a missed event `ratio`, a false alarm 1."""
    act = p >= 1 / (1 + ratio)
    return np.where(event, np.where(act, 0.0, ratio), np.where(act, 1.0, 0.0))


def cost_of_asking(probs: np.ndarray, y: np.ndarray, ratio: float) -> np.ndarray:
    """Return each sample's cost: a wrong answer `ratio`, asking 1."""
    answer = probs.max(1) >= 1 - 1 / ratio
    wrong = probs.argmax(1) != y
    return np.where(answer, np.where(wrong, float(ratio), 0.0), 1.0)


# -- one client ------------------------------------------------------------------------------------
def judge(
    value: np.ndarray,
    stated: np.ndarray | None,
    y: np.ndarray,
    task: Task,
    decision: str,
    ratios: Sequence[int],
    level: float,
) -> Judged:
    """Return every sample's scores."""
    losses, ranked = nll(value, y, task), crps(value, y, task)
    if task.classes or task.events:
        probs, truth = (value, y) if task.classes else at_horizon(value, y, task)
        inside = smallest_sets(probs) if stated is None else stated
        covered = inside[np.arange(len(truth)), truth]
        costs = [
            cost_of_asking(probs, truth, ratio)
            if decision == "ask"
            else cost_of_alarm(probs[:, 1], truth == 1, ratio)
            for ratio in ratios
        ]
        right = probs.argmax(1) == truth
        known = (covered, inside.sum(1).astype(float), probs.max(1), right)
        return Judged(losses, ranked, *known, np.array(costs).reshape(len(ratios), -1))
    mean, scale = value[:, 0], np.sqrt(value[:, 1])
    ends = np.stack([mean - Z * scale, mean + Z * scale], 1) if stated is None else stated
    covered = (ends[:, 0] <= y) & (y <= ends[:, 1])
    above = ndtr((mean - level) / scale)
    costs = [cost_of_alarm(above, y > level, ratio) for ratio in ratios]
    known = (covered, ends[:, 1] - ends[:, 0], ndtr((y - mean) / scale), covered)
    return Judged(losses, ranked, *known, np.array(costs))


def at_horizon(value: np.ndarray, y: np.ndarray, task: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of (no event, event) by the horizon, and which it was, of the samples of
    which this is known.
    """
    place = task.judged_at
    end = task.edges[place]
    event = (y[:, 1] > 0) & (y[:, 0] <= end)
    known = event | (y[:, 0] > end)
    stays = value[known, place]
    return np.stack([stays, 1 - stays], 1), event[known].astype(np.int64)


# -- all clients -----------------------------------------------------------------------------------
def ece(confidence: np.ndarray, right: np.ndarray, task: Task) -> float | None:
    """Return the calibration error of all samples together."""
    if not len(confidence):
        return None
    if not (task.classes or task.events):
        away = 2 * np.abs(confidence - 0.5)  # in the central interval of this level
        levels = np.arange(1, 10) / 10
        return float(np.mean([abs(np.mean(away <= one) - one) for one in levels]))
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, confidence - right, BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def worst_decile(each: Sequence[float]) -> float:
    """Return the mean of the largest tenth, at least one."""
    number = max(1, math.ceil(len(each) / 10 - 1e-9))
    return float(np.mean(sorted(each)[-number:]))


def bounds(tested: int, held: int = 0) -> tuple[int, int]:
    """Return the 99 % beta-binomial interval of covered samples for a 90 % statement that was
    calibrated on `held` own samples, filled up with others' to ENOUGH.
    """
    return interval(max(held, ENOUGH), tested, LEVEL)


def summary(
    clients: Sequence[Judged], held: Sequence[int], task: Task, ratios: Sequence[int]
) -> dict[str, Any]:
    """Return the numbers of some clients together; NLL, CRPS, coverage and costs are means over all
    samples. `nlls` has each client's; `outside` lists [place, covered, tested, low, high] of those
    whose coverage lies outside its interval.
    """

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([one._asdict()[name] for one in clients], -1)

    each = [float(one.nll.mean()) for one in clients]
    outside = []
    for place, (one, rows) in enumerate(zip(clients, held, strict=True)):
        number, count = len(one.covered), int(one.covered.sum())
        low, high = bounds(number, rows)
        if number and not low <= count <= high:
            outside.append([place, count, number, low, high])
    covered, width = all_of("covered"), all_of("width")
    costs = all_of("costs").mean(1)
    calibration = ece(all_of("confidence"), all_of("right"), task)
    return {
        "samples": len(all_of("nll")),
        "clients": len(clients),
        "nll": rounded(all_of("nll").mean()),
        "crps": rounded(all_of("crps").mean()),
        "coverage": rounded(covered.mean()) if len(covered) else None,
        "width": rounded(width.mean()) if len(width) else None,
        "ece": None if calibration is None else rounded(calibration),
        "worst": rounded(worst_decile(each)),
        "cost": {str(ratio): rounded(one) for ratio, one in zip(ratios, costs, strict=True)},
        "nlls": [rounded(one, 4) for one in each],
        "outside": outside,
    }


def rounded(value: Any, digits: int = 6) -> float | None:
    """Return a number with so many significant digits, as a file keeps it; None of NaN and ∞."""
    return float(f"{float(value):.{digits}g}") if math.isfinite(value) else None
