"""The server's side of a tree: a round whose sum comes in parts, one of each region.

The limits of a round go down with its request, and what a region saw of its clients comes up with
its sum. Where a round is limited by its own medians (the first one under `robust`, and methods
where both sides count the changes of a factor), regions are asked twice: for the sizes of the
updates, and, once the medians of all regions are known, for the sum.

A region's sum counts whole or not at all. It must be one that this server could have made: its
names and shapes, and a finite state after it.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import Message, RecordDict

from ...config import Limits
from ...errors import ConfigError, WireError
from ...files.records import Views
from ...fused.workers.cargo import add_seen
from ...maths.exact import Total
from ...methods import Method
from ...recipes.secrecy import Privacy
from ...rounds.robust import HOLDING
from ...rounds.suspects import Apart
from ...tree import Tensors, flatten
from ...wire.continuity import Thread
from ...wire.hello import anatomy_to_text, is_whole
from .. import continuing, records, replies
from ..collected import Collected
from ..exchange import LOST
from ..round import Round
from . import partial
from .grid import Answer, Tree
from .region import ADD, LIMITS, NOT_USED, SEE, STATE, SUM, TRIED

HOOKED = (
    "a tree of aggregators adds up updates before the server sees them; remove the overridden "
    "configure_train or aggregate_train, or let clients connect to the server itself"
)


def check(strategy: Any, hooked: bool) -> None:
    """Raise if a strategy cannot have a tree of aggregators."""
    buffered = strategy.aggregation.buffered
    refuse(strategy.row, strategy.limits, strategy.privacy, buffered)
    if hooked:
        raise ConfigError(HOOKED)


def refuse(row: Method, limits: Limits, privacy: Privacy, buffered: bool) -> None:
    """Raise if a run with these settings cannot have a tree of aggregators."""
    if why := row.additive:
        raise ConfigError(f"{row.name} cannot run in a tree of aggregators: {why}")
    if privacy.on or privacy.private:
        raise ConfigError(
            "secure sums and dp are made between one server and all clients; leave them out in a "
            "tree of aggregators"
        )
    if buffered:
        raise ConfigError("aggregation=buffered needs single updates; a tree has none")
    if limits.robust in HOLDING:
        raise ConfigError(
            f"robust={limits.robust} compares single updates, which stay in their regions; set "
            "robust=gate, clip or off in a tree of aggregators"
        )
    if limits.max_share < 1 and row.server.has_claims:
        raise ConfigError(
            f"max_share compares single updates of {row.name}, which stay in their regions; remove "
            "it in a tree of aggregators"
        )


class Taken:
    """What one region said of its clients in a round, until it is known to be sound."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.clients: set[int] = set()  # whose replies are said to be valid
        self.losses: dict[int, tuple[int, float]] = {}
        self.threads: dict[int, Thread | None] = {}
        self.metrics: dict[int, RecordDict] = {}
        self.tested: Views = {}
        self.why = ""  # why it cannot be used


