"""The updates of a round: stacked where clients were trained one by one, and their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Sum
from ..maths.exact import Total
from ..rounds.halves import Halves
from ..tree import map_tree, take, to


def stacked_updates(updates: list[Any]) -> Any:
    """Return one stack of updates; leaves with one row per sample are padded with zeros to the
    longest.
    """

    def join(*leaves: Tensor) -> Tensor:
        longest = max((leaf.shape[0] for leaf in leaves if leaf.ndim), default=0)
        return torch.stack(
            [
                leaf
                if leaf.ndim == 0 or leaf.shape[0] == longest
                else torch.cat([leaf, leaf.new_zeros(longest - len(leaf), *leaf.shape[1:])])
                for leaf in leaves
            ]
        )

    return map_tree(join, *updates)


class Totals:
    """The sum of a round's statistics: by the method's fast sum if `fast` and it has one, else
    exactly, client by client.
    """

    def __init__(self, halves: Halves, fast: bool) -> None:
        self.server, self.client, self.wanted = halves.server, halves.client, fast
        self.fast: dict[str, Tensor] = {}
        self.exact = Total()

    def add(self, state: Any, chunk: list[int], updates: Any) -> None:
        """Add the stacked updates of some clients."""
        part = self.server.total(state, tuple(chunk), updates) if self.wanted else None
        if part is not None:
            for name, value in part.items():
                self.fast[name] = self.fast[name] + value if name in self.fast else value
            for name in self.server.negligible(self.fast):
                del self.fast[name]
            return
        home, there = to(state, "cpu"), to(updates, "cpu")
        for place, client in enumerate(chunk):
            update = self.server.unpack(home, self.client.pack(take(there, place)))
            self.exact.add(self.server.statistic(home, client, update))
            self.exact.drop(self.server.negligible(self.exact.names()))

    def value(self, device: torch.device) -> Sum:
        """Return the sum, on the device."""
        return self.fast or {name: value.to(device) for name, value in self.exact.value().items()}
