"""What a person may rely on, as tallies: Brier score, prediction sets, and how well doubt finds
errors. Whole numbers that add up exactly, as in `metrics.py`.

*Doubt* is one minus the largest probability: of the calibrated model where held-out samples show
that it finds that model's errors better by MARGIN, else of the network itself (`keeps_plain`).
Its histogram over right and wrong predictions gives the AUROC of error detection and the curve of
risk against coverage: the share of wrong predictions among the samples with the least doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import GRID, on_grid

BINS = 512
MARGIN = 0.02  # AUROC by which calibrated doubt must be better than the network's own
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class Trust(NamedTuple):
    """Counts on test samples. The Brier sum is float64 and a multiple of 2^-32."""

    num_examples: Tensor
    brier: Tensor  # Σ Σ_c (p_c − 1[c = y])²
    covered: Tensor  # samples whose set holds the true class
    set_size: Tensor  # Σ classes in the set
    empty: Tensor  # samples with an empty set
    right: Tensor  # (BINS,) right predictions by doubt
    wrong: Tensor  # (BINS,)
    plain_right: Tensor  # (BINS,) the same by the network's own doubt
    plain_wrong: Tensor  # (BINS,)


def zero() -> Trust:
    """Return the tally of no samples."""
    n, b = torch.zeros((), dtype=torch.int64), torch.zeros(BINS, dtype=torch.int64)
    return Trust(n, n.double(), n, n, n, b, b, b, b)


def add(a: Trust, b: Trust) -> Trust:
    """Return the tally of both sets of samples."""
    return Trust(*(x + y for x, y in zip(a, b, strict=True)))


def tally(
    log_probs: Tensor,
    inside: Tensor,
    y: Tensor,
    mask: Tensor,
    plain: Tensor | None = None,
    use_plain: Tensor | None = None,
) -> Trust:
    """Return the tally of the samples that the mask marks; `inside` (N, K) are their sets, `plain`
    (N,) the network's own doubt, by default that of the probabilities, and `use_plain` whether it
    is the doubt in use. Runs under vmap.
    """
    used, classes = mask != 0, log_probs.shape[-1]
    probs = torch.nan_to_num(log_probs.double().exp())
    truth = y.clamp(0, classes - 1)
    onehot = truth[:, None] == torch.arange(classes, device=y.device)
    top, predicted = probs.max(-1)
    hit = predicted == y
    doubt = 1 - top
    other = doubt if plain is None else plain
    if use_plain is not None:
        doubt = torch.where(use_plain != 0, other, doubt)
    return Trust(
        used.sum(),
        (on_grid((probs - onehot.double()).square().sum(-1)) * used).sum().double() / GRID,
        ((inside & onehot).any(-1) & used).sum(),
        (inside.sum(-1) * used).sum(),
        (~inside.any(-1) & used).sum(),
        *by_doubt(doubt, hit, used),
        *by_doubt(other, hit, used),
    )


def by_doubt(doubt: Tensor, hit: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts of right and of wrong predictions by doubt, (BINS,) each."""
    place = doubt_bin(doubt)
    blank = torch.zeros(BINS, dtype=torch.int64, device=doubt.device)
    right = blank.scatter_add(0, place, (hit & used).long())
    return right, blank.scatter_add(0, place, (~hit & used).long())


def doubts(log_probs: Tensor, plain: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return held-out predictions by calibrated and by plain doubt, right and wrong, int64 (2, 2,
    BINS); they add up.
    """
    top, predicted = torch.nan_to_num(log_probs.double().exp()).max(-1)
    hit, used = predicted == y, mask != 0
    return torch.stack([torch.stack(by_doubt(one, hit, used)) for one in (1 - top, plain)])


def keeps_plain(counts: Tensor) -> bool:
    """Return whether doubt stays the network's own: calibrated doubt does not find held-out errors
    better by MARGIN (`doubts`). Without errors it is the calibrated one.
    """
    shown, plain = (area(*one) for one in counts)
    return shown is not None and plain is not None and shown < plain + MARGIN


def doubt_bin(doubt: Tensor) -> Tensor:
    """Return the bin of a doubt in [0, 1]; bins are finer near 0, where most samples are."""
    return (doubt.clamp(0, 1).sqrt() * BINS).long().clamp(max=BINS - 1)


def possible(t: Trust, number: int) -> bool:
    """Return whether a tally can have come from `number` samples."""
    right, wrong = int(t.right.sum()), int(t.wrong.sum())
    return (
        int(t.num_examples) == number == right + wrong
        and (int(t.plain_right.sum()), int(t.plain_wrong.sum())) == (right, wrong)
        and all(bool((leaf >= 0).all()) for leaf in t)
        and int(t.covered) <= number
        and int(t.covered) + int(t.empty) <= number
        and float(t.brier) <= 2 * number + 1e-6
        and int(t.set_size) <= 2**20 * max(number, 1)
    )


def auroc(t: Trust) -> float | None:
    """Return the probability that a wrong prediction has more doubt than a right one; None without
    both.
    """
    return area(t.right, t.wrong)


def area(right: Tensor, wrong: Tensor) -> float | None:
    """Return the AUROC of error detection from predictions by doubt; None without both kinds."""
    right, wrong = right.double(), wrong.double()
    pairs = float(right.sum() * wrong.sum())
    if not pairs:
        return None
    below = right.cumsum(0) - right
    return float((wrong * (below + 0.5 * right)).sum()) / pairs


def risks(t: Trust) -> list[dict[str, float | None]]:
    """Return the share of errors among the samples with the least doubt, at some coverages."""
    number, wrong = (t.right + t.wrong).double().cumsum(0), t.wrong.double().cumsum(0)
    total = float(number[-1])
    points: list[dict[str, float | None]] = []
    for coverage in COVERAGES:
        wanted = coverage * total
        if not total:
            points.append({"coverage": coverage, "risk": None})
            continue
        place = int((number >= wanted - 1e-9).long().argmax())
        before = place - 1
        low_n = float(number[before]) if place else 0.0
        low_w = float(wrong[before]) if place else 0.0
        span = float(number[place]) - low_n
        share = (wanted - low_n) / span if span else 0.0
        errors = low_w + share * (float(wrong[place]) - low_w)
        points.append({"coverage": coverage, "risk": errors / wanted})
    return points


def summarise(tallies: Mapping[int, Trust]) -> dict[str, Any]:
    """Return the numbers of some clients together, and each client's own."""
    pooled = reduce(add, (tallies[client] for client in sorted(tallies)), zero())
    number = int(pooled.num_examples)

    def share(part: Tensor, whole: int) -> float | None:
        return float(part) / whole if whole else None

    return {
        "brier": share(pooled.brier, number),
        "coverage": share(pooled.covered, number),
        "set_size": share(pooled.set_size, number),
        "empty_sets": share(pooled.empty, number),
        "error_auroc": auroc(pooled),
        "error_auroc_plain": area(pooled.plain_right, pooled.plain_wrong),
        "risk_coverage": risks(pooled),
        "per_client": {
            client: {
                "brier": share(one.brier, int(one.num_examples)),
                "covered": int(one.covered),
                "coverage": share(one.covered, int(one.num_examples)),
                "set_size": share(one.set_size, int(one.num_examples)),
                "error_auroc": auroc(one),
            }
            for client, one in sorted(tallies.items())
        },
    }
