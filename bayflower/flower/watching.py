"""Who is told when a strategy starts in this process: `bayflower try`, which shows its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Started = Callable[[Any, int], None]  # gets a strategy and its number of rounds
_watcher: ContextVar[Started | None] = ContextVar("watcher", default=None)


def starts(strategy: Any, rounds: int) -> None:
    """Tell that a strategy starts."""
    if (tell := _watcher.get()) is not None:
        tell(strategy, rounds)


@contextmanager
def watched(tell: Started) -> Iterator[None]:
    """Call `tell` for every strategy of ours that starts."""
    token = _watcher.set(tell)
    try:
        yield
    finally:
        _watcher.reset(token)
