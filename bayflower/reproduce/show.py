"""A table with ours, the paper's number and the difference side by side: for a terminal, as
Markdown, as JSON.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from .cache import Cache
from .sweep import Plan, expected, jobs, missing_data
from .tables import OURS, Cell, Table

NOT_YET, NOT_RUN = "not yet", "not run"
LEGEND = (
    "Ours as mean ± standard deviation (number of seeds); *the paper's*; ours less the paper's."
)


class Shown(NamedTuple):
    """A cell with what was found for it; `state` says why there is no number."""

    cell: Cell
    values: list[float]  # one a seed, in the cell's unit
    state: str  # "", not yet, not run, undefined
    runs: list[dict[str, Any]]

    @property
    def mean(self) -> float | None:
        """Return the mean over seeds."""
        return statistics.mean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Return the standard deviation over seeds (n − 1)."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Return ours less the paper's, where they are the same quantity."""
        if self.mean is None or self.cell.mean is None or not self.cell.metric.compare:
            return None
        return self.mean - self.cell.mean


def number(cell: Cell, result: dict[str, Any]) -> float | None:
    """Return the cell's number of one run, in the cell's unit; None if the run has none."""
    metric, block = cell.metric, None
    if metric.view == "run":
        block = result
    elif metric.view == "last":
        block = result["last"]
    elif cell.column.at is not None:
        points = [one for one in result["curve"] if metric.view in one]
        if points:
            wanted = cell.column.at * result["rounds"]
            block = min(points, key=lambda one: (abs(one["round"] - wanted), one["round"]))[
                metric.view
            ]
    else:
        block = result["final"].get(metric.view)
        if block and cell.row.client is not None:
            block = next(
                (one for one in block.get("per_client", []) if one["client"] == cell.row.client),
                None,
            )
    value = (block or {}).get(metric.key, metric.absent)
    return None if value is None else metric.scale * float(value)


def look(table: Table, plan: Plan, cache: Cache) -> list[Shown]:
    """Return every cell with what the cache has for it."""
    found = []
    for cell in plan.cells(table):
        if cell.spec is None:
            found.append(
                Shown(
                    cell, [], f"{NOT_YET} ({cell.row.missing})" if cell.row.missing else NOT_YET, []
                )
            )
            continue
        curve = cell.column.at is not None
        runs = [
            run
            for seed in plan.seed_list(table)
            if (run := cache.get(cell.spec, seed, plan.data_dir, curve)) is not None
        ]
        values = [value for run in runs if (value := number(cell, run)) is not None]
        found.append(Shown(cell, values, "" if values else "undefined" if runs else NOT_RUN, runs))
    return found


def ours(shown: Shown) -> str:
    """Return our number for a person: mean ± standard deviation (seeds), or why there is none."""
    if shown.mean is None:
        return shown.state
    digits = shown.cell.metric.digits
    spread = "" if shown.sd is None else f" ± {shown.sd:.{digits}f}"
    return f"{shown.mean:.{digits}f}{spread} ({len(shown.values)})"


def gap(shown: Shown) -> str:
    """Return the difference for a person."""
    return "–" if shown.difference is None else f"{shown.difference:+.{shown.cell.metric.digits}f}"


def words(shown: Shown) -> str:
    """Return a cell for a person: ours; the paper's; the difference."""
    printed = shown.cell.published
    if not printed:
        return ours(shown)
    return f"{ours(shown)}; *{printed}*" + ("" if shown.difference is None else f"; {gap(shown)}")


def markdown(table: Table, plan: Plan, found: list[Shown], level: int = 2) -> str:
    """Return the table as Markdown, with what it rests on."""
    width = len(table.columns)
    lines = [f"{'#' * level} {table.title}", "", table.caption, ""]
    heads = [f"{column.name} [{unit(table, column.metric)}]" for column in table.columns]
    lines += ["| | " + " | ".join(heads) + " |", "|---" * (width + 1) + "|"]
    for place, row in enumerate(table.rows):
        cells = found[place * width : (place + 1) * width]
        lines.append(f"| {row.name} | " + " | ".join(words(one) for one in cells) + " |")
    lines += ["", LEGEND, "", *facts(table, plan, found)]
    return "\n".join(lines) + "\n"


