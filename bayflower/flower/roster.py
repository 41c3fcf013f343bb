"""Who takes part: clients that come late, go, come back, or must be left out. Known by the number
each reports, never by its node.

present    asked in a round, if it is drawn
left       its node is gone, or it was silent for `leave_after` rounds: no longer part of any total,
           welcome back (if it was silent and its node is still there, after as many rounds)
excluded   `max_faults` replies in a row could not be used: not asked again in this run
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from ..config import Limits
from ..contract import ServerHalf
from ..errors import BayflowerError
from ..files.journal import Journal
from ..wire.hello import ClientInfo, Summary, agreed, disagreement, summary
from . import bounds
from .exchange import POLL_SECONDS, Member, NodeHistory, query

QUERY_SECONDS = 60.0  # how long a node that appeared during a run is given to say who it is


class Membership(NamedTuple):
    """Who was there when a run began or ended, and the network they share."""

    members: dict[int, Member]
    common: ClientInfo


class Change(NamedTuple):
    """Clients that train and have come for the first time, and those that are no longer part of any
    total.
    """

    joined: list[int]
    left: list[int]


class Roster:
    """The clients of one run."""

    def __init__(self, limits: Limits, journal: Journal) -> None:
        self.limits, self.journal = limits, journal
        self.history = NodeHistory(limits.ask_again_seconds)
        self.members: dict[int, Member] = {}
        self.common: ClientInfo | None = None
        self.admitted: set[int] = set()  # clients that ever were in training
        self.left: set[int] = set()
        self.excluded: set[int] = set()
        self.returned: set[int] = set()  # back after having left; told so with the next message
        self.accepted: dict[int, int] = {}  # the last round whose reply was used
        self.unused: set[int] = set()  # asked since then, without a reply that was used
        self.faults: dict[int, int] = {}  # replies in a row that could not be used
        self.silent: dict[int, int] = {}  # rounds in a row without any reply
        # clients and claims of which it was said that they were cut down
        self.moderated: set[tuple[int, str]] = set()
        # clients of which it was said that they count for fewer samples than they have
        self.capped: set[int] = set()
        # rounds for which a client that left in silence is not asked, though its node is there
        self.pause: dict[int, int] = {}
        self.refused: dict[int, int] = {}  # by node: how often it could not say who it is
        self.claims: dict[int, int] = {}  # by node: the client it says it is, which another node is

    # -- reading ----------------------------------------------------------------------------------
    def present(self) -> list[int]:
        """Return all clients that can be asked, in order."""
        return sorted(set(self.members) - self.left - self.excluded)

    def training(self) -> list[int]:
        """Return the clients that can be asked to train."""
        return [client for client in self.present() if not self.members[client].new]

    def client_at(self, node: int) -> int | None:
        """Return the client that a node is."""
        return next(
            (member.client for member in self.members.values() if member.node == node), None
        )

    def nodes(self, clients: Iterable[int]) -> list[int]:
        """Return where the clients are."""
        return [self.members[client].node for client in clients]

    def membership(self) -> Membership:
        """Return who is there now."""
        assert self.common is not None
        return Membership({client: self.members[client] for client in self.present()}, self.common)

    def summary(self, dataset: str) -> Summary:
        """Return the federation as a result file describes it: everyone who took part, those
        included that have left.
        """
        facts = {client: member.facts for client, member in self.members.items()}
        new = {client: fact for client, fact in facts.items() if self.members[client].new}
        return summary(
            {client: fact for client, fact in facts.items() if client not in new}, new, dataset
        )

    def notices(self, client: int) -> dict[str, Any]:
        """Return what a client must be told besides its work: which of its states counts, and that
        it had been dropped.
        """
        found: dict[str, Any] = (
            {"accepted": self.accepted.get(client, 0)} if client in self.unused else {}
        )
        return {**found, "returned": True} if client in self.returned else found

    def state_round(self, client: int, round: int) -> int:
        """Return the last round up to `round` whose state of a client counts."""
        return self.accepted.get(client, 0) if client in self.unused else round

    # -- who is there -----------------------------------------------------------------------------
    def gather(self, grid: Grid, least: int, wait: float) -> None:
        """Wait for `least` nodes and learn who they are; all must agree on the network."""
        deadline = time.monotonic() + wait
        while len(nodes := sorted(grid.get_node_ids())) < least:
            if time.monotonic() > deadline:
                raise BayflowerError(
                    f"{len(nodes)} of {least} clients came within {wait:.0f} s; start the others"
                )
            time.sleep(POLL_SECONDS)
        for member in query(grid, nodes, wait, self.history, self._refuse):
            known = self.members.get(member.client)
            if known is not None and known.node != member.node:
                raise BayflowerError(
                    f"two nodes say they are client {member.client}; give each its own partition-id"
                )
            self.members[member.client] = member
        if not self.training():
            faults = self.journal.faults
            raise BayflowerError(
                f"no client answered the first query. Last: {faults[-1] if faults else 'no reply'}"
            )
        self.common = agreed({client: member.facts for client, member in self.members.items()})

    def take(self, roll: Membership) -> None:
        """Begin with those whom a strategy before this one found."""
        self.members, self.common = dict(roll.members), roll.common

    def refresh(self, grid: Grid, timeout: float) -> Change:
        """Look who has come and gone since the last round; nodes are queried only if there are
        unknown ones.
        """
        before, admitted = set(self.present()), set(self.admitted)
        nodes = set(grid.get_node_ids())
        gone = [client for client in self.present() if self.members[client].node not in nodes]
        if gone:
            self.find(grid, gone, min(timeout, self.limits.rejoin_seconds))
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
        """Wait until the lost clients are back, perhaps as other nodes, and learn where they are.

        A node that is online again under its number is who it was. Only others are queried, and
        with patience: a machine that has just come back may be slow, and a second query would only
        wait behind the first.
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
            for member in query(
                grid, unknown, min(QUERY_SECONDS, max(left, 1.0)), self.history, self._refuse
            ):
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
        """Take note of who of those `asked` gave a reply that was `used`, or `answered` at all;
        return who is no longer part of totals.
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
                        f"client {client}: {self.faults[client]} replies in a row were not used; "
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
        """Return for how many samples the clients count that would have more than `max_share` of
        the round, and say so once.
        """
        share, sizes = (
            self.limits.max_share,
            {client: self.members[client].facts.train_size for client in chosen},
        )
        found = bounds.caps(sizes, share) if share < 1 else {}
        for client in sorted(set(found) - self.capped):
            self.journal.fault(
                f"client {client} has {sizes[client]} samples and counts for {found[client]} "
                f"(max_share is {share:g})"
            )
        self.capped |= set(found)
        return found

    def moderate(self, half: ServerHalf, state: Any, updates: dict[int, Any]) -> dict[int, Any]:
        """Return the updates of a round with nobody's claims above `max_share` of all, and say once
        whose were cut down.
        """
        if not updates:
            return {}
        kept, cuts = bounds.reduce(half, state, updates, self.limits.max_share)
        for client in sorted({cut.client for cut in cuts}):
            new = [
                cut
                for cut in cuts
                if cut.client == client and (client, cut.name) not in self.moderated
            ]
            self.moderated |= {(client, cut.name) for cut in new}
            if new:
                least = min(cut.factor for cut in new)
                self.journal.fault(
                    f"client {client} counts for less than it claims, {least:.2g} of it at the "
                    "least, of "
                    f"{', '.join(cut.name for cut in new)} (max_share is {self.limits.max_share:g})"
                )
        return kept

    # -- memory -----------------------------------------------------------------------------------
    def memory(self) -> dict[str, Any]:
        """Return what a resumed run must know, in JSON's types."""
        return {
            "admitted": sorted(self.admitted),
            "left": sorted(self.left | self.excluded),
            "unused": sorted(self.unused),
            "accepted": {str(client): round for client, round in sorted(self.accepted.items())},
        }

    def remember(self, memory: Mapping[str, Any]) -> Change:
        """Go on from what `memory` returned; return who is new since then, and who of those that
        took part is not there.
        """
        here = set(self.training())
        if not memory:  # written by an engine whose clients never change
            self.admitted = set(here)
            return Change([], [])
        self.admitted, self.left = set(memory["admitted"]), set(memory["left"])
        self.accepted = {int(client): int(round) for client, round in memory["accepted"].items()}
        self.unused = set(memory["unused"])
        self.returned = self.left & here
        self.left -= here
        absent = sorted(self.admitted - here - self.left)
        joined = sorted(here - self.admitted)
        for client in absent:
            self._leave(client, "it was not there when the run went on")
        self.admitted |= here
        return Change(joined, absent)

    # -- inside -----------------------------------------------------------------------------------
    def _unknown(self, nodes: set[int]) -> list[int]:
        """Return the nodes to ask who they are: not known, not hopeless, and not one that says it
        is a client that is there.
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

    def _meet(self, grid: Grid, unknown: list[int], timeout: float, nodes: set[int]) -> None:
        for member in query(grid, unknown, timeout, self.history, self._refuse):
            self._welcome(member, nodes)

    def _welcome(self, member: Member, nodes: set[int]) -> None:
        """Take in a client that came late, came back or moved to another node; refuse one that is
        somebody else.
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
                    f"node {member.node} says it is client {client}, which node {known.node} is; "
                    "left out"
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
        """Return whether the client's network is the one that all share; if not, say so."""
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
            f"client {client} has left: {why}; it is not part of the totals until it is back",
            client,
        )
