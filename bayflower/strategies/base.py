"""Any server half as a Flower Strategy: identity, sampling, messages per client, checking of replies, exact streaming sums.

Replies are pulled and added as they come: a round needs memory for the sum and one reply, however many clients there are. Clients are
known by the partition id each reports in one query at the start, because Flower's node ids are random.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .. import methods, metrics, sampling, wire
from ..config import Training, convert_fields
from ..exact import Total
from ..outcome import Outcome, Progress, RoundRecord, Views, curve_point
from ..tree import num_bytes
from ..types import Anatomy, BayflowerError, ConfigError, Purpose, ServerHalf, Tensors

log = logging.getLogger("bayflower")
POLL_SECONDS = 0.2


class Member(NamedTuple):
    """A client as the server knows it."""

    client: int
    node: int
    new: bool


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
        progress: Progress | None = None,
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
        self.evaluate_every, self.progress = evaluate_every, progress
        self.run = run or uuid.uuid4().hex
        self.members: dict[int, Member] = {}
        self.records: list[RoundRecord] = []
        self.faults: list[str] = []
        self.half: ServerHalf | None = None
        self.state: Any = None
        self.outcome: Outcome | None = None
        self._tested: Views = {}
        self._sent: dict[int, int] = {}  # bytes sent to each client of the round

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
        anatomy = self._identify(grid, timeout)
        self._initialise(anatomy, wire.to_tensors(initial_arrays))
        result = Result()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self._ask(evaluate_fn, 0, result)
        for round in range(1, num_rounds + 1):
            started = time.perf_counter()
            messages = self.configure_train(round, result.arrays, train_config, grid)
            trained = self._aggregate(round, stream(grid, messages, timeout))
            self.records[-1]["seconds"] = time.perf_counter() - started
            if trained is not None:
                result.train_metrics_clientapp[round] = trained
            self._ask(evaluate_fn, round, result)
            if self.progress:
                self.progress(self.records)
        result.arrays = self._arrays()
        messages = self.configure_evaluate(num_rounds, result.arrays, evaluate_config, grid)
        tested = self.aggregate_evaluate(num_rounds, stream(grid, messages, timeout))
        if tested is not None:
            result.evaluate_metrics_clientapp[num_rounds] = tested
        if self.progress:
            self.progress(self.records)
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterator[Message]:
        """Yield one message for each client of the round, made when it is asked for."""
        clients = [member.client for member in self.members.values() if not member.new]
        chosen = sampling.choose(clients, self.fraction_train, seed=self.seed, round=server_round, least=self.min_train_nodes)
        test = bool(self.evaluate_every and server_round > 1 and (server_round - 1) % self.evaluate_every == 0)
        self._sent = {}
        return self._messages(chosen, MessageType.TRAIN, server_round, config, evaluate=test, purpose="finetune")

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
                client, update, tallies, loss = self._accept(reply, server_round, losses)
                total.add(half.statistic(self.state, client, update))
                count, size = int(update.num_examples), num_bytes(update)
            except (BayflowerError, ValueError) as error:
                self._fault(reply, server_round, str(error))
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
        else:
            self.state = half.finalise(self.state, total.value())
        report = half.report(self.state)
        self.records.append(RoundRecord.make(server_round, 0.0, up, sum(self._sent.values()), losses, report))
        return MetricRecord({wire.TRAIN_LOSS: self.records[-1]["train_loss"], **report}) if losses else None

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterator[Message]:
        """Yield one message for every client, those that never trained included."""
        known = sorted(self.members)
        self._sent = {}
        return self._messages(known, MessageType.EVALUATE, server_round, config, evaluate=True, purpose=None)

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
            except (BayflowerError, ValueError) as error:
                self._fault(reply, server_round, str(error))
        self.outcome = Outcome(self.records, views, new, self.state, {}, tuple(self.faults))
        if "personal" not in views:
            return None
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
        content = RecordDict({wire.HEADER: wire.make_header()})
        messages = (Message(wire.copy_content(content), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes)
        anatomies: dict[int, Anatomy] = {}
        for reply in stream(grid, messages, timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._note(f"node {node} cannot be used: {reason(reply)}")
                continue
            head = wire.header(reply, ("client", "new", "anatomy"))
            client = int(head["client"])
            if client in self.members:
                raise BayflowerError(f"two nodes say they are client {client}; give each its own partition-id")
            self.members[client] = Member(client, node, bool(head["new"]))
            anatomies[client] = wire.text_to_anatomy(head["anatomy"])
        if not any(not member.new for member in self.members.values()):
            raise BayflowerError("no client answered the first query; see the clients' logs")
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
        params, buffers = ({name: initial[name] for name in names} for names in (anatomy.trainable, anatomy.buffers))
        trained = tuple(sorted(member.client for member in self.members.values() if not member.new))
        self.state = self.half.init(params, buffers, trained)

    def _arrays(self) -> ArrayRecord:
        return wire.to_arrays(self._half().shared(self.state))

    def _messages(
        self, clients: list[int], kind: str, round: int, config: ConfigRecord, *, evaluate: bool, purpose: Purpose | None
    ) -> Iterator[Message]:
        half = self._half()
        instructions = json.dumps({"training": dataclasses.asdict(self.training), "options": dataclasses.asdict(self.options)})
        shared: tuple[ArrayRecord, int] | None = None
        for client in clients:
            member = self.members[client]
            if shared is None or half.per_client:
                broadcast = half.broadcast(self.state, client)
                shared = wire.to_arrays(broadcast), num_bytes(broadcast)
            head = wire.make_header(
                method=self.row.name, run=self.run, round=round, seed=self.seed, evaluate=evaluate,
                purpose=purpose or ("new" if member.new else "finetune"), instructions=instructions,
            )  # fmt: skip
            content = RecordDict({wire.BROADCAST: shared[0], wire.HEADER: head})
            if config:
                content["config"] = config
            self._sent[client] = shared[1]
            yield Message(content, dst_node_id=member.node, message_type=kind)

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
        update = wire.matching(wire.arrays(reply, wire.UPDATE, consume=True), half.expects(self.state))
        if reason := half.check(self.state, client, update):
            raise wire.WireError(reason)
        tallies = wire.arrays_to_tallies(wire.arrays(reply, wire.TALLY)) if wire.TALLY in reply.content else {}
        numbers = reply.content.get(wire.METRICS)
        loss = numbers.get(wire.TRAIN_LOSS) if isinstance(numbers, MetricRecord) else None
        return client, update, tallies, float(loss) if isinstance(loss, (int, float)) else float("nan")

    def _fault(self, reply: Message, round: int, reason: str) -> None:
        node = reply.metadata.src_node_id
        client = next((member.client for member in self.members.values() if member.node == node), None)
        who = f"client {client}" if client is not None else f"node {node}"
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


def reason(reply: Message) -> str:
    """Return why a client failed, in one line."""
    lines = (reply.error.reason or "").strip().splitlines()
    return lines[-1] if lines else f"error code {reply.error.code}"


def stream(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Yield replies as they come, in any order, until all are there or `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    waiting = set(grid.push_messages(messages))
    while waiting and time.monotonic() < deadline:
        came = False
        for reply in grid.pull_messages(sorted(waiting)):
            came = True
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if waiting and not came:
            time.sleep(POLL_SECONDS)
