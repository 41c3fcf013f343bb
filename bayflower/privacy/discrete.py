"""Exact discrete Gaussian noise (Canonne, Kamath and Steinke 2020, NeurIPS), many numbers at once.

    P(X = x) ∝ exp(−x² / 2σ²)  for whole numbers x, with σ = 2^BITS

Every decision is made by comparing whole numbers with random bits, so no rounding of a
floating-point number can show what the noise hides. As σ is a power of two, all numbers that are
compared need no division. The bits are the operating system's, never those of a run's seed.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np

BITS = 20  # σ is this power of two
PART = 1 << 17  # numbers at a time


class Entropy:
    """Random bits of the operating system. With a seed, which is for tests alone, they repeat."""

    seed: ClassVar[int | None] = None

    def __init__(self) -> None:
        self.fixed = None if self.seed is None else np.random.default_rng(self.seed)

    def draw(self, bits: int, number: int) -> Any:
        """Return whole numbers of so many bits, at most 63."""
        raw = os.urandom(8 * number) if self.fixed is None else self.fixed.bytes(8 * number)
        return (np.frombuffer(raw, "<u8") >> np.uint64(64 - bits)).astype(np.int64)

    def one_in(self, number: int, size: int) -> Any:
        """Return bools, each true with probability 1/number."""
        if number == 1:
            return np.ones(size, dtype=bool)
        found, left = np.zeros(size, dtype=bool), np.arange(size)
        most = 2**32 // number * number
        while left.size:
            drawn = self.draw(32, left.size)
            good = drawn < most
            found[left[good]] = drawn[good] % number == 0
            left = left[~good]
        return found

    def chosen(self, share: float, size: int) -> Any:
        """Return bools, each true with probability `share`, to 53 bits."""
        return self.draw(53, size) < int(share * 2**53)


def falls(entropy: Entropy, over: Any, bits: int) -> Any:
    """Return bools, each true with probability exp(−over/2^bits)."""
    whole, part = over >> bits, over & ((1 << bits) - 1)
    found = fraction(entropy, part, bits)
    for number in range(int(whole.max(initial=0))):
        left = np.flatnonzero(found & (whole > number))
        found[left] = fraction(entropy, None, bits, left.size)
    return found


def fraction(entropy: Entropy, over: Any, bits: int, size: int = 0) -> Any:
    """Return bools, each true with probability exp(−over/2^bits) for over < 2^bits; None = exp(−1).

    A chain of trials k = 1, 2, … with probabilities over/(k·2^bits) first fails at an odd k with
    exactly this probability.
    """
    size = size if over is None else over.size
    odd, left, trial = np.zeros(size, dtype=bool), np.arange(size), 1
    while left.size:
        goes_on = entropy.one_in(trial, left.size)
        if over is not None:
            goes_on &= entropy.draw(bits, left.size) < over[left]
        odd[left[~goes_on]] = trial % 2 == 1
        left, trial = left[goes_on], trial + 1
    return odd


def laplace(entropy: Entropy, number: int) -> Any:
    """Return about `number` discrete Laplace numbers of scale 2^BITS."""
    low = entropy.draw(BITS, 2 * number)
    low = low[fraction(entropy, low, BITS)]
    high, left = np.zeros(low.size, dtype=np.int64), np.arange(low.size)
    while left.size:
        left = left[fraction(entropy, None, BITS, left.size)]
        high[left] += 1
    size, minus = low + (high << BITS), entropy.draw(1, low.size) == 1
    return np.where(minus, -size, size)[~(minus & (size == 0))]


def gaussian(entropy: Entropy, number: int) -> Any:
    """Return whole numbers (int64) with the discrete Gaussian distribution of σ = 2^BITS."""
    found: list[Any] = []
    missing = number
    while missing > 0:
        drawn = laplace(entropy, min(missing + 64, PART))
        apart = np.abs(drawn) - (1 << BITS)
        kept = drawn[falls(entropy, apart * apart, 2 * BITS + 1)][:missing]
        found.append(kept)
        missing -= kept.size
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
