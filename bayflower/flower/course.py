"""The course of a run on the server: its clients, its state and the steps of its rounds. The hooks
of Flower's Strategy (`strategy.py`) are made of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from ..config import Limits
from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.checkpoint import Checkpoint, server_state
from ..files.journal import Journal
from ..files.records import RoundRecord, curve_point
from ..methods import Method
from ..networks.model import Anatomy
from ..recipes import Training
from ..rounds import schedule
from ..tree import Tensors
from . import records, wrapped
from .calibrating import Calibrator
from .exchange import Request
from .holding import INSIDE
from .roster import Change, Membership, Roster
from .round import Round, RunFacts
from .wrapped import Form, OwnForm, WrappedForm

log = logging.getLogger("bayflower")
# Flower's kind of function that aggregates metrics
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
EMPTY_ROUNDS = 3  # a run stops after this many rounds in a row without a valid reply


class Course:
    """What a strategy knows of its run, and the steps of its rounds."""

    row: Method
    run: str
    seed: int
    training: Training
    options: Any
    limits: Limits
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    min_replies: int
    evaluate_every: int
    wait: float | None
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsFn | None
    resume: Checkpoint | None
    roll: Membership | None  # the clients, if an earlier strategy queried them
    records: list[RoundRecord]
    faults: list[str]
    journal: Journal
    roster: Roster
    calibrator: Calibrator | None
    half: ServerHalf | None = None
    state: Any = None
    _wrapped: ArrayRecord | None = None  # what a strategy around this one wants sent
    _round: Round | None = None  # the current round
    _empty: int = 0  # rounds in a row without a valid reply
    _driven: bool = False  # True if our own `start` runs; False inside another strategy

    # -- the course of a run ----------------------------------------------------------------------
    def _begin(self, grid: Grid, initial: ArrayRecord, timeout: float) -> int:
        """Query the clients; make the first state or restore the last; return the first round."""
        if self.roll is None:
            self.roster.gather(
                grid, self.min_available_nodes, timeout if self.wait is None else self.wait
            )
        else:
            self.roster.take(self.roll)
        assert self.roster.common is not None
        self._initialise(self.roster.common.anatomy, records.to_tensors(initial))
        if self.resume:
            self.state = server_state(self.resume, self._half().state_type)
            self._apply(self.roster.remember(self.resume.roster))
        self.training = self.roster.told(self.training)
        return self.resume.round + 1 if self.resume else 1

    def _host(self, round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Prepare a round inside another strategy, which runs in place of our `start`."""
        if self._driven:
            return
        if self.calibrator:
            log.warning(INSIDE)
            self.calibrator, self.roster.header = None, {}
        if why := wrapped.refusal(self.row, self.training):
            raise ConfigError(f"{why}; use {self.row.title} without a wrapper")
        if self.half is None:
            self._begin(grid, arrays, 3600.0 if self.wait is None else self.wait)
            if whole := wrapped.counters(self.state):
                raise ConfigError(
                    f"buffer {whole[0]!r} holds integers, which Flower's clipping cannot scale; "
                    "use a network without it"
                )
        elif round != self.journal.round:
            self._apply(self.roster.refresh(grid, 60.0))
        if round != self.journal.round:
            self.journal.begin(round)
        self._wrapped, self.state = arrays, wrapped.adopted(self.state, arrays)

    def _initialise(self, anatomy: Anatomy, initial: Tensors) -> None:
        for name in (*anatomy.trainable, *anatomy.buffers):
            if name not in initial:
                raise BayflowerError(
                    f"initial_arrays lacks {name!r}, which the clients' model has; pass the same "
                    "model's state_dict()"
                )
        self.half = self.row.server(self.options, anatomy)
        params, buffers = (
            {name: initial[name] for name in sorted(names)}
            for names in (anatomy.trainable, anatomy.buffers)
        )
        self.roster.admitted = set(self.roster.training())
        self.state = self.half.init(params, buffers, tuple(self.roster.training()))

    def _apply(self, change: Change) -> None:
        """Tell the method which clients joined and which left."""
        for client in change.joined:
            self.state = self._half().admit(self.state, client)
        for client in change.left:
            if client in self.roster.admitted:
                self.state = self._half().forget(self.state, client)

    def _aggregate(self, server_round: int, incoming: Iterable[Message]) -> MetricRecord | None:
        """Aggregate the valid replies and update the server's state; return the round's metrics,
        None without a valid reply.
        """
        half, asked = self._half(), self._now()
        found = asked.collect(incoming, self.train_metrics_aggr_fn is not None)
        losses = found.losses
        if found.tested and self.records:
            self.records[-1].update(curve_point(found.tested))
        self._require(server_round, len(losses))
        if losses:
            self.state = half.finalise(self.state, found.total.value())
        left = self.roster.settle(server_round, sorted(asked.sent), losses, found.answered)
        self._apply(Change([], left))
        numbers = half.report(self.state).items()
        report = {name: value for name, value in numbers if math.isfinite(value)}
        down = sum(asked.sent.values())
        self.records.append(
            RoundRecord.make(server_round, 0.0, found.bytes_up, down, losses, report)
        )
        if not losses:
            return None
        if self.train_metrics_aggr_fn:
            return self.train_metrics_aggr_fn(found.metrics, self.weighted_by_key)
        return MetricRecord({records.TRAIN_LOSS: self.records[-1]["train_loss"], **report})

    def _require(self, round: int, valid: int) -> None:
        """Stop the run if the round has too few valid replies, or several rounds had none."""
        if valid < self.min_replies and (valid or self.min_replies > 1):
            number = f"{valid} valid replies" if valid else "no valid reply"
            raise BayflowerError(
                f"round {round}: {number}, min_replies is {self.min_replies}; the run stopped; "
                f"last fault: {self.journal.cause()}"
            )
        if valid:
            self._empty = 0
            return
        self.journal.no_reply(round)
        self._empty += 1
        if self._empty == EMPTY_ROUNDS:
            raise BayflowerError(
                f"no valid reply in {EMPTY_ROUNDS} rounds in a row; the run stopped; last fault: "
                f"{self.journal.cause()}"
            )

    # -- what is asked ---------------------------------------------------------------------------
    def _half(self) -> ServerHalf:
        if self.half is None:
            raise BayflowerError("the strategy has not started; call start()")
        return self.half

    def _now(self) -> Round:
        if self._round is None:
            raise BayflowerError("no round is open; call start() or configure_train() first")
        return self._round

    @property
    def form(self) -> Form:
        """Return how messages look: our own form, or the plain one inside another strategy."""
        if self._wrapped is not None:
            return WrappedForm(self._wrapped, self.arrayrecord_key)
        return OwnForm(self.arrayrecord_key, self.configrecord_key)

    def _arrays(self) -> ArrayRecord:
        return self.form.arrays(self._half().shared(self.state))

    def _facts(self) -> RunFacts:
        settings = (self.training, self.options, self.limits)
        return RunFacts(self.run, self.row, self.seed, *settings, self.roster, self.journal)

    def _training_round(self, round: int, config: ConfigRecord) -> Round:
        """Return the round with the clients that train in it."""
        chosen = schedule.clients_of(
            round,
            self.roster.training(),
            self.fraction_train,
            seed=self.seed,
            least=self.min_train_nodes,
        )
        test = self.form.tests_ride_along and schedule.test_due(round, self.evaluate_every)
        request = Request(chosen, MessageType.TRAIN, round, config, test)
        caps = self.roster.caps(chosen)
        self._round = Round(self._facts(), self.form, self._half(), self.state, request, caps)
        return self._round

    def _test_round(self, round: int, config: ConfigRecord) -> Round:
        """Return the test after a round with the clients that are tested."""
        chosen = schedule.clients_tested(
            round,
            self.roster.present(),
            self.fraction_evaluate,
            seed=self.seed,
            least=self.min_evaluate_nodes if self.fraction_evaluate else 0,
        )
        order = self.calibrator.order() if self.calibrator else ""
        request = Request(chosen, MessageType.EVALUATE, round, config, True, order)
        self._round = Round(self._facts(), self.form, self._half(), self.state, request)
        return self._round
