"""What a half lets a report show: headings of its numbers, and pictures of its last state."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    """How a reported number is shown over rounds: the title, the axis, and a sentence."""

    title: str
    axis: str
    words: str
    percent: bool = False  # the number is a share, shown as a percentage


class Mark(NamedTuple):
    """One column of a picture: a range with its middle, and the quartiles where it is a box."""

    name: str
    low: float
    middle: float
    high: float
    quartiles: tuple[float, float] | None = None


class Picture(NamedTuple):
    """What only the server's last state shows: one mark a column."""

    title: str
    words: str
    x_title: str
    y_title: str
    marks: tuple[Mark, ...]
    y_range: tuple[float, float] | None = None  # None: as the marks need it


def quantiles(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Return lowest, quartiles and highest of sorted values."""
    if len(values) == 1:
        return (values[0],) * 5
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return values[0], first, middle, third, values[-1]
