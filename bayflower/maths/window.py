"""Statistics as integers modulo 2^64, so that a sum of masked statistics has the bits of the plain
one.

A real number is cut into *limbs*. Limb j counts units of 2^(top − 46j); each is a whole number:

    d_0 = round(x / 2^top)      rest = x − d_0·2^top      d_1 = round(rest / 2^(top − 46))   …

Every step is exact in float64. What is left after the last limb is rounded away, and the vector
counts the elements of which something was. If that count is 0 for all clients, the sum is that of
`exact.py` to the bit.

No limb can overflow. A number is at most `largest`, which the sender checks, and `top` is chosen so
that K such numbers stay below 2^62 units. A lower limb is at most 2^45, so 2^16 clients stay below
2^61. Hence sums modulo 2^64 are the sums themselves.

A vector has the highest limb of all real numbers, then the next limb, …, then all whole numbers,
then the count of rounded elements.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BayflowerError
from .exact import Scaled, Total, piece

STEP = 46  # bits from one limb to the next
SPAN = 62  # bits of a sum of the highest limb
MOST_CLIENTS = 2**16
MOST_LIMBS = 4
PART = 1 << 20  # elements that are cut at a time
GRID = 56  # bits below the scale of a number that rounding leaves (`on_grid`)
SPLIT = 2**31  # an int64 is hi·2^31 + lo, both exact in float64


class Entry(NamedTuple):
    """One tensor of a statistic."""

    name: str
    shape: tuple[int, ...]
    real: bool

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class Window(NamedTuple):
    """The agreed form of a vector: which tensors, and the units of their limbs."""

    entries: tuple[Entry, ...]  # sorted by name
    clients: int
    largest: float  # bound on one client's numbers
    limbs: int

    @property
    def top(self) -> int:
        """Return the exponent of the highest limb's unit."""
        return math.frexp(self.largest * self.clients)[1] - SPAN

    @property
    def reals(self) -> int:
        """Return how many real numbers there are."""
        return sum(entry.size for entry in self.entries if entry.real)

    @property
    def size(self) -> int:
        """Return the length of a vector."""
        whole = sum(entry.size for entry in self.entries if not entry.real)
        return self.limbs * self.reals + whole + 1

    def digest(self) -> str:
        """Return a name for the window: equal for equal windows only."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def agree(
    statistic: Mapping[str, Tensor | Scaled], clients: int, largest: float, limbs: int
) -> Window:
    """Return the window for statistics of this form; `largest` bounds one client's numbers."""
    if not 1 <= clients <= MOST_CLIENTS:
        raise BayflowerError(f"a secure sum is for at most {MOST_CLIENTS} clients, got {clients}")
    entries = [
        Entry(name, tuple(statistic[name].shape), statistic[name].is_floating_point())
        for name in sorted(statistic)
    ]
    return Window(tuple(entries), clients, float(largest), limbs)


def on_grid(values: Tensor, scale: float = 1.0) -> Tensor:
    """Return values in whole units of about 2^-55 · scale. For a scale of 1 no window of two limbs
    rounds them, while `secure_range`, samples and clients multiply to less than 2^52.
    """
    unit = 2.0 ** (math.frexp(scale)[1] - GRID)
    return (values.double() / unit).round() * unit


def encode(statistic: Mapping[str, Tensor | Scaled], window: Window) -> Tensor:
    """Return the vector (int64) of one client's statistic; raise if it does not fit the window."""
    if names := sorted(set(statistic) ^ {entry.name for entry in window.entries}):
        raise BayflowerError(
            f"the statistic has other parts than the agreed ones, e.g. {names[0]!r}; this client "
            "cannot be part of the secure sum"
        )
    vector, lost = torch.empty(window.size, dtype=torch.int64), 0
    reals, at, whole = window.reals, 0, window.limbs * window.reals
    for entry in window.entries:
        value = statistic[entry.name]
        if tuple(value.shape) != entry.shape or value.is_floating_point() != entry.real:
            raise BayflowerError(
                f"{entry.name} has shape {tuple(value.shape)}, agreed was {entry.shape}; this "
                "client cannot be part of the secure sum"
            )
        flat = (value.tensor if isinstance(value, Scaled) else value).detach().reshape(-1).cpu()
        if not entry.real:
            part = flat.to(torch.int64)
            fits(entry.name, part.double(), 2.0**SPAN / window.clients)
            vector[whole : whole + entry.size] = part
            whole += entry.size
            continue
        given = Scaled(flat, value.weight) if isinstance(value, Scaled) else flat
        for start in range(0, entry.size, PART):
            rest = piece(given, slice(start, start + PART)).to(torch.float64, copy=True)
            fits(entry.name, rest, window.largest)
            for limb in range(window.limbs):
                exponent = window.top - STEP * limb
                digit = (rest * 2.0**-exponent).round_()
                here = limb * reals + at
                vector[here : here + len(rest)] = digit.to(torch.int64)
                rest.sub_(digit.mul_(2.0**exponent))
            lost += int(rest.count_nonzero())
            at += len(rest)
    vector[-1] = lost
    return vector


def fits(name: str, values: Tensor, largest: float) -> None:
    """Raise unless all values are finite and at most `largest` in size."""
    size = float(values.abs().max()) if values.numel() else 0.0
    if not size <= largest:
        raise BayflowerError(
            f"{name} has a value of size {size:.3g}; the window of the secure sum ends at "
            f"{largest:.3g}: raise secure_range, or lower lr if training diverges"
        )


def decode(vector: Tensor, window: Window, total: Total) -> int:
    """Add a sum of vectors to `total`; return how many elements clients rounded."""
    reals, whole = window.reals, window.limbs * window.reals
    for limb in range(window.limbs):
        exponent, at = window.top - STEP * limb, limb * reals
        low = vector[at : at + reals].remainder(SPLIT)
        high = vector[at : at + reals] - low
        for digits in (high, low):
            total.add(named(digits.double().mul_(2.0**exponent), window, real=True))
    end = whole + sum(entry.size for entry in window.entries if not entry.real)
    total.add(named(vector[whole:end], window, real=False))
    return int(vector[-1])


def scalar(vector: Tensor, window: Window, name: str) -> float:
    """Return the real number called `name` in a sum of vectors."""
    reals = [entry for entry in window.entries if entry.real]
    at = sum(entry.size for entry in reals if entry.name < name)
    digits = [int(vector[limb * window.reals + at]) for limb in range(window.limbs)]
    return math.fsum(
        math.ldexp(digit, window.top - STEP * limb) for limb, digit in enumerate(digits)
    )


def named(flat: Tensor, window: Window, real: bool) -> dict[str, Tensor]:
    """Return the real or the whole numbers by name."""
    found, at = {}, 0
    for entry in window.entries:
        if entry.real == real:
            found[entry.name] = flat[at : at + entry.size].reshape(entry.shape)
            at += entry.size
    return found
