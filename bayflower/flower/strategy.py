"""Any server half as a Flower Strategy: Flower's interface and the sequence of rounds.

The steps of a round are in `course.py`, its messages and their aggregation in `round.py`, the
clients of the run in `roster.py`.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .. import methods
from ..config import STRATEGY_GROUPS, Run, parse
from ..errors import BayflowerError, ConfigError
from ..files.checkpoint import Checkpoint
from ..files.journal import Journal
from ..files.records import Outcome, Progress, RoundRecord, curve_point
from ..privacy.budget import Budget
from ..recipes.check import check_calibrated
from ..rounds import schedule
from ..rounds.clock import Clock
from ..rounds.refine import Refiner
from . import budgeting, configs, hooks, predicting, records, watching
from .buffering import HOOKED, Buffering
from .collected import Enough
from .course import Course, MetricsFn
from .holding import asked_for
from .logs import Teller
from .regions import joining
from .regions.grid import Tree
from .roster import Membership, Roster
from .spreading import calibrator_for
from .summing import Summing
from .whole import refuse

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # Flower's kind of function


class BayflowerStrategy(Course, Strategy):
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
        keep_personal: bool = True,
        run_config: Mapping[str, Any] | None = None,
        quiet: bool = False,
        parsed: Run | None = None,
        folder: Path | None = None,
        refiner: Refiner | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        hooks.check(type(self), BayflowerStrategy)
        self.row, self.teller = methods.get(self.method), Teller(quiet)
        schedule.check(fraction_train, fraction_evaluate)
        if weighted_by_key != records.NUM_EXAMPLES:
            raise ConfigError(
                f"weighted_by_key must be {records.NUM_EXAMPLES!r}, got {weighted_by_key!r}; a "
                "method defines its own weights"
            )
        # what the app's run config says of local training holds unless it is given here
        settings = {**configs.named(run_config or {}, configs.RUN_CONFIG), **settings}
        self.named, self.keep_personal = frozenset(settings), keep_personal
        asks = (calibration, bool(fraction_evaluate) or keep_personal, seed)
        data, told = (parsed.data, {}) if parsed else asked_for(settings, *asks)
        if parsed is None:
            parsed = parse(self.method, settings, among=STRATEGY_GROUPS)
            told |= predicting.told(parsed.training)
        task = parsed.training.task
        check_calibrated(task, data.calibration)
        self.calibrator = calibrator_for(data, task) if data.calibrated else None
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
        self.enough = Enough(min_replies, self.journal)
        self.roster = Roster(self.limits, self.journal, self.training, told)
        self.privacy, self.refiner = parsed.privacy, refiner
        self.folder = folder  # where what was spent of a privacy budget is kept
        self.summing = Summing(self.privacy, self.run, self.roster) if self.privacy.on else None
        self.aggregation, self.clock = parsed.aggregation, clock  # a clock simulates time
        who = {"method": self.row.name, "seed": seed, "run": self.run}
        waits = not self.aggregation.buffered
        self.buffering = None if waits else Buffering(self.aggregation, clock, min_replies, who)
        self.outcome: Outcome | None = None

    # -- Flower's interface -----------------------------------------------------------------------
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Return Flower's Result after `num_rounds` and a final test; `outcome` then holds all
        tallies and states.
        """
        if evaluate_fn is not None:
            refuse(self.row)
        hooked = self._hooked("configure_train") or self._hooked("aggregate_train")
        budgeting.check(self.privacy, hooked)
        if self.buffering and hooked:
            raise ConfigError(HOOKED)
        if isinstance(grid, Tree):
            joining.check(self, hooked)
            self.joining = joining.Joining(grid, self.limits.rejoin_seconds)
        memory = self.resume.roster if self.resume else None
        planned = (num_rounds, self.fraction_train, self.folder, memory)
        self.budget = Budget.of(self.privacy, *planned, self.training.local_epochs)
        watching.starts(self, num_rounds)
        self.training = self.training.lasting(num_rounds)
        self._driven, self._last = True, num_rounds
        told = ConfigRecord() if train_config is None else train_config
        asks = ConfigRecord() if evaluate_config is None else evaluate_config
        with self.teller.open():
            self.teller.begins(type(self).__name__, num_rounds, initial_arrays, told, asks)
            self.summary()
            first = self._begin(grid, initial_arrays, timeout)
            if self.budget is not None:
                self.training = self.budget.training(self.training)
            if self.buffering:
                known = (self._half(), self.state, self.roster, num_rounds)
                self.buffering.begin(*known, self.folder)
            result = self._rounds(first, num_rounds, grid, timeout, told, asks, evaluate_fn)
            self.teller.ends(self.records, len(self.faults))
        return result

    def _rounds(
        self,
        first: int,
        last: int,
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """Return the result of the rounds from `first` to `last` and of the final test."""
        result = Result()
        if first == 1:
            self._ask(evaluate_fn, 0, result)
        for round in range(first, last + 1):
            started = time.perf_counter()
            if self.budget is not None and not self.budget.allows():
                last = self._last = round - 1
                if self.after_round and last:
                    self.after_round(self, last, True)
                break
            self.teller.round(round, last)
            self.journal.begin(round)
            if round > first or self.roll is not None:
                wait = self.buffering.patience(grid, self.roster) if self.buffering else math.inf
                self._apply(self.roster.refresh(grid, timeout, wait))
            try:
                trained = self._train(round, train_config, grid, timeout)
            except BayflowerError:
                if self.after_round and round > 1:
                    self.after_round(self, round - 1, True)
                raise
            self.records[-1]["seconds"] = time.perf_counter() - started
            if self.clock is not None and not self.buffering:
                self.records[-1]["simulated_seconds"] = self.clock.wait(self._now().sent)
            if trained is not None:
                result.train_metrics_clientapp[round] = trained
            self.teller.metrics(trained)
            self.teller.took(self.records[-1]["seconds"])
            if self.after_round:
                self.after_round(self, round, False)
            if round < last and self._tests_every_round:
                self._test(round, evaluate_config, grid, timeout, result)
            self._ask(evaluate_fn, round, result)
            if self.progress:
                self.progress(self.records)
        result.arrays = self._arrays()
        if self.buffering:
            self.buffering.end(self.roster)
        self._test(last, evaluate_config, grid, timeout, result)
        if self.calibrator and self.outcome:
            found = self._calibrate(self.calibrator, grid, timeout, self.retries)
            self.outcome = self.outcome._replace(calibrated=found, faults=tuple(self.faults))
        if self.outcome:
            self.outcome = self.outcome._replace(**budgeting.ended(self.budget))
        self._keep_rest(grid, timeout, self.retries)
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
        if not self._driven:
            self._say_sampled("configure_train")
        return asked.messages(asked.request)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies as they arrive and return the new global arrays; an invalid reply
        is reported and ignored.
        """
        trained = self._aggregate(server_round, replies)
        return (None if trained is None else self._shown()), trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterator[Message]:
        """Yield one message for every client, including new clients."""
        self._host(server_round, arrays, grid)
        asked = self._test_round(server_round, config)
        if not self._driven:
            self._say_sampled("configure_evaluate")
        return asked.messages(asked.request)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the personal models' metrics on the clients' own test data, or the result of
        `evaluate_metrics_aggr_fn`.
        """
        keep, asked = self.evaluate_metrics_aggr_fn is not None, self._now()
        views, new, numbers = asked.tallies(replies, keep, self.calibrator)
        faults = tuple(self.faults)
        self.outcome = Outcome(self.records, views, new, self.state, {}, faults)
        found = {client for group in (views, new) for client in group.get("personal", {})}
        self._kept = frozenset(found) if asked.request.keep else frozenset()
        self.teller.received("aggregate_evaluate", len(found), len(asked.request.clients))
        if not asked.request.clients and (not self.fraction_evaluate or asked.handed is not None):
            return None
        only_new = bool(new) and all(self.roster.members[c].new for c in asked.request.clients)
        idle = all(record["train_loss"] is None for record in self.records)
        if (
            self.records and idle and not self.privacy.hides_clients
        ):  # secret sampling may choose nobody
            raise BayflowerError(
                f"no client could be trained in any round; last fault: {self.journal.cause()}"
            )
        if "personal" not in views and not only_new:
            raise BayflowerError(
                f"round {server_round}: no client could be tested; last fault: "
                f"{self.faults[-1] if self.faults else 'no reply'}"
            )
        if only_new:  # no training client is in the share that was drawn
            return None
        if self.records:
            self.records[-1].update(curve_point(views, self._now().expected().task))
        if self.evaluate_metrics_aggr_fn:
            return self.evaluate_metrics_aggr_fn(numbers, self.weighted_by_key)
        summary = self._now().expected().task.summarise(views["personal"])
        return MetricRecord(
            {key: value for key, value in summary.items() if isinstance(value, (int, float))}
        )

    def summary(self) -> None:
        """Log how clients are sampled, the method and its settings."""
        self.teller.sampling(self)

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        hooks.watch(cls, BayflowerStrategy)

    # -- the steps of our own `start`, with the user's hooks where there are any -------------------
    def _hooked(self, name: str) -> bool:
        return hooks.is_overridden(self, name, BayflowerStrategy)

    @property
    def _tests_every_round(self) -> bool:
        """Return whether clients are tested after every round: where a hook waits for it."""
        return self._hooked("configure_evaluate") or self._hooked("aggregate_evaluate")

    def _say_sampled(self, hook: str) -> None:
        present = self.roster.training() if hook == "configure_train" else self.roster.present()
        self.teller.sampled(hook, len(self._now().request.clients), len(present))

    def _train(
        self, round: int, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        """Return the metrics of a round of training."""
        if self._hooked("configure_train"):
            args = (round, self._shown(), config, grid)
            self._take("configure_train", self.configure_train(*args), *args)
        else:
            self._training_round(round, config)
        if self.budget is not None and self._used != self.training:
            raise ConfigError(
                "dp plans the budget before the first round; leave train_config empty"
            )
        if self.budget is not None and self.budget.local:
            self._now().further = {"noise": json.dumps(self.budget.mechanism(1.0))}
        if self.summing:
            self.summing.open(self._now(), grid, timeout, self.budget)
        if self.joining:
            self.joining.open(self._now(), timeout, self.retries)
        self._say_sampled("configure_train")
        if self.buffering:
            return self._aggregate(round, self.buffering.exchange(self._now(), grid, timeout))
        replies = self._now().exchange(grid, timeout, self.retries)
        if self._hooked("aggregate_train"):
            return self._hand_in(self.aggregate_train, round, replies)[1]
        return self._aggregate(round, replies)

    def _test(
        self, round: int, config: ConfigRecord, grid: Grid, timeout: float, result: Result
    ) -> None:
        """Add the clients' test after a round to the result."""
        if self._hooked("configure_evaluate"):
            args = (round, self._shown(), config, grid)
            self._take("configure_evaluate", self.configure_evaluate(*args), *args)
        else:
            self._test_round(round, config)
        self._now().further = budgeting.told(self.budget)
        self._say_sampled("configure_evaluate")
        replies: Iterable[Message] = self._now().exchange(grid, timeout, self.retries)
        if self._hooked("aggregate_evaluate"):
            replies = list(replies)  # an override may read them twice, as Flower's
        if (tested := self.aggregate_evaluate(round, replies)) is not None:
            result.evaluate_metrics_clientapp[round] = tested
        self.teller.metrics(tested)

    def _ask(
        self,
        evaluate_fn: EvaluateFn | None,
        round: int,
        result: Result,
    ) -> None:
        if evaluate_fn is None:
            return
        if (answer := evaluate_fn(round, self._shown())) is not None:
            result.evaluate_metrics_serverapp[round] = answer
        self.teller.tested(round, answer)
