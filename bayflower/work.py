"""The work of one call of a client: what trains, what moves, and what a pass over the data found.
Part of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from .maths.optim import OptState
from .tree import Tensors

if TYPE_CHECKING:
    from .maths.optim import Optimizer


class Phase(NamedTuple):
    """One stretch of local training. Everything here is static: a step may branch on it.

    Exactly one of `epochs` and `steps` is positive. `trainable` names the parameters that move (all
    if None). `batches` is how many mini-batches one step consumes (2 for the support and query sets
    of MAML).
    """

    name: str
    optimizer: Optimizer
    batch_size: int
    epochs: int = 0
    steps: int = 0
    trainable: tuple[str, ...] | None = None
    batches: int = 1

    def moving(self, params: Tensors) -> tuple[str, ...]:
        """Return the names of the parameters that move."""
        return self.trainable if self.trainable is not None else tuple(params)


class Survey(NamedTuple):
    """What one pass over the training data found: `total` is summed over the samples, `each` has
    one row a sample (both trees).
    """

    total: Any
    each: Any


class Work(NamedTuple):
    """What lives during one call of a client: parameters on the move, buffers, the half's own
    notes, optimiser state.
    """

    params: Tensors
    buffers: Tensors
    memo: Any  # a tree: constants of the round, or what a step remembers for the next
    # the engine makes a fresh one at the start of each phase
    opt: OptState = OptState(torch.zeros(()), {}, {})
    # filled after the phases, before `finish`, where the half asks for it
    survey: Survey = Survey({}, {})


G = TypeVar("G", bound=Callable[..., Any])
_unchanged: dict[Any, Callable[[Phase], bool] | None] = {}


def unchanged(gradient: G) -> G:
    """Mark a half's `gradient` that returns the loss's own gradient as it is. Then a step of plain
    gradient descent may add a part of it to the weights without writing it (`stacked/products.py`).
    """
    _unchanged[gradient] = None
    return gradient


def unchanged_where(holds: Callable[[Phase], bool]) -> Callable[[G], G]:
    """Return what marks a `gradient` that is unchanged only in the phases for which `holds`."""

    def mark(gradient: G) -> G:
        _unchanged[gradient] = holds
        return gradient

    return mark


def is_unchanged(gradient: Any, phase: Phase | None = None) -> bool:
    """Return whether a `gradient` is marked so for a phase, or for every one; one that overrides it
    is not.
    """
    if gradient not in _unchanged:
        return False
    holds = _unchanged[gradient]
    return holds is None or (phase is not None and holds(phase))
