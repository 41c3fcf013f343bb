"""Messages to and from nodes: who is there, what is asked, and replies as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from . import wire
from .facts import MAX_CLIENT, Facts, from_header, is_whole

POLL_SECONDS = 0.2
AT_ONCE = 4  # replies asked for in one request: more would be held in memory together
LOST = {3, 4, 5, 8}  # Flower's codes for a message, reply, node or ClientApp process that is gone: asking again may help


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


def query(grid: Grid, nodes: list[int], timeout: float, refused: Callable[[int, str], None]) -> Iterator[Member]:
    """Yield who each node says it is; `refused` is told the node and the reason where that cannot be used."""
    messages = (Message(RecordDict({wire.HEADER: wire.make_header()}), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes)
    asked: dict[str, int] = {}
    for reply in stream(grid, messages, timeout, asked):
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


def stream(grid: Grid, messages: Iterable[Message], timeout: float, asked: dict[str, int] | None = None) -> Iterator[Message]:
    """Yield replies as they come, in any order, until all are there or `timeout` seconds have passed.

    Flower's grid returns all replies that have come at once, so few are asked for at a time. `asked` learns which node each message
    went to, because a reply that Flower makes up for a lost one does not say it.
    """
    outgoing = list(messages)  # Flower's grid goes over them twice
    if not outgoing:
        return
    deadline = time.monotonic() + timeout
    nodes = [message.metadata.dst_node_id for message in outgoing]
    sent = {number: node for number, node in zip(grid.push_messages(outgoing), nodes, strict=True) if number is not None}
    del outgoing
    if asked is not None:
        asked.update(sent)
    waiting = list(sent)
    while waiting and time.monotonic() < deadline:
        came = False
        for start in range(0, len(waiting), AT_ONCE):
            for reply in grid.pull_messages(waiting[start : start + AT_ONCE]):
                came = True
                sent.pop(reply.metadata.reply_to_message_id, None)
                yield reply
        waiting = [number for number in waiting if number in sent]
        if waiting and not came:
            time.sleep(POLL_SECONDS)
