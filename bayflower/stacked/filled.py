"""Tensors that a network writes into, in stacks.

`out = torch.zeros(B, T, H)` makes one tensor for all clients of a stack, which has no place for the
numbers of each: `out[:, t] = h` is refused. Made of the samples it has a place for every client.

Some layers of stacks keep their output for the slopes where torch's keep their input: a linear
layer with the LeakyReLU after it. A network that writes into such an output gets a copy.

Both take memory, so they are done only for networks that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

REFUSED = "inplace arithmetic"  # how vmap begins to say that there is no place
CHANGED = "modified by an inplace operation"  # autograd's words for a kept tensor that was changed
_samples: ContextVar[Tensor | None] = ContextVar("samples", default=None)
_copies: ContextVar[bool] = ContextVar("copies", default=False)


@contextmanager
def made_of(samples: Tensor) -> Iterator[None]:
    """Make tensors inside of these samples."""
    token = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(token)


@contextmanager
def written() -> Iterator[None]:
    """Give away copies of the outputs that layers keep, inside."""
    token = _copies.set(True)
    try:
        yield
    finally:
        _copies.reset(token)


def writes() -> bool:
    """Return whether the network writes into what layers keep."""
    return _copies.get()


def own(x: Tensor) -> Tensor:
    """Return an output that its layer keeps, or a copy for a network that writes into it."""
    return x.clone() if writes() else x


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
