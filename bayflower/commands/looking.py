"""`bayflower doctor` and `bayflower cite`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def doctor(
    data_dir: Annotated[Path, typer.Option(help="where data sets lie")] = Path("data"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on which a SuperLink is to listen")] = 9092,
    deployment: Annotated[Path | None, typer.Option(help="folder of `bayflower deploy init`: how long its certificates are good")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has: versions, devices, data, Docker engine, port, certificates; exit code 1 if something is wrong.

    Example: `bayflower doctor --data-dir data --deployment federation`
    """
    from .. import doctor as examiner

    found = examiner.examine(data_dir, port, deployment)
    wrong = any(one.state == "wrong" for one in found)
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [one._asdict() for one in found]}))
    else:
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False, show_header=False)
        colours = {"ok": "green", "missing": "yellow", "wrong": "red"}
        for one in found:
            grid.add_row(f"[{colours[one.state]}]{one.state}[/]", one.what, one.seen, one.remedy)
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(grid)
    if wrong:
        raise typer.Exit(1)


def cite(
    what: Annotated[list[str], typer.Argument(metavar="METHOD|DIR", help="methods, or folders of runs")],
    as_json: AsJson = False,
) -> None:
    """Print the BibTeX of what a run used: method, data set, Flower, Bayflower.

    Example: `bayflower cite fedmap >> references.bib`
    """
    from ..cite import bibtex, entries

    found = entries(what)
    print(json.dumps([{"kind": kind, "key": key, **fields} for kind, key, fields in found]) if as_json else bibtex(found))
