"""`bayflower report`: one HTML page with the results of some runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR…", help="--out folders of runs or comparisons; all results in them count"
        ),
    ],
    html: Annotated[Path, typer.Option(help="the file to write")] = Path("report.html"),
    features: Annotated[
        str,
        typer.Option(
            help="t-SNE pictures of features, made from checkpoints: auto (pFedVMP, FedNP), all "
            "or none"
        ),
    ] = "auto",
    data_dir: Annotated[
        str, typer.Option(help="folder of the data sets, if it has changed since the runs")
    ] = "",
) -> None:
    """Write one self-contained HTML page: the verdict with its caveats, then plots, then tables.

    Runs that differ only in the seed become one line with a band. Example: `bayflower report
    runs/demo --html report.html`
    """
    from rich.console import Console
    from rich.markup import escape

    from ..report import write_report

    console = Console(stderr=True)
    with console.status("reading") as status:
        number = write_report(
            folders, html, features, data_dir, say=lambda text: status.update(escape(text))
        )
    print(f"written: {html}, {number} run{'s' if number != 1 else ''}")
