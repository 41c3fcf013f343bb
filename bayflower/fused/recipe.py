"""The recipe of a stack of clients: tensors that a recorded step reads, filled for each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..contract import ClientHalf, Work
from ..maths.optim import SHARE
from ..networks.model import Batch
from ..recipes import step as recipes
from ..stacked import chance
from ..tree import upload


class StackedRecipe:
    """What is done around the steps of one phase of `number` clients; what is off has no tensor.

    `labels` are the training labels of all clients, `starts` where those of each begin, and `sizes`
    how many each has. With `moving` they are those of other clients in every round.
    """

    def __init__(
        self,
        half: ClientHalf,
        purpose: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        labels: Tensor,
        starts: Tensor,
        sizes: Tensor,
        moving: bool = False,
    ) -> None:
        self.recipe = recipes.of(half.training, half.model.num_classes)
        self.purpose, device = purpose, labels.device
        self.shares: Tensor | None = None  # of the learning rate, by (step, client)
        if self.recipe.scheduled:
            self.shares = torch.ones(shape, dtype=dtype, device=device)
        self.keys: Tensor | None = None  # of the augmentation, by client
        if self.recipe.augments:
            self.keys = torch.zeros(shape[1], dtype=torch.int64, device=device)
        self.weights: Tensor | None = None  # of the classes, by (client, class)
        if self.recipe.weighs:
            self.labels, self.starts, self.sizes, self.moving = labels, starts, sizes, moving
            self.weights = torch.ones(shape[1], self.recipe.classes, dtype=dtype, device=device)
            self.known = self._known()

    def _known(self) -> Tensor:
        """Return the weights of the classes of all clients."""
        assert self.weights is not None
        classes, labels, sizes = self.recipe.classes, self.labels, self.sizes
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=labels.device), sizes)
        shift = self.starts - (sizes.cumsum(0) - sizes)  # from the place in order of the clients
        own = torch.arange(len(owner), device=labels.device) + shift[owner]
        places = owner * classes + labels[own]
        counts = torch.bincount(places, minlength=len(sizes) * classes)
        return self.recipe.weights(counts.reshape(-1, classes)).to(self.weights.dtype)

    def load(
        self, rows: Tensor, round: int, lengths: np.ndarray, key_of: Callable[[], Any]
    ) -> None:
        """Fill the tensors for a round in which the clients at `rows` take `lengths` steps and have
        these keys for what is done to their samples.
        """
        if self.keys is not None:
            self.keys.copy_(upload(key_of(), self.keys.device))
        if self.shares is not None:
            table = np.ones(tuple(self.shares.shape))
            for of in sorted(set(lengths.tolist())):
                share = [self.recipe.share(self.purpose, round, step, of) for step in range(of)]
                table[:of, lengths == of] = np.array(share)[:, None]
            self.shares.copy_(upload(table, self.shares.device))
        if self.weights is not None:
            if self.moving:
                self.known = self._known()
            self.weights.copy_(self.known[rows])

    def groups(self, batches: tuple[Batch, ...], at: Tensor, size: int) -> tuple[Batch, ...]:
        """Return the batches of step `at` of the first clients, augmented."""
        if self.keys is None:
            return batches
        keys = chance.further(self.keys[:size], at[0])
        return vmap(self.recipe.groups)(keys, batches)

    def set_rate(self, work: Work, at: Tensor, size: int) -> None:
        """Write the share of the learning rate that step `at` takes into the work."""
        if self.shares is not None and work.opt.rate:
            work.opt.rate[SHARE].copy_(self.shares.index_select(0, at)[0, :size])

    def shaped(
        self, fn: Callable[..., Any], size: int
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return fn with its losses smoothed and weighted, and the arguments that come in front."""
        front = () if self.weights is None else (self.weights[:size],)
        return self.recipe.stacked(fn), front
