"""The check of every reply, before anything of it reaches a sum: who sent it, for which round, and whether its content can be true."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, MetricRecord

from . import wire
from .exchange import Member, reason
from .metrics import Tally
from .types import ServerHalf


class Expected(NamedTuple):
    """What the replies of one round must be replies to."""

    run: str
    method: str
    round: int
    asked: Container[int]  # clients that were asked
    members: Mapping[int, Member]


class Accepted(NamedTuple):
    """A reply to train that can be used."""

    client: int
    update: Any
    tallies: dict[str, Tally]
    loss: float


def sender(reply: Message, expected: Expected) -> int:
    """Return the client a reply comes from; raise if it is not a reply to what was asked in this round."""
    if reply.has_error():
        raise wire.WireError(f"the client failed: {reason(reply)}")
    head = wire.header(reply, ("method", "run", "round", "client"))
    client = head["client"]
    member = expected.members.get(client) if isinstance(client, int) and not isinstance(client, bool) else None
    if member is None:
        raise wire.WireError(f"client {client!r} is not known")
    if member.node != reply.metadata.src_node_id:
        raise wire.WireError(f"it says it is client {client}, which is another node")
    if client not in expected.asked:
        raise wire.WireError(f"client {client} was not asked in this round")
    for name in ("round", "run", "method"):
        if head[name] != getattr(expected, name):
            raise wire.WireError(f"the reply is for {name} {head[name]!r}, not {getattr(expected, name)!r}")
    return int(client)


def accept(reply: Message, expected: Expected, half: ServerHalf, state: Any, done: Container[int]) -> Accepted:
    """Return the content of a reply to train that can be used; raise with the reason otherwise."""
    client = sender(reply, expected)
    if client in done:
        raise wire.WireError("a second reply in the same round")
    update = half.unpack(state, wire.arrays(reply, wire.UPDATE, consume=True))
    if why := half.check(state, client, update):
        raise wire.WireError(why)
    tallies = wire.arrays_to_tallies(wire.arrays(reply, wire.TALLY)) if wire.TALLY in reply.content else {}
    return Accepted(client, update, tallies, train_loss(reply))


def tested(reply: Message, expected: Expected) -> tuple[int, dict[str, Tally]]:
    """Return (client, tallies by view) of a reply to evaluate."""
    client = sender(reply, expected)
    return client, wire.arrays_to_tallies(wire.arrays(reply, wire.TALLY))


def train_loss(reply: Message) -> float:
    """Return the mean loss of local training that a reply reports."""
    numbers = reply.content.get(wire.METRICS)
    loss = numbers.get(wire.TRAIN_LOSS) if isinstance(numbers, MetricRecord) else None
    if not isinstance(loss, (int, float)) or not math.isfinite(loss):
        raise wire.WireError(f"{wire.TRAIN_LOSS} must be a finite number, got {loss!r}")
    return float(loss)
