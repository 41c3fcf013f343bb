"""The updates of a round: stacked where clients were trained one by one, and their sum."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Sum
from ..maths.exact import Total
from ..rounds.halves import Halves
from ..rounds.robust import HOLDING, Limiter, Measured
from ..rounds.suspects import Apart, Why
from ..tree import Tensors, map_tree, take, to, upload


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


class Hasty(NamedTuple):
    """What was measured of updates that were added as if nobody had to be left out, and by which
    factors they and their claims were cut.
    """

    seen: Measured | None
    cuts: Tensors
    claims: Tensors


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
        self.apart: dict[Why, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}  # of suspects
        self.exact, self.suspects = Total(), Apart()
        self.held: list[tuple[Any, list[int], Any]] = []
        self.told: list[tuple[int | None, str]] = []  # of the round, once it is summed
        self.calm = False  # whether the fast sum was enough and no suspect came as a surprise

    def add(self, state: Any, chunk: list[int], updates: Any) -> None:
        """Add the stacked updates of some clients."""
        if self.holds:  # copied: a recorded step writes to the same memory again
            self.held.append((state, chunk, map_tree(torch.clone, updates)))
        elif not (self.wanted and self._add_fast(state, chunk, updates)):
            home = to(state, "cpu")
            for client, update in self._alone(state, chunk, updates):
                verdict = self.limiter.alone(home, client, update) if self.limiter.on else None
                if verdict is not None and verdict.why:
                    self.suspects.add(self.server, home, client, verdict)
                else:
                    self._add_one(home, client, verdict.used if verdict is not None else update)

    def _add_fast(
        self, state: Any, chunk: list[int], updates: Any, seen: Measured | None = None
    ) -> bool:
        """Add the method's fast sum; return whether it has one."""
        server, limiter = self.server, self.limiter
        groups: dict[Why, list[int]] = {frozenset(): list(range(len(chunk)))}
        if limiter.on:
            claims = server.stacked_claims(state, updates)
            seen = seen or limiter.see(state, chunk, updates, claims)
            updates = limiter.limit(seen).updates
            factors = limiter.claimed(chunk, {name: seen.sizes[name] for name in claims})
            if factors:
                updates = server.stacked_reduced(state, updates, factors)
            groups = {}
            for place, client in enumerate(chunk):
                groups.setdefault(limiter.why(client), []).append(place)
        for why, places in groups.items():
            used = self._total(state, chunk, updates, places)
            if used is None:
                self.wanted = False
                limiter.undo()
                return False
            if not why:
                self._join(self.fast, used)
                continue
            pair = self.apart.setdefault(why, ({}, {}))
            self._join(pair[0], used)
            if limiter.kept_anyway(why):
                assert seen is not None
                self._join(pair[1], self._total(state, chunk, limiter.muted(seen), places) or {})
        return True

    def hasty(self, state: Any, chunk: list[int], updates: Any, out: Collection[int]) -> Hasty:
        """Add the method's fast sum as if only the clients `out` had to be left out, without
        waiting for a GPU. Return what was measured, to be read later.
        """
        server, limiter, found = self.server, self.limiter, Hasty(None, {}, {})
        if limiter.on:
            claims = server.stacked_claims(state, updates)
            seen = limiter.look(state, chunk, updates, claims)
            done = limiter.cut(seen, blindly=True)
            factors = limiter.within({name: seen.sizes[name] for name in claims})
            updates = done.updates
            if factors:
                updates = server.stacked_reduced(state, updates, factors)
            found = Hasty(seen, done.factors, factors)
        places = [place for place, client in enumerate(chunk) if client not in out]
        used = self._total(state, chunk, updates, places)
        assert used is not None  # a round before had one
        self._join(self.fast, used)
        return found

    def _total(self, state: Any, chunk: list[int], updates: Any, places: list[int]) -> Sum | None:
        """Return the method's fast sum over the clients at `places` of a chunk."""
        if len(places) < len(chunk):
            chunk = [chunk[place] for place in places]
            chosen = upload(places, updates.num_examples.device)
            updates = map_tree(lambda leaf: leaf[chosen], updates)
        return self.server.total(state, tuple(chunk), updates)

    def _join(self, total: dict[str, Tensor], part: Sum) -> None:
        """Add a sum to a total."""
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
        for name in self.server.negligible(total):
            del total[name]

    def _alone(self, state: Any, chunk: list[int], updates: Any) -> Iterator[tuple[int, Any]]:
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
            limiter.settle()
            return
        everyone = {client: update for one in self.held for client, update in self._alone(*one)}
        home = to(self.held[0][0], "cpu")
        for client, update in limiter.together(home, everyone).items():
            self._add_one(home, client, update)

    def value(self, device: torch.device) -> Sum:
        """Return the sum, on the device."""
        if self.held:
            self._release()
        else:
            self.limiter.settle()
        suspects = self.limiter.suspects
        standing = suspects.standing
        self.calm = bool(self.fast) and not suspects.surprises
        for why, (used, left) in self.apart.items():
            self._join(self.fast, left if why & standing else used)
        self.suspects.into(self.exact, standing)
        self.exact.drop(self.server.negligible(self.exact.names()))
        self.told = self.limiter.lines()
        self.limiter.close(late=True)
        return self.fast or {name: value.to(device) for name, value in self.exact.value().items()}
