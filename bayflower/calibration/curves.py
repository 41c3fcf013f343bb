"""The gate and affine scaling, from tables of held-out NLL that add up over clients.

A *form* of a model is the point (its weights as they are) or one of its posteriors at a scale. The
predictive of a posterior at scale s is the mean of softmax(f + s·d) over offsets d of the logits f,
so s = 0 is the point and s = 1 the posterior as it was fitted. Calibrated it is

    p = (1 − e) softmax(log p / T + r (1 − 1/T) m + h·b) + e / K

with a temperature T, a share h of the bias b, which moves the mean prediction towards the classes
that the client's training data have, and e = 0.5 / (n + STRENGTH + 1) for n held-out samples: what
Jeffreys' rule gives an event that as many samples did not show. The bias is one step towards the
wanted mean, and often too short: a model that is sure of most samples nearly has that mean, while
its samples between two classes need more. So shares go up to 2. With r = 0 a high temperature makes
all classes even, and a rare class too likely. With r = 1 it leads to the model's own mean
prediction, whose logarithm is m.

    raw[form, 0] = Σ over held-out samples of l = −log p_y, uncalibrated; raw[form, 1] = Σ (l − l of
    the point)²;   table[form, side, T] = Σ l, calibrated;       in units of 2^-20, as whole numbers

A side is a pair of r and h.

A client keeps its own sums by fold (every FOLDS-th sample), so that it can choose without a fold
and look at that fold with fresh eyes (`without`). What it sends is their sum.

The sums have no rounding in any order. A client chooses on its own sums, on everyone's, or between
both: own + STRENGTH · everyone / number of everyone's samples. So a client with few samples follows
the others, and one with many its own. The gate: uncalibrated, a posterior is used only where it is
better than the point by MARGIN and by one standard error; calibrated, only where it is better than
the calibrated point by GAIN.

The sums are log-likelihoods. So log T, h and r are their posterior means over the table, with equal
weights of all sides and a normal prior of log T around 0 with deviation WIDE. The best entry alone
would follow chance where samples are few. Between two temperatures the table is cubic in log T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the posteriors; 0 is the point
SHARES = (0.0, 0.5, 1.0, 2.0)  # of the bias
SIDES = tuple((rest, share) for rest in (0.0, 1.0) for share in SHARES)  # older files: the first
FINEST = 27  # temperatures
FINER = 8  # places of the posterior between two of them
WIDE = 2.0  # deviation of the prior of log T
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


def mean_of(predicted: Tensor) -> Tensor:
    """Return the logarithm (K,) of the mean prediction on a client's training data, less its own
    mean; one more sample of each class keeps it finite.
    """
    found = (predicted + 1).log()
    return found - found.mean()


def offset_of(
    temperature: Tensor, rest: Tensor | float, share: Tensor | float, bias: Tensor, mean: Tensor
) -> Tensor:
    """Return what is added to log p / T: r (1 − 1/T) m + h·b, (…, K) for temperatures (…, 1)."""
    return rest * (1 - 1 / temperature) * mean + share * bias


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
    mean: Tensor,
    floor: Tensor,
    y: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sums (raw, table) of some held-out samples by fold, int64; runs under vmap."""
    heat = temperatures().to(logits.device)[:, None]
    sides = [offset_of(heat, *side, bias, mean) for side in SIDES]
    every = [log_softmax(logits.double())]
    for delta in offsets.values():
        every += [predictive(logits, scale * delta) for scale in SCALES]
    losses = torch.stack([loss(one, y) for one in every])
    squares = (losses - losses[0]).square()
    raw = torch.stack([summed(losses, mask), summed(squares, mask)], -2)
    table = torch.stack(
        [torch.stack([row(one, side, floor, y, mask) for side in sides]) for one in every]
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


def row(log_probs: Tensor, added: Tensor, floor: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the summed NLL at every temperature, in units, by fold, int64 (T, FOLDS); `added` (T,
    K) is added to the logits.
    """
    heat = temperatures().to(log_probs.device)
    cold = (log_probs[None] / heat[:, None, None] + added[:, None]).log_softmax(-1)
    return summed(loss(doubtful(cold, floor), y), mask)


class Chosen(NamedTuple):
    """What one client uses: calibrated, and without calibration (`gate`)."""

    posterior: str  # "" = the point
    scale: float
    temperature: float
    share: float  # of the bias
    gate: tuple[str, float]  # posterior and scale
    # held-out NLL a sample of the client's own: the point, the chosen form, calibrated (the mean
    # over the posterior, which is no smaller)
    point: float | None
    gated: float | None
    calibrated: float | None
    fitted: dict[str, float]  # and of each posterior as it was fitted
    plain: bool = False  # whether doubt is the network's own (trust.py), known after scoring
    rest: float = 0.0  # r


class Sums(NamedTuple):
    """What held-out samples say: their number, and the sums of all forms."""

    rows: int
    raw: Tensor  # (forms, 2)
    table: Tensor  # (forms, sides, temperatures)


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
    heat, rest, share, weights = posterior_mean(curve[best] * weight)
    level = own.raw[:, 0].double() / UNIT / max(own.rows, 1)
    mean = finer(own.table[best].double() / UNIT / max(own.rows, 1))
    held = own.rows > 0
    return Chosen(
        *known[best],
        heat,
        share,
        known[gate],
        float(level[0]) if held else None,
        float(level[gate]) if held else None,
        float((weights * mean).sum()) if held else None,
        {
            name: float(level[place])
            for place, (name, scale) in enumerate(known)
            if scale == 1.0 and held
        },
        rest=rest,
    )


def posterior_mean(losses: Tensor) -> tuple[float, float, float, Tensor]:
    """Return (temperature, r, share of the bias, weights) from summed NLL (sides, temperatures):
    the means over the posterior, of the temperature that of log T. The weights (sides, places) are
    those of `finer` places.
    """
    heat, found = finer(temperatures().log()), finer(losses)
    unlikely = found + heat.square() / (2 * WIDE**2)
    weights = torch.softmax(-unlikely.flatten(), 0).reshape(unlikely.shape)
    sides = torch.tensor(SIDES[: len(losses)], dtype=torch.float64)
    rest, share = (weights.sum(-1) @ sides).tolist()
    return math.exp(float((weights * heat).sum())), rest, share, weights


def finer(curve: Tensor) -> Tensor:
    """Return curves (…, T) at FINER times as many places, by cubics through four values (Catmull
    and Rom); beyond both ends they go on straight.
    """
    first, last = 2 * curve[..., :1] - curve[..., 1:2], 2 * curve[..., -1:] - curve[..., -2:-1]
    wide = torch.cat([first, curve, last], -1)
    a, b, c, d = (wide[..., k : k + curve.shape[-1] - 1, None] for k in range(4))
    u = torch.arange(FINER, dtype=curve.dtype) / FINER
    found = b + u / 2 * (c - a + u * (2 * a - 5 * b + 4 * c - d + u * (3 * (b - c) + d - a)))
    return torch.cat([found.flatten(-2), curve[..., -1:]], -1)
