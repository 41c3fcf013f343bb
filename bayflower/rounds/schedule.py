"""The schedule of a run: which clients train, when models are tested, when a checkpoint is due."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError
from .sampling import choose
from .sampling import drawn as drawn  # parts of a schedule
from .sampling import number_of as number_of
from .sampling import refilled as refilled

EVALUATION = 2**30  # added to the round when clients are sampled for a test


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
    """Return whether the clients of a round also test the model before training, which gives the
    accuracy curve's point of the round before.
    """
    return every > 0 and round > 1 and (round - 1) % every == 0


def checkpoint_due(round: int, every: int, last: int) -> bool:
    """Return whether a checkpoint is due after a round: every `every` rounds and after the last; 0
    = never.
    """
    return every > 0 and (round % every == 0 or round == last)


def check(fraction_train: float, fraction_evaluate: float) -> None:
    """Raise if a share of clients is impossible."""
    if not 0 < fraction_train <= 1:
        raise ConfigError(
            f"fraction_train must be in (0, 1], got {fraction_train}; 1 means every client in "
            "every round"
        )
    if not 0 <= fraction_evaluate <= 1:
        raise ConfigError(
            f"fraction_evaluate must be in [0, 1], got {fraction_evaluate}; 0 means no test "
            "after the last round"
        )
