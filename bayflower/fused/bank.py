"""The store of the fused engine's client states between rounds: stacked on the device; `disk.py`
has the one on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..tree import Rows, map_tree, stack, take, to
from .fixed import leaves


class Bank(Protocol):
    """The states of all clients."""

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients, on the device."""

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the stacked states of some clients after `round`."""

    def ahead(self, chosen: Sequence[int], training: Sequence[int]) -> None:
        """Prepare for `take` of these clients, while those that are `training` change."""

    def save(self, round: int) -> None:
        """Make the states of now those of the checkpoint after `round`, which is written next."""

    def tidy(self, round: int) -> None:
        """Delete what is no longer needed after the checkpoint of `round` was written."""

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state) of every client whose state is in memory."""

    def shut(self) -> None:
        """Finish what is under way."""


class DeviceBank:
    """All states stacked on the device."""

    def __init__(self, fresh: Any, clients: Sequence[int], device: torch.device) -> None:
        self.rows = Rows(clients, device)
        self.device = device
        self.tree = map_tree(
            lambda leaf: leaf.to(device).expand(len(clients), *leaf.shape).clone(), fresh
        )

    def load(self, known: Mapping[int, Any]) -> None:
        """Load states from a checkpoint."""
        self.put(
            sorted(known), to(stack([known[client] for client in sorted(known)]), self.device), 0
        )

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients."""
        return take(self.tree, self.rows.index(chosen))

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the stacked states of some clients."""
        index = self.rows.index(chosen)
        for mine, new in zip(leaves(self.tree), leaves(states), strict=True):
            mine.index_copy_(0, index, new.detach().to(mine.dtype))

    def ahead(self, chosen: Sequence[int], training: Sequence[int]) -> None:
        """Do nothing: all states are here."""

    def save(self, round: int) -> None:
        """Do nothing: a checkpoint contains all states."""

    def tidy(self, round: int) -> None:
        """Do nothing: a checkpoint contains all states."""

    def shut(self) -> None:
        """Do nothing."""

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state), copied to the CPU."""
        there = to(self.tree, "cpu")
        for client, row in self.rows.of.items():
            yield client, map_tree(lambda leaf, row=row: leaf[row].clone(), there)
