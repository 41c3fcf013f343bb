"""The check of every reply before it is aggregated: its sender, its round, and whether its content
is plausible.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, MetricRecord, RecordDict

from ..config import Limits
from ..contract import ServerHalf
from ..rounds.diverged import loss_problem
from ..tasks import Task
from ..tree import flatten
from . import bounds, records
from .exchange import Member, reason
from .wrapped import Form

ODD_LOSS = 1e3  # times one plus the median of the round: such a loss stays out of metrics
MOST_TESTS = 1000  # arrays of test results and of calibration


class Expected(NamedTuple):
    """What a valid reply of this round must match."""

    run: str
    method: str
    round: int
    asked: Container[int]  # clients that were asked
    members: Mapping[int, Member]
    task: Task
    limits: Limits
    training: Any  # settings of local training
    caps: Mapping[int, int]  # clients that count for fewer samples than they have
    form: Form  # how updates are read


class Accepted(NamedTuple):
    """A valid reply to a training request."""

    update: Any
    tallies: dict[str, Any]
    loss: float


def sender(reply: Message, expected: Expected) -> int:
    """Return the client that sent a reply; raise if the reply is too large or does not answer a
    request of this round.
    """
    if reply.has_error():
        raise records.WireError(f"the client failed: {reason(reply)}")
    records.weigh(reply.content, expected.limits.max_message_mb)
    head = records.header(reply, ("method", "run", "round", "client"))
    client = head["client"]
    member = (
        expected.members.get(client)
        if isinstance(client, int) and not isinstance(client, bool)
        else None
    )
    if member is None:
        raise records.WireError(f"client {repr(client)[:80]} is unknown")
    if member.node != reply.metadata.src_node_id:
        raise records.WireError(f"it claims client {client}, which is held by another node")
    if client not in expected.asked:
        raise records.WireError(f"client {client} was not sampled in this round")
    for name in ("round", "run", "method"):
        if head[name] != getattr(expected, name):
            raise records.WireError(
                f"the reply is for {name} {repr(head[name])[:80]}, not {getattr(expected, name)!r}"
            )
    return int(client)


def accept(
    reply: Message,
    client: int,
    expected: Expected,
    half: ServerHalf,
    state: Any,
    done: Container[int],
) -> Accepted:
    """Return the content of a valid reply to a training request of `client`; raise with the reason
    if it is invalid.
    """
    if client in done:
        raise records.WireError("duplicate reply in the same round")
    declared = expected.members[client].facts.train_size
    most = 2 * len(flatten(half.expects(state))) + 64
    records.few(reply, records.UPDATE, most)
    update = half.unpack(state, expected.form.update(reply, state))
    why = half.check(state, client, update) or bounds.problem(
        half, state, client, update, declared, expected.limits, expected.training
    )
    if why:
        raise records.WireError(why)
    tallies = tallies_of(reply, expected, client) if records.TALLY in reply.content else {}
    loss = train_loss(reply)
    if client in expected.caps:
        most = expected.caps[client]
        update = update._replace(num_examples=update.num_examples.clamp(max=most))
    return Accepted(update, tallies, loss)


def tested(reply: Message, expected: Expected) -> tuple[int, dict[str, Any]]:
    """Return (client, tallies by view) of a reply to a test request."""
    client = sender(reply, expected)
    return client, tallies_of(reply, expected, client)


def tallies_of(reply: Message, expected: Expected, client: int) -> dict[str, Any]:
    """Return the tallies of a reply by view; raise if a test on this client's data cannot give
    them.
    """
    records.few(reply, records.TALLY, MOST_TESTS)
    tallies = records.arrays_to_tallies(records.arrays(reply, records.TALLY), expected.task)
    most = 2 * expected.members[client].facts.test_size
    for view, tally in tallies.items():
        if int(tally.num_examples) > most:
            raise records.WireError(
                f"the test result {view!r} counts {int(tally.num_examples)} samples, more than "
                "twice the number the client reported"
            )
    if "personal" not in tallies:
        raise records.WireError("the test result of the personal model is missing")
    return tallies


def train_loss(reply: Message) -> float:
    """Return the mean loss of local training that a reply reports."""
    loss = records.metric(reply, records.TRAIN_LOSS)
    if why := loss_problem(records.TRAIN_LOSS, loss):
        raise records.WireError(why)
    return float(loss)  # type: ignore[arg-type]


def odd_losses(losses: Mapping[int, float]) -> list[int]:
    """Return the clients whose training loss is out of all proportion to the round's median."""
    if not losses:
        return []
    middle = statistics.median(abs(loss) for loss in losses.values())
    return [client for client in sorted(losses) if abs(losses[client]) > ODD_LOSS * (1 + middle)]


def metrics_of(reply: Message) -> RecordDict:
    """Return the metrics of a reply without its arrays."""
    return RecordDict(
        {name: MetricRecord(dict(record)) for name, record in reply.content.metric_records.items()}
    )
