"""Any server half as a Flower Strategy: sampling, messages per client, exact streaming sums, and
the course of a run.

Replies are added as they come: memory for one sum and one reply. Who is there, which replies count,
how messages travel: `flower/`.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .. import methods, metrics
from ..config import make_instructions, strategy_settings
from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.checkpoint import Checkpoint, server_state
from ..files.journal import Journal
from ..files.records import Outcome, Progress, RoundRecord, Views, curve_point
from ..maths.exact import Total
from ..networks.model import Anatomy
from ..rounds import sampling
from ..tree import Tensors
from ..wire.protocol import request_header
from . import records, replies, wrapped
from .exchange import LOST, Request, reason, stream
from .roster import Change, Roll, Roster

log = logging.getLogger("bayflower")
# Flower's kind of function that aggregates metrics
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
EVALUATION = 2**30  # added to a round for the draw of clients that are tested
EMPTY_ROUNDS = 3  # rounds in a row without any valid reply after which a run stops


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
        roll: Roll | None = None,
        resume: Checkpoint | None = None,
        **settings: Any,
    ) -> None:
        row = methods.get(self.method)
        if not 0 < fraction_train <= 1:
            raise ConfigError(
                f"fraction_train must be in (0, 1], got {fraction_train}; 1 means every client in "
                "every round"
            )
        if not 0 <= fraction_evaluate <= 1:
            raise ConfigError(
                f"fraction_evaluate must be in [0, 1], got {fraction_evaluate}; 0 means no test "
                "after the last round"
            )
        if weighted_by_key != records.NUM_EXAMPLES:
            raise ConfigError(
                f"weighted_by_key must be {records.NUM_EXAMPLES!r}, got {weighted_by_key!r}; a "
                "method defines its own weights"
            )
        self.row, self.seed = row, seed
        self.training, self.options, self.limits = strategy_settings(self.method, settings)
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self.fraction_evaluate, self.min_evaluate_nodes = fraction_evaluate, min_evaluate_nodes
        self.weighted_by_key, self.arrayrecord_key, self.configrecord_key = (
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
        )
        self.train_metrics_aggr_fn, self.evaluate_metrics_aggr_fn = (
            train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn,
        )
        self.min_available_nodes, self.min_replies = min_available_nodes, min_replies
        self.evaluate_every, self.retries = evaluate_every, retries
        self.progress, self.after_round, self.resume, self.wait = (
            progress,
            after_round,
            resume,
            wait,
        )
        self.run = resume.run if resume else run or uuid.uuid4().hex
        self.roll = roll  # who is there, if somebody has asked before
        self.records: list[RoundRecord] = list(resume.records) if resume else []
        self.faults: list[str] = list(resume.faults) if resume else []
        self.journal = Journal(self.run, self.faults)
        self.roster = Roster(self.limits, self.journal)
        self.half: ServerHalf | None = None
        self.state: Any = None
        self.outcome: Outcome | None = None
        self._sent: dict[int, int] = {}  # bytes sent to each client of the round
        self._asked: dict[str, int] = {}  # node a message went to
        self._caps: dict[int, int] = {}  # clients that count for fewer samples than they have
        self._empty = 0  # rounds in a row without a valid reply
        self._driven = False  # whether `start` is ours; if not, another strategy is around this one
        self._plain: ArrayRecord | None = None  # what that one wants to be sent

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
        """Return Flower's Result after `num_rounds` and a final test; `outcome` then holds every
        tally and state.
        """
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
                self._apply(self.roster.muster(grid, timeout))
            try:
                trained = self._aggregate(
                    round, self._exchange(grid, self._train_request(round, train_config), timeout)
                )
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
        tested = self.aggregate_evaluate(
            num_rounds,
            self._exchange(grid, self._test_request(num_rounds, evaluate_config), timeout),
        )
        if tested is not None:
            result.evaluate_metrics_clientapp[num_rounds] = tested
        if self.progress:
            self.progress(self.records)
        self.roll = self.roster.roll()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterator[Message]:
        """Yield one message for each client of the round, made when it is asked for."""
        self._host(server_round, arrays, grid)
        return self._messages(self._train_request(server_round, config))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the replies as they come and return the new global arrays; a reply that cannot be
        used is reported and left out.
        """
        trained = self._aggregate(server_round, replies)
        return (None if trained is None else self._arrays()), trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterator[Message]:
        """Yield one message for every client, those that never trained included."""
        self._host(server_round, arrays, grid)
        return self._messages(self._test_request(server_round, config))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the personal models' metrics on the clients' own test data, or what
        `evaluate_metrics_aggr_fn` makes of the replies'.
        """
        views, numbers = self._tested(server_round, replies)
        if not self.fraction_evaluate:
            return None
        if "personal" not in views:
            raise BayflowerError(
                f"round {server_round}: no client could be tested. Last: "
                f"{self.faults[-1] if self.faults else 'no reply'}"
            )
        if self.records and all(record["train_loss"] is None for record in self.records):
            raise BayflowerError(
                f"no client could be trained in any round. Last: {self.faults[-1]}"
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
        """Learn who is there, make the first state, or go on from
        the last; return the first round.
        """
        if self.roll is None:
            self.roster.gather(
                grid, self.min_available_nodes, timeout if self.wait is None else self.wait
            )
        else:
            self.roster.take(self.roll)
        assert self.roster.common is not None
        self._initialise(self.roster.common.anatomy, records.to_tensors(initial))
        if not self.resume:
            return 1
        self.state = server_state(self.resume, self._half().state_type)
        self._apply(self.roster.remember(self.resume.roster))
        return self.resume.round + 1

    def _host(self, round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Begin, or go on, inside another strategy, which calls what our `start` would."""
        if self._driven:
            return
        if why := wrapped.refusal(self.row):
            raise ConfigError(f"{why}; call start() of {self.row.title} itself")
        if self.half is None:
            self._begin(grid, arrays, 3600.0 if self.wait is None else self.wait)
            if whole := wrapped.counters(self.state):
                raise ConfigError(
                    f"{whole[0]!r} holds a whole number, which Flower's clipping cannot scale; "
                    "use a network without it"
                )
        elif round != self.journal.round:
            self._apply(self.roster.muster(grid, 60.0))
        if round != self.journal.round:
            self.journal.begin(round)
        self._plain, self.state = arrays, wrapped.adopted(self.state, arrays)

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
        """Let the method know who came and who went."""
        for client in change.joined:
            self.state = self._half().admit(self.state, client)
        for client in change.left:
            if client in self.roster.admitted:
                self.state = self._half().forget(self.state, client)

    def _aggregate(self, server_round: int, incoming: Iterable[Message]) -> MetricRecord | None:
        """Add what can be used of the replies and take the step; return the round's numbers, None
        if there was no reply.
        """
        half, total, up = self._half(), Total(), 0
        losses: dict[int, tuple[int, float]] = {}
        numbers: list[RecordDict] = []
        answered: set[int] = set()
        tested: Views = {}
        expected = self._expected(server_round)
        held: dict[int, Any] = {}  # updates whose weight depends on what the others claim
        wait = self.limits.max_share < 1 and half.has_claims
        for reply in incoming:
            try:
                replies.sender(reply, expected)
                size = records.num_bytes(reply.content)  # before `accept` takes the arrays out
                client, update, tallies, loss = replies.accept(
                    reply, expected, half, self.state, losses
                )
                if wait:
                    held[client] = update
                else:
                    total.add(half.statistic(self.state, client, update))
                count = int(update.num_examples)
            except Exception as error:  # whatever a client sends, it must not end the others' run
                self._fault(reply, server_round, error)
                if (
                    not (reply.has_error() and reply.error.code in LOST)
                    and (asked := self._client_of(reply)) is not None
                ):
                    answered.add(asked)
                continue
            total.drop(half.negligible(total.names()))
            losses[client] = (count, loss)
            if self.train_metrics_aggr_fn:
                numbers.append(replies.metrics_of(reply))
            up += size
            del update, reply  # before the next one comes
            for view, tally in tallies.items():
                tested.setdefault(view, {})[client] = tally
        for client, update in self.roster.moderate(half, self.state, held).items():
            total.add(half.statistic(self.state, client, update))
        for client in sorted(set(self._sent) - set(losses) - self.journal.blamed):
            self.journal.fault(
                f"round {server_round}, client {client}: no reply in time; left out of this round",
                client,
            )
        if tested and self.records:
            self.records[-1].update(curve_point(tested))
        self._require(server_round, len(losses))
        if losses:
            self.state = half.finalise(self.state, total.value())
        self._apply(
            Change([], self.roster.settle(server_round, sorted(self._sent), losses, answered))
        )
        report = {
            name: value for name, value in half.report(self.state).items() if math.isfinite(value)
        }
        self.records.append(
            RoundRecord.make(server_round, 0.0, up, sum(self._sent.values()), losses, report)
        )
        if losses and self.train_metrics_aggr_fn:
            return self.train_metrics_aggr_fn(numbers, self.weighted_by_key)
        return (
            MetricRecord({records.TRAIN_LOSS: self.records[-1]["train_loss"], **report})
            if losses
            else None
        )

    def _require(self, round: int, valid: int) -> None:
        """Stop the run if too few replies can be used, or none in several rounds."""
        if valid < self.min_replies and (valid or self.min_replies > 1):
            number = f"{valid} valid replies" if valid else "no valid reply"
            raise BayflowerError(
                f"round {round}: {number}, min_replies is {self.min_replies}; stopped"
            )
        if valid:
            self._empty = 0
            return
        self.journal.fault(f"round {round}: no valid reply; the global state stays as it was")
        self._empty += 1
        if self._empty == EMPTY_ROUNDS:
            last = self.faults[-2] if len(self.faults) > 1 else self.faults[-1]
            raise BayflowerError(
                f"no valid reply in {EMPTY_ROUNDS} rounds in a row; stopped. Last: {last}"
            )

    def _tested(
        self, server_round: int, incoming: Iterable[Message]
    ) -> tuple[Views, list[RecordDict]]:
        """Return the test results of the training clients by view, and the metrics of their
        replies; `outcome` has all results.
        """
        numbers: list[RecordDict] = []
        views: Views = {}
        new: Views = {}
        expected = self._expected(server_round)
        for reply in incoming:
            try:
                client, tallies = replies.tested(reply, expected)
            except Exception as error:  # as above
                self._fault(reply, server_round, error)
                continue
            target = new if self.roster.members[client].new else views
            if target is views and self.evaluate_metrics_aggr_fn:
                numbers.append(replies.metrics_of(reply))
            for view, tally in tallies.items():
                target.setdefault(view, {})[client] = tally
        self.outcome = Outcome(self.records, views, new, self.state, {}, tuple(self.faults))
        return views, numbers

    # -- messages ---------------------------------------------------------------------------------
    def _half(self) -> ServerHalf:
        if self.half is None:
            raise BayflowerError("the strategy has not started; call start()")
        return self.half

    def _arrays(self) -> ArrayRecord:
        shared = self._half().shared(self.state)
        return (
            records.to_arrays(shared)
            if self._plain is None
            else wrapped.ordered(shared, list(self._plain))
        )

    def _expected(self, round: int) -> replies.Expected:
        assert self.roster.common is not None
        classes = self.roster.common.num_classes
        return replies.Expected(
            self.run,
            self.row.name,
            round,
            self._sent,
            self.roster.members,
            classes,
            self.limits,
            self.training,
            self._caps,
            self._plain is not None,
        )

    def _train_request(self, round: int, config: ConfigRecord) -> Request:
        chosen = sampling.choose(
            self.roster.training(),
            self.fraction_train,
            seed=self.seed,
            round=round,
            least=self.min_train_nodes,
        )
        self._caps = self.roster.caps(chosen)
        test = bool(
            self._plain is None
            and self.evaluate_every
            and round > 1
            and (round - 1) % self.evaluate_every == 0
        )
        self._sent, self._asked = {}, {}
        return Request(chosen, MessageType.TRAIN, round, config, test)

    def _test_request(self, round: int, config: ConfigRecord) -> Request:
        self._sent, self._asked = {}, {}
        least = self.min_evaluate_nodes if self.fraction_evaluate else 0
        chosen = sampling.choose(
            self.roster.present(),
            self.fraction_evaluate,
            seed=self.seed,
            round=round + EVALUATION,
            least=least,
        )
        return Request(chosen, MessageType.EVALUATE, round, config, True)

    def _exchange(self, grid: Grid, request: Request, timeout: float) -> Iterator[Message]:
        """Yield the replies to a request; a client whose node or process was lost is asked again
        once it is back.
        """
        for attempt in range(self.retries + 1):
            lost: list[int] = []
            nodes = self.roster.nodes(request.clients)
            for reply in stream(
                grid,
                nodes,
                partial(self._messages, request),
                timeout,
                self.roster.line,
                self._asked,
            ):
                client = self._client_of(reply)
                if (
                    attempt < self.retries
                    and client is not None
                    and reply.has_error()
                    and reply.error.code in LOST
                ):
                    log.warning(
                        "round %d, client %d: %s; asked again", request.round, client, reason(reply)
                    )
                    lost.append(client)
                else:
                    yield reply
            if not lost:
                return
            self.roster.find(grid, lost, min(timeout, self.limits.rejoin_seconds))
            request = request._replace(clients=sorted(lost))

    def _client_of(self, reply: Message) -> int | None:
        """Return the client that was asked what `reply` answers, if it is known."""
        return self.roster.client_at(
            self._asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        )

    def _messages(
        self, request: Request, nodes: Iterable[int] | None = None, ttl: float | None = None
    ) -> Iterator[Message]:
        """Yield the messages of a request, or those to some of its nodes, made when they are asked
        for.
        """
        half = self._half()
        instructions = make_instructions(self.training, self.options)
        shared: ArrayRecord | None = None
        there = set(self.roster.nodes(request.clients) if nodes is None else nodes)
        for client, member in (
            (one, self.roster.members[one])
            for one in request.clients
            if self.roster.members[one].node in there
        ):
            if self._plain is None and (shared is None or half.per_client):
                shared = records.to_arrays(half.pack(half.broadcast(self.state, client)))
            head = request_header(
                method=self.row.name,
                run=self.run,
                round=request.round,
                seed=self.seed,
                evaluate=request.test,
                purpose="new" if member.new else "finetune",
                instructions=instructions,
            )
            head |= self.roster.told(client)
            if self._plain is not None:
                told = ConfigRecord({**request.config, **head, "plain": True})
                content = RecordDict({self.arrayrecord_key: self._plain, records.HEADER: told})
            else:
                assert shared is not None
                content = RecordDict(
                    {self.arrayrecord_key: shared, records.HEADER: ConfigRecord(head)}
                )
                if request.config:
                    content[self.configrecord_key] = ConfigRecord(
                        {**request.config, "server-round": request.round}
                    )
            self._sent[client] = records.num_bytes(content)
            yield Message(content, dst_node_id=member.node, message_type=request.kind, ttl=ttl)

    def _fault(self, reply: Message, round: int, error: Exception) -> None:
        known = isinstance(error, (BayflowerError, ValueError))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        client = self._client_of(reply)
        who = f"client {client}" if client is not None else f"node {reply.metadata.src_node_id}"
        self.journal.fault(f"round {round}, {who}: reply not used: {text}", client)

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
