"""Messages to and from nodes: who is there, what is asked, and replies as they come.

A message or a reply can vanish without a word, for instance when a client's network fails in the
middle of it: Flower drops it and tells nobody. So a node that is online but silent, or was started
anew after it was asked, is asked again. A SuperNode works on one message after the other and
clients answer a repeated one from what they kept, so asking too early costs a client some seconds
and changes nothing. A run that ended in the wrong moment leaves a SuperNode one reply behind
(`deploy/gate.py`); where that shows, it is asked twice at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ..wire.hello import MAX_CLIENT, ClientInfo, from_header, is_whole
from . import records

log = logging.getLogger("bayflower")
POLL_SECONDS = 0.2
AT_ONCE = 4  # replies asked for in one request: more would be held in memory together
# Flower's codes for a message, reply, node or ClientApp process that is gone: asking again may help
LOST = {3, 4, 5, 8}
LOOK_SECONDS = 2.0  # between two looks at who is online
# a SuperNode looks for messages every three seconds, and sends what it has when it gets one
BEHIND_SECONDS = 10.0
# seconds by which a client's clock may be ahead of ours: it takes a message that has expired for
# one that was never there
CLOCKS = 600.0
# the grid of Flower's simulation: it loses nothing, and two messages for one client would run side
# by side
SIMULATION = "InMemoryGrid"

# (nodes, seconds until it expires) -> a message for each node
Ask = Callable[[list[int], float], Iterable[Message]]


class Member(NamedTuple):
    """A client as the server knows it."""

    client: int
    node: int
    new: bool
    facts: ClientInfo


class Request(NamedTuple):
    """What is asked of whom in a round."""

    clients: list[int]
    kind: str
    round: int
    config: ConfigRecord
    test: bool


class NodeHistory:
    """What one exchange teaches the next: how long each node takes, and which repeated messages may
    still be answered in vain.
    """

    def __init__(self, again: float) -> None:
        self.again = again  # seconds of silence after which a node is asked again; 0 = never
        self.slowest: dict[int, float] = {}  # by node: seconds until its reply came, at most
        # messages whose replies are no longer wanted, and when they expire
        self.spare: dict[str, float] = {}
        # nodes that send a reply when the next message comes, and not before
        self.behind: set[int] = set()

    def patience(self, node: int) -> float:
        """Return the seconds for which a node may be silent: twice what it is known to take, if
        that is more.
        """
        return max(self.again, 2 * self.slowest.get(node, 0.0))

    def sweep(self, grid: Grid) -> None:
        """Fetch replies that came twice, so that Flower need not keep them."""
        numbers = list(self.spare)
        for start in range(0, len(numbers), AT_ONCE):
            for reply in grid.pull_messages(numbers[start : start + AT_ONCE]):
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
) -> Iterator[Member]:
    """Yield who each node says it is; `refused` is told the node and the reason where that cannot
    be used.
    """

    def ask(those: list[int], ttl: float) -> Iterator[Message]:
        for node in those:
            yield Message(
                RecordDict({records.HEADER: records.make_header()}),
                dst_node_id=node,
                message_type=MessageType.QUERY,
                ttl=ttl,
            )

    asked: dict[str, int] = {}
    for reply in stream(grid, nodes, ask, timeout, history, asked):
        node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if reply.has_error():
            if reply.error.code not in LOST:  # a node that is gone says nothing about itself
                refused(node, reason(reply))
            continue
        try:
            head = records.header(reply, ("client", "new"))
            if not is_whole(head["client"], 0, MAX_CLIENT - 1):
                raise records.WireError(
                    f"client must be a whole number below {MAX_CLIENT}, got "
                    f"{str(head['client'])[:80]!r}"
                )
            member = Member(head["client"], node, bool(head["new"]), from_header(head))
        except Exception as error:  # whatever a node answers, it must not end the others' run
            refused(node, str(error) or type(error).__name__)
            continue
        yield member


def reason(reply: Message) -> str:
    """Return why a client failed, in one line: the last that has words."""
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
    """Yield one reply of each node as they come, in any order, until all are there or `timeout`
    seconds have passed.

    Flower's grid returns all replies that have come at once, so few are asked for at a time.
    `asked` learns which node each message went to, because a reply that Flower makes up for a lost
    one does not say it. Errors of nodes that stay lost come last.
    """
    talk = Exchange(grid, ask, time.monotonic() + timeout, history, {} if asked is None else asked)
    talk.push(list(nodes))
    talk.push([node for node in talk.last if node in history.behind])
    while (talk.sent or talk.revive()) and time.monotonic() < talk.deadline:
        came = False
        numbers = list(talk.sent)
        for start in range(0, len(numbers), AT_ONCE):
            for reply in grid.pull_messages(
                [number for number in numbers[start : start + AT_ONCE] if number in talk.sent]
            ):
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


class Exchange:
    """One question to several nodes: which messages are under way, and who is to be asked again,
    with a message made anew.
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
        self.sent: dict[str, tuple[int, float]] = {}  # message: its node, and when it was sent
        self.settled: set[str] = set()  # messages whose node has answered another one
        # nodes whose only message was lost, and what Flower said
        self.lost: dict[int, Message] = {}
        self.revived: set[int] = set()  # nodes of which that was so once
        self.last: dict[int, float] = {}  # when a node was asked last
        self.waits: dict[int, float] = {}  # how long it may then be silent
        self.heard = time.monotonic()  # when the last reply came
        self.looked = -LOOK_SECONDS
        self.again = history.again > 0 and type(grid).__name__ != SIMULATION

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
        """Return whether a reply counts: not if its node has answered, or may still answer, another
        message.
        """
        number = reply.metadata.reply_to_message_id
        if number in self.settled:
            return False
        if number not in self.sent:
            return True  # nobody asked for it: the strategy says so
        node, when = self.sent.pop(number)
        others = [other for other, (to, _) in self.sent.items() if to == node]
        if reply.has_error() and reply.error.code in LOST:
            if not others and self.again and node not in self.revived:
                self.lost[node] = reply
            return not others and node not in self.lost
        now = time.monotonic()
        if when < self.last[node] and now - self.last[node] < BEHIND_SECONDS:
            self.history.behind.add(node)  # long silent, and here as soon as it was asked again
        elif not reply.has_error():
            self.history.slowest[node] = max(self.history.slowest.get(node, 0.0), now - when)
        for other in others:
            del self.sent[other]
        self.settled.update(others)
        self.history.spare.update(dict.fromkeys(others, self.deadline + CLOCKS))
        return True

    def revive(self) -> bool:
        """Ask nodes again whose message was lost and that are
        online; return whether there are any.
        """
        back = sorted(self.lost.keys() & set(self.grid.get_node_ids())) if self.lost else []
        for node in back:
            log.info("node %d: %s; asked again", node, reason(self.lost.pop(node)))
            self.revived.add(node)
            self.push([node])
        return bool(back)

    def look(self) -> None:
        """Ask again whoever was lost and is back, was started anew since it was asked, or has been
        silent for too long.

        Silence is counted from the last reply of any node: while replies come, whoever is missing
        does not hold up the round.
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
                    "node %d %s; asked again",
                    node,
                    f"has been silent for {wait:.0f} s" if late else "was started anew",
                )
                self.push([node])
                self.waits[node] = 2 * wait if late else wait


def started(grid: Grid) -> dict[int, float]:
    """Return for each node that is online for how many seconds it has been so, for ever where the
    grid does not say.
    """
    try:
        return {
            info.node_id: time.time() - datetime.fromisoformat(info.last_activated_at).timestamp()
            for info in grid.get_nodes()
        }
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return dict.fromkeys(grid.get_node_ids(), math.inf)
