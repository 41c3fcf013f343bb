"""The recipe of a stack of clients: tensors that a recorded step reads, filled for each round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..contract import ClientHalf, Work
from ..maths.optim import SHARE
from ..recipes import step as recipes
from ..tree import upload


class StackedRecipe:
    """What is done around the steps of one phase of `number` clients; what is off has no tensor."""

    def __init__(
        self,
        half: ClientHalf,
        purpose: str,
        number: int,
        steps: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.recipe = recipes.of(half.training, half.model.num_classes)
        self.purpose, self.steps = purpose, steps
        self.shares: Tensor | None = None
        if self.recipe.scheduled:
            self.shares = torch.ones(steps, number, dtype=dtype, device=device)

    def load(self, chosen: Sequence[int], round: int, lengths: np.ndarray) -> None:
        """Fill the tensors for a round in which the chosen clients take `lengths` steps."""
        if self.shares is not None:
            table = np.ones(tuple(self.shares.shape))
            by_length = {
                int(of): [
                    self.recipe.share(self.purpose, round, step, int(of)) for step in range(int(of))
                ]
                for of in set(lengths.tolist())
            }
            for place, of in enumerate(lengths.tolist()):
                table[: int(of), place] = by_length[int(of)]
            self.shares.copy_(upload(table, self.shares.device))

    def set_rate(self, work: Work, at: Tensor, size: int) -> None:
        """Write the share of the learning rate that step `at` takes into the work."""
        if self.shares is not None and work.opt.rate:
            work.opt.rate[SHARE].copy_(self.shares.index_select(0, at)[0, :size])
