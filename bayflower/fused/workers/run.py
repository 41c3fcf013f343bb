"""A run of the fused engine whose clients are on workers: the same rounds, tests and checkpoints.

The server's state goes to the workers once a round, and what comes back is a sum. Single updates
come back only where the server must look at all of them before it adds one: in the first round
under `robust` (its limits are the medians of that round), with robust=median, trimmed or krum,
where both sides count the changes of a factor, in secure sums, and where the server makes sums
private. The server's half runs in this process, on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ... import methods
from ...config import Run
from ...contract import Purpose
from ...data import Federation
from ...errors import ConfigError
from ...files import checkpoint
from ...files.checkpoint import Checkpoint
from ...files.records import Outcome, Progress, RoundRecord, Views
from ...rounds import deciding, solo, spread, uncertain
from ...rounds.calibrated import Calibrated
from ...rounds.halves import Halves
from ...tree import Tensors
from ..pending import Losses
from ..run import SMALL_MODEL, FusedRun
from ..secure import totals_for
from ..traffic import Count
from . import cargo
from .blocks import divided
from .crew import AUTO, Crew, GoneError
from .herd import Herd
from .worker import Order

log = logging.getLogger("bayflower")


def run_workers(
    run: Run,
    federation: Federation,
    halves: Halves,
    progress: Progress | None = None,
    out: Path | None = None,
    resume: Checkpoint | None = None,
    crew: Crew | None = None,
) -> Outcome:
    """Return the outcome of all rounds and the final test; checkpoints go to `out`. Without a
    `crew` one is started, and ended.
    """
    small = halves.model.num_parameters < SMALL_MODEL and torch.get_num_threads() > 1
    if small:
        with solo.one_thread():
            return run_workers(run, federation, halves, progress, out, resume, crew)
    if run.settings.client_states == "disk":
        raise ConfigError(
            "client_states=disk needs one process; leave workers out, or use client_states=device"
        )
    if run.settings.fraction_evaluate < 1 and run.data.calibrated:
        raise ConfigError(
            "fraction_evaluate below 1 needs one process, or calibration=off; leave workers out"
        )
    variables = methods.handed_on([run.method])
    most = len(divided(federation.clients, run.settings.worker_block))
    own = crew or Crew(run.settings.workers, run.settings.device, most)
    wanted = run.settings.workers
    if wanted != AUTO and len(own.workers) < int(wanted):
        log.warning("%s workers were asked for, but there are %d blocks of clients", wanted, most)
    there = replace(run, settings=replace(run.settings, device="cuda" if own.gpu else "cpu"))
    here = replace(run, settings=replace(run.settings, device="cpu"))
    shown, lines = Shown(progress), list[str]()
    try:
        while True:
            one = WorkersRun(
                own,
                (there, variables, lines),
                here,
                federation,
                halves,
                progress=shown,
                out=out,
                resume=resume,
            )
            try:
                return one.execute()
            except GoneError as error:
                log.info("lost: %s", error)
                saved = checkpoint.read(out) if out is not None else None
                if saved is not None and saved.run == one.name:
                    resume = saved
                back = f"round {resume.round}" if resume is not None else "the start"
                lines = one.broken(f"a machine died with its copies of states; back to {back}")
                log.warning(lines[-1])
    finally:
        if crew is None:
            own.close()


class Shown:
    """Shows each round once, also if it is done again."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.most = progress, 0

    def __call__(self, records: list[RoundRecord]) -> None:
        """Show the records if there are as many as ever."""
        self.most = max(self.most, len(records))
        if self.progress and len(records) == self.most:
            self.progress(records)


