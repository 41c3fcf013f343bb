"""One round: the messages to its clients, their replies, and the aggregation.

Replies are aggregated as they arrive, so memory holds one sum and one reply. An invalid reply is
reported and ignored: no reply of a client can stop the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..config import Limits, Training, make_instructions
from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.journal import Journal
from ..files.records import Views
from ..methods import Method
from ..rounds.calibrated import Calibrated
from ..rounds.robust import Limiter
from ..wire.continuity import Thread
from ..wire.protocol import request_header
from . import bounds, continuing, records, replies
from .calibrating import Calibrator
from .collected import Arriving, Collected
from .exchange import LOST, Request, reason, stream
from .guard import described
from .roster import Roster
from .wrapped import Form

log = logging.getLogger("bayflower")
NOTHING_HELD = (
    "calibration: no client held samples out, so no personal model is calibrated; give clients "
    "more samples, or let their data return (train, test, calibration)"
)


class RunFacts(NamedTuple):
    """What all rounds of a run share."""

    run: str
    row: Method
    seed: int
    training: Training
    options: Any
    limits: Limits
    roster: Roster
    journal: Journal
    limiter: Limiter


class Round:
    """One request to some clients, and their replies."""

    def __init__(
        self,
        facts: RunFacts,
        form: Form,
        half: ServerHalf,
        state: Any,
        request: Request,
        caps: dict[int, int] | None = None,
    ) -> None:
        self.facts, self.form, self.half, self.state = facts, form, half, state
        self.request, self.number = request, request.round
        self.caps = caps or {}  # by client: its capped number of samples
        self.sent: dict[int, int] = {}  # by client: bytes sent
        self.asked: dict[str, int] = {}  # by message id: its node
        # by client: the content of its message, where an overridden hook made the messages
        self.handed: dict[int, RecordDict] | None = None
        self.further: dict[str, Any] = {}  # further keys of every header
        self.came: set[int | None] = set()  # clients whose reply an overridden hook was given

    # -- what is asked -----------------------------------------------------------------------------
    def messages(
        self, request: Request, nodes: Iterable[int] | None = None, ttl: float | None = None
    ) -> Iterator[Message]:
        """Yield the messages of a request, or those to `nodes` only. Each is built when needed."""
        facts, roster = self.facts, self.facts.roster
        instructions = make_instructions(facts.training, facts.options)
        content_for = self.form.contents(self.half, self.state)
        there = set(roster.nodes(request.clients) if nodes is None else nodes)
        for client in request.clients:
            member = roster.members[client]
            if member.node not in there:
                continue
            if self.handed is not None:
                content = self.handed[client]
                yield Message(content, dst_node_id=member.node, message_type=request.kind, ttl=ttl)
                continue
            head = request_header(
                method=facts.row.name,
                run=facts.run,
                round=request.round,
                seed=facts.seed,
                evaluate=request.test,
                purpose="new" if member.new else "finetune",
                instructions=instructions,
            )
            head |= {**roster.notices(client), **self.further}
            head |= facts.limiter.told(len(request.clients))
            if request.order:
                head["calibration"] = request.order
            if not request.keep:
                head["keep"] = False
            content = content_for(client, head, request.config, request.round)
            if request.sums:
                content[records.CALIBRATION] = records.to_arrays(request.sums)
            self.sent[client] = records.num_bytes(content)
            yield Message(content, dst_node_id=member.node, message_type=request.kind, ttl=ttl)

    def take(self, given: Iterable[Message], who: str) -> None:
        """Send these messages, which the overridden hook `who` returned, in place of all."""
        roster, run = self.facts.roster, self.facts.run
        handed: dict[int, RecordDict] = {}
        for message in given:
            node, content = message.metadata.dst_node_id, message.content
            client = roster.client_at(node)
            if client is None:
                raise ConfigError(f"{who} returned a message to node {node}, where no client is")
            if client in handed:
                raise ConfigError(f"{who} returned two messages to node {node}; send one")
            head = content.get(records.HEADER)
            ours = isinstance(head, ConfigRecord) and head.get("run") == run
            if not ours or message.metadata.message_type != self.request.kind:
                raise ConfigError(
                    f"{who} returned a message of its own, which lacks what {self.facts.row.title} "
                    f"sends; return the messages of super().{who.split('.')[-1]}(), fewer or with "
                    "further records"
                )
            records.only_arrays(message)
            handed[client] = content
        self.handed = handed
        self.request = self.request._replace(clients=sorted(handed))
        self.sent = {client: records.num_bytes(content) for client, content in handed.items()}
        if self.caps:
            self.caps = roster.caps(self.request.clients)

    def exchange(self, grid: Grid, timeout: float, retries: int) -> Iterator[Message]:
        """Yield the replies to the request. A client whose node or process was lost gets a retry
        once it is back.
        """
        request, roster = self.request, self.facts.roster
        asks = {"kind": request.kind, "method": self.facts.row.name}
        self.facts.journal.write("asked", clients=request.clients, **asks)
        for attempt in range(retries + 1):
            lost: list[int] = []
            nodes, ask = roster.nodes(request.clients), partial(self.messages, request)
            for reply in stream(grid, nodes, ask, timeout, roster.history, self.asked):
                client = self.client_of(reply)
                gone = reply.has_error() and reply.error.code in LOST
                self.heard(reply, client)
                if attempt < retries and client is not None and gone:
                    why = reason(reply)
                    log.warning("round %d, client %d: %s; retrying", self.number, client, why)
                    lost.append(client)
                else:
                    yield reply
            if not lost:
                return
            roster.find(grid, lost, min(timeout, self.facts.limits.rejoin_seconds))
            request = request._replace(clients=sorted(lost))

    def heard(self, reply: Message, client: int | None) -> None:
        """Log what arrived, before it is looked at."""
        if self.facts.journal.audit is None:
            return
        try:
            what = {"why": reason(reply)[:500]} if reply.has_error() else described(reply.content)
        except Exception as error:  # a reply that cannot be described must not stop the run
            what = {"why": f"it cannot be described ({type(error).__name__})"}
        asked, node = reply.metadata.reply_to_message_id, str(reply.metadata.src_node_id)
        self.facts.journal.write("arrived", client=client, node=node, message=asked, **what)

    def client_of(self, reply: Message) -> int | None:
        """Return the client that `reply` comes from, or None if its node is unknown."""
        node = self.asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        return self.facts.roster.client_at(node)

    # -- what came, and what is used ---------------------------------------------------------------
    def expected(self) -> replies.Expected:
        """Return what a valid reply of this round must match."""
        facts, common = self.facts, self.facts.roster.common
        assert common is not None
        return replies.Expected(
            facts.run,
            facts.row.name,
            self.number,
            self.sent,
            facts.roster.members,
            facts.training.make_task(common.num_classes),
            facts.limits,
            facts.training,
            self.caps,
            self.form,
        )

    def collect(self, incoming: Iterable[Message], keep_metrics: bool) -> Collected:
        """Return the aggregate of the valid replies to training requests."""
        found, expected, half = Collected(), self.expected(), self.half
        limiter, share = self.facts.limiter, self.facts.limits.max_share
        moderates = share < 1 and half.has_claims
        arriving = Arriving(half, self.state, limiter, moderates)
        threads = {}  # by client: what its reply says of continuity
        for reply in incoming:
            try:
                client = replies.sender(reply, expected)
                size = records.num_bytes(reply.content)  # `accept` removes the arrays
                accepted = replies.accept(reply, client, expected, half, self.state, found.losses)
                self.follow(reply, client)
                arriving.add(found.total, client, accepted.update)
            except Exception as error:  # an invalid reply of one client must not stop the run
                self.fault(reply, error)
                lost = reply.has_error() and reply.error.code in LOST
                if not lost and (asked := self.client_of(reply)) is not None:
                    found.answered.add(asked)
                continue
            found.losses[client] = (int(accepted.update.num_examples), accepted.loss)
            threads[client] = continuing.heard(reply)
            if keep_metrics:
                found.metrics[client] = replies.metrics_of(reply)
            found.bytes_up += size
            for view, tally in accepted.tallies.items():
                found.tested.setdefault(view, {})[client] = tally
            del accepted, reply  # frees the memory before the next reply
        held = arriving.settle(found.total)
        self.conclude(found, threads)
        if moderates:
            known = (self.facts.roster.moderated, self.facts.journal)
            held = bounds.moderate(half, self.state, held, share, *known)
        for client, update in held.items():
            found.total.add(half.statistic(self.state, client, update))
        self.name_missing(found)
        return found

    def conclude(self, found: Collected, threads: Mapping[int, Thread | None]) -> None:
        """End a round of which all replies are known; `threads` say how they continue."""
        self.settle(found)
        for client in found.losses:
            self.facts.roster.continuity.accept(client, self.number, threads[client])
        self.facts.limiter.close()

    def name_missing(self, found: Collected) -> None:
        """Report the clients of which nothing was used, if nothing else was said of them."""
        journal = self.facts.journal
        for client in sorted(self.left_out(found)):
            journal.event(f"round {self.number}, client {client}: left out by aggregate_train")
        missing = set(self.sent) - set(found.losses) - journal.blamed - self.left_out(found)
        for client in sorted(missing):
            journal.fault(
                f"round {self.number}, client {client}: no reply before the timeout; ignored in "
                "this round",
                client,
            )

    def settle(self, found: Collected) -> None:
        """Report clients far beyond their limits and clients that are left out, drop replies that
        are refused, and weigh training losses by what their clients counted for.
        """
        limiter = self.facts.limiter
        for client, text in limiter.lines():
            blamed = client if client in limiter.refused else None
            self.facts.journal.fault(f"round {self.number}, {text}", blamed)
        for client in sorted(limiter.refused):
            found.refuse(client)
        found.losses = {
            client: (limiter.counted(client, number), loss)
            for client, (number, loss) in found.losses.items()
        }

    def count(self, found: Collected) -> list[int]:
        """Update the counts of this round's clients; return those that are dropped."""
        unheard, roster = self.left_out(found), self.facts.roster
        heard = sorted(set(self.sent) - unheard)
        left = roster.settle(self.number, heard, found.losses, found.answered)
        roster.unused |= unheard
        return left

    def left_out(self, found: Collected) -> set[int]:
        """Return the clients that replied, but whose reply an overridden hook did not pass on."""
        seen = {*found.losses, *self.facts.journal.blamed}
        return {client for client in self.came if client in self.sent and client not in seen}

    def saved(self, incoming: Iterable[Message]) -> int:
        """Return how many clients saved their personal model."""
        expected, number = self.expected(), 0
        for reply in incoming:
            try:
                replies.sender(reply, expected)
                number += 1
            except Exception as error:  # as above
                self.fault(reply, error)
        return number

    def tallies(
        self,
        incoming: Iterable[Message],
        keep_metrics: bool,
        calibrator: Calibrator | None = None,
    ) -> tuple[Views, Views, list[RecordDict]]:
        """Return the test results by view of the training clients and of the new clients, and the
        metrics of the training clients' replies. `calibrator` gets what the replies say of
        calibration.
        """
        metrics: list[RecordDict] = []
        views: Views = {}
        new: Views = {}
        expected = self.expected()
        for reply in incoming:
            try:
                client, tallies = replies.tested(reply, expected)
                self.follow(reply, client)
            except Exception as error:  # as above
                self.fault(reply, error)
                continue
            if calibrator is not None:
                self.hear(reply, client, calibrator)
            target = new if self.facts.roster.members[client].new else views
            if target is views and keep_metrics:
                metrics.append(replies.metrics_of(reply))
            for view, tally in tallies.items():
                target.setdefault(view, {})[client] = tally
        return views, new, metrics

    def calibrate(self, incoming: Iterable[Message], calibrator: Calibrator) -> None:
        """Hand the replies to a request to calibrate to `calibrator`."""
        expected = self.expected()
        for reply in incoming:
            try:
                client = replies.sender(reply, expected)
            except Exception as error:  # as above
                self.fault(reply, error)
                continue
            self.hear(reply, client, calibrator)

    def calibrated(
        self, grid: Grid, timeout: float, retries: int, calibrator: Calibrator
    ) -> Calibrated | None:
        """Return the uncertainty of the clients of this round, after two more requests to each;
        None if no training client could be calibrated.
        """
        roster = self.facts.roster
        if not calibrator.tables or roster.common is None:
            return None
        if not any(int(one["rows"]) for one in calibrator.tables.values()):
            self.facts.journal.fault(NOTHING_HELD)
        for _ in calibrator.stages[1:]:
            calibrator.close()
            request = self.request._replace(test=False, config=ConfigRecord())
            request = request._replace(order=calibrator.order(), sums=calibrator.sums())
            asked = Round(self.facts, self.form, self.half, self.state, request)
            asked.calibrate(asked.exchange(grid, timeout, retries), calibrator)
        new = {client for client, member in roster.members.items() if member.new}
        return calibrator.result(new, roster.common.num_classes)

    def hear(self, reply: Message, client: int, calibrator: Calibrator) -> None:
        """Hand what a reply says of calibration to `calibrator`."""
        member, common = self.facts.roster.members[client], self.facts.roster.common
        assert common is not None
        try:
            records.few(reply, records.CALIBRATION, replies.MOST_TESTS)
            flat = records.arrays(reply, records.CALIBRATION)
            task = self.facts.training.make_task(common.num_classes)
            known = (member.new, member.facts, common.num_classes, task)
            calibrator.hear(flat, client, *known)
        except Exception as error:  # as above
            self.fault(reply, error)

    def follow(self, reply: Message, client: int) -> None:
        """Report what in a reply does not continue the client's earlier ones; with
        continuity=refuse, raise.
        """
        known, refuse = self.facts.roster.continuity, self.facts.limits.continuity == "refuse"
        for text in continuing.judged(reply, client, known, refuse):
            self.facts.journal.fault(f"round {self.number}, client {client}: {text}", client)

    def fault(self, reply: Message, error: Exception) -> None:
        """Report why a reply was not used."""
        known = isinstance(error, (BayflowerError, ValueError))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        client = self.client_of(reply)
        who = f"client {client}" if client is not None else f"node {reply.metadata.src_node_id}"
        text = f"round {self.number}, {who}: reply not used: {text}"
        self.facts.journal.fault(text, client)
