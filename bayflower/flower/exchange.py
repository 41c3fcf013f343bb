"""Messages to nodes and their replies: queries, requests, retries and duplicates.

Flower may drop a message or a reply without an error, for instance when a client's network fails
during a transfer. The server therefore sends a message again if its node is online but silent, or
was restarted after the message was sent. Retrying too early is harmless: a SuperNode works on one
message at a time, and a client answers a duplicate with its saved reply. A run that was interrupted
can leave a SuperNode one reply behind: it sends a reply only when the next message arrives
(`deploy/gate.py`). Such a node gets every message twice.
"""

from __future__ import annotations

import logging
import math
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ..tree import Tensors
from ..wire.hello import MAX_CLIENT, ClientInfo, from_header, is_whole
from . import records
from .pulling import pull

log = logging.getLogger("bayflower")
POLL_SECONDS = 0.2
# replies pulled in one call of the simulation's grid, whose replies need no unpacking; a larger
# number would hold more of them in memory
AT_ONCE = 4
# Flower's error codes for a lost message, reply, node or ClientApp process: a retry may help
LOST = {3, 4, 5, 8}
LOOK_SECONDS = 2.0  # interval between two checks of which nodes are online
# A SuperNode polls every 3 s. A reply this soon after a retry shows that it is one reply behind.
BEHIND_SECONDS = 10.0
# Tolerance for clocks that differ, added to the lifetime of a message: a client whose clock is
# ahead treats an expired message as unknown.
CLOCKS = 600.0
# The grid of Flower's simulation needs no retries: it loses nothing, and it would run two messages
# for one client at the same time.
SIMULATION = "InMemoryGrid"

OWNER = re.compile(r"client-(\d{1,9})")  # the name of a registered key

# (nodes, seconds until expiry) -> one message for each node
Ask = Callable[[list[int], float], Iterable[Message]]


class Member(NamedTuple):
    """A client as the server knows it."""

    client: int
    node: int
    new: bool
    facts: ClientInfo


class Request(NamedTuple):
    """The clients that a round addresses, and the message they get."""

    clients: list[int]
    kind: str
    round: int
    config: ConfigRecord
    test: bool
    order: str = ""  # to calibrate, and everyone's sums so far
    sums: Tensors = {}
    keep: bool = True  # a test: whether the clients save their personal models


class Routed(Grid):
    """A grid whose nodes are reached through others, which answer for several
    (`regions/grid.py`).
    """

    @abstractmethod
    def stream(
        self,
        nodes: Iterable[int],
        ask: Ask,
        timeout: float,
        history: NodeHistory,
        asked: dict[str, int],
    ) -> Iterator[Message]:
        """Yield one reply of each node, as the function `stream` does."""


class NodeHistory:
    """What later exchanges need from earlier ones: how long each node takes to reply, and which
    duplicates may still get a late reply.
    """

    def __init__(self, again: float, most_mb: int = 2048) -> None:
        self.again = again  # seconds of silence after which a message is sent again; 0 = never
        self.most_mb = most_mb  # cap on a reply's size, in millions of bytes
        self.slowest: dict[int, float] = {}  # by node: longest time to a reply, in seconds
        self.spare: dict[str, float] = {}  # duplicates whose reply is not needed: when they expire
        self.behind: set[int] = set()  # nodes that send a reply only when the next message arrives

    def patience(self, node: int) -> float:
        """Return the seconds of silence allowed to a node: at least `again`, and at least twice its
        slowest reply.
        """
        return max(self.again, 2 * self.slowest.get(node, 0.0))

    def sweep(self, grid: Grid) -> None:
        """Pull the late replies to duplicates, so that Flower can delete them."""
        for reply in pulled(grid, dict.fromkeys(self.spare, 0), self.most_mb):
            self.spare.pop(reply.metadata.reply_to_message_id, None)
        self.spare = {
            number: until for number, until in self.spare.items() if until > time.monotonic()
        }