class Joining:
    """The sums of one run's rounds, of which each region makes a part."""

    def __init__(self, tree: Tree, rejoin: float) -> None:
        self.tree, tree.rejoin = tree, rejoin
        self.timeout, self.retries = 0.0, 0

    def open(self, asked: Round, timeout: float, retries: int) -> None:
        """Say what regions are to do with the request that is sent next."""
        self.timeout, self.retries = timeout, retries
        self.tree.up = self.tree.down = 0
        limiter = asked.facts.limiter
        kind = SEE if limiter.holds else ADD
        self.order(asked, kind, uuid.uuid4().hex)

    def order(self, asked: Round, kind: str, token: str) -> None:
        """Put the order of a round where the tree finds it."""
        facts, roster, tree = asked.facts, asked.facts.roster, self.tree
        assert roster.common is not None
        members, limiter, tree.answers = roster.members, facts.limiter, {}
        at = {member.node: client for client, member in members.items()}
        robust: dict[tuple[int, ...], tuple[Any, Tensors]] = {}

        def limits(nodes: list[int]) -> tuple[Any, Tensors]:
            key = tuple(nodes)
            if key not in robust:
                flat: Tensors = {}
                told = partial.limits_out(limiter, {at[node] for node in nodes}, flat)
                robust[key] = told, flat
            return robust[key]

        def sizes(nodes: list[int]) -> list[Any]:
            known = [(at[node], members[at[node]].facts) for node in nodes]
            return [[client, one.train_size, one.test_size] for client, one in known]

        def kept(nodes: list[int]) -> dict[str, Any]:
            memory, own = roster.continuity.memory(), {str(at[node]) for node in nodes}
            return {
                key: {c: v for c, v in some.items() if c in own} for key, some in memory.items()
            }

        order: dict[str, Any] = {"token": token, "num_classes": roster.common.num_classes}
        order |= {"anatomy": anatomy_to_text(roster.common.anatomy)}
        order |= {"limits": dataclasses.asdict(facts.limits)}
        order |= {"caps": {str(client): most for client, most in asked.caps.items()}}
        order |= {"clients": sizes, "continuity": kept, "robust": lambda nodes: limits(nodes)[0]}
        state = records.to_arrays(asked.state)
        shared = {STATE: state, LIMITS: lambda nodes: records.to_arrays(limits(nodes)[1])}
        tree.sums = (kind, order, shared)

    def collect(self, asked: Round, incoming: Iterable[Message], keep: bool) -> Collected:
        """Return the aggregate of the valid replies, from the sums of all regions."""
        found, limiter, apart = Collected(), asked.facts.limiter, Apart()
        assert self.tree.sums is not None
        if self.tree.sums[0] == SEE:
            incoming = self.seen(asked, incoming, found)
        threads: dict[int, Thread | None] = {}
        for one in self.read(asked, incoming, found):
            if self.join(asked, one, found, apart, keep):
                threads |= one.threads
        limiter.settle()
        apart.into(found.total, limiter.suspects.standing)
        found.total.drop(asked.half.negligible(found.total.names()))
        asked.conclude(found, threads)
        asked.name_missing(found)
        found.bytes_up = self.tree.up
        found.bytes_down = self.tree.down - sum(asked.sent.values())
        self.tree.sums, self.tree.answers = None, {}
        return found

    def seen(
        self, asked: Round, incoming: Iterable[Message], found: Collected
    ) -> Iterable[Message]:
        """Take the limits of a round from the sizes of its updates; return the replies to the
        second request, which goes to the clients whose first reply is valid.
        """
        assert self.tree.sums is not None
        limiter, token = asked.facts.limiter, str(self.tree.sums[1]["token"])
        sound: list[int] = []
        for one in self.read(asked, incoming, found):
            try:
                add_seen(limiter, self.sight(asked, one))
                sound += one.losses
            except Exception as error:  # whatever a region says must not stop the run
                self.refuse(asked, one, error, found)
        limiter.renew()
        limiter.undo()
        if not sound:
            return []
        self.order(asked, ADD, token)
        clients, asked.request = asked.request, asked.request._replace(clients=sorted(sound))
        replies = list(asked.exchange(self.tree, self.timeout, self.retries))
        asked.request = clients
        return replies

    def read(self, asked: Round, incoming: Iterable[Message], found: Collected) -> list[Taken]:
        """Return what each region said of the clients whose replies are valid."""
        expected, known = asked.expected(), dict[int, Taken]()
        for reply in incoming:
            answer = self.tree.answers.get(reply.metadata.reply_to_message_id)
            one = known.setdefault(id(answer), Taken(answer)) if answer is not None else None
            if reply.has_error():
                self.failed(asked, reply, found)
                continue
            assert one is not None  # without an answer all replies of a region are errors
            if (sender := asked.client_of(reply)) is not None:
                one.clients.add(sender)
            try:
                client = replies.sender(reply, expected)
                number = one.answer.order["counted"].get(str(client))
                if not is_whole(number, 0, 2**53) or client in one.losses:
                    raise WireError("its region does not count it, or counts it twice")
                asked.follow(reply, client)
                loss = replies.train_loss(reply)
                if records.TALLY in reply.content:
                    for view, tally in replies.tallies_of(reply, expected, client).items():
                        one.tested.setdefault(view, {})[client] = tally
                one.threads[client] = continuing.heard(reply)
                one.metrics[client] = replies.metrics_of(reply)
                one.losses[client] = (int(number), loss)
            except Exception as error:  # as above
                one.why = one.why or f"client {sender}: {error}"
        return list(known.values())

    def failed(self, asked: Round, reply: Message, found: Collected) -> None:
        """Report a client whose reply was not used."""
        code, client = reply.error.code, asked.client_of(reply)
        text = str(reply.error.reason)
        if code != NOT_USED:
            text = f"the client failed: {text}"
        asked.fault(reply, WireError(text))
        if client is not None and code not in LOST and code - TRIED not in LOST:
            found.answered.add(client)

    def sight(self, asked: Round, one: Taken) -> Any:
        """Return what a region saw of its clients; raise if that cannot be."""
        if one.why:
            raise WireError(one.why)
        members, order = asked.facts.roster.members, one.answer.order
        own = {client for client in members if members[client].node in one.answer.nodes}
        if {str(client) for client in one.losses} != set(order["counted"]):
            raise WireError("its region counts clients that did not reply")
        return partial.seen_in(order["seen"], self.flat(one), own)

    def flat(self, one: Taken) -> Tensors:
        """Return the arrays of a region's sum."""
        return records.to_tensors(one.answer.content[SUM])  # type: ignore[arg-type]

    def join(self, asked: Round, one: Taken, found: Collected, apart: Apart, keep: bool) -> bool:
        """Add a region's sum to that of the round, or report why it is not used; return which."""
        limiter, order = asked.facts.limiter, one.answer.order
        try:
            seen = self.sight(asked, one) if limiter.on or one.why else None
            flat = self.flat(one)
            total, own = partial.sum_in(order["total"], flat, "total"), Apart()
            partial.apart_in(order["apart"], flat, own)
            if set(one.losses) & set(found.losses):
                raise WireError("it counts a client that another answer has counted")
            if one.losses:
                self.try_out(asked, total, own)
            both = Total()
            both.merge(found.total)
            both.merge(total)  # raises if shapes differ from those of another region
        except Exception as error:  # as above
            self.refuse(asked, one, error, found)
            return False
        if seen is not None:
            add_seen(limiter, seen)
        found.total = both
        for why, pair in own.sums.items():
            there = apart.sums.setdefault(why, (Total(), Total()))
            for sum_, part in zip(there, pair, strict=True):
                sum_.merge(part)
        found.losses |= one.losses
        found.metrics |= one.metrics if keep else {}
        for view, tallies in one.tested.items():
            found.tested.setdefault(view, {}).update(tallies)
        return True

    def try_out(self, asked: Round, total: Total, apart: Apart) -> None:
        """Raise if the server could not go on from a region's sum alone."""
        both = Total()
        both.merge(total)
        for used, _ in apart.sums.values():
            both.merge(used)
        new = asked.half.finalise(asked.state, both.value())
        after, before = flatten(new), flatten(asked.state)
        for name, leaf in after.items():
            if name in before and before[name].shape != leaf.shape:
                raise WireError(f"its sum gives {name!r} another shape")
            if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                raise WireError(f"its sum gives {name!r} values that are not finite")
        most = asked.facts.limits.max_change
        old, shared = (asked.half.shared(one) for one in (asked.state, new))
        size = math.sqrt(sum(float(one.double().square().sum()) for one in old.values()))
        moved = [shared[name].double() - old[name].double() for name in old if name in shared]
        away = math.sqrt(sum(float(one.square().sum()) for one in moved))
        if away > most * (1 + size):
            raise WireError(f"its sum moves the model by {away:.3g} (max_change = {most:g})")

    def refuse(self, asked: Round, one: Taken, error: Exception, found: Collected) -> None:
        """Report a region whose sum is not used: none of its clients counts in this round."""
        known = isinstance(error, (WireError, ValueError))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        for client in sorted(one.clients):
            asked.facts.journal.fault(
                f"round {asked.number}, client {client}: the sum of its region is not used: {text}",
                client,
            )
            found.answered.add(client)
