"""Sampling of a round's clients: seeded, and independent of the order in which clients joined."""

from __future__ import annotations

from collections.abc import Iterable

from ..data import batches


def choose(
    clients: Iterable[int], fraction: float, *, seed: int, round: int, least: int = 1
) -> list[int]:
    """Return a sample of the clients, in ascending order: `fraction` of them, rounded down, but at
    least `least` if there are that many.
    """
    known = sorted(clients)
    number = min(max(int(fraction * len(known) + 1e-9), least), len(known))
    if number == len(known):
        return known
    return sorted(
        int(client)
        for client in batches.rng(seed, "sampling", round).choice(known, size=number, replace=False)
    )
