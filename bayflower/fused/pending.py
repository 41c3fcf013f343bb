"""The records of rounds that may still be running: a GPU is given the next round before it is asked
what became of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.records import Progress, RoundRecord
from .meter import Mark, Meter
from .traffic import Count


class Open(NamedTuple):
    """A round whose work was handed over."""

    round: int
    losses: dict[int, Tensor]
    sizes: Count
    report: Callable[[], dict[str, float]]
    begin: Mark
    end: Mark


class Pending:
    """Takes rounds in and writes their records, at most one round behind."""

    def __init__(self, records: list[RoundRecord], meter: Meter, progress: Progress | None) -> None:
        self.records, self.meter, self.progress = records, meter, progress
        self.waiting: list[Open] = []
        self.last: Mark | None = None

    def begin(self) -> Mark:
        """Return when the coming round begins: with the end of the last one, or now if something
        else came between.
        """
        return self.last if self.last is not None else self.meter.mark()

    def add(
        self,
        round: int,
        losses: dict[int, Tensor],
        count: Count,
        report: Callable[[], dict[str, float]],
        begin: Mark,
    ) -> None:
        """Take a round in; the one before it is written."""
        self.last = self.meter.mark()
        self.waiting.append(Open(round, losses, count, report, begin, self.last))
        while len(self.waiting) > 1:
            self._write(self.waiting.pop(0))

    def flush(self) -> None:
        """Wait for all rounds and write them; what comes next is not part of a round."""
        while self.waiting:
            self._write(self.waiting.pop(0))
        self.last = None

    def _write(self, done: Open) -> None:
        means: dict[int, Any] = {}
        with self.meter.beside(done.end):  # not behind the round that runs now
            if done.losses:
                means = dict(
                    zip(done.losses, torch.stack(list(done.losses.values())).tolist(), strict=True)
                )
            report = done.report()
            done.sizes.settle()
        weighted = {client: (done.sizes.examples[client], means[client]) for client in means}
        seconds = self.meter.between(done.begin, done.end)
        self.records.append(
            RoundRecord.make(done.round, seconds, done.sizes.up, done.sizes.down, weighted, report)
        )
        if self.progress:
            self.progress(self.records)
