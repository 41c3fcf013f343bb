"""`bayflower bench`: how fast the fused engine is, beside the loop engine, in one run. Suites give
rows; rows become a table and a file.

`cases.py` has the workloads and how a run is timed, `suites.py` and `stages.py` the suites,
`report.py` the file and the table. Nothing here needs flwr or a GPU: what cannot be measured is a
row that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .cases import Options
from .raced import raced
from .report import Report, environment, table
from .single import single
from .stages import profile, steps
from .suites import cpu, cross_device, methods, scaling, with_ratios
from .zoo import brought

__all__ = ["SUITES", "Options", "environment", "run", "table", "with_ratios"]

Suite = Callable[[Options, Callable[[str], None]], Iterator[dict[str, Any]]]
SUITES: dict[str, tuple[Suite, str]] = {
    "methods": (methods, "milliseconds a round of each method, fused and one client after another"),
    "scaling": (
        scaling,
        "rounds a second and memory over the number of clients, with and without chunks",
    ),
    "cross-device": (cross_device, "many clients, a hundredth of them a round, states on disk"),
    "cpu": (cpu, "the same small work on a CPU: loop, fused, Flower's Ray simulation"),
    "races": (raced, "the workloads of other simulators, at their published numbers of rounds"),
    "networks": (brought, "networks that people bring: stacked or why not, how fast, the numbers"),
    "profile": (profile, "where the time of a round goes"),
    "steps": (steps, "time of one training step over the number of clients in it"),
    "single": (single, "time of a step where clients are trained one by one, recorded and plain"),
}


def run(
    suite: str, options: Options, file: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the content of the JSON file, which is written after every row."""
    if suite not in SUITES:
        raise ConfigError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    report = Report(suite, options, file)
    for row in SUITES[suite][0](options, say):
        report.add(row)
    return report.content
