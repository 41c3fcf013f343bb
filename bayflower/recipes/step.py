"""The recipe of a step: what is done around a client half's own step, the same on every engine.

An engine asks for the recipe of a half (`of`) and does, for every step of a phase, what is not
off. Where everything is off, nothing is computed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .rates import share
from .settings import Training


class Recipe(NamedTuple):
    """The recipe of one kind of training, for so many classes."""

    training: Training
    classes: int

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes."""
        return self.training.scheduled

    def share(self, purpose: str, round: int, step: int, steps: int) -> float:
        """Return the share of the learning rate that a step takes."""
        rounds, within = self.training.over_rounds, self.training.over_steps
        return share(rounds, within, purpose, round, step, steps)


@lru_cache(maxsize=64)
def of(training: Training, classes: int) -> Recipe:
    """Return the recipe of a half with these settings."""
    return Recipe(training, classes)
