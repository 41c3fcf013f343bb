"""Messages to and from nodes: who is there, what is asked, and replies as they come.

A message or a reply can vanish without a word, for instance when a client's network fails in the middle of it: Flower drops it and tells
nobody. So a node that is online but silent is asked again. A SuperNode works on one message after the other and clients answer a repeated
one from what they kept, so asking too early costs a client some seconds and changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from . import wire
from .facts import MAX_CLIENT, Facts, from_header, is_whole

log = logging.getLogger("bayflower")
POLL_SECONDS = 0.2
AT_ONCE = 4  # replies asked for in one request: more would be held in memory together
LOST = {3, 4, 5, 8}  # Flower's codes for a message, reply, node or ClientApp process that is gone: asking again may help
CLOCKS = 600.0  # seconds by which a client's clock may be ahead of ours: it takes a message that has expired for one that was never there
SIMULATION = "InMemoryGrid"  # the grid of Flower's simulation: it loses nothing, and two messages for one client would run side by side

Ask = Callable[[list[int], float], Iterable[Message]]  # (nodes, seconds until it expires) -> a message for each node


class Member(NamedTuple):
    """A client as the server knows it."""

    client: int
    node: int
    new: bool
    facts: Facts


class Request(NamedTuple):
    """What is asked of whom in a round."""

    clients: list[int]
    kind: str
    round: int
    config: ConfigRecord
    test: bool


class Line:
    """What one exchange teaches the next: how long each node takes, and which repeated messages may still be answered in vain."""

    def __init__(self, again: float) -> None:
        self.again = again  # seconds of silence after which a node is asked again; 0 = never
        self.slowest: dict[int, float] = {}  # by node: seconds until its reply came, at most
        self.spare: dict[str, float] = {}  # messages whose replies are no longer wanted, and when they expire

    def patience(self, node: int) -> float:
        """Return the seconds for which a node may be silent: twice what it is known to take, if that is more."""
        return max(self.again, 2 * self.slowest.get(node, 0.0))

    def sweep(self, grid: Grid) -> None:
        """Fetch replies that came twice, so that Flower need not keep them."""
        numbers = list(self.spare)
        for start in range(0, len(numbers), AT_ONCE):
            for reply in grid.pull_messages(numbers[start : start + AT_ONCE]):
                self.spare.pop(reply.metadata.reply_to_message_id, None)
        self.spare = {number: until for number, until in self.spare.items() if until > time.monotonic()}


def query(grid: Grid, nodes: list[int], timeout: float, line: Line, refused: Callable[[int, str], None]) -> Iterator[Member]:
    """Yield who each node says it is; `refused` is told the node and the reason where that cannot be used."""

    def ask(those: list[int], ttl: float) -> Iterator[Message]:
        for node in those:
            yield Message(RecordDict({wire.HEADER: wire.make_header()}), dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)

    asked: dict[str, int] = {}
    for reply in stream(grid, nodes, ask, timeout, line, asked):
        node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if reply.has_error():
            if reply.error.code not in LOST:  # a node that is gone says nothing about itself
                refused(node, reason(reply))
            continue
        try:
            head = wire.header(reply, ("client", "new"))
            if not is_whole(head["client"], 0, MAX_CLIENT - 1):
                raise wire.WireError(f"client must be a whole number below {MAX_CLIENT}, got {str(head['client'])[:80]!r}")
            member = Member(head["client"], node, bool(head["new"]), from_header(head))
        except Exception as error:  # whatever a node answers, it must not end the others' run
            refused(node, str(error) or type(error).__name__)
            continue
        yield member


def reason(reply: Message) -> str:
    """Return why a client failed, in one line: the last that has words."""
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if any(letter.isalpha() for letter in line)]
    return lines[-1] if lines else f"error code {reply.error.code}"


def stream(
    grid: Grid, nodes: Iterable[int], ask: Ask, timeout: float, line: Line, asked: dict[str, int] | None = None
) -> Iterator[Message]:  # fmt: skip
    """Yield one reply of each node as they come, in any order, until all are there or `timeout` seconds have passed.

    Flower's grid returns all replies that have come at once, so few are asked for at a time. Messages are made anew when a node is asked
    again, not kept. That happens when nothing has come from any node for as long as it may be silent, then after twice that time, and so
    on; while replies come, whoever is missing would not hold up the round. `asked` learns which node each message went to, because a reply
    that Flower makes up for a lost one does not say it.
    """
    waits = {node: line.patience(node) for node in nodes}
    if not waits:
        return
    deadline = time.monotonic() + timeout
    sent: dict[str, tuple[int, float]] = {}  # message: its node, and when it was sent
    settled: set[str] = set()  # messages whose node has answered another one

    def push(those: list[int]) -> None:
        outgoing = list(ask(those, deadline - time.monotonic() + CLOCKS))  # Flower's grid goes over them twice
        to = [message.metadata.dst_node_id for message in outgoing]
        numbers = {number: node for number, node in zip(grid.push_messages(outgoing), to, strict=True) if number is not None}
        sent.update({number: (node, time.monotonic()) for number, node in numbers.items()})
        if asked is not None:
            asked.update(numbers)

    push(list(waits))
    heard = time.monotonic()  # when the last reply came
    last = dict.fromkeys(waits, heard)  # when a node was asked last
    again = line.again > 0 and type(grid).__name__ != SIMULATION
    while sent and time.monotonic() < deadline:
        came = False
        numbers = list(sent)
        for start in range(0, len(numbers), AT_ONCE):
            for reply in grid.pull_messages([number for number in numbers[start : start + AT_ONCE] if number in sent]):
                came = True
                number = reply.metadata.reply_to_message_id
                if number in settled:
                    continue
                if number in sent:
                    node, when = sent.pop(number)
                    others = [other for other, (to, _) in sent.items() if to == node]
                    if others and reply.has_error() and reply.error.code in LOST:
                        continue  # the node may still answer another one
                    if not reply.has_error():
                        line.slowest[node] = max(line.slowest.get(node, 0.0), time.monotonic() - when)
                    for other in others:
                        del sent[other]
                    settled.update(others)
                    line.spare.update(dict.fromkeys(others, deadline + CLOCKS))
                yield reply
        now = time.monotonic()
        if came:
            heard = now
            continue
        late = [node for node in {node for node, _ in sent.values()} if now - max(heard, last[node]) >= waits[node]] if again else []
        online = set(grid.get_node_ids()) if late else set()
        for node in sorted(late):
            last[node] = now
            if node in online:
                log.info("node %d has been silent for %.0f s; asked again", node, waits[node])
                push([node])
                waits[node] *= 2
        if sent:
            time.sleep(POLL_SECONDS)
    line.sweep(grid)
