"""Whether a run ended while it still learned: a line for its reader, from the training losses.

l_1 … l_n    mean training loss of each round
q            a quarter of the rounds
before       mean of the q losses before the last q
last         mean of the last q
still        before − last > SHARE (l_1 − last), and above the noise of such a difference
noise        TIMES s √(2/q), s the deviation of the last 2q losses from a straight line
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

LEAST = 8  # rounds that say something
SHARE = 0.1
TIMES = 3.0
SHORT = "training loss still fell at the end: more rounds, or a larger lr, may help"


def still_learning(result: Mapping[str, Any]) -> str | None:
    """Return a line if the training loss still fell at the end of a run, else None."""
    losses: list[Any] = [record.get("train_loss") for record in result.get("rounds") or []]
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
    return f"{SHORT} (from {before:.3g} to {last:.3g} over the last {2 * quarter} rounds)"
