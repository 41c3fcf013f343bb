"""The updates of a round: stacked where clients were trained one by one, and their sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..contract import Sum
from ..maths.exact import Total
from ..rounds.halves import Halves
from ..rounds.robust import HOLDING, Limiter, Measured
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
    exactly, client by client. `limiter` limits what is added; where updates must wait for each
    other, they are added when the last are there.
    """

    def __init__(self, halves: Halves, fast: bool, limiter: Limiter) -> None:
        self.server, self.client, self.limiter = halves.server, halves.client, limiter
        self.wanted = fast and limiter.how not in HOLDING
        self.holds = limiter.holds
        self.fast: dict[str, Tensor] = {}
        self.exact = Total()
        self.held: list[tuple[Any, list[int], Any]] = []

    def add(self, state: Any, chunk: list[int], updates: Any) -> None:
        """Add the stacked updates of some clients."""
        if self.holds:  # copied: a recorded step writes to the same memory again
            self.held.append((state, chunk, map_tree(torch.clone, updates)))
        elif not (self.wanted and self._add_fast(state, chunk, updates)):
            for client, update in self._apart(state, chunk, updates):
                if self.limiter.on:
                    update = self.limiter.alone(to(state, "cpu"), client, update)[0]
                if update is not None:
                    self._add_one(to(state, "cpu"), client, update)

    def _add_fast(
        self, state: Any, chunk: list[int], updates: Any, seen: Measured | None = None
    ) -> bool:
        """Add the method's fast sum; return whether it has one."""
        server, limiter = self.server, self.limiter
        if limiter.on:
            claims = server.stacked_claims(state, updates)
            seen = seen or limiter.see(state, chunk, updates, claims)
            updates = limiter.limit(seen).updates
            factors = limiter.claimed({name: seen.sizes[name] for name in claims})
            if factors:
                updates = server.stacked_reduced(state, updates, factors)
            kept = [place for place, client in enumerate(chunk) if not limiter.drops(client)]
            if not kept:
                return True
            if len(kept) < len(chunk):
                chunk = [chunk[place] for place in kept]
                updates = map_tree(lambda leaf: leaf[kept], updates)
        part = server.total(state, tuple(chunk), updates)
        if part is None:
            self.wanted = False
            limiter.undo()
            return False
        for name, value in part.items():
            self.fast[name] = self.fast[name] + value if name in self.fast else value
        for name in server.negligible(self.fast):
            del self.fast[name]
        return True

    def _apart(self, state: Any, chunk: list[int], updates: Any) -> Iterator[tuple[int, Any]]:
        """Yield the updates of stacked clients as the server gets them."""
        home, there = to(state, "cpu"), to(updates, "cpu")
        for place, client in enumerate(chunk):
            yield client, self.server.unpack(home, self.client.pack(take(there, place)))

    def _add_one(self, state: Any, client: int, update: Any) -> None:
        self.exact.add(self.server.statistic(state, client, update))
        self.exact.drop(self.server.negligible(self.exact.names()))

    def _release(self) -> None:
        """Add the updates that waited for each other."""
        limiter, server = self.limiter, self.server
        fast = self.wanted and all(
            server.total(state, tuple(chunk), updates) is not None
            for state, chunk, updates in self.held[:1]
        )
        if fast:
            seen = [
                limiter.see(state, chunk, updates, server.stacked_claims(state, updates))
                for state, chunk, updates in self.held
            ]
            limiter.renew()
            for (state, chunk, updates), own in zip(self.held, seen, strict=True):
                self._add_fast(state, chunk, updates, own)
            return
        everyone = {client: update for one in self.held for client, update in self._apart(*one)}
        home = to(self.held[0][0], "cpu")
        for client, update in limiter.together(home, everyone)[0].items():
            self._add_one(home, client, update)

    def value(self, device: torch.device) -> Sum:
        """Return the sum, on the device."""
        if self.held:
            self._release()
        self.limiter.close()
        return self.fast or {name: value.to(device) for name, value in self.exact.value().items()}
