"""Means with 95 % intervals of Student's t."""

from __future__ import annotations

import math
import statistics

# 97.5 % quantiles of Student's t by degrees of freedom
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


def spread(values: list[float], digits: int = 1) -> str:
    """Return mean ± half a 95 % interval; of one value the value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half_interval(values):.{digits}f}"


def half_interval(values: list[float]) -> float:
    """Return half a 95 % interval of two or more values."""
    factor = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return factor * statistics.stdev(values) / math.sqrt(len(values))
