"""The clients of a run: late joiners, drop-outs, rejoining and excluded clients. A client is known
by the number it reports, never by its node.

present    may be sampled for a round
left       its node is offline, or it sent no reply for `leave_after` rounds. It is dropped from all
           totals and may rejoin (a silent client whose node is online: after `leave_after` rounds)
excluded   `max_faults` invalid replies in a row: gets no more messages in this run
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from ..config import Limits, Training
from ..errors import BayflowerError
from ..files.journal import Journal
from ..recipes.check import SUMS, checked, questions, resolved, sums_of, told
from ..recipes.labels import together
from ..wire.continuity import Continuity
from ..wire.hello import ClientInfo, Summary, agreed, disagreement, summary
from . import bounds
from .exchange import POLL_SECONDS, Member, NodeHistory, query

QUERY_SECONDS = 60.0  # timeout of the first query to a node that appeared during a run


class Membership(NamedTuple):
    """The clients present when a run began or ended, and the network they share."""

    members: dict[int, Member]
    common: ClientInfo


class Change(NamedTuple):
    """Training clients that joined for the first time, and clients dropped from all totals."""

    joined: list[int]
    left: list[int]


class Roster:
    """The clients of one run."""

    def __init__(
        self, limits: Limits, journal: Journal, training: Training | None = None, header: Any = None
    ) -> None:
        self.limits, self.journal, self.header = limits, journal, dict(header or {})
        self.asked: dict[str, Any] = questions(training)  # further keys of the first question
        self.sums: dict[str, list[Any]] = {name: [] for name in SUMS}  # of each training client
        self.label_counts: list[int] = []  # of all training clients when the run began
        self.history = NodeHistory(limits.ask_again_seconds, limits.max_message_mb)
        self.members: dict[int, Member] = {}
        self.common: ClientInfo | None = None
        self.admitted: set[int] = set()  # clients that have ever been in training
        self.left: set[int] = set()
        self.excluded: set[int] = set()
        self.returned: set[int] = set()  # rejoined; the next message tells them so
        self.secure = False  # sums are secure: clients must notice themselves what they have lost
        self.continuity = Continuity()  # the states and data from which clients answered
        self.accepted: dict[int, int] = {}  # by client: the last round whose reply was used
        self.unused: set[int] = set()  # clients whose last request gave no usable reply
        self.faults: dict[int, int] = {}  # by client: invalid replies in a row
        self.silent: dict[int, int] = {}  # by client: rounds in a row without any reply
        self.moderated: set[tuple[int, str]] = set()  # (client, claim) already reported as capped
        self.capped: set[int] = set()  # clients whose sample count was already reported as capped
        # by client that left because it was silent: rounds until its online node is queried again
        self.pause: dict[int, int] = {}
        self.refused: dict[int, int] = {}  # by node: number of invalid replies to a query
        self.claims: dict[int, int] = {}  # by node: the client it claims, held by another node

    # -- reading ----------------------------------------------------------------------------------
    def present(self) -> list[int]:
        """Return all clients that can be sampled, in order."""
        return sorted(set(self.members) - self.left - self.excluded)

    def training(self) -> list[int]:
        """Return the clients that can be sampled for training."""
        return [client for client in self.present() if not self.members[client].new]

    def client_at(self, node: int) -> int | None:
        """Return the client at `node`, or None."""
        return next(
            (member.client for member in self.members.values() if member.node == node), None
        )

    def nodes(self, clients: Iterable[int]) -> list[int]:
        """Return the nodes of the clients."""
        return [self.members[client].node for client in clients]

    def membership(self) -> Membership:
        """Return the present clients and their network."""
        assert self.common is not None
        return Membership({client: self.members[client] for client in self.present()}, self.common)

    def summary(self, dataset: str) -> Summary:
        """Return the federation as a result file describes it: every client that took part,
        including those that left.
        """
        facts = {client: member.facts for client, member in self.members.items()}
        new = {client: fact for client, fact in facts.items() if self.members[client].new}
        return summary(
            {client: fact for client, fact in facts.items() if client not in new}, new, dataset
        )

    def told(self, training: Training) -> Training:
        """Return the settings of training that clients are told, which suit their data."""
        assert self.common is not None
        known = checked(training, self.common.input_shape, self.common.num_classes)
        return told(resolved(known, self.label_counts), self.sums)

    def notices(self, client: int) -> dict[str, Any]:
        """Return the extra keys of a client's header: what all are told, the last accepted round
        (if a later reply was not used, or sums are secure), and whether it had been dropped.
        """
        found = dict(self.header)
        if client in self.unused or self.secure:
            found["accepted"] = self.accepted.get(client, 0)
        return {**found, "returned": True} if client in self.returned else found

    def state_round(self, client: int, round: int) -> int:
        """Return the last round up to `round` after which the server uses a client's state."""
        return self.accepted.get(client, 0) if client in self.unused else round

    # -- who is there -----------------------------------------------------------------------------
    def gather(self, grid: Grid, least: int, wait: float) -> None:
        """Wait for `least` nodes and query them. All clients must have the same network: those that
        differ from the majority, or claim another's number, are left out and named.
        """
        deadline = time.monotonic() + wait
        while len(nodes := sorted(grid.get_node_ids())) < least:
            if time.monotonic() > deadline:
                found = f"{len(nodes)} of {least} clients connected within {wait:.0f} s"
                raise BayflowerError(f"{found}; start the others")
            time.sleep(POLL_SECONDS)
        disputes = []
        for member in self._query(grid, nodes, wait):
            known = self.members.setdefault(member.client, member)
            if known.node != member.node:
                both = f"nodes {known.node} and {member.node} both claim client {member.client}"
                disputes.append(f"{both}; give each node its own partition-id")
                self.claims[member.node] = member.client
        if not self.training():
            faults = self.journal.faults
            raise BayflowerError(
                "no client answered the first query; last fault: "
                f"{faults[-1] if faults else 'no reply'}"
            )
        if len(disputes) >= len(self.members):
            raise BayflowerError(disputes[0])
        for text in disputes:
            self.journal.fault(f"{text}; the one that answered first takes part")
        self.common = agreed({client: member.facts for client, member in self.members.items()})
        for client, member in sorted(self.members.items()):
            if not self._fits(member):
                del self.members[client]
        self._count()

    def take(self, roll: Membership) -> None:
        """Start with the clients that an earlier strategy found."""
        self.members, self.common = dict(roll.members), roll.common
        self._count()

    def refresh(self, grid: Grid, timeout: float, patience: float = math.inf) -> Change:
        """Return who joined and who left since the last round. Only unknown nodes are queried.
        Lost ones are waited for, at most for `patience`.
        """
        before, admitted = set(self.present()), set(self.admitted)
        nodes = set(grid.get_node_ids())
        gone = [client for client in self.present() if self.members[client].node not in nodes]
        if gone:
            self.find(grid, gone, min(timeout, self.limits.rejoin_seconds, patience))
            nodes = set(grid.get_node_ids())
        for client in gone:
            if self.members[client].node not in nodes:
                self._leave(client, "its node is gone")
        self.pause = {
            client: rounds - 1
            for client, rounds in self.pause.items()
            if rounds > 1 and self.members[client].node in nodes
        }
        self._meet(grid, self._unknown(nodes), min(timeout, QUERY_SECONDS), nodes)
        joined = [client for client in self.training() if client not in admitted]
        self.admitted.update(joined)
        return Change(joined, sorted(before - set(self.present())))

    def find(self, grid: Grid, lost: Iterable[int], timeout: float) -> None:
        """Wait until the lost clients are back, perhaps at other nodes, and update their nodes.

        A node that is online again with its old id holds its old client. Only other nodes are
        queried, with a long timeout: a machine that has just restarted may be slow, and a second
        query would only queue behind the first.
        """
        deadline = time.monotonic() + timeout
        missing, answered = set(lost), set[int]()
        while missing:
            nodes = set(grid.get_node_ids())
            missing = {client for client in missing if self.members[client].node not in nodes}
            if not missing:
                return
            taken = {
                member.node for member in self.members.values() if member.client not in missing
            }
            unknown = sorted(nodes - taken - answered - set(self._hopeless()))
            left = deadline - time.monotonic()
            soon = min(QUERY_SECONDS, max(left, 1.0))
            for member in self._query(grid, unknown, soon):
                answered.add(member.node)
                if member.client in missing and self._fits(member):
                    self.members[member.client] = member
                    missing.discard(member.client)
                elif member.client not in missing:
                    self._welcome(member, nodes)
            if not missing or time.monotonic() >= deadline:
                return
            time.sleep(POLL_SECONDS)

    def settle(
        self, round: int, asked: Iterable[int], used: Mapping[int, Any], answered: set[int]
    ) -> list[int]:
        """Update the counts of the clients `asked` from those whose reply was `used` and those that
        `answered` at all; return the clients dropped from the totals.
        """
        dropped = []
        for client in asked:
            if client in used:
                self.accepted[client] = round
                self.unused.discard(client)
                self.returned.discard(client)
                self.faults.pop(client, None)
                self.silent.pop(client, None)
                continue
            self.unused.add(client)
            if client in answered:
                self.faults[client] = self.faults.get(client, 0) + 1
                if self.faults[client] >= self.limits.max_faults:
                    self.excluded.add(client)
                    self.journal.fault(
                        f"client {client}: {self.faults[client]} invalid replies in a row; "
                        "excluded from the run "
                        f"(max_faults is {self.limits.max_faults})",
                        client,
                    )
                    dropped.append(client)
            else:
                self.silent[client] = self.silent.get(client, 0) + 1
                if self.silent[client] >= self.limits.leave_after:
                    self._leave(client, f"no reply in {self.silent[client]} rounds in a row")
                    self.pause[client] = self.limits.leave_after + 1
                    dropped.append(client)
        return dropped

    def caps(self, chosen: Iterable[int]) -> dict[int, int]:
        """Return the capped sample counts of clients with more than `max_share` of the round's
        samples; report each such client once.
        """
        share, sizes = (
            self.limits.max_share,
            {client: self.members[client].facts.train_size for client in chosen},
        )
        found = bounds.caps(sizes, share) if share < 1 else {}
        for client in sorted(set(found) - self.capped):
            self.journal.fault(
                f"client {client}: its {sizes[client]} samples are counted as {found[client]} "
                f"(max_share is {share:g})"
            )
        self.capped |= set(found)
        return found

    # -- memory -----------------------------------------------------------------------------------
    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        return {
            "admitted": sorted(self.admitted),
            "left": sorted(self.left | self.excluded),
            "unused": sorted(self.unused),
            "accepted": {str(client): round for client, round in sorted(self.accepted.items())},
            "continuity": self.continuity.memory(),
            **({"label_counts": self.label_counts} if self.label_counts else {}),
            **{name: some for name, some in self.sums.items() if any(some)},
        }

    def remember(self, memory: Mapping[str, Any]) -> Change:
        """Continue from what `memory` returned; return the clients that are new since then, and the
        earlier clients that are absent.
        """
        here = set(self.training())
        if "admitted" not in memory:  # written by an engine whose clients never change
            self.admitted = set(here)
            return Change([], [])
        self.admitted, self.left = set(memory["admitted"]), set(memory["left"])
        self.unused = set(memory["unused"])
        self.accepted = {int(client): int(round) for client, round in memory["accepted"].items()}
        self.continuity.remember(memory.get("continuity", {}))
        self.label_counts = list(memory.get("label_counts", self.label_counts))
        self.sums = {name: list(memory.get(name, some)) for name, some in self.sums.items()}
        self.returned = self.left & here
        self.left -= here
        absent = sorted(self.admitted - here - self.left)
        joined = sorted(here - self.admitted)
        for client in absent:
            self._leave(client, "it was absent when the run was resumed")
        self.admitted |= here
        return Change(joined, absent)

    # -- inside -----------------------------------------------------------------------------------
    def _count(self) -> None:
        """Add up the labels that the training clients reported; nothing unless all did."""
        known = [self.members[client].facts.label_counts for client in self.training()]
        self.label_counts = together(known) if known and all(known) else []
        self.sums = sums_of([self.members[client].facts for client in self.training()])

    def _unknown(self, nodes: set[int]) -> list[int]:
        """Return the nodes to query: not known, not given up, and not claiming a client that is
        present at another node.
        """
        known = {
            member.node
            for client, member in self.members.items()
            if client not in self.left or client in self.pause
        }
        waiting = {node for node, client in self.claims.items() if client not in self.left}
        return sorted(nodes - known - waiting - set(self._hopeless()))

    def _hopeless(self) -> list[int]:
        excluded = [self.members[client].node for client in self.excluded if client in self.members]
        return [
            *excluded,
            *(node for node, times in self.refused.items() if times >= self.limits.max_faults),
        ]

    def _query(self, grid: Grid, nodes: list[int], timeout: float) -> Iterator[Member]:
        told = {**self.header, **self.asked}
        for member in query(grid, nodes, timeout, self.history, self._refuse, told):
            sizes = {"train": member.facts.train_size, "test": member.facts.test_size}
            self.journal.write("hello", client=member.client, node=str(member.node), **sizes)
            yield member

    def _meet(self, grid: Grid, unknown: list[int], timeout: float, nodes: set[int]) -> None:
        for member in self._query(grid, unknown, timeout):
            self._welcome(member, nodes)

    def _welcome(self, member: Member, nodes: set[int]) -> None:
        """Admit a client that joins late, rejoins or moved to another node; ignore a node that
        claims a client held by another node.
        """
        client, known = member.client, self.members.get(member.client)
        if client in self.excluded:
            self.refused[member.node] = self.limits.max_faults
            return
        if (
            known is not None
            and client not in self.left
            and known.node != member.node
            and known.node in nodes
        ):
            if self.claims.get(member.node) != client:
                self.journal.fault(
                    f"node {member.node} claims client {client}, already held by node "
                    f"{known.node}; ignored"
                )
            self.claims[member.node] = client
            return
        if not self._fits(member):
            return
        if client in self.left:
            self.left.discard(client)
            self.returned.add(client)
            self.journal.event(f"client {client} is back", client)
        elif known is None:
            self.journal.event(f"client {client} has joined", client)
        self.silent.pop(client, None)
        self.claims.pop(member.node, None)
        self.members[client] = member

    def _fits(self, member: Member) -> bool:
        """Return whether the client has the network that all share; report it if not."""
        why = disagreement(member.facts, self.common) if self.common is not None else None
        if why is not None:
            self._refuse(member.node, f"client {member.client}: {why}")
        return why is None

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = self.refused.get(node, 0) + 1
        self.journal.fault(f"node {node} cannot be used: {why}")

    def _leave(self, client: int, why: str) -> None:
        self.left.add(client)
        self.silent.pop(client, None)
        self.journal.fault(
            f"client {client} has left: {why}; it is dropped from the totals until it rejoins",
            client,
        )
