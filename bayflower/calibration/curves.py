"""The gate and temperature scaling, from one table of held-out NLL that adds up over clients.

A *form* of a model is the point (its weights as they are) or one of its posteriors at a scale. The
predictive of a posterior at scale s is the mean of softmax(f + s·d) over offsets d of the logits f,
so s = 0 is the point and s = 1 the posterior as it was fitted. Affine scaling then gives
softmax(log p / T + h·b): a temperature T, and a share h of the bias b, which moves the mean
prediction towards the classes that the client's training data have.

    table[form, h, T] = Σ over held-out samples of −log p_y, in units of 2^-20, as whole numbers

A table adds up in any order without rounding. A client chooses on its own table, on everyone's, or
between both: own + STRENGTH · everyone / number of everyone's samples. So a client with few samples
follows the others, and one with many its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the posteriors; 0 is the point
SHARES = (0.0, 0.5, 1.0)  # of the bias
FINEST = 27  # temperatures
SMOOTHING = 10.0  # samples that the model's own mean prediction counts for in the bias
LOWEST, HIGHEST = 0.1, 10.0
UNIT = 2.0**20
STRENGTH = 100.0  # held-out samples that everyone's table counts for beside a client's own
MARGIN = 0.002  # nats a sample by which a posterior must be better than the point


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


def table(
    logits: Tensor, offsets: Mapping[str, Tensor], bias: Tensor, y: Tensor, mask: Tensor
) -> Tensor:
    """Return the table (forms, shares, temperatures) of some held-out samples, int64; runs under
    vmap.
    """
    every = [log_softmax(logits.double())]
    for delta in offsets.values():
        every += [predictive(logits, scale * delta) for scale in SCALES]
    return torch.stack(
        [torch.stack([row(one, share * bias, y, mask) for share in SHARES]) for one in every]
    )


def row(log_probs: Tensor, bias: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the summed NLL at every temperature, in units, int64 (T,)."""
    heat = temperatures().to(log_probs.device)
    cold = log_probs[None] / heat[:, None, None] + bias
    place = y.clamp(0, log_probs.shape[-1] - 1)[None, :, None].expand(len(heat), -1, -1)
    nll = cold.logsumexp(-1) - cold.gather(-1, place)[..., 0]
    # a probability that is not finite counts as the worst there is
    nll = torch.nan_to_num(nll, nan=700.0, posinf=700.0).clamp(0, 700)
    return ((nll * UNIT).round().long() * (mask != 0)).sum(-1)


class Chosen(NamedTuple):
    """The form, temperature and share of the bias of one client."""

    posterior: str  # "" = the point
    scale: float
    temperature: float
    share: float
    # held-out NLL a sample of the client's own: the point, the chosen form, calibrated
    point: float | None
    gated: float | None
    calibrated: float | None
    fitted: dict[str, float]  # and of each posterior as it was fitted


def choose(
    own: Tensor, rows: int, total: Tensor, total_rows: int, posteriors: Sequence[str], how: str
) -> Chosen:
    """Return what a client uses, from its own table and everyone's, each with its number of
    samples; `how` is client, global or shrunk.
    """
    mine, everyone = own.double() / UNIT, total.double() / UNIT
    curve, weight = mine, float(rows)
    if how == "global":
        curve, weight = everyone, float(total_rows)
    elif how == "shrunk" and total_rows:
        curve, weight = mine + STRENGTH * everyone / total_rows, rows + STRENGTH
    known, one = forms(posteriors), neutral()
    if not weight:
        return Chosen("", 0.0, 1.0, 0.0, None, None, None, {})
    level = curve[:, 0, one] / weight
    best = int(level.argmin())
    if float(level[0] - level[best]) < MARGIN:
        best = 0
    floors = curve[best].amin(-1) / weight
    side = int(floors.argmin())
    if float(floors[0] - floors[side]) < MARGIN:
        side = 0
    heat = lowest(curve[best, side])

    def held(form: int, share: int, temperature: float) -> float | None:
        return between(mine[form, share] / rows, temperature) if rows else None

    return Chosen(
        *known[best],
        heat,
        SHARES[side],
        held(0, 0, 1.0),
        held(best, 0, 1.0),
        held(best, side, heat),
        {
            name: float(mine[place, 0, one]) / rows
            for place, (name, scale) in enumerate(known)
            if scale == 1.0 and rows
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
