"""What finished runs decide: a claim "this row is better than that one" held against the paired
differences of both, seed by seed.

The difference is the mean over seeds that both rows have, its interval Student's at 95 % over these
seeds. With it the claim is

    level        the interval lies within ±1 point (only where the unit is per cent)
    reproduced   it lies above 0
    refuted      it lies below 0
    undecided    else, or with fewer than two seeds in common
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ..report.paired import Difference, paired
from .cache import Cache
from .show import number
from .sweep import Plan
from .tables import Cell, Claim, Table

MARGIN = 1.0  # points within which two rows are level
WORDS = ("reproduced", "refuted", "level", "undecided")


class Decided(NamedTuple):
    """A claim in one column."""

    claim: Claim
    column: str
    unit: str
    digits: int
    difference: Difference | None  # better is positive; None without a seed in common
    verdict: str


def decide(table: Table, plan: Plan, cache: Cache) -> list[Decided]:
    """Return every claim of a table in each of its columns."""
    cells = {(cell.row.name, cell.column.name): cell for cell in plan.cells(table)}
    found = []
    for claim in table.claims:
        for column in claim.columns or [one.name for one in table.columns]:
            pair = [cells[name, column] for name in (claim.row, claim.against)]
            mine, other = (by_seed(cell, table, plan, cache) for cell in pair)
            metric = pair[0].metric
            sign = 1 if metric.better == "high" else -1
            both = {(seed, ""): sign * (mine[seed] - other[seed]) for seed in mine.keys() & other}
            difference = paired(both) if both else None
            unit = metric.unit
            found.append(
                Decided(claim, column, unit, metric.digits, difference, judged(difference, unit))
            )
    return found


def by_seed(cell: Cell, table: Table, plan: Plan, cache: Cache) -> dict[int, float]:
    """Return the cell's numbers of the runs that are there, by seed."""
    found = {}
    for seed in plan.seed_list(table) if cell.spec else ():
        assert cell.spec is not None
        run = cache.get(cell.spec, seed, plan.data_dir, cell.column.at is not None)
        value = None if run is None else number(cell, run)
        if value is not None:
            found[seed] = value
    return found


def judged(difference: Difference | None, unit: str) -> str:
    """Return the verdict on a claim whose difference this is."""
    if difference is None or difference.low is None or difference.high is None:
        return "undecided"
    if unit == "%" and difference.low > -MARGIN and difference.high < MARGIN:
        return "level"
    if difference.low > 0:
        return "reproduced"
    return "refuted" if difference.high < 0 else "undecided"


def sentences(decided: list[Decided]) -> list[str]:
    """Return a line a claim and column: the difference with its interval, the seeds, the verdict;
    last a count of verdicts.
    """
    lines = []
    for one in decided:
        words = f"* {one.claim.text}, {one.column}: "
        if one.difference is None:
            lines.append(f"{words}no seed in common: **{one.verdict}**.")
            continue
        low, mean, high = (one.difference.low, one.difference.mean, one.difference.high)
        text = f"{mean:+.{one.digits}f} {one.unit}"
        if low is not None and high is not None:
            text += f" (95 % interval {low:+.{one.digits}f} to {high:+.{one.digits}f})"
        seeds = f"{one.difference.seeds} seed{'s' if one.difference.seeds > 1 else ''}"
        lines.append(f"{words}{text}, {seeds}: **{one.verdict}**.")
    if lines:
        counts = Counter(one.verdict for one in decided)
        said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
        lines.append(f"* Claims: {said}.")
    return lines


def plain(decided: list[Decided]) -> list[dict[str, Any]]:
    """Return the claims in JSON's types."""
    return [
        {
            "claim": one.claim.text,
            "row": one.claim.row,
            "against": one.claim.against,
            "column": one.column,
            "unit": one.unit,
            "difference": one.difference and one.difference.mean,
            "interval": one.difference and [one.difference.low, one.difference.high],
            "seeds": one.difference.seeds if one.difference else 0,
            "verdict": one.verdict,
        }
        for one in decided
    ]
