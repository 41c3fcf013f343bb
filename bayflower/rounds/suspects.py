"""Who is left out of a round, and what the run's faults say of it.

A client is a suspect if its change is far beyond its limit, turned against its own past, or opposes
the others'. Whether it is left out is settled when all clients of the round have replied:

    a majority is never left out     what more than half of a round's clients do is what is usual;
                                     a method that changes its course looks like this
    few say nothing                  of fewer than MANY clients nobody is left out for this round

Updates are added as they arrive, so those of suspects go to sums of their own: one with them as
they are within their limits, one with what is added if they are left out. At the end of the round
one of the two counts. Sums are exact, so the order of arrival does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..maths.exact import Total
from ..tree import Tensors
from .gate import MANY

OPPOSED, TURNED, FAR, EXACT = "opposed", "turned", "far", "exact"
Why = frozenset[str]
BEYOND = 10.0  # times its limit: so far beyond, a client is named
FAR_CLAIM = 1e5  # the same for claims: those of honest clients differ by a thousand times
LOOKS = {
    FAR: "are far beyond what is usual",
    TURNED: "turned against their own past",
    OPPOSED: "oppose the others",
}


class Verdict(NamedTuple):
    """One update within its limits, what is added instead if its client is left out (None:
    nothing), and for what it may be left out.
    """

    used: Any
    left: Any
    why: Why

    def chosen(self, out: bool) -> Any:
        """Return what is added of the update; None: nothing."""
        return self.left if out else self.used


class Suspects:
    """The clients of one round, which of them may be left out, and which of them are."""

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self.of: dict[str, set[int]] = {reason: set() for reason in (OPPOSED, TURNED, FAR, EXACT)}
        self.standing: Why = frozenset()  # reasons for which clients are left out
        self.spared: dict[str, int] = {}  # by reason that a majority has: of how many clients
        self.cuts: list[tuple[Sequence[int], Tensors]] = []  # clients, and their factors by name
        self.farthest: set[int] = set()  # clients that robust=krum leaves out

    def why(self, client: int) -> Why:
        """Return for what a client may be left out."""
        return frozenset(reason for reason, some in self.of.items() if client in some)

    @property
    def surprises(self) -> set[int]:
        """Return the clients that are suspect for what nobody could know before the round."""
        known = self.of[OPPOSED]  # by the rounds before
        return (self.of[TURNED] | self.of[FAR]) - known | self.of[EXACT]

    def settle(self) -> None:
        """Decide for what clients are left out, now that all of the round are known."""
        out: set[int] = set()
        most, standing, self.spared = len(self.clients) // 2, [], {}
        for reason in (OPPOSED, TURNED, FAR):
            some = self.of[reason] & self.clients
            if not some or (reason != OPPOSED and len(self.clients) < MANY):
                continue
            if len(out | some) <= most:
                out |= some
                standing.append(reason)
            else:
                self.spared[reason] = len(some)
        self.standing = frozenset(standing)

    def out(self, client: int) -> bool:
        """Return whether a client is left out of the round."""
        return bool(self.why(client) & self.standing)

    @property
    def left(self) -> set[int]:
        """Return the clients that are left out of the round."""
        return {client for client in self.clients if self.out(client)}

    def lines(self) -> dict[tuple[int | None, str], str]:
        """Return what is to be reported of the round, by client and kind. Clients that oppose the
        others, or their past, are reported by the gate.
        """
        total = len(self.clients)
        found: dict[tuple[int | None, str], str] = {
            (None, reason): f"{number} of {total} clients {LOOKS[reason]}; a majority is never left"
            " out: their changes are cut down to their limits and used (robust)"
            for reason, number in self.spared.items()
        }
        for client, far in sorted(self.beyond().items()):
            out = FAR in self.standing and client in self.of[FAR]
            if not out and FAR in self.spared:
                continue  # most are; the line above says so
            what = ", ".join(f"{name} by {times:.3g}" for name, times in sorted(far.items())[:4])
            done = "left out of this round" if out else "cut down to the limit"
            found[client, "far" if out else "cut"] = (
                f"client {client}: far beyond what is usual ({what} times its limit); {done} "
                "(robust)"
            )
        for client in sorted(self.farthest):
            found[client, "farthest"] = (
                f"client {client}: farther from the others than most; left out of this round "
                "(robust=krum)"
            )
        return found

    def beyond(self) -> dict[int, dict[str, float]]:
        """Return the clients far beyond a limit: by name how many times."""
        found: dict[int, dict[str, float]] = {}
        for clients, factors in self.cuts:
            for name, values in zip(factors, table(factors.values()), strict=True):
                most = FAR_CLAIM if claims_of(name) else BEYOND
                for client, one in zip(clients, values, strict=True):
                    if one < 1 / most:
                        found.setdefault(client, {})[name] = 1 / one if one else math.inf
        return found


class Apart:
    """The sums of suspects: by reason one with their updates, and one without."""

    def __init__(self) -> None:
        self.sums: dict[Why, tuple[Total, Total]] = {}

    def add(self, half: ServerHalf, state: Any, client: int, verdict: Verdict) -> None:
        """Add a suspect's update, or raise and change nothing."""
        both = (verdict.used, verdict.left)
        terms = [None if one is None else half.statistic(state, client, one) for one in both]
        pair = self.sums.setdefault(verdict.why, (Total(), Total()))
        for total, statistic in zip(pair, terms, strict=True):
            if statistic is not None:
                total.add(statistic)
                total.drop(half.negligible(total.names()))

    def into(self, total: Total, standing: Why) -> None:
        """Add to `total` what counts once it is settled for what clients are left out."""
        for why, (used, left) in self.sums.items():
            total.merge(left if why & standing else used)
        self.sums = {}


def table(rows: Iterable[Tensor]) -> list[list[float]]:
    """Return tensors of one length as lists, read from their device at once."""
    some = list(rows)
    if not some:
        return []
    found: list[list[float]] = torch.stack(
        [one.double().to(some[0].device) for one in some]
    ).tolist()
    return found


def claims_of(name: str) -> bool:
    """Return whether a size is a claim."""
    return name.startswith("class ")


def settled(verdicts: Mapping[int, Verdict], suspects: Suspects) -> dict[int, Any]:
    """Return what is added of each client's update; clients of which nothing is are missing."""
    chosen = {client: one.chosen(suspects.out(client)) for client, one in verdicts.items()}
    return {client: update for client, update in chosen.items() if update is not None}
