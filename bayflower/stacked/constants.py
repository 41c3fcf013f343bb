"""Constant tensors that are made once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch


@contextmanager
def outside() -> Iterator[None]:
    """Make tensors that can be kept, wherever the program is.

    Inside `torch.func.grad` each new tensor is wrapped for that gradient, and inside
    `torch.inference_mode` it can never take part in one. Neither may be kept: an export after it,
    for example, fails.
    """
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        yield


def constant(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that keeps the tensors a function gives for its last arguments, made
    outside of everything.
    """

    def keep(fn: Callable[..., Any]) -> Any:
        @lru_cache(maxsize=maxsize)
        @wraps(fn)
        def made(*args: Any) -> Any:
            with outside():
                return fn(*args)

        return made

    return keep
