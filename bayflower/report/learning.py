"""Whether a run ended too early or too late: a line for its reader, from the training losses and
the tests of the personal models over the rounds.

l_1 … l_n    mean training loss of each round
q            a quarter of the rounds
before       mean of the q losses before the last q
last         mean of the last q
still        before − last > SHARE (l_1 − last), and above the noise of such a difference
noise        TIMES s √(2/q), s the deviation of the last 2q losses from a straight line
t_1 … t_m    NLL on test samples, at the rounds that were tested
too late     t_m − min t > RISE, with LATER tests after the lowest, while the training loss fell
no more      t_m − min t > NEAR: more rounds are not advised
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

LEAST = 8  # rounds that say something
SHARE = 0.1
TIMES = 3.0
RISE, NEAR = 0.05, 0.01  # nats
LATER = 2
EARLY = "training loss still fell at the end: more rounds, or a larger lr, may help"
LATE = "test NLL rose while training loss fell: fewer rounds, or weight_decay, may help"


class Ending(NamedTuple):
    """What a reader should know of a run's end, and the numbers that show it."""

    short: str
    numbers: str

    def __str__(self) -> str:
        return f"{self.short} ({self.numbers})"


def ending(result: Mapping[str, Any]) -> Ending | None:
    """Return whether a run ended too early or too late; None if neither shows."""
    records = result.get("rounds") or []
    tests = [
        (record["round"], loss, nll)
        for record in records
        if (nll := (record.get("personal") or {}).get("nll")) is not None
        and (loss := record.get("train_loss")) is not None
    ]
    if tests:
        place = min(range(len(tests)), key=lambda k: tests[k][2])
        (low, before, lowest), (end, after, last) = tests[place], tests[-1]
        if last - lowest > RISE and len(tests) - 1 - place >= LATER and after < before:
            numbers = f"from {lowest:.3g} in round {low} to {last:.3g} in round {end}"
            return Ending(LATE, numbers)
        if not last - lowest <= NEAR:
            return None
    return still_learning([record.get("train_loss") for record in records])


def still_learning(losses: list[Any]) -> Ending | None:
    """Return a line if the training loss still fell at the end of a run, else None."""
    if len(losses) < LEAST or not all(isinstance(one, (int, float)) for one in losses):
        return None
    if not all(map(math.isfinite, losses)):
        return None
    quarter = len(losses) // 4
    before, last = np.mean(losses[-2 * quarter : -quarter]), np.mean(losses[-quarter:])
    ends = np.array(losses[-2 * quarter :])
    line = np.polyval(np.polyfit(np.arange(len(ends)), ends, 1), np.arange(len(ends)))
    noise = TIMES * float(np.std(ends - line)) * math.sqrt(2 / quarter)
    fall = float(before - last)
    if fall <= max(SHARE * (losses[0] - last), noise):
        return None
    return Ending(EARLY, f"from {before:.3g} to {last:.3g} over the last {2 * quarter} rounds")
