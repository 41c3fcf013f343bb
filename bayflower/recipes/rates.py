"""Learning rates over the rounds of a run and over the steps of a round.

A step has the rate lr · g(round) · h(step). Both factors have one form, at place t of T, both
counted from 0:

    t < W      (t + 1) / W                                   linear warm-up of W places
    constant   1
    step       drop_factor^⌊(t − W) / every⌋
    cosine     floor + (1 − floor) (1 + cos(π (t − W) / (T − W))) / 2

They are torch.optim.lr_scheduler's LinearLR, ConstantLR, StepLR and CosineAnnealingLR. A cosine
stays at its floor after T. Only the rounds of training have schedules: steps before a test, and the
fit of a new client, take lr itself.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from ..contract import Work
from ..maths.optim import SHARE

Kind = Literal["constant", "step", "cosine"]
KINDS = ("constant", "step", "cosine")


class Schedule(NamedTuple):
    """One of the two factors. `length` is T; 0 where the caller knows it."""

    kind: Kind = "constant"
    warmup: int = 0
    every: int = 0
    factor: float = 0.1
    floor: float = 0.0
    length: int = 0

    @property
    def changes(self) -> bool:
        """Return whether the factor is not 1 everywhere."""
        return self.kind != "constant" or self.warmup > 1

    def at(self, place: int, length: int = 0) -> float:
        """Return the factor at `place` of `length`."""
        if place < self.warmup:
            return (place + 1) / self.warmup
        place, length = place - self.warmup, max((length or self.length) - self.warmup, 1)
        if self.kind == "step":
            return float(self.factor ** (place // self.every))
        if self.kind == "cosine":
            part = min(place / length, 1.0)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * part)) / 2
        return 1.0


def share(rounds: Schedule, steps: Schedule, purpose: str, round: int, step: int, of: int) -> float:
    """Return the share of lr that step `step` of `of` takes in `round`, which counts from 1."""
    if purpose != "train":
        return 1.0
    return rounds.at(max(round - 1, 0)) * steps.at(step, of)


def at_share(work: Work, value: float) -> Work:
    """Return the work whose next step takes this share of the learning rate."""
    old = work.opt.rate[SHARE]
    return work._replace(opt=work.opt._replace(rate={SHARE: torch.full_like(old, value)}))