class WorkersRun(FusedRun):
    """One run: its clients on workers, the server's state here."""

    def __init__(
        self,
        crew: Crew,
        known: tuple[Run, dict[str, str], list[str]],
        run: Run,
        federation: Federation,
        halves: Halves,
        **more: Any,
    ) -> None:
        """`known`: the run as workers have it, variables of their environment, and lines on what
        went wrong before this object was made.
        """
        self.crew, (self.there, self.variables, self.lines), self.plain = crew, known, halves
        super().__init__(run, federation, halves, **more)
        self.faults += self.lines

    def _engine(self, resume: Checkpoint | None) -> Herd:
        settings = replace(self.there.settings, stacking=self.settings.stacking)
        # workers broadcast and add; where sums are private, that is done here
        halves = self.halves._replace(server=self.plain.server)
        self.crew.begin(halves, replace(self.there, settings=settings), self.variables)
        return self._herd("train", self.federation.clients)

    def _herd(self, kind: str, clients: Sequence[Any]) -> Herd:
        size = self.settings.worker_block
        return Herd(self.crew, kind, clients, size, self.halves.client.state_type)

    def _load(self, clients: dict[int, Tensors]) -> None:
        self.engine.load(clients)

    def broken(self, why: str) -> list[str]:
        """Return the lines of this object, which cannot go on."""
        return [*self.lines, *self._told(), why]

    def _told(self) -> list[str]:
        """Return what went wrong on workers since the last call."""
        found, self.engine.told = self.engine.told, []
        return found

    def execute(self) -> Outcome:
        """Return the outcome of all remaining rounds and the final test."""
        done = super().execute()
        facts = {
            "workers": len(self.crew.workers),
            "lost_workers": self.crew.lost,
            "moved_blocks": self.engine.moved,
        }
        late = [f"after round {self.settings.rounds}: {text}" for text in self._told()]
        return done._replace(usage={**(done.usage or {}), **facts}, faults=(*done.faults, *late))

    # -- one round ---------------------------------------------------------------------------------
    def _train(
        self, round: int, chosen: list[int], sizes: dict[int, int], count: Count
    ) -> tuple[Losses, int]:
        herd: Herd = self.engine
        self.limiter.catch_up()
        single = self.limiter.holds or self.run.privacy.on or self.server is not self.plain.server
        secure = (count.secure[0], 0, 0) if count.secure else None
        limiter = None if single else cargo.without_half(self.limiter)
        order = Order(round, self.name, None, count.tests, secure, limiter)
        with self.meter.time("training"):
            herd.decide(chosen, self.state, round)
            found = herd.train(order, chosen, self.state)
        with self.meter.time("aggregation"):
            fast = not herd.one_by_one_because
            totals = totals_for(self.run, self.halves, fast, sizes, self.limiter)
            for number in sorted(found.singles):
                for chunk, updates in found.singles[number]:
                    totals.add(self.state, chunk, cargo.thawed(updates))
            if found.sums is not None:
                cargo.merge_into(totals, found.sums)
                for seen in found.seen():
                    cargo.add_seen(self.limiter, seen)
            losses = {c: loss for one in found.reports for c, loss in one.losses.items()}
            self._lost(round, {c: why for one in found.reports for c, why in one.lost.items()})
            if self._any_reply(round, losses):
                self._close(round, totals)
        herd.rebalance()
        self.faults += [f"round {round}: {text}" for text in self._told()]
        count.up += sum(one.up for one in found.reports) + (count.secure[2] if count.secure else 0)
        count.down += sum(one.down for one in found.reports)
        count.down += count.secure[1] if count.secure else 0
        kind = torch.float64
        clients = sorted(losses)
        return (
            [(clients, torch.tensor([losses[client] for client in clients], dtype=kind))],
            max(one.stacked for one in found.reports),
        )

    # -- tests -------------------------------------------------------------------------------------
    def test(self, fused: Any, chosen: Sequence[int], round: int, purpose: Purpose) -> Views:
        """Return every view's tally of some clients after a round."""
        with self.meter.time("evaluation"):
            found: Views = fused.test(chosen, self.state, round, purpose)
        return found

    def newcomers(self) -> Any:
        """Return the new clients, None if there are none."""
        if not self.tested_new:
            return None
        made = self._herd("new", self.federation.new_clients)
        made.one_by_one_because = self.engine.one_by_one_because
        return made

    def calibrate(self, newcomers: Any, round: int) -> Any:
        """Return the calibrated uncertainty of all clients after the last round."""
        classes = self.halves.model.task.classes

        def both() -> Any:
            # in one piece: a worker that dies takes fitted models with it
            if newcomers is not None:
                newcomers.settle()
            return self._calibrated(newcomers, round, classes)

        with self.meter.time("calibration"):
            return self.engine.tried(both)

    def _calibrated(self, newcomers: Herd | None, round: int, classes: bool) -> Any:
        herd: Herd = self.engine
        own, kinds = herd.hold(self.state, round, "finetune")
        total = summed(own, classes)
        if classes:
            total = summed(herd.asked_of_all("score", total), classes)
        others: dict[int, Any] = {}
        if newcomers is not None:
            newcomers.hold(self.state, round, "new")
            if classes:
                newcomers.asked_of_all("score", total)
            others = newcomers.asked_of_all("judge", total)
        found = herd.asked_of_all("judge", total)
        if classes:
            return Calibrated(found, others, total, kinds)
        return spread.Calibrated(found, others, total, kinds, self.halves.model.task)


def summed(own: dict[int, Any], classes: bool) -> Any:
    """Return the sums of all clients."""
    parts = list(own.values())
    return uncertain.added([deciding.whole(one) for one in parts] if classes else parts)
