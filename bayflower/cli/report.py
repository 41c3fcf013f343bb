"""`bayflower report`: one page that shows what some runs found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR…", help="the --out of runs or comparisons; all results below are shown"
        ),
    ],
    html: Annotated[Path, typer.Option(help="the file to write")] = Path("report.html"),
    features: Annotated[
        str,
        typer.Option(
            help="features in the plane (t-SNE), from checkpoints: auto (pFedVMP, FedNP), all or "
            "none"
        ),
    ] = "auto",
    data_dir: Annotated[
        str, typer.Option(help="where data sets lie, if that has changed since the runs")
    ] = "",
) -> None:
    """Write one self-contained HTML page: curves, clients, fairness, calibration, what each method
    shows, the partition, bytes and seconds.

    Runs that differ by nothing but the seed become one line with a band. Example: `bayflower report
    runs/demo --html report.html`
    """
    from rich.console import Console

    from ..report import write_report

    console = Console(stderr=True)
    with console.status("reading") as status:
        number = write_report(
            folders, html, features, data_dir, say=lambda text: status.update(text)
        )
    print(f"written: {html}, {number} run{'s' if number != 1 else ''}")
