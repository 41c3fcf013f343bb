"""Sums that judge predictions of numbers and counts. All are additive; like those of classes they
are multiples of 2^-32, so that adding them is exact whatever the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import GRID, add, on_grid, ratio

LEVELS = (0.5, 0.9)  # of the central intervals
PIT_BINS = 10
LARGEST = 2.0**20  # of one sample's term, in units of the target's scale


class Numbers(NamedTuple):
    """What is summed over test samples; lengths are in units of the target's scale."""

    num_examples: Tensor
    squared: Tensor  # Σ (y − mean)²
    absolute: Tensor  # Σ |y − median|
    nll: Tensor  # Σ −log p(y), in the target's units
    crps: Tensor  # Σ continuous ranked probability score
    deviance: Tensor  # Σ 2 (log p(y|y) − log p(y|mean)); 0 for numbers
    covered: Tensor  # (2,) how many y lie in the central 50 and 90 % intervals
    width: Tensor  # (2,) Σ widths of those intervals
    pit: Tensor  # (10,) samples by F(y), in equal bins


class Judged(NamedTuple):
    """One number a sample (B,), or (B, 2) where there is one a level."""

    squared: Tensor
    absolute: Tensor
    nll: Tensor
    crps: Tensor
    deviance: Tensor
    covered: Tensor
    width: Tensor
    pit: Tensor  # F(y) in [0, 1]


def zero() -> Numbers:
    """Return the sums of no samples."""
    n, b = torch.zeros((), dtype=torch.int64), torch.zeros(PIT_BINS, dtype=torch.int64)
    two = torch.zeros(len(LEVELS), dtype=torch.int64)
    one = n.double()
    return Numbers(n, one, one, one, one, one, two, two.double(), b)


def summed(one: Judged, mask: Tensor) -> Numbers:
    """Return the sums over the samples that the mask marks. What is not finite counts as the
    largest term, and as not covered.
    """
    used = mask != 0

    def total(term: Tensor) -> Tensor:
        # nan_to_num: a network that diverged must not make every sum useless
        known = torch.nan_to_num(term.double(), LARGEST, LARGEST, -LARGEST)
        marked = used if term.ndim == 1 else used[:, None]
        return on_grid(known.clamp(-LARGEST, LARGEST)).mul(marked).sum(0).double() / GRID

    place = (torch.nan_to_num(one.pit, 0.0) * PIT_BINS).long().clamp(0, PIT_BINS - 1)
    bins = torch.arange(PIT_BINS, device=place.device)
    return Numbers(
        used.sum(),
        total(one.squared),
        total(one.absolute),
        total(one.nll),
        total(one.crps),
        total(one.deviance),
        (one.covered & used[:, None]).sum(0),
        total(one.width),
        ((place[:, None] == bins) & used[:, None]).sum(0),
    )


def possible(t: Numbers) -> bool:
    """Return whether sums can have come from samples."""
    number = int(t.num_examples)
    counts = (t.covered, t.pit)
    lengths = (t.squared, t.absolute, t.crps, t.width)
    return (
        0 <= number < 2**40
        and all(bool(leaf.double().isfinite().all()) for leaf in t)
        and all(bool((leaf >= 0).all()) and bool((leaf <= number).all()) for leaf in counts)
        and all(
            bool((leaf >= 0).all()) and bool((leaf <= LARGEST * number).all()) for leaf in lengths
        )
        and abs(float(t.nll)) <= LARGEST * number
        and abs(float(t.deviance)) <= LARGEST * number
        and int(t.pit.sum()) == number
    )


def numbers(t: Numbers, scale: float, counts: bool) -> dict[str, Any]:
    """Return the metrics of some samples in the target's units; None of no samples."""
    number = t.num_examples
    mse = ratio(t.squared, number)
    found: dict[str, Any] = {
        "rmse": None if mse is None else scale * math.sqrt(mse),
        "mae": scaled(ratio(t.absolute, number), scale),
        "nll": ratio(t.nll, number),
        "crps": scaled(ratio(t.crps, number), scale),
    }
    if counts:
        found["deviance"] = ratio(t.deviance, number)
    for place, level in enumerate(LEVELS):
        found[f"coverage_{round(100 * level)}"] = ratio(t.covered[place], number)
        found[f"width_{round(100 * level)}"] = scaled(ratio(t.width[place], number), scale)
    return found


def scaled(value: float | None, scale: float) -> float | None:
    """Return scale·value, None of None."""
    return None if value is None else scale * value


def summarise(tallies: Mapping[int, Numbers], scale: float, counts: bool) -> dict[str, Any]:
    """Return the block METRICS of a result: of all samples together, the mean and the worst over
    clients, and of each client.
    """
    clients = [(client, tallies[client]) for client in sorted(tallies)]
    seen = [(client, t) for client, t in clients if int(t.num_examples) > 0]
    pooled = reduce(add, (t for _, t in seen)) if seen else zero()
    each = [numbers(t, scale, counts) for _, t in seen]

    def over(key: str, how: Any) -> float | None:
        return how([one[key] for one in each]) if each else None

    return {
        "num_examples": int(pooled.num_examples),
        "num_clients": len(seen),
        **numbers(pooled, scale, counts),
        "rmse_mean": over("rmse", lambda some: math.fsum(some) / len(some)),
        "nll_mean": over("nll", lambda some: math.fsum(some) / len(some)),
        "worst_client_rmse": over("rmse", max),
        "pit": [int(count) for count in pooled.pit],
        "per_client": [
            {
                "client": int(client),
                "num_examples": int(t.num_examples),
                **numbers(t, scale, counts),
            }
            for client, t in clients
        ],
    }