def query(
    grid: Grid,
    nodes: list[int],
    timeout: float,
    history: NodeHistory,
    refused: Callable[[int, str], None],
    told: Mapping[str, Any],
) -> Iterator[Member]:
    """Yield the client that each node reports to be. `refused` is called with the node and the
    reason if its reply is invalid; `told` are further keys of the header.
    """

    def ask(those: list[int], ttl: float) -> Iterator[Message]:
        for node in those:
            yield Message(
                RecordDict({records.HEADER: records.make_header(**told)}),
                dst_node_id=node,
                message_type=MessageType.QUERY,
                ttl=ttl,
            )

    asked: dict[str, int] = {}
    owners = registered(grid) if nodes else {}
    for reply in stream(grid, nodes, ask, timeout, history, asked):
        node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if reply.has_error():
            if reply.error.code not in LOST:  # a lost node is not an invalid one
                refused(node, reason(reply))
            continue
        try:
            head = records.header(reply, ("client", "new"))
            if not is_whole(head["client"], 0, MAX_CLIENT - 1):
                raise records.WireError(
                    f"client must be a whole number below {MAX_CLIENT}, got "
                    f"{str(head['client'])[:80]!r}"
                )
            if owners.get(node, head["client"]) != head["client"]:
                raise records.WireError(
                    f"its key is that of client {owners[node]}, and it claims to be client "
                    f"{head['client']}"
                )
            member = Member(head["client"], node, bool(head["new"]), from_header(head))
        except Exception as error:  # an invalid reply of one node must not stop the run
            refused(node, str(error) or type(error).__name__)
            continue
        yield member


def reason(reply: Message) -> str:
    """Return why a client failed: the last line of its error text that contains letters."""
    lines = [
        line.strip()
        for line in (reply.error.reason or "").splitlines()
        if any(letter.isalpha() for letter in line)
    ]
    return lines[-1] if lines else f"error code {reply.error.code}"


def stream(
    grid: Grid,
    nodes: Iterable[int],
    ask: Ask,
    timeout: float,
    history: NodeHistory,
    asked: dict[str, int] | None = None,
) -> Iterator[Message]:
    """Yield one reply of each node in order of arrival, until all have replied or `timeout` seconds
    have passed.

    Flower's grid returns all available replies together, so they are pulled one at a time. `asked`
    is filled with the node of each message: Flower's synthetic error replies do not carry the node
    id. Errors of nodes that stay lost come last.
    """
    asked = {} if asked is None else asked
    if isinstance(grid, Routed):
        yield from grid.stream(nodes, ask, timeout, history, asked)
        return
    talk = Exchange(grid, ask, time.monotonic() + timeout, history, asked)
    talk.push(list(nodes))
    talk.push([node for node in talk.last if node in history.behind])
    while (talk.sent or talk.revive()) and time.monotonic() < talk.deadline:
        came = False
        for reply in pulled(grid, talk.nodes(), history.most_mb, talk.sent):
            came = True
            if talk.takes(reply):
                yield reply
        if came:
            talk.heard = time.monotonic()
        elif talk.sent:
            talk.look()
            time.sleep(POLL_SECONDS)
    yield from talk.lost.values()
    history.sweep(grid)


def pulled(
    grid: Grid, nodes: Mapping[str, int], most_mb: int, still: Container[str] | None = None
) -> Iterator[Message]:
    """Yield the replies that are there to these messages, given with their nodes; one at a time, so
    that a reply that cannot be read spoils no other. A message that is no longer in `still` is not
    asked for.
    """
    numbers = list(nodes)
    step = AT_ONCE if type(grid).__name__ == SIMULATION else 1
    for start in range(0, len(numbers), step):
        wanted = [n for n in numbers[start : start + step] if still is None or n in still]
        if step > 1:
            yield from grid.pull_messages(wanted)
        elif wanted:
            yield from pull(grid, wanted[0], nodes[wanted[0]], most_mb)


