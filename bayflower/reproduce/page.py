"""RESULTS.md: every table with what was really run, from the folder of finished runs; what a person
wrote below the marker is kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .cache import Cache
from .show import LEGEND, Shown, facts, listed, look, ours, unit, words
from .sweep import Plan
from .tables import Table
from .verdict import decide, sentences

MARKER = "<!-- Below this line nothing is generated; `bayflower reproduce --write` keeps it. -->"
HEAD = """# Results

Written by `bayflower reproduce --all --write RESULTS.md` from the finished runs in
`experiments/results`. Every published table and figure that the papers' data allow is listed, and
our own sweeps, whose names begin with "ours". A method that does not exist here says "not yet", a
cell that was not run says so. The last round is shown, never the best one. What the forms `full`
and `quick` are: [docs/evidence.md](docs/evidence.md). A quick table shows that its runs go through;
it is no evidence about a method, and neither is a cell that says "quick" in a full table: it was
only run in that form. What holds here and what does not, and why: [Reading](#reading), at the end
of the page.
"""


def write_page(path: Path, tables: list[Table], plan: Plan, cache: Cache) -> None:
    """Write the page; of each table that form which has more numbers, full before quick."""
    lines, details = [HEAD], []
    lines += [
        "| table | what | form | cells with a number | methods not yet here | runs | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        chosen, found, small = best(table, plan, cache)
        runs = list({id(run): run for one in found for run in one.runs}.values())
        done = sum(bool(one.values) for one in found)
        quick = sum(bool(one.values) for one in small)
        absent = sum(one.cell.spec is None for one in found)
        name = f"[{table.id}](#{table.id})" if runs else table.id
        seconds = f"{sum(run['seconds'] for run in runs):.0f}" if runs else "–"
        also = f" and {quick} quick" if quick else ""
        numbers = f"{done}{also} of {len(found)} | {absent} cells | {len(runs)} | {seconds}"
        lines.append(f"| {name} | {table.title} | {chosen.form if runs else '–'} | {numbers} |")
        if runs:
            details += section(table, chosen, found, small)
            if said := sentences(decide(table, chosen, cache)):
                details += [*said, ""]
    everything: list[Any] = [record["result"] for record in cache.everything()]
    if everything:
        lines += [
            "",
            f"{len(everything)} finished runs in all; devices: {listed(everything, 'device')}; "
            f"commits: {listed(everything, 'commit')}. {LEGEND}",
            "",
        ]
    _, mark, kept = path.read_text().partition(MARKER) if path.exists() else ("", "", "")
    path.write_text("\n".join([*lines, *details]) + f"\n{MARKER}" + (kept if mark else "\n"))


def best(table: Table, plan: Plan, cache: Cache) -> tuple[Plan, list[Shown], list[Shown]]:
    """Return the form to show, its cells, and the quick form's cells for those that the full form
    lacks (empty where it has them).
    """
    shown = {form: look(table, replace(plan, form=form), cache) for form in ("full", "quick")}
    if not any(one.values for one in shown["full"]):
        return replace(plan, form="quick"), shown["quick"], []
    small = [
        two if two.values and not one.values else one._replace(values=[], runs=[])
        for one, two in zip(*shown.values(), strict=True)
    ]
    return replace(plan, form="full"), shown["full"], small


def section(table: Table, plan: Plan, found: list[Shown], small: list[Shown]) -> list[str]:
    """Return a table's part of the page."""
    width = len(table.columns)
    cells = [words(one) for one in found]
    for place, one in enumerate(small):
        if one.values:
            cells[place] = f"quick: {ours(one)}" + (
                f"; *{one.cell.published}*" if one.cell.published else ""
            )
    lines = [
        f'<a id="{table.id}"></a>',
        "",
        f"## {table.title}",
        "",
        f"{table.caption} `bayflower reproduce {table.id}"
        f"{' --quick' if plan.form == 'quick' else ''}`",
        "",
    ]
    lines.append(
        "| | "
        + " | ".join(f"{column.name} [{unit(table, column.metric)}]" for column in table.columns)
        + " |"
    )
    lines.append("|---" * (width + 1) + "|")
    for place, row in enumerate(table.rows):
        lines.append(
            f"| {row.name} | " + " | ".join(cells[place * width : (place + 1) * width]) + " |"
        )
    if table.picture:
        lines += ["", f"![{table.title}]({table.picture})"]
    quick = (
        facts(table, replace(plan, form="quick"), small, folder=False)[:2]
        if any(one.values for one in small)
        else []
    )
    return [*lines, "", *facts(table, plan, found, folder=False), *quick, ""]
