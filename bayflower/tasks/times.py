"""Intervals of time at quantiles of everyone's event times, from histograms that clients add.

The grid is the same everywhere and needs no range: bin i holds the times in
(2^((i−1)/32), 2^(i/32)], about 2 % wide. Only events are counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import ConfigError

PER_OCTAVE = 32
FURTHEST = 64 * PER_OCTAVE  # bins −FURTHEST … FURTHEST: times from 2^-64 to 2^64


def border(place: int) -> float:
    """Return the end of a bin."""
    return 2.0 ** (place / PER_OCTAVE)


def bin_of(time: float) -> int:
    """Return the bin of a time; times too short or too long for the grid are in its ends."""
    if time <= border(-FURTHEST):
        return -FURTHEST
    place = min(math.ceil(PER_OCTAVE * math.log2(time)), FURTHEST)
    if time > border(place):  # log2 is rounded; the borders decide
        return min(place + 1, FURTHEST)
    return place - 1 if time <= border(place - 1) else place


def histogram(y: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Return (n, bin, count, bin, count, …) of one client's training targets (time, event)."""
    known = [(float(time), float(event)) for time, event in y]
    counts = Counter(bin_of(time) for time, event in known if event > 0)
    pairs = (float(part) for pair in sorted(counts.items()) for part in pair)
    return (float(len(known)), *pairs)


def quantiles(parts: Sequence[Sequence[float]], number: int) -> tuple[float, ...]:
    """Return `number` rising times: the ends of the bins at which the share of everyone's events
    reaches 1/number, …, 1. Where too few bins hold events, the widest intervals are halved.
    """
    total: Counter[int] = Counter()
    for part in parts:
        for place, count in zip(part[1::2], part[2::2], strict=True):
            if place != int(place) or abs(place) > FURTHEST or count != int(count) or count < 0:
                raise ConfigError(f"a client's histogram of event times is impossible: {part[:9]}")
            total[int(place)] += int(count)
    events = sum(total.values())
    if not events:
        raise ConfigError(
            "no client has seen an event in its training data; survival needs some, or edges "
            "given as times"
        )
    found: set[float] = set()
    seen, share = 0, 1
    for place in sorted(total):
        seen += total[place]
        if seen * number >= share * events:
            found.add(border(place))
            share = seen * number // events + 1
    edges = sorted(found)
    while len(edges) < number:
        gaps = [b - a for a, b in zip((0.0, *edges), edges, strict=False)]
        at = max(range(len(gaps)), key=gaps.__getitem__)
        edges.insert(at, edges[at] - gaps[at] / 2)
    return tuple(edges)
