"""Training that gave numbers that are none: what every engine says of it, and when a run stops."""

from __future__ import annotations

import math
from typing import Any

EMPTY_ROUNDS = 3  # a run stops after this many rounds in a row without a valid reply
LARGEST_LOSS = 1e30  # larger losses are rejected: training has diverged


def loss_problem(name: str, loss: Any) -> str | None:
    """Return why a client's mean training loss cannot be one, or None."""
    number = isinstance(loss, (int, float))
    if number and math.isfinite(loss) and abs(loss) <= LARGEST_LOSS:
        return None
    return (
        f"{name} must be a finite number in [-{LARGEST_LOSS:g}, {LARGEST_LOSS:g}], got "
        f"{str(loss)[:80]}"
    )


def stopped(rounds: int, cause: str) -> str:
    """Return why a run ends after so many rounds without a valid reply."""
    return f"no valid reply in {rounds} rounds in a row; the run stopped; last fault: {cause}"
