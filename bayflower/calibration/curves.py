"""The gate and affine scaling, from tables of held-out NLL that add up over clients.

A *form* of a model is the point (its weights as they are) or one of its posteriors at a scale. The
predictive of a posterior at scale s is the mean of softmax(f + s·d) over offsets d of the logits f,
so s = 0 is the point and s = 1 the posterior as it was fitted. Calibrated it is

    p = (1 − e) softmax(log p / T + h·b) + e / K

with a temperature T, a share h of the bias b, which moves the mean prediction towards the classes
that the client's training data have, and e = 0.5 / (n + STRENGTH + 1) for n held-out samples: what
Jeffreys' rule gives an event that as many samples did not show. The bias is one step towards the
wanted mean, and often too short: a model that is sure of most samples nearly has that mean, while
its samples between two classes need more. So shares go up to 2.

    raw[form, 0] = Σ over held-out samples of l = −log p_y, uncalibrated; raw[form, 1] = Σ (l − l of
    the point)²;     table[form, h, T] = Σ l, calibrated;        in units of 2^-20, as whole numbers

A client keeps its own sums by fold (every FOLDS-th sample), so that it can choose without a fold
and look at that fold with fresh eyes (`without`). What it sends is their sum.

The sums have no rounding in any order. A client chooses on its own sums, on everyone's, or between
both: own + STRENGTH · everyone / number of everyone's samples. So a client with few samples follows
the others, and one with many its own. The gate: uncalibrated, a posterior is used only where it is
better than the point by MARGIN and by one standard error; calibrated, only where it is better than
the calibrated point by GAIN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the posteriors; 0 is the point
SHARES = (0.0, 0.5, 1.0, 2.0)  # of the bias
FINEST = 27  # temperatures
SMOOTHING = 10.0  # samples that the model's own mean prediction counts for in the bias
LOWEST, HIGHEST = 0.1, 10.0
UNIT = 2.0**20
FOLDS = 4
STRENGTH = 30.0  # held-out samples that everyone's table counts for beside a client's own
WORST = 700.0  # nats a sample
MARGIN = 0.002  # nats a sample by which a posterior must be better than the point
GAIN = 0.005  # the same where both are calibrated


def temperatures() -> Tensor:
    """Return the temperatures of a table: evenly spaced logarithms, 1 among them."""
    below = round((FINEST - 1) * math.log(1 / LOWEST) / math.log(HIGHEST / LOWEST))
    step = math.log(HIGHEST / LOWEST) / (FINEST - 1)
    return torch.exp((torch.arange(FINEST, dtype=torch.float64) - below) * step)


def neutral() -> int:
    """Return the place of temperature 1."""
    return int((temperatures() - 1).abs().argmin())


def forms(posteriors: Sequence[str]) -> list[tuple[str, float]]:
    """Return the forms of a table in their order: (posterior, scale), the point first."""
    return [("", 0.0), *((name, scale) for name in posteriors for scale in SCALES)]


def predictive(logits: Tensor, offsets: Tensor) -> Tensor:
    """Return the log of the mean of softmax(logits + offset) over offsets (J, N, C), float64 (N,
    C); a single logit means two classes.
    """
    drawn = log_softmax(logits.double() + offsets.double())
    return drawn.logsumexp(0) - math.log(len(offsets))


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities (…, K) from logits (…, C); a single logit means two classes."""
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    return logits.log_softmax(-1)


