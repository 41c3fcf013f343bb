"""Tensors that a network makes and then fills in place, in stacks.

`out = torch.zeros(B, T, H)` makes one tensor for all clients of a stack, which has no place for the
numbers of each: `out[:, t] = h` is refused. Made of the samples it has a place for every client.
That takes memory, so it is done only for networks that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

REFUSED = "inplace arithmetic"  # how vmap begins to say that there is no place
_samples: ContextVar[Tensor | None] = ContextVar("samples", default=None)


@contextmanager
def made_of(samples: Tensor) -> Iterator[None]:
    """Make tensors inside of these samples."""
    token = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(token)


def of_samples(torchs: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return one of torch's functions that make a tensor of a size, for every client of a stack."""

    def make(*args: Any, **named: Any) -> Any:
        samples, more = _samples.get(), named.keys() - {"size", "fill_value", "dtype", "device"}
        if samples is None or more - {"requires_grad"} or named.get("requires_grad"):
            return NotImplemented
        shaped = torchs(*args, **{**named, "device": "meta"})
        where = torch.device(named.get("device") or torch.get_default_device())
        found = samples.new_empty(shaped.shape, dtype=shaped.dtype, device=where)
        if torchs is torch.empty:
            return found
        if torchs is torch.full:
            return found.fill_(named["fill_value"] if "fill_value" in named else args[-1])
        return found.fill_(torchs is torch.ones)

    return make


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    one: of_samples(one) for one in (torch.empty, torch.full, torch.ones, torch.zeros)
}
