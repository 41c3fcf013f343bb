"""Published comparisons: in each table the paper's own method against each baseline, under the same
conditions, held against our runs.

A column of a table is one set of conditions, or a row where the methods stand side by side. The
claim of a pair is the order that the paper prints. It is judged by the paired difference over seeds
(`verdict.judged`), and only where our runs have been trained: the own method or the baseline has at
least `LEVEL` of the accuracy that the paper prints for it. A table without accuracies (calibration,
fairness) takes the level of the same run in another table of the paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..report.paired import Difference, paired
from .cache import Cache
from .sweep import Plan
from .tables import OURS, Cell, Spec, Table
from .verdict import by_seed, judged

LEVEL = 0.8  # of the published accuracy: a run below it says little about an order
SEEDS = 3  # with fewer a pair is not decided
# why a pair has no verdict, beside those of `verdict`
MISSING, NOT_RUN, FEW, UNTRAINED = "no method", "not run", "too few seeds", "untrained"
STATES = ("reproduced", "refuted", "level", "undecided", FEW, UNTRAINED, NOT_RUN, MISSING)
DECIDED = ("reproduced", "refuted", "level")


class Pair(NamedTuple):
    """The own method against one baseline under one set of conditions; better is positive."""

    table: str
    where: str  # the conditions: a column, or a row
    key: str  # of the metric
    unit: str
    digits: int
    own: str
    other: str
    published: float
    difference: Difference | None
    state: str


def paper_of(table: Table) -> str:
    """Return the paper of a table: the first part of its name."""
    return table.id.partition("-")[0]


def levels(tables: Sequence[Table], plan: Plan, cache: Cache) -> dict[Spec, float]:
    """Return for each run that a paper prints an accuracy of how much of it ours has; of several
    the mean.
    """
    found: dict[Spec, list[float]] = {}
    for table in tables:
        for cell in plan.cells(table) if table.kind != OURS else ():
            if "accuracy" not in cell.metric.key or cell.spec is None or not cell.mean:
                continue
            if values := by_seed(cell, table, plan, cache):
                ratio = sum(values.values()) / len(values) / cell.mean
                found.setdefault(cell.spec, []).append(ratio)
    return {spec: sum(ratios) / len(ratios) for spec, ratios in found.items()}


def pairs(table: Table, plan: Plan, cache: Cache, level: Mapping[Spec, float]) -> list[Pair]:
    """Return the pairs of a table whose two numbers the paper prints, as our runs have them."""
    if table.kind == OURS:
        return []
    plan, found = replace(plan, form="full"), []
    for where, cells in conditions(table, plan):
        for own, other in versus(cells, paper_of(table)):
            assert own.mean is not None
            assert other.mean is not None
            sign = 1 if own.metric.better == "high" else -1
            printed = sign * (own.mean - other.mean)
            difference, state = None, MISSING
            if own.spec is not None and other.spec is not None:
                mine, theirs = (by_seed(cell, table, plan, cache) for cell in (own, other))
                both = {(s, ""): sign * (mine[s] - theirs[s]) for s in mine.keys() & theirs.keys()}
                difference = paired(both) if both else None
                reached = max(level.get(own.spec, 0.0), level.get(other.spec, 0.0))
                state = state_of(difference, own.metric.unit, printed, reached)
            found.append(
                Pair(
                    table.id,
                    where,
                    own.metric.key,
                    own.metric.unit,
                    own.metric.digits,
                    name(own, table),
                    name(other, table),
                    printed,
                    difference,
                    state,
                )
            )
    return found


def state_of(difference: Difference | None, unit: str, printed: float, reached: float) -> str:
    """Return the verdict on the printed order, or why there is none."""
    if difference is None:
        return NOT_RUN
    if reached < LEVEL:
        return UNTRAINED
    if difference.seeds < SEEDS:
        return FEW
    said = judged(difference, unit)
    if printed < 0 and said in ("reproduced", "refuted"):  # the paper's own method is behind
        return "refuted" if said == "reproduced" else "reproduced"
    return said


def conditions(table: Table, plan: Plan) -> Iterator[tuple[str, list[Cell]]]:
    """Yield each set of conditions with its cells, one a method."""
    cells, width = list(plan.cells(table)), len(table.columns)
    if any(row.method for row in table.rows):
        for place, column in enumerate(table.columns):
            yield column.name, cells[place::width]
    else:
        for place, row in enumerate(table.rows):
            yield row.name, cells[place * width : (place + 1) * width]


def versus(cells: list[Cell], paper: str) -> Iterator[tuple[Cell, Cell]]:
    """Yield every own cell with every baseline's."""
    # what a run used up or left out in its last round is no merit
    merits = [cell for cell in cells if cell.metric.compare and cell.metric.view != "last"]
    known = [cell for cell in merits if cell.mean is not None]
    own = [cell for cell in known if cell.spec is not None and cell.spec.method == paper]
    others = [cell for cell in known if cell.spec is None or cell.spec.method != paper]
    yield from ((one, other) for one in own for other in others)


def name(cell: Cell, table: Table) -> str:
    """Return what the table calls the method of a cell."""
    return cell.row.name if any(row.method for row in table.rows) else cell.column.name


def counts(found: Sequence[Pair]) -> Counter[str]:
    """Return how many pairs have each state."""
    return Counter(pair.state for pair in found)


def share_decided(found: Sequence[Pair]) -> tuple[int, int]:
    """Return (decided pairs, pairs in trained conditions)."""
    number = counts(found)
    return sum(number[state] for state in DECIDED), sum(
        number[state] for state in (*DECIDED, "undecided", FEW)
    )
