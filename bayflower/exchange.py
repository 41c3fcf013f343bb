"""Messages to and from nodes: who is there, what is asked, and replies as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from . import wire
from .types import Anatomy, BayflowerError

POLL_SECONDS = 0.2
AT_ONCE = 4  # replies asked for in one request: more would be held in memory together
REJOIN_SECONDS = 90.0  # how long a lost client is waited for before the round goes on without it
LOST = {3, 4, 5, 8}  # Flower's codes for a message, reply, node or ClientApp process that is gone: asking again may help


class Member(NamedTuple):
    """A client as the server knows it."""

    client: int
    node: int
    new: bool


class Request(NamedTuple):
    """What is asked of whom in a round."""

    clients: list[int]
    kind: str
    round: int
    config: ConfigRecord
    test: bool


def query(grid: Grid, nodes: list[int], timeout: float, note: Callable[[str], None]) -> Iterator[tuple[int, Member, Anatomy]]:
    """Yield who each node says it is; `note` is told of those that cannot answer."""
    messages = (Message(RecordDict({wire.HEADER: wire.make_header()}), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes)
    for reply in stream(grid, messages, timeout):
        node = reply.metadata.src_node_id
        if reply.has_error():
            note(f"node {node} cannot be used: {reason(reply)}")
            continue
        try:
            head = wire.header(reply, ("client", "new", "anatomy"))
            client, anatomy = int(head["client"]), wire.text_to_anatomy(head["anatomy"])
        except (BayflowerError, ValueError, TypeError, KeyError) as error:
            note(f"node {node} cannot be used: {' '.join(str(error).split())}")
            continue
        yield client, Member(client, node, bool(head["new"])), anatomy


def reason(reply: Message) -> str:
    """Return why a client failed, in one line."""
    lines = (reply.error.reason or "").strip().splitlines()
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
