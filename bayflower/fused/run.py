"""A run of the fused engine: all rounds, checkpoints, and the final test."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import Run
from ..contract import Purpose
from ..data import Federation
from ..data.crowd import numbers_of, train_sizes
from ..errors import BayflowerError
from ..files.checkpoint import Checkpoint, make, server_state, write
from ..files.journal import NO_REPLY
from ..files.records import Outcome, Progress, RoundRecord, Views, curve_point
from ..privacy.budget import Budget
from ..rounds import prints, schedule, solo
from ..rounds.diverged import EMPTY_ROUNDS, stopped
from ..rounds.halves import Halves
from ..rounds.refine import refiner_of
from ..rounds.robust import Limiter, changed
from ..tree import Tensors, flatten, stack, to, unflatten
from . import asked, secure, states, traffic
from .ahead import Ahead
from .beside import Seat
from .calibrate import calibrated_classes
from .disk import DiskBank
from .engine import Fused
from .meter import Meter
from .pending import Losses, Pending
from .replies import Replies
from .secure import totals_for
from .spread import calibrated_numbers
from .totals import Totals

log = logging.getLogger("bayflower")
# number of parameters; for smaller networks a second CPU thread slows training, above all on a busy
# machine
SMALL_MODEL = 100_000


def run_fused(
    run: Run,
    federation: Federation,
    halves: Halves,
    progress: Progress | None = None,
    out: Path | None = None,
    resume: Checkpoint | None = None,
    seat: Seat | None = None,
) -> Outcome:
    """Return the outcome of all rounds and the final test; checkpoints go to `out`. With a `seat`
    the run trains side by side with others.
    """
    small = halves.model.num_parameters < SMALL_MODEL and torch.get_num_threads() > 1
    if small and run.settings.torch_device().type == "cpu":
        with solo.one_thread():
            return run_fused(run, federation, halves, progress, out, resume, seat)
    one = FusedRun(run, federation, halves, progress=progress, out=out, resume=resume)
    if seat is not None:
        seat.take(one.engine, run, one.broadcast_to)
    try:
        outcome = one.execute()
    finally:
        one.engine.bank.shut()
    return seat.noted(outcome) if seat is not None else outcome


class FusedRun:
    """One run: its clients on the device, the server's state, and the records of its rounds.

    `lap` is called with the name of each stage of a round when it ends, for benchmarks.
    """

    def __init__(
        self,
        run: Run,
        federation: Federation,
        halves: Halves,
        *,
        progress: Progress | None = None,
        out: Path | None = None,
        resume: Checkpoint | None = None,
        lap: Callable[[str], None] = lambda stage: None,
    ) -> None:
        if resume and run.settings.stacking in ("auto", "measured"):
            stacking = resume.config.get("stacking", "auto")
            run = replace(run, settings=replace(run.settings, stacking=stacking))
        memory = resume.roster if resume else None
        known = (run.settings.rounds, run.settings.fraction_train, out, memory)
        self.budget = Budget.of(run.privacy, *known, run.training.local_epochs)
        if self.budget is not None:
            halves = secure.private_halves(self.budget, halves, len(federation.clients))
        self.run, self.settings, self.federation, self.halves = (
            run,
            run.settings,
            federation,
            halves,
        )
        self.server, self.device = halves.server, run.settings.torch_device()
        self.progress, self.out, self.lap = progress, out, lap
        self.meter = Meter(self.device)
        self.name, self.first = resume.run if resume else uuid.uuid4().hex, 1
        self.samples = train_sizes(federation)
        self.everyone = tuple(sorted(self.samples))
        self.engine: Any = self._engine(resume)
        if self.engine.one_by_one_because:
            log.warning(self.engine.one_by_one_because)
        self.state: Any = to(self.server.init(*halves.initial, self.everyone), self.device)
        self.chosen: tuple[int, list[int]] = (0, [])  # the last round that was asked for
        how = "off" if run.privacy.hides_clients else run.limits.robust
        self.limiter = Limiter(halves.server, how, run.privacy.on, refuses=False)
        self.refiner = refiner_of(run, halves, federation.input_shape)
        self.records: list[RoundRecord] = []
        self.faults: list[str] = []
        self.tested: Sequence[int] = ()  # after the last round
        self.tested_new: Sequence[int] = ()  # of the new clients
        self.empty = 0  # rounds in a row without a valid reply
        self.prints: dict[str, Any] = {}  # of the clients' data
        if resume:
            self._go_on(resume)
        self.pending = Pending(self.records, self.meter, progress)
        self.ahead = Ahead(self)

    def _engine(self, resume: Checkpoint | None) -> Any:
        """Return what trains and tests the clients."""
        fresh = self.halves.client.init(*self.halves.initial)
        bank = states.bank_of(
            self.run, fresh, self.device, self.everyone, self.out, self.name, resume
        )
        return Fused(self.halves, self.federation.clients, self.run, bank, lap=self.lap)

    def _go_on(self, resume: Checkpoint) -> None:
        """Restore the state from a checkpoint."""
        prints.check_states(resume, self.halves, here=True)
        self.faults = [*resume.faults, *prints.changed(self.federation, resume.data)]
        self.state = to(server_state(resume, self.server.state_type), self.device)
        self.first, self.records = resume.round + 1, resume.records
        self.limiter.remember(resume.roster)
        self.faults += changed(resume, self.run.limits.robust)
        if resume.clients:
            self._load(resume.clients)

    def _load(self, clients: dict[int, Tensors]) -> None:
        """Load the clients' states of a checkpoint."""
        kind, some = self.halves.client.state_type, sorted(clients)
        if flatten(unflatten(kind, clients[some[0]])):
            known: Any = stack([unflatten(kind, clients[client]) for client in some])
            self.engine.bank.put(some, to(known, self.device), self.first - 1)

    def execute(self) -> Outcome:
        """Return the outcome of all remaining rounds and the final test."""
        last = self.settings.rounds
        for round in range(self.first, last + 1):
            if self.budget is not None and not self.budget.allows():
                last = round - 1
                if self.out is not None and self.settings.checkpoint_every:
                    self.save(last)
                break
            self.round(round)
            due = schedule.checkpoint_due(round, self.settings.checkpoint_every, last)
            if due and self.out is not None:
                self.save(round)
        self.ahead.settled()
        self.pending.flush()
        self._choose_tested(last)
        views = self.test(self.engine, self.tested, last, "finetune") if self.tested else {}
        self.records[-1].update(curve_point(views, self.halves.model.task))
        newcomers = self.newcomers()
        new = self.test_new_clients(newcomers, last)
        asked = self.run.data.calibrated and bool(self.tested)
        found = self.calibrate(newcomers, last) if asked else None
        if newcomers:
            newcomers.close()
        if self.progress:
            self.progress(self.records)
        kept = dict(self.engine.bank.states())
        self.engine.close()
        why = self.engine.one_by_one_because
        return Outcome(
            self.records,
            views,
            new,
            to(self.state, "cpu"),
            kept,
            tuple(self.faults),
            remarks=(
                *(text for text in (why, secure.REMARK if self.run.privacy.on else "") if text),
                *([self.budget.remark()] if self.budget else []),
            ),
            usage=self.meter.report(),
            calibrated=found,
            privacy=self.budget.report() if self.budget else None,
        )

    # -- one round ---------------------------------------------------------------------------------
    def clients_of(self, round: int) -> list[int]:
        """Return the clients that train in a round."""
        if self.chosen[0] != round:
            self.chosen = round, self._clients_of(round)
        return self.chosen[1]

    def _clients_of(self, round: int) -> list[int]:
        settings = self.settings
        usual = schedule.clients_of(
            round, self.everyone, settings.fraction_train, seed=settings.seed
        )
        return self.budget.choose(round, self.everyone, usual) if self.budget else usual

    def round(self, round: int) -> None:
        """Train the clients of a round and update the server's state."""
        chosen = self.clients_of(round)
        before: Views = {}
        if chosen and schedule.test_due(round, self.settings.evaluate_every):
            self.ahead.settled()
            self.pending.flush()  # so that the test does not count as training time
            before = self.test(self.engine, chosen, round - 1, "finetune")
            self.records[-1].update(curve_point(before, self.halves.model.task))
        self.pending.begin()
        if self.budget is not None:
            self.budget.spend(chosen)
        count = traffic.Count(self.run, self.name, round, before)
        sizes = {client: self.samples[client] for client in chosen}
        if self.run.privacy.on:
            count.secure = self._secure_form(len(chosen))
        losses: Losses = []
        stacked = 0
        if chosen:
            losses, stacked = self._train(round, chosen, sizes, count)
        else:  # nobody was sampled, which only a private run allows: it adds noise
            self.state = self.server.finalise(self.state, {})
        if self.ahead.unread is None:
            count.weights = self.weights(chosen)
        report = partial(self._report, self.state, self.budget.shown() if self.budget else {})
        self.pending.add(round, losses, count, report, stacked)
        self.lap("records")

    def weights(self, chosen: Sequence[int]) -> dict[int, int]:
        """Return for how many samples each client of the last round counts."""
        return {client: self.limiter.counted(client, self.samples[client]) for client in chosen}

    def _trained(self, chunk: list[int], round: int) -> tuple[Any, Replies]:
        """Return the broadcast to some clients, and what they give back."""
        with self.meter.time("training"):
            message = self.broadcast_to(chunk)
            return message, self.engine.train(chunk, message, round)

    def _train(
        self, round: int, chosen: list[int], sizes: dict[int, int], count: traffic.Count
    ) -> tuple[Losses, int]:
        """Train the clients of a round and update the server's state. Return each client's mean
        loss, and how many were stacked.
        """
        totals: Totals | None = None
        losses: Losses = []
        chunks = self.engine.chunks(chosen, self.broadcast_to)
        for chunk in chunks:
            message, got = self.ahead.tried(partial(self._trained, chunk, round))
            self.limiter.catch_up()  # while the device trains
            # exact sums if trained one by one: then results equal the loop engine's bit for bit
            totals = totals or totals_for(
                self.run, self.halves, not self.engine.one_by_one_because, sizes, self.limiter
            )
            last = chunk is chunks[-1]
            if last and round < self.settings.rounds:
                # while the device trains
                self.engine.prefetch(self.clients_of(round + 1), round + 1, chunk)
                self.lap("drawing")
            with self.meter.time("aggregation"):
                if self.ahead.may(chunks, totals, got):
                    self.ahead.add(round, got, totals, count)
                    losses.append((got.clients, got.losses))
                else:
                    got = self._added(round, got, totals, losses)
                    if last and self._any_reply(round, losses):
                        self._close(round, totals)
                    self.ahead.calm = totals.calm and not got.lost
            self.lap("aggregation")
            count.add(chunk, self.halves, message, got.clients, got.updates, sizes)
        return losses, 0 if self.engine.one_by_one_because else max(map(len, chunks))

    def _added(self, round: int, got: Replies, totals: Totals, losses: Losses) -> Replies:
        """Add the replies of some clients, and return those that are good."""
        got = got.valid(self.halves, self.state)
        self.engine.keep(got, round)
        self._lost(round, got.lost)
        if got.clients:
            losses.append((got.clients, got.losses))
            totals.add(self.state, got.clients, got.updates)
        return got

    def _close(self, round: int, totals: Totals) -> None:
        """Update the server's state by the sum of a round."""
        new = self.server.finalise(self.state, totals.value(self.device))
        self.faults += [f"round {round}, {text}" for _, text in totals.told]
        before, known = self.state, (round, self.state, new)
        self.state = self.limiter.accepted(*known, self.faults.append)
        if self.refiner is not None:
            self.state = self.refiner(before, self.state, round)

    def _any_reply(self, round: int, losses: Any) -> bool:
        """Return whether there is something to add; raise if several rounds had nothing."""
        if losses or self.budget is not None:  # a private round adds its noise even to nothing
            self.empty = 0
            return True
        self.empty += 1
        cause = self.faults[-1]
        self._fault(f"round {round}: {NO_REPLY}; the global state is unchanged")
        if self.empty == min(EMPTY_ROUNDS, self.settings.rounds):
            raise BayflowerError(stopped(self.empty, cause))
        return False

    def _lost(self, round: int, lost: Mapping[int, str]) -> None:
        """Report clients whose reply is not used."""
        for client, why in sorted(lost.items()):
            self._fault(f"round {round}, client {client}: reply not used: {why}")

    def _fault(self, text: str) -> None:
        self.faults.append(text)
        log.warning("%s", text)

    def _report(self, state: Any, more: dict[str, float]) -> dict[str, float]:
        return {**self.server.report(state), **more}

    def _secure_form(self, clients: int) -> tuple[int, int, int]:
        """Return the length of a masked vector, and the further bytes down and up of a round."""
        form = self.server.summand(self.state, 0, self.server.expects(self.state))
        size = secure.masked_size(form, self.run.privacy.secure_limbs)
        return size, *secure.further_bytes(clients, len(self.everyone))

    def broadcast_to(self, chunk: list[int]) -> Any:
        """Return the broadcast to some clients: a single one, or a stack if each gets its own."""
        return asked.broadcast_to(self.server, self.state, chunk)

    # -- tests and checkpoints ---------------------------------------------------------------------
    def test(self, fused: Fused, chosen: Sequence[int], round: int, purpose: Purpose) -> Views:
        """Return every view's tally of some clients after a round."""
        with self.meter.time("evaluation"):
            return asked.tested(fused, chosen, self.broadcast_to, round, purpose)

    def _choose_tested(self, last: int) -> None:
        """Sample the clients that are tested after the last round, new ones among them."""
        new = numbers_of(self.federation.new_clients)
        share, seed = self.settings.fraction_evaluate, self.settings.seed
        chosen = schedule.clients_tested(last, (*self.everyone, *new), share, seed=seed)
        self.tested = [client for client in chosen if client in self.samples]
        self.tested_new = [client for client in chosen if client not in self.samples]

    def newcomers(self) -> Fused | None:
        """Return the new clients, None if there are none."""
        if not self.tested_new:
            return None
        why = self.engine.one_by_one_because
        return Fused(self.halves, self.federation.new_clients, self.run, one_by_one_because=why)

    def test_new_clients(self, newcomers: Fused | None, round: int) -> Views:
        """Return the tallies of the new clients, adapted as the method defines."""
        if newcomers is None:
            return {}
        return self.test(newcomers, self.tested_new, round, "new")

    def calibrate(self, newcomers: Fused | None, round: int) -> Any:
        """Return the calibrated uncertainty of all clients after the last round."""
        classes = self.halves.model.task.classes
        with self.meter.time("calibration"):
            found = calibrated_classes if classes else calibrated_numbers
            return found(self, newcomers, round)

    def save(self, round: int) -> None:
        """Write a checkpoint after a round."""
        assert self.out is not None
        self.ahead.settled()
        self.pending.flush()
        # saves the measured decision: measured again after a restart, it could differ
        one_by_one = bool(self.engine.one_by_one_because)
        where: Any = "disk" if isinstance(self.engine.bank, DiskBank) else "device"
        stacking: Any = "no" if one_by_one else "yes"
        settings = replace(self.settings, stacking=stacking, client_states=where)
        decided = replace(self.run, settings=settings)
        self.engine.bank.save(round)
        kept = dict(self.engine.bank.states())
        self.prints = self.prints or prints.of(self.federation)
        memory = {**self.limiter.memory(), **(self.budget.memory() if self.budget else {})}
        known = (self.records, self.faults, memory, self.prints)
        write(self.out, make(decided, self.name, round, self.state, kept, *known))
        self.engine.bank.tidy(round)
