"""Any server half as a Flower Strategy: identity, sampling, messages per client, checking of replies, exact streaming sums.

Replies are pulled and added as they come: a round needs memory for the sum and one reply, however many clients there are. Clients are
known by the partition id each reports in one query at the start, because Flower's node ids are random.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .. import methods, metrics, sampling, wire
from ..checkpoint import Checkpoint, server_state
from ..config import Training, convert_fields, make_instructions
from ..exact import Total
from ..exchange import LOST, POLL_SECONDS, REJOIN_SECONDS, Member, Request, query, reason, stream
from ..outcome import Outcome, Progress, RoundRecord, Views, curve_point
from ..protocol import request_header
from ..types import Anatomy, BayflowerError, ConfigError, ServerHalf, Tensors

log = logging.getLogger("bayflower")
EMPTY_ROUNDS = 3  # rounds in a row without any valid reply after which a run stops


class BayflowerStrategy(Strategy):
    """A Flower Strategy made of a server half; `FedMAP`, `FedAvg`, … are this class with `method` set."""

    method: ClassVar[str] = ""

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 1,
        min_replies: int = 1,
        evaluate_every: int = 0,
        seed: int = 0,
        run: str | None = None,
        retries: int = 2,
        progress: Progress | None = None,
        after_round: Callable[[BayflowerStrategy, int, bool], None] | None = None,
        wait: float | None = None,
        roll: tuple[dict[int, Member], Anatomy] | None = None,
        resume: Checkpoint | None = None,
        **settings: Any,
    ) -> None:
        row = methods.get(self.method)
        kinds = {"training": Training, "options": row.config}
        chosen: dict[str, dict[str, Any]] = {group: {} for group in kinds}
        for name, value in {**row.defaults, **settings}.items():
            group = next((group for group, kind in kinds.items() if name in {field.name for field in dataclasses.fields(kind)}), None)
            if group is None:
                known = [field.name for kind in kinds.values() for field in dataclasses.fields(kind)]
                raise ConfigError(f"{row.title} has no setting {name!r}; it has {', '.join(known)}")
            chosen[group][name] = value
        if not 0 < fraction_train <= 1:
            raise ConfigError(f"fraction_train must be in (0, 1], got {fraction_train}; 1 means every client in every round")
        self.row, self.seed = row, seed
        self.training = convert_fields(Training, chosen["training"])
        self.options = convert_fields(row.config, chosen["options"])
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self.min_available_nodes, self.min_replies = min_available_nodes, min_replies
        self.evaluate_every, self.retries = evaluate_every, retries
        self.progress, self.after_round, self.resume, self.wait = progress, after_round, resume, wait
        self.run = resume.run if resume else run or uuid.uuid4().hex
        self.roll = roll  # who is there, if a strategy before this one has asked
        self.members: dict[int, Member] = {}
        self.records: list[RoundRecord] = list(resume.records) if resume else []
        self.faults: list[str] = list(resume.faults) if resume else []
        self.half: ServerHalf | None = None
        self.state: Any = None
        self.outcome: Outcome | None = None
        self._sent: dict[int, int] = {}  # bytes sent to each client of the round
        self._asked: dict[str, int] = {}  # node a message went to
        self._empty = 0  # rounds in a row without a valid reply

    # -- Flower's interface ------------------------------------------------------------------------------------------
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
        """Return Flower's Result after `num_rounds` and a final test; `outcome` then holds every tally and state."""
        self.summary()
        if self.roll is None:
            self.roll = self.members, self._identify(grid, timeout if self.wait is None else self.wait)
        self.members, anatomy = self.roll
        self._initialise(anatomy, wire.to_tensors(initial_arrays))
        first = 1
        if self.resume:
            self.state, first = server_state(self.resume, self._half().state_type), self.resume.round + 1
        result = Result()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        if first == 1:
            self._ask(evaluate_fn, 0, result)
        for round in range(first, num_rounds + 1):
            started = time.perf_counter()
            try:
                trained = self._aggregate(round, self._exchange(grid, self._train_request(round, train_config), timeout))
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
        tested = self.aggregate_evaluate(num_rounds, self._exchange(grid, self._test_request(num_rounds, evaluate_config), timeout))
        if tested is not None:
            result.evaluate_metrics_clientapp[num_rounds] = tested
        if self.progress:
            self.progress(self.records)
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterator[Message]:
        """Yield one message for each client of the round, made when it is asked for."""
        return self._messages(self._train_request(server_round, config))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the replies as they come and return the new global arrays; a reply that cannot be used is reported and left out."""
        trained = self._aggregate(server_round, replies)
        return (None if trained is None else self._arrays()), trained

    def _aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        half = self._half()
        total, up = Total(), 0
        losses: dict[int, tuple[int, float]] = {}
        tested: Views = {}
        for reply in replies:
            try:
                size = wire.num_bytes(reply.content) if reply.has_content() else 0
                client, update, tallies, loss = self._accept(reply, server_round, losses)
                total.add(half.statistic(self.state, client, update))
                count = int(update.num_examples)
            except Exception as error:  # whatever a client sends, it must not end the others' run
                self._fault(reply, server_round, error)
                continue
            total.drop(half.negligible(total.names()))
            losses[client] = (count, loss)
            up += size
            del update, reply  # before the next one comes
            for view, tally in tallies.items():
                tested.setdefault(view, {})[client] = tally
        for client in sorted(set(self._sent) - set(losses) - self._blamed(server_round)):
            self._note(f"round {server_round}, client {client}: no reply in time; left out of this round")
        if tested and self.records:
            self.records[-1].update(curve_point(tested))
        if len(losses) < self.min_replies and losses:
            raise BayflowerError(f"round {server_round}: {len(losses)} valid replies, min_replies is {self.min_replies}; stopped")
        if not losses:
            if self.min_replies > 1:
                raise BayflowerError(f"round {server_round}: no valid reply, min_replies is {self.min_replies}; stopped")
            self._note(f"round {server_round}: no valid reply; the global state stays as it was")
            self._empty += 1
            if self._empty == EMPTY_ROUNDS:
                last = self.faults[-2] if len(self.faults) > 1 else self.faults[-1]
                raise BayflowerError(f"no valid reply in {EMPTY_ROUNDS} rounds in a row; stopped. Last: {last}")
        else:
            self._empty = 0
            self.state = half.finalise(self.state, total.value())
        report = half.report(self.state)
        self.records.append(RoundRecord.make(server_round, 0.0, up, sum(self._sent.values()), losses, report))
        return MetricRecord({wire.TRAIN_LOSS: self.records[-1]["train_loss"], **report}) if losses else None

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterator[Message]:
        """Yield one message for every client, those that never trained included."""
        return self._messages(self._test_request(server_round, config))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the personal models' metrics on the clients' own test data."""
        views: Views = {}
        new: Views = {}
        for reply in replies:
            try:
                client = self._sender(reply, server_round)
                target = new if self.members[client].new else views
                for view, tally in wire.arrays_to_tallies(wire.arrays(reply, wire.TALLY)).items():
                    target.setdefault(view, {})[client] = tally
            except Exception as error:  # as above
                self._fault(reply, server_round, error)
        self.outcome = Outcome(self.records, views, new, self.state, {}, tuple(self.faults))
        if "personal" not in views:
            raise BayflowerError(f"round {server_round}: no client could be tested. Last: {self.faults[-1] if self.faults else 'no reply'}")
        if self.records and all(record["train_loss"] is None for record in self.records):
            raise BayflowerError(f"no client could be trained in any round. Last: {self.faults[-1]}")
        if self.records:
            self.records[-1].update(curve_point(views))
        summary = metrics.summarise(views["personal"])
        return MetricRecord({key: value for key, value in summary.items() if isinstance(value, (int, float))})

    def summary(self) -> None:
        """Log the method and its settings."""
        log.info("%s (%s): %s %s", self.row.title, self.row.paper, self.training, self.options)

    # -- inside ------------------------------------------------------------------------------------------------------
    def _half(self) -> ServerHalf:
        if self.half is None:
            raise BayflowerError("the strategy has not started; call start()")
        return self.half

    def _identify(self, grid: Grid, timeout: float) -> Anatomy:
        """Learn who is there: one query to every node; return the network's anatomy, on which all must agree."""
        deadline = time.monotonic() + timeout
        while len(nodes := sorted(grid.get_node_ids())) < self.min_available_nodes:
            if time.monotonic() > deadline:
                raise BayflowerError(f"{len(nodes)} of {self.min_available_nodes} clients came within {timeout:.0f} s; start the others")
            time.sleep(POLL_SECONDS)
        anatomies: dict[int, Anatomy] = {}
        for client, member, anatomy in query(grid, nodes, timeout, self._note):
            if client in self.members and self.members[client].node != member.node:
                raise BayflowerError(f"two nodes say they are client {client}; give each its own partition-id")
            self.members[client], anatomies[client] = member, anatomy
        if not any(not member.new for member in self.members.values()):
            raise BayflowerError(f"no client answered the first query. Last: {self.faults[-1] if self.faults else 'no reply'}")
        first = min(anatomies)
        for client, anatomy in sorted(anatomies.items()):
            if anatomy != anatomies[first]:
                raise BayflowerError(f"clients {first} and {client} have different networks; all must use the same model")
        return anatomies[first]

    def _initialise(self, anatomy: Anatomy, initial: Tensors) -> None:
        for name in (*anatomy.trainable, *anatomy.buffers):
            if name not in initial:
                raise BayflowerError(f"initial_arrays lacks {name!r}, which the clients' model has; pass the same model's state_dict()")
        self.half = self.row.server(self.options, anatomy)
        params, buffers = ({name: initial[name] for name in sorted(names)} for names in (anatomy.trainable, anatomy.buffers))
        trained = tuple(sorted(member.client for member in self.members.values() if not member.new))
        self.state = self.half.init(params, buffers, trained)

    def _arrays(self) -> ArrayRecord:
        return wire.to_arrays(self._half().shared(self.state))

    def _train_request(self, round: int, config: ConfigRecord) -> Request:
        clients = [member.client for member in self.members.values() if not member.new]
        chosen = sampling.choose(clients, self.fraction_train, seed=self.seed, round=round, least=self.min_train_nodes)
        test = bool(self.evaluate_every and round > 1 and (round - 1) % self.evaluate_every == 0)
        self._sent, self._asked = {}, {}
        return Request(chosen, MessageType.TRAIN, round, config, test)

    def _test_request(self, round: int, config: ConfigRecord) -> Request:
        self._sent, self._asked = {}, {}
        return Request(sorted(self.members), MessageType.EVALUATE, round, config, True)

    def _exchange(self, grid: Grid, request: Request, timeout: float) -> Iterator[Message]:
        """Yield the replies to a request; a client whose node or process was lost is asked again once it is back."""
        for attempt in range(self.retries + 1):
            lost: list[int] = []
            for reply in stream(grid, self._messages(request), timeout, self._asked):
                client = self._client_of(reply)
                if attempt < self.retries and client is not None and reply.has_error() and reply.error.code in LOST:
                    log.warning("round %d, client %d: %s; asked again", request.round, client, reason(reply))
                    lost.append(client)
                else:
                    yield reply
            if not lost:
                return
            self._find(grid, lost, min(timeout, REJOIN_SECONDS))
            request = request._replace(clients=sorted(lost))

    def _find(self, grid: Grid, lost: list[int], timeout: float) -> None:
        """Wait until the lost clients are back, perhaps as other nodes, and learn where they are."""
        deadline = time.monotonic() + timeout
        missing = set(lost)
        while missing and time.monotonic() < deadline:
            taken = {member.node for member in self.members.values() if member.client not in missing}
            unknown = sorted(set(grid.get_node_ids()) - taken)
            for client, member, _ in query(grid, unknown, min(10.0, timeout), self._note):
                if client in missing:
                    self.members[client] = member
                    missing.discard(client)
            if missing:
                time.sleep(POLL_SECONDS)

    def _client_of(self, reply: Message) -> int | None:
        """Return the client that was asked what `reply` answers, if it is known."""
        node = self._asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        return next((member.client for member in self.members.values() if member.node == node), None)

    def _messages(self, request: Request) -> Iterator[Message]:
        half = self._half()
        instructions = make_instructions(self.training, self.options)
        shared: ArrayRecord | None = None
        for client in request.clients:
            member = self.members[client]
            if shared is None or half.per_client:
                shared = wire.to_arrays(half.pack(half.broadcast(self.state, client)))
            head = request_header(
                method=self.row.name, run=self.run, round=request.round, seed=self.seed, evaluate=request.test,
                purpose="new" if member.new else "finetune", instructions=instructions,
            )  # fmt: skip
            content = RecordDict({wire.BROADCAST: shared, wire.HEADER: ConfigRecord(head)})
            if request.config:
                content["config"] = request.config
            self._sent[client] = wire.num_bytes(content)
            yield Message(content, dst_node_id=member.node, message_type=request.kind)

    def _sender(self, reply: Message, round: int) -> int:
        """Return the client a reply comes from; raise if it is not a reply to what was asked in this round."""
        if reply.has_error():
            raise wire.WireError(f"the client failed: {reason(reply)}")
        head = wire.header(reply, ("method", "run", "round", "client"))
        client = head["client"]
        member = self.members.get(client) if isinstance(client, int) else None
        if member is None:
            raise wire.WireError(f"client {client!r} is not known")
        if member.node != reply.metadata.src_node_id:
            raise wire.WireError(f"it says it is client {client}, which is another node")
        if client not in self._sent:
            raise wire.WireError(f"client {client} was not asked in this round")
        for name, want in (("round", round), ("run", self.run), ("method", self.row.name)):
            if head[name] != want:
                raise wire.WireError(f"the reply is for {name} {head[name]!r}, not {want!r}")
        return int(client)

    def _accept(self, reply: Message, round: int, done: dict[int, Any]) -> tuple[int, Any, dict[str, metrics.Tally], float]:
        """Return (client, update, tallies, loss) of a reply that can be used; raise with the reason otherwise."""
        client = self._sender(reply, round)
        if client in done:
            raise wire.WireError("a second reply in the same round")
        half = self._half()
        update = half.unpack(self.state, wire.arrays(reply, wire.UPDATE, consume=True))
        if reason := half.check(self.state, client, update):
            raise wire.WireError(reason)
        tallies = wire.arrays_to_tallies(wire.arrays(reply, wire.TALLY)) if wire.TALLY in reply.content else {}
        numbers = reply.content.get(wire.METRICS)
        loss = numbers.get(wire.TRAIN_LOSS) if isinstance(numbers, MetricRecord) else None
        if not isinstance(loss, (int, float)) or not math.isfinite(loss):
            raise wire.WireError(f"{wire.TRAIN_LOSS} must be a finite number, got {loss!r}")
        return client, update, tallies, float(loss)

    def _fault(self, reply: Message, round: int, error: Exception) -> None:
        known = isinstance(error, (BayflowerError, ValueError))
        reason = " ".join(str(error).split()) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
        client = self._client_of(reply)
        who = f"client {client}" if client is not None else f"node {reply.metadata.src_node_id}"
        self._note(f"round {round}, {who}: reply not used: {reason}")

    def _blamed(self, round: int) -> set[int]:
        """Return the clients of which a fault was reported in this round."""
        return {client for client in self._sent if any(note.startswith(f"round {round}, client {client}:") for note in self.faults)}

    def _note(self, text: str) -> None:
        self.faults.append(text)
        log.warning("%s", text)

    def _ask(self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None, round: int, result: Result) -> None:
        if evaluate_fn is None:
            return
        result.arrays = self._arrays()
        if (answer := evaluate_fn(round, result.arrays)) is not None:
            result.evaluate_metrics_serverapp[round] = answer
