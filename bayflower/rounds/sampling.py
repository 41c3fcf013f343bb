"""Which clients take part in a round: seeded, and independent of the order in which clients are
known.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..data import batches


def choose(
    clients: Iterable[int], fraction: float, *, seed: int, round: int, least: int = 1
) -> list[int]:
    """Return `fraction` of the clients (rounded down, at least `least` of those there are), in
    ascending order.
    """
    known = sorted(clients)
    number = min(max(int(fraction * len(known) + 1e-9), least), len(known))
    if number == len(known):
        return known
    return sorted(
        int(client)
        for client in batches.rng(seed, "sampling", round).choice(known, size=number, replace=False)
    )
