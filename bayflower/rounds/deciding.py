"""What held-out samples say of one client or of all, and what a client uses after that: posterior,
affine scaling, sets, doubt and thresholds of alarms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calibration import conformal, curves, trust
from ..tree import Tensors, stack

UNUSUAL = 0.95  # share of held-out samples that stay below the thresholds of alarms
NOTHING = 1e-9  # below it a measure is rounding
ALARMS = ("entropy", "information", "distance")


class Held(NamedTuple):
    """What held-out samples say, as whole numbers that add up over clients. A client's own have
    rows, raw and table by fold, with a leading axis (`whole`).
    """

    rows: Tensor
    raw: Tensor  # (forms, 2), see calibration/curves.py
    table: Tensor  # (forms, sides, temperatures)
    scores: Tensor  # (1 or K, bins), see calibration/conformal.py
    doubts: Tensor  # (2, 2, bins), see calibration/trust.py


class Scored(NamedTuple):
    """The histograms of Held."""

    scores: Tensor
    doubts: Tensor


class Choice(NamedTuple):
    """What a client uses."""

    scales: Tensors  # of every posterior; at most one is above 0
    gate: Tensors  # the same without calibration
    temperature: Tensor
    rest: Tensor  # whether a high temperature leads to the mean prediction, 0 to 1
    share: Tensor  # of the bias
    lowest: Tensor  # the lowest bin that a set takes in, (1 or K,)
    plain: Tensor  # 1: doubt is the network's own, 0: that of the calibrated probabilities
    alarms: Tensors  # thresholds by measure


def whole(held: Held) -> Held:
    """Return a client's own sums without folds."""
    rows, raw, table = (leaf.sum(0) for leaf in (held.rows, held.raw, held.table))
    return held._replace(rows=rows, raw=raw, table=table)


def nothing_held(
    posteriors: int, classes: int, by_class: bool, device: torch.device | str = "cpu"
) -> Held:
    """Return what no held-out samples say, without folds."""
    forms = 1 + posteriors * len(curves.SCALES)
    blank: dict[str, Any] = {"dtype": torch.int64, "device": device}
    return Held(
        torch.zeros((), **blank),
        torch.zeros(forms, 2, **blank),
        torch.zeros(forms, len(curves.SIDES), curves.FINEST, **blank),
        torch.zeros(classes if by_class else 1, conformal.BINS, **blank),
        torch.zeros(2, 2, trust.BINS, **blank),
    )


def alike(own: Held, total: Held) -> Held:
    """Return a client's own sums with the sides that everyone's have; those of an older file have
    the first ones only.
    """
    return own._replace(table=own.table[..., : total.table.shape[-2], :])


def folded(held: Held) -> Held:
    """Return sums as a client's own, all in the first fold."""
    first = {
        name: torch.cat([leaf[None], leaf.new_zeros(curves.FOLDS - 1, *leaf.shape)])
        for name, leaf in held._asdict().items()
        if name in ("rows", "raw", "table")
    }
    return held._replace(**first)


def decide(
    own: Held, total: Held, posteriors: tuple[str, ...], how: str
) -> tuple[curves.Chosen, Choice]:
    """Return what a client uses, from its own table and everyone's; sets hold every class, no alarm
    sounds and doubt is the calibrated one until held-out samples have been scored.
    """
    mine, everyone = sums(whole(own)), sums(total)
    chosen = curves.choose(mine, everyone, posteriors, how)
    return chosen, as_choice(chosen, posteriors, len(own.scores))


def decide_folds(own: Held, total: Held, posteriors: tuple[str, ...], how: str) -> Choice:
    """Return what a client would use without each of its folds, stacked; a training client's fold
    is not in everyone's sums either.
    """
    mine, everyone = sums(whole(own)), sums(total)
    found = []
    for fold in range(curves.FOLDS):
        part = curves.Sums(int(own.rows[fold]), own.raw[fold], own.table[fold])
        # a new client was never in everyone's sums, and its histogram is not added to theirs
        rest = curves.without(everyone, part) if everyone.rows >= part.rows else everyone
        chosen = curves.choose(curves.without(mine, part), rest, posteriors, how)
        found.append(as_choice(chosen, posteriors, len(own.scores)))
    return stack(found)


def sums(held: Held) -> curves.Sums:
    """Return the sums of all forms."""
    return curves.Sums(int(held.rows), held.raw, held.table)


def as_choice(chosen: curves.Chosen, posteriors: tuple[str, ...], groups: int) -> Choice:
    """Return a choice as tensors, without thresholds."""

    def scales(posterior: str, scale: float) -> Tensors:
        return {
            name: torch.tensor(scale if name == posterior else 0.0, dtype=torch.float64)
            for name in posteriors
        }

    return Choice(
        scales(chosen.posterior, chosen.scale),
        scales(*chosen.gate),
        torch.tensor(chosen.temperature, dtype=torch.float64),
        torch.tensor(chosen.rest, dtype=torch.float64),
        torch.tensor(chosen.share, dtype=torch.float64),
        torch.zeros(groups, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        {name: torch.tensor(torch.inf, dtype=torch.float64) for name in ALARMS},
    )


def with_sets(
    both: tuple[curves.Chosen, Choice], own: Held, total: Held, how: str, coverage: float
) -> tuple[curves.Chosen, Choice]:
    """Return a choice with the threshold of its sets and the doubt in use, from the held-out rows
    that `how` says.
    """
    plain = trust.keeps_plain(own.doubts if how == "client" else total.doubts)
    lowest = conformal.threshold(own.scores, total.scores, coverage, how)
    return both[0]._replace(plain=plain), both[1]._replace(
        lowest=lowest, plain=torch.tensor(int(plain))
    )


def thresholds(measured: Tensor) -> Tensors:
    """Return the thresholds of alarms from the measures of held-out samples (N, 3); with fewer than
    20 samples their largest.
    """
    if not len(measured):
        return {name: torch.tensor(torch.inf, dtype=torch.float64) for name in ALARMS}
    level = UNUSUAL if len(measured) >= 20 else 1.0
    found = torch.quantile(measured.double().cpu(), level, dim=0)
    # a measure that is zero up to rounding says nothing: the point has no information
    found = torch.where(found > NOTHING, found, torch.inf)
    return dict(zip(ALARMS, found.unbind(), strict=True))
