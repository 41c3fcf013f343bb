"""The course of a run on the server: its clients, its state and the steps of its rounds. The hooks
of Flower's Strategy (`strategy.py`) are made of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
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
from ..privacy.budget import Budget
from ..recipes import Training
from ..recipes.secrecy import Privacy
from ..rounds import schedule
from ..rounds.calibrated import Calibrated
from ..rounds.refine import Refiner
from ..rounds.robust import Limiter, changed
from ..tree import Tensors
from ..wire.hello import ClientInfo
from . import budgeting, buffering, configs, predicting, records, replies, wrapped
from .buffering import Buffering
from .calibrating import Calibrator
from .collected import Enough
from .exchange import Request
from .holding import INSIDE
from .logs import Teller
from .regions.joining import Joining
from .roster import Change, Membership, Roster
from .round import Round, RunFacts
from .summing import ALONE, Plain, Summing
from .whole import Whole, adopted
from .wrapped import Form, OwnForm, WrappedForm

log = logging.getLogger("bayflower")
# Flower's kind of function that aggregates metrics
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]


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
    enough: Enough
    roster: Roster
    summing: Summing | None  # None: sums are not secure
    joining: Joining | None = None  # None: no tree of aggregators
    buffering: Buffering | None  # None: a round waits for all of its clients
    budget: Budget | None = None
    privacy: Privacy
    calibrator: Calibrator | None
    half: ServerHalf | None = None
    limiter: Limiter
    refiner: Refiner | None  # the method's step on samples of the server's own
    state: Any = None
    teller: Teller
    keep_personal: bool
    named: frozenset[str]  # settings that the strategy was made with
    _whole: Whole | None = None
    _wrapped: ArrayRecord | None = None  # what a strategy around this one wants sent
    _given: ArrayRecord | None = None  # the arrays that hooks were last given
    _grid: Grid | None = None
    _round: Round | None = None  # the current round
    _used: Training | None = None  # the settings of the last round
    _opened: float = 0.0  # when the round began
    _driven: bool = False  # True if our own `start` runs
    _own_loop: bool = False  # True if a `start` of the user's runs
    _last: int | None = None  # the last round, if it is known
    _kept: frozenset[int] = frozenset()  # clients that saved their personal models in a test

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
        self._whole = Whole(initial, self.roster.common)
        self._initialise(self.roster.common, initial)
        if self.resume:
            self.state = server_state(self.resume, self._half().state_type)
            self._apply(self.roster.remember(self.resume.roster))
            self.limiter.remember(self.resume.roster)
            for text in changed(self.resume, self.limits.robust):
                self.journal.fault(text)
        if self.buffering:
            self.buffering.restore(self.resume, self.roster)
        self.training = self.roster.told(self.training)
        return self.resume.round + 1 if self.resume else 1

    def _host(self, round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Prepare a round for the caller of a hook: our `start`, one of the user's, or another
        strategy that runs in place of both.
        """
        self._grid = grid
        if self._driven:
            self._adopt(arrays, "configure_train")
            return
        if self.buffering or self.summing or self.privacy.private:
            other = ALONE if self.summing else budgeting.ALONE
            raise ConfigError(buffering.ALONE if self.buffering else other)
        if self.calibrator:
            log.warning(INSIDE)
            self.calibrator, self.roster.header = None, predicting.told(self.training)
        if not self._own_loop and (why := wrapped.refusal(self.row, self.training)):
            raise ConfigError(f"{why}; use {self.row.title} without a wrapper")
        if self.half is None:
            if self._last is not None:
                self.training = self.training.lasting(self._last)
            self._begin(grid, arrays, 3600.0 if self.wait is None else self.wait)
            self._given = arrays
            if not self._own_loop:
                wrapped.refuse_counters(self.state)
        elif round != self.journal.round:
            self._apply(self.roster.refresh(grid, 60.0))
        if round != self.journal.round:
            self.journal.begin(round)
        if self._own_loop:
            self._adopt(arrays, "configure_train")
        else:
            self._wrapped, self.state = arrays, wrapped.adopted(self.state, arrays)

    def _adopt(self, arrays: ArrayRecord, where: str) -> None:
        """Take over a global model that a hook has changed."""
        if arrays is not self._given and self._wrapped is None:
            self.state = adopted(self._half(), self.state, arrays, f"what {where} was given")
            self._given = arrays

    def _initialise(self, common: ClientInfo, arrays: ArrayRecord) -> None:
        anatomy, initial = common.anatomy, predicting.completed(arrays, self.training, common)
        clients = tuple(self.roster.training())
        self.half = budgeting.made(self.budget, self.row, self.options, anatomy, len(clients))
        how = "off" if self.privacy.hides_clients else self.limits.robust
        self.limiter = Limiter(self.half, how, self.summing is not None)
        names = (anatomy.trainable, anatomy.buffers)
        params, buffers = ({name: initial[name] for name in sorted(some)} for some in names)
        self.roster.admitted, self.state = set(clients), self.half.init(params, buffers, clients)

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
        half, asked, keeps = self._half(), self._now(), self.train_metrics_aggr_fn is not None
        if self.buffering:
            found = self.buffering.collect(asked, incoming, keeps, self.records)
        else:
            found = (self.joining or self.summing or Plain()).collect(asked, incoming, keeps)
        losses = found.losses
        if found.tested and self.records:
            self.records[-1].update(curve_point(found.tested, asked.expected().task))
        asks, hides = asked.request.clients, self.privacy.hides_clients
        if asks or (asked.handed is None and not hides):  # a hook may ask nobody, or chance does
            self.enough.check(server_round, len(losses))
        self.teller.received("aggregate_train", len(losses), len(asks))
        if losses or (hides and not self.summing):
            before, new = self.state, half.finalise(self.state, found.total.value())
            self.state = self.limiter.accepted(asked.number, before, new, self.journal.fault)
            if self.refiner is not None:
                self.state = self.refiner(before, self.state, server_round)
        left = self.buffering.settle(asked, found) if self.buffering else asked.count(found)
        self._apply(Change([], left))
        numbers = {**half.report(self.state), **budgeting.shown(self.budget)}
        report = {name: value for name, value in numbers.items() if math.isfinite(value)}
        odd = replies.odd_losses({client: loss for client, (_, loss) in losses.items()})
        for client in odd:
            self.journal.fault(
                f"round {server_round}, client {client}: its training loss {losses[client][1]:.3g} "
                "is out of all proportion to the others'; it does not count in the metrics"
            )
        shown = {client: loss for client, loss in losses.items() if client not in odd}
        seconds = time.perf_counter() - self._opened
        down = sum(asked.sent.values()) + found.bytes_down
        self.records.append(
            RoundRecord.make(server_round, seconds, found.bytes_up, down, shown, report)
        )
        self.records[-1].update(found.more)
        if not losses:
            return None
        if self.train_metrics_aggr_fn:
            told = [one for client, one in found.metrics.items() if client not in odd]
            return self.train_metrics_aggr_fn(told, self.weighted_by_key)
        return MetricRecord({records.TRAIN_LOSS: self.records[-1]["train_loss"], **report})

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
        return OwnForm(self.arrayrecord_key, self.configrecord_key, self._whole)

    def _arrays(self) -> ArrayRecord:
        """Return the global model."""
        self._given = self.form.arrays(self._half().shared(self.state))
        return self._given

    def _shown(self) -> ArrayRecord:
        """Return the global model for hooks and `evaluate_fn`; warn of what is not global."""
        if self._wrapped is None and self._whole is not None:
            shared = self._half().shared(self.state)
            for text in self._whole.remarks(self.row.title, shared):
                self.teller.warn(text, text)
        return self._arrays()

    def _facts(self) -> RunFacts:
        known = (self.run, self.row, self.seed, self._used or self.training, self.options)
        return RunFacts(*known, self.limits, self.roster, self.journal, self.limiter)

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs beside states, in JSON types."""
        more = budgeting.memory(self.budget) | (self.buffering.memory() if self.buffering else {})
        return {**self.roster.memory(), **self.limiter.memory(), **more}

    def kept(self) -> dict[int, Tensors]:
        """Return earlier states of the server that a resumed run needs, by round."""
        return self.buffering.kept() if self.buffering else {}

    def _training_round(self, round: int, config: ConfigRecord) -> Round:
        """Return the round with the clients that train in it. Settings of local training in
        `config` hold for this round.
        """
        used = configs.trained_with(self.training, config, self.named, self.teller.warn)
        if why := self.row.client.refuses(self.options, used):
            raise ConfigError(f"train_config: {self.row.name} {why}")
        self._used, self._opened = used, time.perf_counter()
        everyone, keys = self.roster.training(), {"seed": self.seed, "least": self.min_train_nodes}
        test = self.form.tests_ride_along and schedule.test_due(round, self.evaluate_every)
        request = Request([], MessageType.TRAIN, round, config, test)
        half: ServerHalf = self._half()
        choose: Callable[..., list[int]] = schedule.clients_of
        if self.buffering:
            old = partial(Round, self._facts(), self.form, half)
            self.buffering.wake(old, half, request, self.evaluate_every)
            choose = self.buffering.choose
        usual = choose(round, everyone, self.fraction_train, **keys)
        chosen = budgeting.sampled(self.budget, half, round, everyone, usual)
        facts, request = self._facts(), request._replace(clients=chosen)
        caps = self.roster.caps(chosen)
        self._round = Round(facts, self.form, half, self.state, request, caps)
        return self._round

    def _test_round(self, round: int, config: ConfigRecord) -> Round:
        """Return the test after a round with the clients that are tested."""
        least = self.min_evaluate_nodes if self.fraction_evaluate else 0
        present, keys = self.roster.present(), {"seed": self.seed, "least": least}
        chosen = schedule.clients_tested(round, present, self.fraction_evaluate, **keys)
        configs.tested_with(self._used or self.training, config, self.teller.warn)
        order = self.calibrator.order() if self.calibrator else ""
        keep = self._last is None or round >= self._last
        request = Request(chosen, MessageType.EVALUATE, round, config, True, order, keep=keep)
        self._round = Round(self._facts(), self.form, self._half(), self.state, request)
        return self._round

    # -- overridden hooks --------------------------------------------------------------------------
    def _enter(self, rounds: Any) -> None:
        """Note that a `start` of the user's own runs, for so many rounds if it says so."""
        self._own_loop = True
        if isinstance(rounds, int):
            self._last = rounds
        elif self.training.lasting(1) is not self.training:
            raise ConfigError(
                "schedule=cosine needs schedule_rounds: this start() has no argument num_rounds"
            )

    def _take(
        self,
        name: str,
        messages: Iterable[Message],
        round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Return the messages of a round as the overridden hook `name` made them; they, and no
        others, are what the round asks.
        """
        given, who = list(messages), f"{type(self).__name__}.{name}"
        kind = MessageType.TRAIN if name == "configure_train" else MessageType.EVALUATE
        asked = self._round
        if asked is None or (asked.number, asked.request.kind) != (round, kind):
            if given:
                raise ConfigError(
                    f"{who} returned messages without a call of super().{name}(), which opens the "
                    "round; return its messages, fewer or with further records"
                )
            self._host(round, arrays, grid)
            train = kind == MessageType.TRAIN
            asked = (self._training_round if train else self._test_round)(round, config)
        asked.take(given, who)
        return given

    def _hand_in(
        self, hook: Callable[..., Any], round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return what an overridden `aggregate_train` makes of the replies. The arrays it returns
        are the global model; None leaves the model as it was before the round, as in Flower.
        """
        came, who = list(replies), f"{type(self).__name__}.aggregate_train"
        asked, before, done = self._now(), self.state, len(self.records)
        asked.came |= {asked.client_of(reply) for reply in came}
        found = hook(round, came)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(f"{who} must return (arrays, metrics), got {type(found).__name__}")
        if len(self.records) == done:
            if asked.request.clients:
                raise ConfigError(wrapped.NO_SUPER.format(who, self.row.title))
            self._aggregate(round, [])
        if found[0] is None:
            self.state = before
        else:
            self._adopt(found[0], "aggregate_train")
        return found

    def _calibrate(
        self, calibrator: Calibrator, grid: Grid, timeout: float, retries: int
    ) -> Calibrated | None:
        """Return the uncertainty of all clients: those of the last test, and the others, which are
        asked for their tables first. With keep_personal off only those of the test.
        """
        asked = self._now()
        rest = [one for one in self.roster.present() if one not in asked.request.clients]
        if rest and self.keep_personal:
            request = asked.request._replace(clients=rest, test=False, config=ConfigRecord())
            others = Round(self._facts(), self.form, self._half(), self.state, request)
            others.calibrate(others.exchange(grid, timeout, retries), calibrator)
            request = request._replace(clients=sorted({*asked.request.clients, *rest}))
            asked = Round(self._facts(), self.form, self._half(), self.state, request)
        found = asked.calibrated(grid, timeout, retries, calibrator)
        self._kept = frozenset(calibrator.ones)  # models are saved with the last request
        return found

    def _keep_rest(self, grid: Grid, timeout: float, retries: int) -> None:
        """Ask every client that has not saved its personal model to do so."""
        rest = [client for client in self.roster.present() if client not in self._kept]
        if not rest or not self.keep_personal:
            return
        request = Request(rest, MessageType.EVALUATE, self.journal.round, ConfigRecord(), False)
        asked = Round(self._facts(), self.form, self._half(), self.state, request)
        saved = asked.saved(asked.exchange(grid, timeout, retries))
        self.teller.say("Personal models: %d of %d further clients saved theirs", saved, len(rest))

    def _leave(self) -> None:
        """End a `start` of the user's own."""
        if not self._driven and self.half is not None and self._grid is not None:
            self._keep_rest(self._grid, 3600.0 if self.wait is None else self.wait, 0)
