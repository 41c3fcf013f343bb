"""Several labels at once: independent Bernoulli distributions, one logit a label.

A label that is not known is negative: it adds nothing to the loss and is not counted. The metrics
of each label come from a histogram of its scores by truth (as for two classes), so that AUROC and
AUPRC are of sums that clients may add; scores in the same bin are ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..metrics import GRID, LARGEST_NLL, SCORE_BINS, add, area, on_grid
from .task import Task, over_gaussian

PARTS = 10  # of the probability, for reliability


class Labelled(NamedTuple):
    """What is counted on test samples."""

    num_examples: Tensor
    nll: Tensor  # Σ −log p(y) over samples and labels
    correct: Tensor  # (L,) labels predicted right at 0.5
    scores: Tensor  # (L, 2, 50) samples by truth and score


@dataclass(frozen=True)
class SeveralLabels(Task):
    """`size` labels, each true or not. Prediction: their probabilities (B, L)."""

    size: int

    name = "labels"
    events = True
    curve = ("nll", "macro_auroc")

    @property
    def network(self) -> int:
        """Return one logit a label."""
        return self.size

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return Σ_l −log p(y_l) over the labels that are known."""
        known = y >= 0
        each = nn.functional.binary_cross_entropy_with_logits(
            out, y.clamp(min=0).to(out.dtype), reduction="none"
        )
        return (each * known).sum(-1)

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return diag(p(1 − p)) of the labels that are known."""
        return torch.diag_embed(torch.sigmoid(out) * torch.sigmoid(-out) * (y >= 0))

    def predict(self, out: Tensor) -> Tensor:
        """Return the probabilities."""
        return torch.sigmoid(out)

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return the mean probabilities over Gaussian logits."""
        return over_gaussian(torch.sigmoid, out, variance)

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the probabilities."""
        return prediction

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return labels drawn for each sample."""
        return torch.bernoulli(prediction, generator=generator)

    def zero(self) -> Labelled:
        """Return the tally of no samples."""
        n, each = torch.zeros((), dtype=torch.int64), torch.zeros(self.size, dtype=torch.int64)
        return Labelled(n, n.double(), each, torch.zeros(self.size, 2, SCORE_BINS).long())

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Labelled:
        """Return the tally; a probability that is not finite counts as wrong."""
        used = (mask != 0)[:, None] & (y >= 0)
        finite = prediction.isfinite()
        truth = y > 0
        p = torch.where(finite, prediction.double(), torch.where(truth, 0.0, 1.0))
        right = torch.where(truth, p, 1 - p).clamp(min=torch.finfo(prediction.dtype).tiny)
        place = (p * SCORE_BINS).long().clamp(0, SCORE_BINS - 1)
        bins = torch.arange(SCORE_BINS, device=y.device)
        hot = place[..., None] == bins  # (B, L, 50)
        rows = [(hot & (used & side)[..., None]).sum(0) for side in (~truth, truth)]
        return Labelled(
            (mask != 0).sum(),
            (on_grid(-right.log()) * used).sum().double() / GRID,
            (((p >= 0.5) == truth) & used).sum(0),
            torch.stack(rows, 1),
        )

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        number, seen = int(tally.num_examples), tally.scores.sum((1, 2))
        return (
            0 <= number < 2**40
            and all(bool((leaf >= 0).all()) for leaf in tally)
            and bool((seen <= number).all())
            and bool((tally.correct <= seen).all())
            and float(tally.nll) <= LARGEST_NLL * number * self.size
        )

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result."""
        clients = [(client, tallies[client]) for client in sorted(tallies)]
        seen = [(client, t) for client, t in clients if int(t.num_examples) > 0]
        pooled = reduce(add, (t for _, t in seen)) if seen else self.zero()
        per_client = [{"client": int(client), **shown(t)} for client, t in clients]
        return {
            "num_clients": len(seen),
            **shown(pooled),
            "per_label": [
                {
                    "label": label,
                    "num_examples": int(scores.sum()),
                    "accuracy": rate(int(right), int(scores.sum())),
                    "auroc": area(scores),
                    "auprc": precision_area(scores),
                }
                for label, (scores, right) in enumerate(
                    zip(pooled.scores, pooled.correct, strict=True)
                )
            ],
            "reliability": reliability(pooled.scores.sum(0)),
            "per_client": per_client,
        }


def shown(t: Labelled) -> dict[str, Any]:
    """Return the metrics of some samples: macro is the mean over labels, micro all labels pooled.
    The NLL is of a sample, all its labels together.
    """
    every = t.scores.sum(0)
    known = int(every.sum())
    return {
        "num_examples": int(t.num_examples),
        "nll": rate(float(t.nll), int(t.num_examples)),
        "label_accuracy": rate(int(t.correct.sum()), known),
        "macro_auroc": average([area(scores) for scores in t.scores]),
        "macro_auprc": average([precision_area(scores) for scores in t.scores]),
        "micro_auroc": area(every),
        "micro_auprc": precision_area(every),
        "calibration_error": off(reliability(every)),
    }


def reliability(scores: Tensor) -> list[dict[str, Any]]:
    """Return the share of true labels by tenths of the probability, from the histogram (2, 50):
    `confidence` is the mean of the bins' middles, `accuracy` the share.
    """
    rows, bins = [], scores.tolist()
    each = SCORE_BINS // PARTS
    for part in range(PARTS):
        places = range(part * each, (part + 1) * each)
        number = sum(bins[side][k] for side in (0, 1) for k in places)
        if number:
            said = sum((bins[0][k] + bins[1][k]) * (k + 0.5) / SCORE_BINS for k in places)
            rows.append(
                {
                    "low": part / PARTS,
                    "high": (part + 1) / PARTS,
                    "count": number,
                    "confidence": said / number,
                    "accuracy": sum(bins[1][k] for k in places) / number,
                }
            )
    return rows


def off(rows: list[dict[str, Any]]) -> float | None:
    """Return the mean difference between probability and share; None of no labels."""
    number = sum(row["count"] for row in rows)
    gaps = [row["count"] * abs(row["confidence"] - row["accuracy"]) for row in rows]
    return math.fsum(gaps) / number if number else None


def rate(part: float, whole: int) -> float | None:
    """Return part / whole, None for 0/0."""
    return part / whole if whole else None


def average(values: list[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def precision_area(scores: Tensor) -> float | None:
    """Return the average precision Σ (recall step) × precision from the highest bin down; None
    without both kinds.
    """
    negatives, positives = (row.flip(0).tolist() for row in scores)
    whole = sum(positives)
    if not whole or not sum(negatives):
        return None
    found = hits = total = 0.0
    for n, p in zip(negatives, positives, strict=True):
        hits, total = hits + p, total + n + p
        found += p / whole * (hits / total if total else 0.0)
    return found
