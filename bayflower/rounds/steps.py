"""Who takes the steps of one client: they are called one after the other, unless an engine has a
faster way (`fused/alone.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor

from ..contract import ClientHalf, Phase, Work
from ..networks.model import Batch
from ..recipes.step import Recipe
from ..stacked import chance
from ..tree import Tensors

# (the work, batches, noise, the step's key, class weights) → (the work after a step, its loss)
Step = Callable[
    [Work, tuple[Batch, ...], Tensors, int | Tensor, Tensor | None], tuple[Work, Tensors]
]


class Steps:
    """Takes steps by calling them."""

    def take(self, name: Any, step: Step, work: Work, *args: Any) -> tuple[Work, Tensors]:
        """Return what `step` returns of the work and the other arguments; `name` is that of the
        phase.
        """
        return step(work, *args)

    def done(self, work: Work) -> Work:
        """Return the work of a phase that is over, which nobody changes any more."""
        return work


_steps: ContextVar[Steps | None] = ContextVar("steps", default=None)


@contextmanager
def taking(steps: Steps) -> Iterator[None]:
    """Let these take the steps inside."""
    token = _steps.set(steps)
    try:
        yield
    finally:
        _steps.reset(token)


def taker() -> Steps:
    """Return who takes steps here."""
    return _steps.get() or Steps()


def step_of(half: ClientHalf, phase: Phase, recipe: Recipe) -> Step:
    """Return the step of a phase."""
    return partial(stepped, half, phase, recipe)


def stepped(
    half: ClientHalf,
    phase: Phase,
    recipe: Recipe,
    work: Work,
    groups: tuple[Batch, ...],
    noise: Tensors,
    key: int | Tensor,
    weights: Tensor | None,
) -> tuple[Work, Tensors]:
    """Return the work after a step with this key, and what a person wants to see."""
    with chance.step(key), recipe.losses(weights):
        return half.step(phase, work, groups, noise)
