"""Replies pulled one by one, each measured before Flower unpacks it.

Flower sends a message as a tree of objects and builds it from their bytes inside `pull_messages`.
Two replies could end a run there: one that cannot be built, and one of a few megabytes that unpacks
to gigabytes, because an array may name the same chunk many times. So the server asks for one reply
at a time, and a reply that cannot be built is its client's fault. Objects are counted, pulled and
measured against `max_message_mb` before any of them is unpacked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.serverapp import Grid
from flwr.supercore.inflatable import inflatable_object
from flwr.superlink.grid import http_grid

from ..errors import WireError
from .trees import LONGEST_ARRAY, LONGEST_BODY, MEGABYTE, MOST_OBJECTS, PARTS


def pull(grid: Grid, number: str, node: int, most_mb: int) -> list[Message]:
    """Return the reply to the message called `number`, if it is there. One that cannot be read is
    an error reply of `node`; a failure of the network is raised.
    """
    try:
        with measured(most_mb):
            return [checked(reply, number, node) for reply in grid.pull_messages([number])]
    except (OSError, http_grid.httpx.HTTPError):
        raise
    except Exception as error:  # whatever the bytes of one client do to Flower's code
        said = str(error) or type(error).__name__
        return [unreadable(number, node, " ".join(said.split())[:200])]


def checked(reply: Message, number: str, node: int) -> Message:
    """Return a reply whose own words say where it comes from. Flower keeps its sender and the
    message it answers outside the reply, and returns what the client wrote inside.
    """
    facts = reply.metadata
    if facts.reply_to_message_id != number:
        raise WireError("it claims to answer another message")
    if node and facts.src_node_id != node and not reply.has_error():  # errors may be Flower's own
        raise WireError(f"it claims to come from node {facts.src_node_id}")
    return reply


def unreadable(number: str, node: int, why: str) -> Message:
    """Return the error reply that stands for one that could not be read."""
    metadata = Metadata(0, "", node, 0, number, "", time.time(), 1.0, "train")
    error = Error(code=0, reason=f"its reply cannot be read ({why})")
    return Message(error=error, metadata=metadata)  # type: ignore[call-overload, no-any-return]


@contextmanager
def measured(most_mb: int) -> Iterator[None]:
    """Measure what Flower pulls before it is unpacked, as long as this lasts."""
    pulled, built = http_grid.pull_objects, http_grid.inflate_object_from_contents
    most = most_mb * MEGABYTE

    def few(object_ids: Iterable[str], pull_object_fn: Callable[[str], bytes], **more: Any) -> Any:
        wanted, size = list(object_ids), 0
        if len(wanted) > MOST_OBJECTS:
            raise WireError(f"it has {len(wanted)} parts, more than {MOST_OBJECTS}")

        def counted(number: str) -> bytes:
            nonlocal size
            content = pull_object_fn(number)
            size += len(content)
            if size > most:
                raise WireError(f"it has more than max_message_mb = {most_mb} million bytes")
            return content

        return pulled(wanted, counted, **more)

    def small(object_id: str, object_contents: dict[str, bytes], **more: Any) -> Any:
        size = unpacked_size(object_id, object_contents)
        if size > most:
            raise WireError(
                f"it would unpack to {size} bytes; max_message_mb = {most_mb} allows fewer"
            )
        return built(object_id, object_contents, **more)

    replaced = {"pull_objects": few, "inflate_object_from_contents": small}
    try:
        for name, function in replaced.items():
            setattr(http_grid, name, function)
        yield
    finally:
        http_grid.pull_objects, http_grid.inflate_object_from_contents = pulled, built


def unpacked_size(object_id: str, contents: Mapping[str, bytes]) -> int:
    """Return the bytes of the arrays and records of a message; what is named twice counts twice."""
    known: dict[str, int] = {}

    def size_of(number: str, allowed: tuple[str, ...]) -> int:
        if number in known:
            return known[number]
        content = contents[number]
        kind, parts, length = inflatable_object.get_object_head_values_from_object_content(content)
        if kind not in allowed:
            raise WireError(f"it has a {kind[:40]!r} where {' or '.join(allowed)} must be")
        body = content[len(content) - length :] if 0 < length <= len(content) else b""
        longest = LONGEST_ARRAY if kind == "Array" else LONGEST_BODY
        if kind != "ArrayChunk" and length > longest:
            raise WireError(f"its {kind} has {length} bytes, more than {longest}")
        each = {part: size_of(part, PARTS[kind]) for part in parts}
        if kind == "Array":
            places = json.loads(body)["arraychunk_ids"]
            size = sum(each[parts[place]] for place in places)
        elif kind in ("RecordDict", "ArrayRecord"):
            size = sum(each[part] for part in json.loads(body).values())
        else:
            size = length + sum(each.values())
        known[number] = size
        return size

    return size_of(object_id, ("Message",))
