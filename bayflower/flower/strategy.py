"""Any server half as a Flower Strategy: Flower's interface and the sequence of rounds.

Messages and aggregation of one round are in `round.py`, the clients of the run in `roster.py`.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .. import methods, metrics
from ..config import STRATEGY_GROUPS, Run, parse
from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.checkpoint import Checkpoint, server_state
from ..files.journal import Journal
from ..files.records import Outcome, Progress, RoundRecord, curve_point
from ..networks.model import Anatomy
from ..rounds import schedule
from ..tree import Tensors
from . import records, wrapped
from .calibrating import Calibrator
from .exchange import Request
from .holding import INSIDE, asked_for
from .roster import Change, Membership, Roster
from .round import Round, RunFacts
from .wrapped import Form, OwnForm, WrappedForm

log = logging.getLogger("bayflower")
# Flower's kind of function that aggregates metrics
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
EMPTY_ROUNDS = 3  # a run stops after this many rounds in a row without a valid reply


class BayflowerStrategy(Strategy):
    """A Flower Strategy made of a server half; `FedMAP`, `FedAvg`, … are this class with `method`
    set.
    """

    method: ClassVar[str] = ""

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = records.NUM_EXAMPLES,
        arrayrecord_key: str = records.BROADCAST,
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        min_replies: int = 1,
        evaluate_every: int = 0,
        seed: int = 0,
        run: str | None = None,
        retries: int = 2,
        progress: Progress | None = None,
        after_round: Callable[[BayflowerStrategy, int, bool], None] | None = None,
        wait: float | None = None,
        roll: Membership | None = None,
        resume: Checkpoint | None = None,
        calibration: str = "off",
        parsed: Run | None = None,
        **settings: Any,
    ) -> None:
        self.row = methods.get(self.method)
        schedule.check(fraction_train, fraction_evaluate)
        if weighted_by_key != records.NUM_EXAMPLES:
            raise ConfigError(
                f"weighted_by_key must be {records.NUM_EXAMPLES!r}, got {weighted_by_key!r}; a "
                "method defines its own weights"
            )
        asks = (calibration, fraction_evaluate, seed)
        data, told = (parsed.data, {}) if parsed else asked_for(settings, *asks)
        self.calibrator = Calibrator(data) if data.calibrated else None
        parsed = parsed or parse(self.method, settings, among=STRATEGY_GROUPS)
        self.training, self.options, self.limits = parsed.training, parsed.options, parsed.limits
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self.fraction_evaluate, self.min_evaluate_nodes = fraction_evaluate, min_evaluate_nodes
        self.weighted_by_key, self.configrecord_key = weighted_by_key, configrecord_key
        self.arrayrecord_key, self.seed = arrayrecord_key, seed
        self.train_metrics_aggr_fn, self.wait = train_metrics_aggr_fn, wait
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        self.min_available_nodes, self.min_replies = min_available_nodes, min_replies
        self.evaluate_every, self.retries = evaluate_every, retries
        self.progress, self.after_round = progress, after_round
        self.run = resume.run if resume else run or uuid.uuid4().hex
        self.resume, self.roll = resume, roll  # the clients, if an earlier strategy queried them
        self.records: list[RoundRecord] = list(resume.records) if resume else []
        self.faults: list[str] = list(resume.faults) if resume else []
        self.journal = Journal(self.run, self.faults)
        self.roster = Roster(self.limits, self.journal, self.training, told)
        self.half: ServerHalf | None = None
        self.state: Any = None
        self.outcome: Outcome | None = None
        self._wrapped: ArrayRecord | None = None  # what a strategy around this one wants sent
        self._round: Round | None = None  # the current round
        self._empty = 0  # rounds in a row without a valid reply
        self._driven = False  # True if our own `start` runs; False inside another strategy

    # -- Flower's interface -----------------------------------------------------------------------
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Return Flower's Result after `num_rounds` and a final test; `outcome` then holds all
        tallies and states.
        """
        self.training = self.training.lasting(num_rounds)
        self.summary()
        self._driven = True
        first = self._begin(grid, initial_arrays, timeout)
        result = Result()
        train_config, evaluate_config = (
            train_config or ConfigRecord(),
            evaluate_config or ConfigRecord(),
        )
        if first == 1:
            self._ask(evaluate_fn, 0, result)
        for round in range(first, num_rounds + 1):
            started = time.perf_counter()
            self.journal.begin(round)
            if round > first or self.roll is not None:
                self._apply(self.roster.refresh(grid, timeout))
            try:
                asked = self._training_round(round, train_config)
                trained = self._aggregate(round, asked.exchange(grid, timeout, self.retries))
            except BayflowerError:
                if self.after_round and round > 1:
                    self.after_round(self, round - 1, True)
                raise
            self.records[-1]["seconds"] = time.perf_counter() - started
            if trained is not None:
                result.train_metrics_clientapp[round] = trained
            if self.after_round:
                self.after_round(self, round, False)
            self._ask(evaluate_fn, round, result)
            if self.progress:
                self.progress(self.records)
        result.arrays = self._arrays()
        asked = self._test_round(num_rounds, evaluate_config)
        tested = self.aggregate_evaluate(num_rounds, asked.exchange(grid, timeout, self.retries))
        if tested is not None:
            result.evaluate_metrics_clientapp[num_rounds] = tested
        if self.calibrator and self.outcome:
            found = self._now().calibrated(grid, timeout, self.retries, self.calibrator)
            self.outcome = self.outcome._replace(calibrated=found, faults=tuple(self.faults))
        if self.progress:
            self.progress(self.records)
        self.roll = self.roster.membership()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterator[Message]:
        """Yield one message for each client of the round, built when needed."""
        self._host(server_round, arrays, grid)
        asked = self._training_round(server_round, config)
        return asked.messages(asked.request)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies as they arrive and return the new global arrays; an invalid reply
        is reported and ignored.
        """
        trained = self._aggregate(server_round, replies)
        return (None if trained is None else self._arrays()), trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterator[Message]:
        """Yield one message for every client, including new clients."""
        self._host(server_round, arrays, grid)
        asked = self._test_round(server_round, config)
        return asked.messages(asked.request)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the personal models' metrics on the clients' own test data, or the result of
        `evaluate_metrics_aggr_fn`.
        """
        keep = self.evaluate_metrics_aggr_fn is not None
        views, new, numbers = self._now().tallies(replies, keep, self.calibrator)
        faults = tuple(self.faults)
        self.outcome = Outcome(self.records, views, new, self.state, {}, faults)
        if not self.fraction_evaluate:
            return None
        if "personal" not in views:
            raise BayflowerError(
                f"round {server_round}: no client could be tested; last fault: "
                f"{self.faults[-1] if self.faults else 'no reply'}"
            )
        if self.records and all(record["train_loss"] is None for record in self.records):
            raise BayflowerError(
                f"no client could be trained in any round; last fault: {self.journal.cause()}"
            )
        if self.records:
            self.records[-1].update(curve_point(views))
        if self.evaluate_metrics_aggr_fn:
            return self.evaluate_metrics_aggr_fn(numbers, self.weighted_by_key)
        summary = metrics.summarise(views["personal"])
        return MetricRecord(
            {key: value for key, value in summary.items() if isinstance(value, (int, float))}
        )

    def summary(self) -> None:
        """Log the method and its settings."""
        log.info("%s (%s): %s %s", self.row.title, self.row.paper, self.training, self.options)

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

    def _ask(
        self,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        round: int,
        result: Result,
    ) -> None:
        if evaluate_fn is None:
            return
        result.arrays = self._arrays()
        if (answer := evaluate_fn(round, result.arrays)) is not None:
            result.evaluate_metrics_serverapp[round] = answer