class Exchange:
    """One request to several nodes: the messages that wait for a reply, and the nodes that need a
    retry. A retry is a new message.
    """

    def __init__(
        self, grid: Grid, ask: Ask, deadline: float, history: NodeHistory, asked: dict[str, int]
    ) -> None:
        self.grid, self.ask, self.deadline, self.history, self.asked = (
            grid,
            ask,
            deadline,
            history,
            asked,
        )
        self.sent: dict[str, tuple[int, float]] = {}  # message id: its node, and when it was sent
        self.settled: set[str] = set()  # duplicates of messages that have been answered
        self.lost: dict[int, Message] = {}  # by node: Flower's error for its only message
        self.revived: set[int] = set()  # nodes that got a retry after such an error
        self.last: dict[int, float] = {}  # by node: when its last message was sent
        self.waits: dict[int, float] = {}  # by node: seconds of silence allowed after that
        self.heard = time.monotonic()  # when the last reply of any node came
        self.looked = -LOOK_SECONDS
        self.again = history.again > 0 and type(grid).__name__ != SIMULATION

    def nodes(self) -> dict[str, int]:
        """Return the node of each message that waits for a reply."""
        return {number: node for number, (node, _) in self.sent.items()}

    def push(self, nodes: list[int]) -> None:
        """Send a message to each of the nodes."""
        # Flower's grid goes over them twice
        outgoing = list(self.ask(nodes, self.deadline - time.monotonic() + CLOCKS))
        to = [message.metadata.dst_node_id for message in outgoing]
        if not outgoing:
            return
        now = time.monotonic()
        for number, node in zip(self.grid.push_messages(outgoing), to, strict=True):
            if number is not None:
                self.sent[number], self.asked[number], self.last[node] = (node, now), node, now

    def takes(self, reply: Message) -> bool:
        """Return whether a reply counts. It does not if its node has answered a duplicate, or if it
        is an error and the node may still answer a duplicate.
        """
        number = reply.metadata.reply_to_message_id
        if number in self.settled:
            return False
        if number not in self.sent:
            return True  # an unsolicited reply: the strategy reports it
        node, when = self.sent.pop(number)
        others = [other for other, (to, _) in self.sent.items() if to == node]
        if reply.has_error() and reply.error.code in LOST:
            if not others and self.again and node not in self.revived:
                self.lost[node] = reply
            return not others and node not in self.lost
        now = time.monotonic()
        if when < self.last[node] and now - self.last[node] < BEHIND_SECONDS:
            self.history.behind.add(node)  # the old reply came right after the retry
        elif not reply.has_error():
            self.history.slowest[node] = max(self.history.slowest.get(node, 0.0), now - when)
        for other in others:
            del self.sent[other]
        self.settled.update(others)
        self.history.spare.update(dict.fromkeys(others, self.deadline + CLOCKS))
        return True

    def revive(self) -> bool:
        """Retry the nodes whose message was lost and that are online; return whether there are
        any.
        """
        back = sorted(self.lost.keys() & set(self.grid.get_node_ids())) if self.lost else []
        for node in back:
            log.info("node %d: %s; retrying", node, reason(self.lost.pop(node)))
            self.revived.add(node)
            self.push([node])
        return bool(back)

    def look(self) -> None:
        """Retry each node that was lost and is back, was restarted after its message was sent, or
        has been silent for too long.

        Silence counts from the last reply of any node: while replies arrive, a straggler does not
        delay the round.
        """
        now = time.monotonic()
        if not self.again or now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        self.revive()
        silent = {node for node, _ in self.sent.values()}
        begun = started(self.grid)
        for node in sorted(silent & begun.keys()):
            wait = self.waits.setdefault(node, self.history.patience(node))
            late = now - max(self.heard, self.last[node]) >= wait
            if late or now - self.last[node] > begun[node]:
                log.info(
                    "node %d %s; retrying",
                    node,
                    f"has been silent for {wait:.0f} s" if late else "was restarted",
                )
                self.push([node])
                self.waits[node] = 2 * wait if late else wait


def registered(grid: Grid) -> dict[int, int]:
    """Return the client of each online node whose key the server registered under a client's name,
    as `bayflower deploy` does for the keys in `nodes`. Such a node can be no other client.
    """
    try:
        names = {info.node_id: OWNER.fullmatch(info.name) for info in grid.get_nodes()}
    except (NotImplementedError, AttributeError, TypeError):
        return {}
    return {node: int(found[1]) for node, found in names.items() if found}


def started(grid: Grid) -> dict[int, float]:
    """Return for each online node how many seconds it has been online; infinity if the grid does
    not report it.
    """
    try:
        return {
            info.node_id: time.time() - datetime.fromisoformat(info.last_activated_at).timestamp()
            for info in grid.get_nodes()
        }
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return dict.fromkeys(grid.get_node_ids(), math.inf)