def unit(table: Table, metric: str) -> str:
    """Return the unit of a column."""
    return table.metrics[metric or table.metric].unit


def facts(table: Table, plan: Plan, found: list[Shown], folder: bool = True) -> list[str]:
    """Return sentences on form, runs, devices, data (what the data folder lacks if `folder`) and
    errata.
    """
    form = table.form(plan.form)
    said = ", ".join(f"{key} {value}" for key, value in {**form, **plan.changes}.items())
    theirs = (
        ", ".join(f"{key} {value or 'not stated'}" for key, value in table.paper.items())
        or "not stated"
    )
    paper = "" if table.kind == OURS else f"; the paper: {theirs}"
    lines = [f"* Form: {plan.form} ({said}){paper}."]
    runs = {id(run): run for one in found for run in one.runs}.values()
    if runs:
        seconds = sum(run["seconds"] for run in runs)
        lines.append(
            f"* {len(runs)} runs, {seconds:.0f} s in all; rounds: {listed(runs, 'rounds')}; "
            f"device: {listed(runs, 'device')}; "
            f"commit: {listed(runs, 'commit')}; torch "
            f"{', '.join(sorted({run['versions']['torch'] for run in runs}))}."
        )
        notes = sorted({run["note"] for run in runs if run["note"]})
        lines += [f"* Data used: {'; '.join(notes)}."] if notes else []
    absent = missing_data(jobs(table, plan), plan.data_dir) if folder else {}
    lines += (
        [f"* Not in the data folder: {', '.join(absent)}."]
        if absent and any(one.state == NOT_RUN for one in found)
        else []
    )
    lines += [
        f"* {text}"
        for text in (table.data, table.tuning if plan.form == "full" else "", table.errata)
        if text
    ]
    return lines


def listed(runs: Any, key: str) -> str:
    """Return the different values of a field, for a person."""
    return ", ".join(sorted({str(run[key] or "not noted") for run in runs}))


def content(table: Table, plan: Plan, found: list[Shown]) -> dict[str, Any]:
    """Return the table in JSON's types."""
    return {
        "table": table.id,
        "title": table.title,
        "caption": table.caption,
        "source": table.source,
        "form": plan.form,
        "settings": {**table.form(plan.form), **plan.changes},
        "paper": table.paper,
        "data": table.data,
        "errata": table.errata,
        "cells": [
            {
                "row": one.cell.row.name,
                "column": one.cell.column.name,
                "method": one.cell.spec.method if one.cell.spec else None,
                "unit": one.cell.metric.unit,
                "published": one.cell.published or None,
                "mean": one.mean,
                "sd": one.sd,
                "values": one.values,
                "seeds": len(one.values),
                "difference": one.difference,
                "state": one.state or "done",
                "rounds": sorted({run["rounds"] for run in one.runs}),
            }
            for one in found
        ],
    }


def state(table: Table, plan: Plan, cache: Cache, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a line of the list of tables: cells that have a number, runs that are there, seconds
    that the others should take.
    """
    needed = jobs(table, plan)
    todo = [
        job for job in needed if cache.get(job.spec, job.seed, plan.data_dir, job.curve) is None
    ]
    guesses = [expected(job, records, plan.device) for job in todo]
    known = [guess for guess in guesses if guess is not None]
    seconds = sum(known) / len(known) * len(todo) if known else (0.0 if not todo else None)
    shown = look(table, plan, cache)
    return {
        "cells": len(shown),
        "done": sum(bool(one.values) for one in shown),
        "not_yet": sum(one.cell.spec is None for one in shown),
        "runs": len(needed),
        "runs_done": len(needed) - len(todo),
        "seconds_left": seconds,
        "missing_data": sorted(missing_data(todo, plan.data_dir)),
    }
