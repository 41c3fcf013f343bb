"""The records of rounds that may still run on the GPU: the next round is queued before the results
of the last one are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.records import Progress, RoundRecord
from .meter import Mark, Meter
from .traffic import Count

Losses = list[tuple[Sequence[int], Tensor]]  # some clients and their mean losses, in chunks


class Open(NamedTuple):
    """A round whose work is queued on the device."""

    round: int
    losses: Losses
    sizes: Count
    report: Callable[[], dict[str, float]]
    stacked: int
    begin: Mark
    end: Mark


class Pending:
    """Collects rounds and writes their records, at most one round late."""

    def __init__(self, records: list[RoundRecord], meter: Meter, progress: Progress | None) -> None:
        self.records, self.meter, self.progress = records, meter, progress
        self.waiting: list[Open] = []
        self.last: Mark | None = None

    def begin(self) -> None:
        """Begin the next round: at the end of the last one, or now if other work came between."""
        if self.last is None:
            self.last = self.meter.mark()

    def add(
        self,
        round: int,
        losses: Losses,
        count: Count,
        report: Callable[[], dict[str, float]],
        stacked: int,
    ) -> None:
        """Add a round, `stacked` clients of which trained together; write the record of the one
        before it.
        """
        assert self.last is not None
        begin, self.last = self.last, self.meter.mark()
        self.waiting.append(Open(round, losses, count, report, stacked, begin, self.last))
        while len(self.waiting) > 1:
            self._write(self.waiting.pop(0))

    def drop(self) -> None:
        """Forget the last round, which is done again: its time goes on, and ends that of what was
        begun after it.
        """
        self.last = self.waiting.pop().begin

    def flush(self) -> None:
        """Wait for all rounds and write their records; later work counts to no round."""
        while self.waiting:
            self._write(self.waiting.pop(0))
        self.last = None

    def _write(self, done: Open) -> None:
        means: dict[int, Any] = {}
        with self.meter.beside(done.end):  # does not wait for the current round
            if done.losses:
                clients = [client for some, _ in done.losses for client in some]
                values = torch.cat([losses for _, losses in done.losses]).tolist()
                means = dict(zip(clients, values, strict=True))
            report = {"stacked": done.stacked, **done.report()}
            done.sizes.settle()
        weighted = {client: (done.sizes.weights[client], means[client]) for client in means}
        seconds = self.meter.between(done.begin, done.end)
        self.records.append(
            RoundRecord.make(done.round, seconds, done.sizes.up, done.sizes.down, weighted, report)
        )
        if self.progress:
            self.progress(self.records)
