"""Sampling of a round's clients: seeded, and independent of the order in which clients joined."""

from __future__ import annotations

from collections.abc import Iterable

from numpy.random import Generator

from ..data import batches


def choose(
    clients: Iterable[int], fraction: float, *, seed: int, round: int, least: int = 1
) -> list[int]:
    """Return a sample of the clients, in ascending order: `fraction` of them, rounded down, but at
    least `least` if there are that many.
    """
    known = sorted(clients)
    return drawn(known, number_of(len(known), fraction, least), seed=seed, round=round)


def number_of(clients: int, fraction: float, least: int = 1) -> int:
    """Return `fraction` of a number of clients, rounded down, but at least `least` of them."""
    return min(max(int(fraction * clients + 1e-9), least), clients)


def drawn(clients: Iterable[int], number: int, *, seed: int, round: int) -> list[int]:
    """Return so many of the clients, in ascending order; all of them if there are no more."""
    return _of(sorted(clients), number, batches.rng(seed, "sampling", round))


def refilled(
    clients: Iterable[int], number: int, *, seed: int, round: int, asked: int
) -> list[int]:
    """Return so many of the clients, drawn when `asked` others of a round had been asked."""
    return _of(sorted(clients), number, batches.rng(seed, "refill", round, asked))


def _of(known: list[int], number: int, chance: Generator) -> list[int]:
    if number >= len(known):
        return known
    places = chance.choice(len(known), size=number, replace=False)
    return sorted(known[place] for place in places.tolist())
