"""Random numbers as a function of whole numbers: no generator, no state, the same on every engine.

A step of a client has a *key*. From it a training pass takes the numbers of its random layers:

    bits(key, pass, call, i_1, …, i_d) = mixed(mixed(key + offset(pass, call)) + Σ_k i_k C_k)

    pass       the training passes of a step, counted from 0 (MAML has several)
    call       the random layers of a pass, counted from 0 in the order in which they are called
    i_1 … i_d  the place in the tensor; C_k are odd constants, so a number depends neither on the
               size of the batch, nor on padding, nor on how many clients are stacked

`mixed` is SplitMix64's finaliser. It is made of operations on whole numbers, so that a CPU and a
GPU, clients alone and clients under `torch.func.vmap` have equal bits, inside a recorded graph too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import BayflowerError

GAMMA = -7046029254386353131  # SplitMix64's odd constant, 2^64 / golden ratio, as a signed number
FIRST, SECOND = -4658895280553007687, -7723592293110705685  # the finaliser's factors
WORD, HALF = 2**64, 2**32
Key = Tensor | int
T = TypeVar("T")


def mixed(z: Tensor) -> Tensor:
    """Return the bits of whole numbers thoroughly mixed; products wrap around."""
    z = (z ^ shifted(z, 30)) * FIRST
    z = (z ^ shifted(z, 27)) * SECOND
    return z ^ shifted(z, 31)


def shifted(z: Tensor, by: int) -> Tensor:
    """Return z shifted right as if it had no sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def mixed_number(z: int) -> int:
    """Return what `mixed` gives for one number, which may be too large; the result has a sign."""
    z %= WORD
    z = (z ^ (z >> 30)) * FIRST % WORD
    z = (z ^ (z >> 27)) * SECOND % WORD
    return signed(z ^ (z >> 31))


def signed(z: int) -> int:
    """Return the whole number of 64 bits that has the bits of z."""
    return (z + WORD // 2) % WORD - WORD // 2


def further(keys: Tensor, number: Tensor) -> Tensor:
    """Return the keys of what has this number below `keys`, such as a step of a phase."""
    return mixed(mixed(keys) + number * GAMMA)


def further_number(key: int, number: int) -> int:
    """Return what `further` gives for one key."""
    return mixed_number(mixed_number(key) + number * GAMMA)


def part(key: Key, number: int) -> Key:
    """Return the key of part `number` of what has a key, such as one of a step's batches."""
    if isinstance(key, int):
        return further_number(key, number)
    return mixed(mixed(key) + signed(number * GAMMA))


@lru_cache(maxsize=1024)
def offset(number: int, call: int) -> int:
    """Return what a call of a pass adds to the key of a step."""
    return mixed_number(mixed_number((number + 1) * GAMMA) + call + 1)


@lru_cache(maxsize=64)
def constant(axis: int) -> int:
    """Return C_k, an odd number."""
    return mixed_number((axis + 1) * FIRST) | 1


# -- whose numbers ---------------------------------------------------------------------------------
class Step:
    """The key of one step of one client, and where the step is in its passes and calls."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.passes = 0  # begun so far
        self.number = 0  # of the pass that is running
        self.calls = 0  # of random layers in it


_step: ContextVar[Step | None] = ContextVar("step", default=None)


@contextmanager
def step(key: Key) -> Iterator[None]:
    """Give the training passes inside the random numbers of `key`."""
    token = _step.set(Step(key))
    try:
        yield
    finally:
        _step.reset(token)


def within(fn: Callable[..., T]) -> Callable[..., T]:
    """Return fn with one more argument in front, the key of the step in which it runs."""

    def keyed(key: Key, *args: Any) -> T:
        with step(key):
            return fn(*args)

    return keyed


@contextmanager
def one_pass() -> Iterator[None]:
    """Begin the next training pass of the step."""
    if (now := _step.get()) is None:
        yield
        return
    outside = now.number, now.calls
    now.number, now.calls, now.passes = now.passes, 0, now.passes + 1
    try:
        yield
    finally:
        now.number, now.calls = outside


def passes() -> int:
    """Return how many training passes the step has begun."""
    now = _step.get()
    return now.passes if now else 0


def calls() -> int:
    """Return how many random layers the running pass has called."""
    now = _step.get()
    return now.calls if now else 0


@contextmanager
def again(number: int) -> Iterator[None]:
    """Give the passes inside the numbers that those from pass `number` on had: the same network."""
    if (now := _step.get()) is None:
        yield
        return
    before, now.passes = now.passes, number
    try:
        yield
    finally:
        now.passes = before


def next_key() -> Key:
    """Return the key of the next call of a random layer."""
    now = _step.get()
    if now is None:
        raise BayflowerError(
            "a training pass of a network with random layers (dropout) needs the key of a step: "
            "call it inside bayflower.stacked.chance.step(key)"
        )
    now.calls += 1
    place = offset(now.number, now.calls - 1)
    return mixed_number(now.key + place) if isinstance(now.key, int) else mixed(now.key + place)


# -- numbers of the next call ----------------------------------------------------------------------
def bits(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return 64 random bits for each place of a tensor."""
    sums = torch.zeros((), dtype=torch.int64, device=device)
    for axis, size in enumerate(shape):
        line = torch.arange(size, device=device) * constant(axis)
        sums = sums + line.reshape(-1, *(1,) * (len(shape) - 1 - axis))
    return mixed(sums + next_key())


def kept(shape: Sequence[int], drop: float, device: torch.device) -> Tensor:
    """Return True with probability 1 − drop, up to 2^-32, at each place: two places share 64
    bits.
    """
    width = shape[-1] if shape else 1
    pairs = bits((*shape[:-1], -(-width // 2)), device)
    level = min(round(drop * HALF), HALF)
    both = torch.stack([(pairs & (HALF - 1)) >= level, shifted(pairs, 32) >= level], -1)
    return both.flatten(-2)[..., :width].reshape(tuple(shape))


def uniform(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1) in float64."""
    return shifted(bits(shape, device), 11).double() * 2.0**-53


def normal(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return standard normal numbers in float64 (Box and Muller)."""
    first, second = uniform((2, *shape), device).unbind(0)
    return (-2 * (1 - first).log()).sqrt() * torch.cos(2 * math.pi * second)
