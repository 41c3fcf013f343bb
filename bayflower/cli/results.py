"""`bayflower results`: the results of runs as a table, as a file, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..errors import ConfigError
from .options import AsJson

if TYPE_CHECKING:
    from ..report.collect import Group


def results(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR…", help="--out folders of runs or studies; all results in them count"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="write a table to this file: .csv, .parquet or .json")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="rows of that table: clients (each client of each model) or runs")
    ] = "clients",
    metric: Annotated[
        str,
        typer.Option(
            help="what to compare: accuracy, balanced_accuracy, nll, ece; for two classes auroc, "
            "sensitivity, specificity; for numbers rmse, mae, nll, crps, deviance; for survival "
            "c_index, c_index_uno, integrated_brier; for labels macro_auroc, macro_auprc; auto = "
            "the first of these that the runs have"
        ),
    ] = "auto",
    model: Annotated[
        str,
        typer.Option(
            help="which models: personal, new_clients (of clients that never trained), global or "
            "before"
        ),
    ] = "personal",
    as_json: AsJson = False,
) -> None:
    """Show the results of runs with paired differences and a verdict, or write them to a file.

    Example: `bayflower results runs/study --out table.csv`
    """
    from ..report import flat
    from ..report.collect import group, read
    from ..report.verdict import leading, verdicts

    found = read(folders)
    if rows not in ("clients", "runs"):
        raise ConfigError(f"--rows must be clients or runs, got {rows!r}")
    table = flat.of_clients(found) if rows == "clients" else flat.of_runs(found)
    if out is not None:
        flat.write(out, table)
    groups = group(found)
    if not any(one.values(leading([one]), model) for one in groups):
        raise ConfigError(f"no run has a test of {model!r}; see `final` in docs/results-file.md")
    if as_json:
        said = [one.as_json() for one in verdicts(groups, metric, model)]
        print(json.dumps({"runs": flat.of_runs(found), "verdicts": said}))
        return
    if out is not None:
        print(f"written: {out}, {len(table)} rows")
        return
    show_groups(groups, metric, model)


def show_groups(groups: list[Group], metric: str = "auto", model: str = "personal") -> None:
    """Print a table and a verdict for each set of groups that share their data."""
    from ..report.text import verdict_table
    from ..report.verdict import verdicts

    console = Console()
    for found in verdicts(groups, metric, model):
        mine = [group for group in groups if group.title in found.means]
        console.print(verdict_table(found, mine, model))
        for line in found.words:
            console.print(f"* {line}", markup=False, highlight=False)
