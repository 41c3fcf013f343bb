"""The recipe of a step: what is done around a client half's own step, the same on every engine.

An engine asks for the recipe of a half (`of`) and does, for every step of a phase, what is not
off. Where everything is off, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BayflowerError
from ..networks.model import Batch
from ..stacked import chance
from ..stacked.shaped import shaping, smoothed, weighted
from . import labels
from .augment import augmented
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

    # -- samples -----------------------------------------------------------------------------------
    @property
    def augments(self) -> bool:
        """Return whether anything is done to the samples."""
        return self.training.augmentation.on

    def augmented(self, key: chance.Key, batch: Batch) -> Batch:
        """Return the batch with this key augmented."""
        with chance.step(key):
            return augmented(self.training.augmentation, batch, self.classes)

    def groups(self, key: chance.Key, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        """Return the batches of the step with this key augmented."""
        return tuple(
            self.augmented(chance.part(key, number), batch) for number, batch in enumerate(batches)
        )

    # -- loss --------------------------------------------------------------------------------------
    @property
    def weighs(self) -> bool:
        """Return whether classes have weights."""
        return self.training.class_weights != labels.NONE

    def weights(self, counts: Tensor) -> Tensor:
        """Return the class weights (…, K) of clients with these counts of labels (…, K)."""
        if self.training.class_weights == labels.CLIENT:
            return labels.balanced(counts)
        if not (listed := labels.given(self.training.class_weights)):
            raise BayflowerError("class_weights=federation has no numbers yet; this is a bug")
        given = torch.tensor(listed, dtype=torch.float64, device=counts.device)
        return given.expand(counts.shape)

    def weights_of(self, y: Tensor) -> Tensor | None:
        """Return the class weights of a client with the training labels y; None without any."""
        return self.weights(labels.counted(y, self.classes)) if self.weighs else None

    def losses(self, weights: Tensor | None) -> AbstractContextManager[None]:
        """Return where losses are smoothed and weighted."""
        if weights is None and not self.training.label_smoothing:
            return nullcontext()
        return shaping(self.training.label_smoothing, weights)

    def stacked(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return fn with its losses smoothed and weighted; with weights it takes one more argument
        in front, those of its client.
        """
        if self.weighs:
            return weighted(fn, self.training.label_smoothing)
        return smoothed(fn, self.training.label_smoothing) if self.training.label_smoothing else fn


@lru_cache(maxsize=64)
def of(training: Training, classes: int) -> Recipe:
    """Return the recipe of a half with these settings."""
    return Recipe(training, classes)
