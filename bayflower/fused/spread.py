"""The uncertainty of all clients on one device where targets are numbers: the steps of
`rounds/spread.py`, client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..contract import Purpose
from ..data import DataSettings
from ..rounds import solo
from ..rounds.spread import Calibrated, Fitted, Held, One, Spread
from ..rounds.uncertain import added
from ..tree import take
from .engine import Fused


class Running(Protocol):
    """What this needs of a run."""

    engine: Fused
    tested: Sequence[int]
    tested_new: Sequence[int]
    run: Any

    def broadcast_to(self, chunk: list[int]) -> Any:
        """Return the broadcast to some clients."""


class Clients:
    """The clients of one engine (training or new) with their fitted models."""

    def __init__(
        self,
        fused: Fused,
        chosen: Sequence[int],
        broadcast_to: Callable[[list[int]], Any],
        round: int,
        purpose: Purpose,
    ) -> None:
        self.fused, self.spread = fused, Spread(fused.unstacked)
        self.fitted: dict[int, Fitted] = {}
        self.own: dict[int, Held] = {}
        for chunk in fused.chunks(chosen, broadcast_to):
            fused.hold(chunk)
            broadcast, states = broadcast_to(chunk), fused.bank.take(chunk)
            if fused.half.phases(purpose):
                states = fused._adapted(chunk, states, broadcast, purpose, round)
            for place, client in enumerate(chunk):
                own = take(broadcast, place) if fused.per_client else broadcast
                train = fused.stack.alone(client)
                with solo.one_thread():
                    self.fitted[client] = self.spread.fit(take(states, place), own, train)
                    held = fused.stack.held_of(client)
                    self.own[client] = self.spread.hold(self.fitted[client], held)

    def judged(self, total: Held, settings: DataSettings) -> dict[int, One]:
        """Return every client with what it uses and its tallies."""
        found = {}
        for client, fitted in self.fitted.items():
            self.fused.hold([client])
            choice = self.spread.settled(self.own[client], total, settings.calibrated_with)
            test = self.fused.stack.alone(client, test=True)
            rows = int(self.own[client].rows)
            with solo.one_thread():
                found[client] = One(rows, choice, self.spread.judge(fitted, choice, test))
        return found


def calibrated_numbers(run: Running, newcomers: Fused | None, round: int) -> Calibrated:
    """Return the uncertainty of all clients after the last round."""
    settings = run.run.data
    own = Clients(run.engine, run.tested, run.broadcast_to, round, "finetune")
    total: Held = added(list(own.own.values()))
    others: dict[int, One] = {}
    if newcomers is not None:
        new = Clients(newcomers, run.tested_new, run.broadcast_to, round, "new")
        others = new.judged(total, settings)
    found = own.judged(total, settings)
    return Calibrated(found, others, total, own.spread.kinds, own.spread.task)
