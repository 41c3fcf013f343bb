"""torch.utils.checkpoint inside a pass of a network: layers are called directly.

Checkpointing calls layers once more in backward, when the pass is over. A network gets its weights
for the pass only (`functional_call`), so the second call would see others, and slopes would be
wrong without a word. Called directly, layers have the right slopes, and clients can be stacked; the
memory that checkpointing saves is used. Outside of passes torch's function is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

FORWARD = "_checkpoint_without_reentrant_generator"
UNKNOWN = (
    "torch.utils.checkpoint cannot be called directly with this version of torch; leave it out of "
    "the network"
)
_direct: ContextVar[bool] = ContextVar("direct", default=False)


@lru_cache(maxsize=1)
def prepared() -> bool:
    """Let torch's checkpointing look whether a pass is running; return whether that is possible."""
    torchs, function = getattr(checkpointing, FORWARD, None), checkpointing.CheckpointFunction
    if torchs is None:
        return False

    def around(*args: Any, **named: Any) -> Iterator[None]:
        return once() if _direct.get() else torchs(*args, **named)

    apply = function.apply

    def applied(run: Any, preserve: Any, *args: Any) -> Any:
        return run(*args) if _direct.get() else apply(run, preserve, *args)

    setattr(checkpointing, FORWARD, around)
    function.apply = staticmethod(applied)  # type: ignore[method-assign]
    return True


def once() -> Iterator[None]:
    """Return what surrounds a call in which nothing is saved or recomputed."""
    yield


@contextmanager
def called_directly() -> Iterator[None]:
    """Call what is checkpointed inside directly."""
    if not prepared():
        with torch.autograd.graph.disable_saved_tensors_hooks(UNKNOWN):
            yield
        return
    token = _direct.set(True)
    try:
        yield
    finally:
        _direct.reset(token)