def scaled(log_probs: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """Return log-probabilities at a temperature and with a bias (K,)."""
    return (log_probs / temperature + bias).log_softmax(-1)


def bias_of(classes: Tensor, predicted: Tensor) -> Tensor:
    """Return the bias (K,) from a client's training data: samples of each class, and the sum of
    the predicted probabilities.
    """
    number = predicted.sum().clamp(min=1e-9)
    mean = (predicted / number).clamp(min=1e-6)
    wanted = (classes + SMOOTHING * mean) / (classes.sum() + SMOOTHING)
    found = (wanted / mean).log()
    return found - found.mean()


def doubtful(log_probs: Tensor, floor: Tensor) -> Tensor:
    """Return the log-probabilities mixed with a share `floor` of even ones."""
    share = torch.log(floor / log_probs.shape[-1]).expand_as(log_probs)
    return torch.logaddexp(log_probs + torch.log1p(-floor), share)


def floor_of(rows: Tensor | int) -> Tensor:
    """Return the share of even probabilities for as many held-out samples."""
    return 0.5 / (torch.as_tensor(rows, dtype=torch.float64) + STRENGTH + 1)


def tables(
    logits: Tensor,
    offsets: Mapping[str, Tensor],
    bias: Tensor,
    floor: Tensor,
    y: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sums (raw, table) of some held-out samples by fold, int64; runs under vmap."""
    every = [log_softmax(logits.double())]
    for delta in offsets.values():
        every += [predictive(logits, scale * delta) for scale in SCALES]
    losses = torch.stack([loss(one, y) for one in every])
    squares = (losses - losses[0]).square()
    raw = torch.stack([summed(losses, mask), summed(squares, mask)], -2)
    table = torch.stack(
        [torch.stack([row(one, share * bias, floor, y, mask) for share in SHARES]) for one in every]
    )
    return raw.movedim(-1, 0), table.movedim(-1, 0)


def loss(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return −log p_y of each sample; a probability that is not finite counts as the worst."""
    place = y.clamp(0, log_probs.shape[-1] - 1).expand(log_probs.shape[:-1])[..., None]
    found = -log_probs.gather(-1, place)[..., 0]
    return torch.nan_to_num(found, nan=WORST, posinf=WORST).clamp(0, WORST)


def summed(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over samples (the last axis) in units, by fold, int64 (…, FOLDS)."""
    return by_fold((values * UNIT).round().long() * (mask != 0))


def by_fold(values: Tensor) -> Tensor:
    """Return the sums of every FOLDS-th value of the last axis (…, FOLDS)."""
    full = torch.nn.functional.pad(values, (0, -values.shape[-1] % FOLDS))
    return full.unflatten(-1, (-1, FOLDS)).sum(-2)


def fold_of(number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the fold of each of `number` samples."""
    return torch.arange(number, device=device) % FOLDS


def row(log_probs: Tensor, bias: Tensor, floor: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the summed NLL at every temperature, in units, by fold, int64 (T, FOLDS)."""
    heat = temperatures().to(log_probs.device)
    cold = (log_probs[None] / heat[:, None, None] + bias).log_softmax(-1)
    return summed(loss(doubtful(cold, floor), y), mask)


class Chosen(NamedTuple):
    """What one client uses: calibrated, and without calibration (`gate`)."""

    posterior: str  # "" = the point
    scale: float
    temperature: float
    share: float  # of the bias
    gate: tuple[str, float]  # posterior and scale
    # held-out NLL a sample of the client's own: the point, the chosen form, calibrated
    point: float | None
    gated: float | None
    calibrated: float | None
    fitted: dict[str, float]  # and of each posterior as it was fitted
    plain: bool = False  # whether doubt is the network's own (trust.py), known after scoring


class Sums(NamedTuple):
    """What held-out samples say: their number, and the sums of all forms."""

    rows: int
    raw: Tensor  # (forms, 2)
    table: Tensor  # (forms, shares, temperatures)


def without(every: Sums, part: Sums) -> Sums:
    """Return the sums of the samples that are not in a part."""
    return Sums(every.rows - part.rows, every.raw - part.raw, every.table - part.table)


def choose(own: Sums, total: Sums, posteriors: Sequence[str], how: str) -> Chosen:
    """Return what a client uses, from its own sums and everyone's; `how` is client, global or
    shrunk.
    """
    if how == "global":
        weight, mine, others = float(total.rows), 0.0, 1.0
    else:
        mine, others = 1.0, 0.0
        if how == "shrunk" and total.rows:
            others = STRENGTH / total.rows
        weight = own.rows + others * total.rows
    known = forms(posteriors)
    if not weight:
        return Chosen("", 0.0, 1.0, 0.0, ("", 0.0), None, None, None, {})
    raw = (mine * own.raw.double() + others * total.raw.double()) / UNIT / weight
    curve = (mine * own.table.double() + others * total.table.double()) / UNIT / weight
    gain = raw[0, 0] - raw[:, 0]
    error = ((raw[:, 1] - gain.square()).clamp(min=0) / weight).sqrt()
    passed = (gain >= MARGIN) & (gain >= error)
    gate = int(torch.where(passed, gain, -torch.inf).argmax()) if bool(passed.any()) else 0
    lowest_of = curve.amin((1, 2))
    best = int(lowest_of.argmin())
    if float(lowest_of[0] - lowest_of[best]) < GAIN:
        best = 0
    floors = curve[best].amin(-1)
    side = int(floors.argmin())
    if float(floors[0] - floors[side]) < MARGIN:
        side = 0
    heat = lowest(curve[best, side])
    level = own.raw[:, 0].double() / UNIT / max(own.rows, 1)
    mean = own.table[best, side].double() / UNIT / max(own.rows, 1)
    held = own.rows > 0
    return Chosen(
        *known[best],
        heat,
        SHARES[side],
        known[gate],
        float(level[0]) if held else None,
        float(level[gate]) if held else None,
        between(mean, heat) if held else None,
        {
            name: float(level[place])
            for place, (name, scale) in enumerate(known)
            if scale == 1.0 and held
        },
    )


def lowest(curve: Tensor) -> float:
    """Return the temperature with the lowest NLL: the parabola in log T through the best three."""
    heat, best = temperatures(), int(curve.argmin())
    if best in (0, len(curve) - 1):
        return float(heat[best])
    left, middle, right = (float(curve[best + shift]) for shift in (-1, 0, 1))
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return float(heat[best]) * math.exp(shift * math.log(HIGHEST / LOWEST) / (FINEST - 1))


def between(curve: Tensor, temperature: float) -> float:
    """Return the curve at a temperature, linear in log T between the table's."""
    step = math.log(HIGHEST / LOWEST) / (FINEST - 1)
    place = math.log(temperature) / step + neutral()
    low = min(max(int(place), 0), len(curve) - 2)
    share = min(max(place - low, 0.0), 1.0)
    return float(curve[low]) * (1 - share) + float(curve[low + 1]) * share
