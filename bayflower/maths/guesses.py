"""Truths that lie on a GPU, and are guessed where the host is not to wait for them.

A server half asks `holds` for what is nearly always true. Within `guessing` the answer is yes, and
the truth is noted: whoever guesses looks at it later, and takes back what rests on a wrong guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_noted: ContextVar[list[Tensor] | None] = ContextVar("noted", default=None)


def holds(truth: Tensor) -> bool:
    """Return whether a truth () holds, or that it does within `guessing`."""
    noted = _noted.get()
    if noted is None:
        return bool(truth)
    noted.append(truth.detach())
    return True


@contextmanager
def guessing() -> Iterator[list[Tensor]]:
    """Guess that what is asked for holds; the list gets each truth."""
    noted: list[Tensor] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
