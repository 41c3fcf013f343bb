"""The bytes of a round's messages, computed from shapes: the fused engine reports them without
sending anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..config import Run
from ..contract import ClientHalf
from ..files.records import Views
from ..rounds.halves import Halves
from ..tree import Shapes, flatten, map_tree, shapes, unflatten
from ..wire.continuity import BLANK, KEY
from ..wire.protocol import (
    BROADCAST,
    HEADER,
    METRICS,
    TALLY,
    UPDATE,
    content_bytes,
    reply_header,
    reply_numbers,
    request_header,
    varint_bytes,
)


class Count:
    """Bytes up and down of one round, and how many samples each client has."""

    def __init__(self, run: Run, name: str, round: int, before: Views) -> None:
        self.run, self.name, self.round = run, name, round
        self.tests: Shapes = ()
        if before:
            first = {view: next(iter(tallies.values())) for view, tallies in before.items()}
            self.tests = shapes(
                {
                    view: dict(zip(tally._fields, tally, strict=True))
                    for view, tally in first.items()
                }
            )
        self.up = self.down = 0
        self.examples: dict[int, int] = {}
        self.weights: dict[int, int] = {}  # samples for which clients count in a mean
        self.open: list[tuple[Sequence[int], ClientHalf, Any]] = []
        # of a secure sum: the length of a vector, and the bytes down and up of keys and shares
        self.secure: tuple[int, int, int] | None = None

    def add(
        self,
        clients: Sequence[int],
        halves: Halves,
        message: Any,
        replied: Sequence[int],
        updates: Any,
        examples: Mapping[int, int],
    ) -> None:
        """Count the messages to some clients. `settle` counts the replies of those that `replied`,
        whose sizes may depend on values.

        `message` is stacked if it differs from client to client, `updates` always.
        """
        server = halves.server
        instructions = self.run.instructions()
        head = request_header(
            method=self.run.method,
            run=self.name,
            round=self.round,
            seed=self.run.settings.seed,
            evaluate=bool(self.tests),
            purpose="finetune",
            instructions=instructions,
        )
        self.examples.update(examples)
        shared: int | None = None
        apart = server.per_client and not server.packs_alike(message)
        if replied:
            self.open.append((replied, halves.client, outline(updates, halves.client.sized_by)))
        for place in range(len(clients)):
            if shared is None or apart:
                own = (
                    map_tree(lambda leaf, place=place: leaf[place], message)
                    if server.per_client
                    else message
                )
                shared = content_bytes({BROADCAST: shapes(server.pack(own))}, {HEADER: head}, {})
            self.down += shared

    def settle(self) -> None:
        """Count the messages from the clients; this waits for a GPU."""
        if self.secure and self.open:
            self.down, self.up = self.down + self.secure[1], self.up + self.secure[2]
        for clients, half, updates in self.open:
            sizes = half.packed_shapes(updates)
            if self.secure:
                sizes = [(("masked", (self.secure[0],), "int64"),)] * len(clients)
            for client, packed in zip(clients, sizes, strict=True):
                self.up += reply_bytes(
                    self.run.method,
                    self.name,
                    varint_bytes(2 * self.round),
                    varint_bytes(2 * client),
                    packed,
                    self.tests,
                    varint_bytes(2 * self.examples[client]),
                )
        self.open.clear()


def outline(updates: Any, sized_by: tuple[str, ...]) -> Any:
    """Return stacked updates in which only the `sized_by` leaves have values. They are copies,
    because the engine reuses its own tensors.
    """
    flat = {
        name: leaf.clone()
        if name.startswith(sized_by)
        else torch.empty((), dtype=leaf.dtype).expand(leaf.shape)
        for name, leaf in flatten(updates).items()
    }
    return unflatten(type(updates), flat)


@lru_cache(maxsize=4096)
def reply_bytes(
    method: str,
    run: str,
    round_bytes: int,
    client_bytes: int,
    packed: Shapes,
    tests: Shapes,
    count_bytes: int,
) -> int:
    """Return the bytes of a reply; only the lengths of its integers matter."""
    head = reply_header(
        method=method, run=run, round=of_length(round_bytes), client=of_length(client_bytes)
    )
    head[KEY] = BLANK.text()
    arrays = {UPDATE: packed, **({TALLY: tests} if tests else {})}
    return content_bytes(
        arrays, {HEADER: head}, {METRICS: reply_numbers(of_length(count_bytes), 0.0)}
    )


def of_length(length: int) -> int:
    """Return a number that takes `length` bytes in a message."""
    return 1 << (7 * (length - 1) - 1) if length > 1 else 0
