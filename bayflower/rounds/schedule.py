"""What happens in which round: who trains, when the models are tested, when a checkpoint is due."""

from __future__ import annotations

from collections.abc import Iterable

from .sampling import choose

EVALUATION = 2**30  # added to a round for the draw of clients that are tested


def clients_of(
    round: int, clients: Iterable[int], fraction: float, *, seed: int, least: int = 1
) -> list[int]:
    """Return the clients that train in a round."""
    return choose(clients, fraction, seed=seed, round=round, least=least)


def clients_tested(
    round: int, clients: Iterable[int], fraction: float, *, seed: int, least: int = 1
) -> list[int]:
    """Return the clients that are tested after a round."""
    return choose(clients, fraction, seed=seed, round=round + EVALUATION, least=least)


def test_due(round: int, every: int) -> bool:
    """Return whether the clients of a round test the model they begin with: a point of the accuracy
    curve for the round before.
    """
    return every > 0 and round > 1 and (round - 1) % every == 0


def checkpoint_due(round: int, every: int, last: int) -> bool:
    """Return whether a checkpoint is written after a round; always after the last one, unless
    `every` is 0.
    """
    return every > 0 and (round % every == 0 or round == last)
