"""A simulated clock: when clients of known speed would reply. No time passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..data import batches

USUAL = 1.0  # seconds of a client that is not named


class Clock:
    """The simulated time of a run, and when each client that is training will be ready."""

    def __init__(self, seconds: Mapping[int, float], seed: int) -> None:
        self.seconds, self.seed = dict(seconds), seed
        self.now = 0.0
        self.due: dict[int, tuple[float, float]] = {}  # by client: its time, and a draw for ties

    def begin(self, clients: Iterable[int], round: int) -> None:
        """Let clients begin to train now."""
        for client in clients:
            draw = float(batches.rng(self.seed, "clock", client, round).random())
            self.due[client] = (self.now + self.seconds.get(client, USUAL), draw)

    def first(self) -> int | None:
        """Return the client that is ready first; the clock moves on to then. None if nobody
        trains.
        """
        if not self.due:
            return None
        client = min(self.due, key=lambda one: (*self.due[one], one))
        self.now = max(self.now, self.due.pop(client)[0])
        return client

    def wait(self, clients: Iterable[int]) -> float:
        """Return the seconds of a round that waits for all of these clients."""
        return max((self.seconds.get(one, USUAL) for one in clients), default=0.0)

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        return {"now": self.now, "due": {str(one): list(at) for one, at in self.due.items()}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` returned."""
        self.now = float(memory.get("now", 0.0))
        self.due = {int(one): (at[0], at[1]) for one, at in memory.get("due", {}).items()}
