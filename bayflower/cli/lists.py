"""`bayflower methods`, `settings`, `models` and `version`: lists of what is available."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from .. import methods as table
from .options import AsJson, Preset
from .terminal import show


def methods(as_json: AsJson = False) -> None:
    """List the methods, those of other packages included: name, paper and summary; with --json also
    where their halves are.
    """
    rows = [
        {
            "name": row.name,
            "title": row.title,
            "paper": row.paper,
            "summary": row.summary,
            "server": row.files[0],
            "client": row.files[1],
        }
        for row in table.METHODS.values()
    ]
    show(rows, ("name", "paper", "summary"), as_json)
    for problem in table.METHODS.problems():
        print(f"note: {problem}", file=sys.stderr)


def settings(
    method: Annotated[
        str,
        typer.Argument(help="see `bayflower methods`", autocompletion=lambda: list(table.METHODS)),
    ],
    run_config: Annotated[
        bool,
        typer.Option("--run-config", help="print the run-config table for a Flower app instead"),
    ] = False,
    preset: Preset = None,
    as_json: AsJson = False,
) -> None:
    """List every setting of a method with its default; set them with `--set KEY=VALUE`.

    Example: `bayflower settings fedmap`
    """
    if run_config:
        from ..flower.bundle import config_table

        print(config_table(method=table.get(method).name), end="")
        return
    from ..config import describe

    rows = [
        {"group": group, "name": name, "default": default, "meaning": text}
        for group, name, default, text in describe(method, preset)
    ]
    show(rows, ("group", "name", "default", "meaning"), as_json)


def models(as_json: AsJson = False) -> None:
    """List the networks for `--set model=NAME`."""
    from ..networks.papers import MODELS

    show(
        [{"name": name, "network": text} for name, text in MODELS.items()],
        ("name", "network"),
        as_json,
    )


def version() -> None:
    """Print the version."""
    print(__version__)
