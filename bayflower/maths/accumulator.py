"""Exact sums of float64 tensors in windows of digits; `exact.py` says how it works."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK = 65_536  # elements; the temporaries of one addition are a few times this
PIECE = 16_384  # elements that are rounded at a time: that takes a dozen temporaries
WIDTH = 46
ORIGIN = -25
HIGHEST, LOWEST = 22, -23  # windows that reach 2^1032 and 2^-1083: all of float64
# from this window down 1/unit is no float64, so what is left is scaled up by 2^512 first
LIFT, LIFTED = 512, -22
MAGIC = 1.5 * 2.0**52
LIMIT = 60  # additions between two carries; (LIMIT + 1)·2^45 < 2^51


def unit(window: int) -> int:
    """Return the exponent of the unit of `window`."""
    return WIDTH * window + ORIGIN


class Buffers:
    """Two vectors to work in, used again for every addition: fresh ones would scatter the heap, and
    memory would creep up.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.spare = torch.empty(size, dtype=torch.float64, device=device)
        self.rest = torch.empty(size, dtype=torch.float64, device=device)


class Accumulator:
    """The exact sum of float64 vectors of one size."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.device = device
        self.limbs: dict[int, Tensor] = {}
        self.adds = 0  # since the last carry

    def add(self, x: Tensor, bound: float | None = None, buffers: Buffers | None = None) -> None:
        """Add the finite float64 vector `x`, which may be `buffers.rest`; `bound` ≥ max |x| where
        the caller knows it.
        """
        bound = magnitude(x) if bound is None else bound
        if not bound < float("inf"):
            raise ValueError(
                f"only finite numbers can be added, got one that is {'inf' if bound > 0 else 'nan'}"
            )
        if bound == 0.0:
            return
        self.reserve()
        buffers = buffers or Buffers(self.size, self.device)
        window = HIGHEST
        while window > LOWEST and bound <= 2.0 ** (unit(window - 1) + WIDTH - 1):
            window -= 1
        floor, lift, rest = min(self.limbs, default=HIGHEST), 0, x
        while True:
            if window <= LIFTED and not lift:
                lift, rest = LIFT, torch.mul(rest, 2.0**LIFT, out=buffers.rest)
            exponent, limb, new = unit(window) + lift, self.limb(window), buffers.spare
            torch.add(limb, rest, alpha=2.0**-exponent, out=new)
            # limb − new is minus what was taken
            rest = torch.add(rest, limb.sub_(new), alpha=2.0**exponent, out=buffers.rest)
            self.limbs[window], buffers.spare = new, limb
            if window == LOWEST or (
                window <= floor and not bool(torch.abs(rest, out=buffers.spare).sum())
            ):
                return
            window -= 1

    def merge(self, other: Accumulator, here: slice, there: slice) -> None:
        """Add the elements `there` of `other` to the elements `here`; both must have been prepared:
        `reserve`, `carry`.
        """
        for window, limb in other.limbs.items():
            self.limb(window)[here] += (limb[there] - MAGIC).to(self.device)

    def limb(self, window: int) -> Tensor:
        """Return the tensor of `window`, made on first use."""
        if window not in self.limbs:
            self.limbs[window] = torch.full(
                (self.size,), MAGIC, dtype=torch.float64, device=self.device
            )
        return self.limbs[window]

    def reserve(self) -> None:
        """Make room for one more addition."""
        if self.adds >= LIMIT:
            self.carry()
        self.adds += 1

    def carry(self) -> None:
        """Pass whole multiples of 2^46 to the window above, so that every window but the highest
        holds at most 2^45. After one addition they do.
        """
        if self.adds <= 1:
            return
        self.adds = 1
        for window in range(min(self.limbs, default=HIGHEST), HIGHEST):
            if window not in self.limbs:
                continue
            # a whole number
            over = self.limbs[window].sub(MAGIC).mul_(2.0**-WIDTH).add_(MAGIC).sub_(MAGIC)
            if bool(over.any()):
                self.limbs[window].sub_(over, alpha=2.0**WIDTH)
                self.limb(window + 1).add_(over)
        if HIGHEST in self.limbs and bool(((self.limbs[HIGHEST] - MAGIC).abs() > 2.0**50).any()):
            raise OverflowError("the sum is over 10,000 times the largest float64")

    def value(self) -> Tensor:
        """Return the sum, each element rounded once to the nearest float64; ±inf where that is out
        of range.
        """
        self.carry()
        out = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for start in range(0, self.size if self.limbs else 0, PIECE):
            part = slice(start, start + PIECE)
            out[part] = rounded({window: limb[part] - MAGIC for window, limb in self.limbs.items()})
        return out


def rounded(digits: Mapping[int, Tensor]) -> Tensor:
    """Return Σ digits·unit rounded once, for digits of at most 2^45 (in the highest window any).

    A digit is a float64, so one addition rounds the sum of two windows, which most sums have. With
    more windows the sum so far, from the lowest up, is high + low: high is rounded to nearest, low
    is the remainder *rounded to odd*: its last bit is set where digits were lost. So it can be
    added to again, and rounded at the end as if exact (Boldo and Melquiond 2008).
    """
    lowest, *windows = sorted(digits)
    if lowest == HIGHEST:
        return digits[lowest] * 2.0 ** (unit(lowest) - 64) * 2.0**64
    high = valued(digits[lowest], lowest)
    if len(windows) == 1 and windows[0] != HIGHEST:
        return high.add_(valued(digits[windows[0]], windows[0]))
    low: Tensor | None = None
    for window in windows:
        # the last step, where high may pass 2^1024 before low brings it back: do it 2^-64 smaller
        if window == HIGHEST:
            return at_the_top(digits[window], high, torch.zeros_like(high) if low is None else low)
        high, error = two_sum(valued(digits[window], window), high)
        low = error if low is None else odd_sum(error, low)
    return high if low is None else high + low


def at_the_top(x: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Return x·unit + high + low rounded once, where x is the digit of the highest window."""
    scaled = torch.where(
        low == 0, low, torch.copysign((low.abs() * 2.0**-64).clamp_(min=2.0**-900), low)
    )
    top, error = two_sum(x * 2.0 ** (unit(HIGHEST) - 64), high * 2.0**-64)
    return torch.where(x == 0, high + low, (top + odd_sum(error, scaled)) * 2.0**64)


def valued(digits: Tensor, window: int) -> Tensor:
    """Return digits·unit, in two steps: the unit itself may be no float64."""
    half = unit(window) // 2
    return digits * 2.0**half * 2.0 ** (unit(window) - half)


def magnitude(x: Tensor) -> float:
    """Return max |x| (0 for no elements), inf or nan if there is one."""
    if x.numel() == 0:
        return 0.0
    low, high = float(x.amin()), float(x.amax())  # both pass a nan on; together faster than a norm
    return max(-low, high) if high == high else high


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = a + b rounded and s + e = a + b exactly."""
    s = a + b
    part = s - a
    return s, (a - (s - part)).add_(b - part)


def odd_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded to odd: itself if it is a float64, else the neighbour whose last bit is
    1.
    """
    s, error = two_sum(a, b)
    bits = s.view(torch.int64)
    step = torch.where((error > 0) == (s > 0), 1, -1)  # away from zero or towards it
    return torch.where((error != 0) & (bits & 1 == 0), bits + step, bits).view(torch.float64)
