"""Constant tensors that are made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch


def constant(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that keeps the tensors a function gives for its last arguments.

    Inside `torch.func.grad` each new tensor is wrapped for that gradient, and inside
    `torch.inference_mode` it can never take part in one. Neither may be kept: an export after it,
    for example, fails. So the tensors are made outside of both.
    """

    def keep(fn: Callable[..., Any]) -> Any:
        @lru_cache(maxsize=maxsize)
        @wraps(fn)
        def made(*args: Any) -> Any:
            with torch._C._DisableFuncTorch(), torch.inference_mode(False):
                return fn(*args)

        return made

    return keep
