"""What every command does at a terminal: read KEY=VALUE, show a table, keep logs quiet."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ..api.progress import bar as bar  # part of what this module offers
from ..api.progress import bars as bars
from ..settings import with_pairs


def values(sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Return the settings given by flags and by --set KEY=VALUE."""
    given = {name: value for name, value in flags.items() if value is not None}
    return with_pairs(given, sets or [])


def show(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    """Print rows as a table or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        grid.add_row(*(str(row[column]) for column in columns))
    Console().print(grid)


def quiet_logs(verbose: bool) -> None:
    """Show warnings only, or everything of ours with --verbose."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("bayflower").setLevel(logging.INFO if verbose else logging.ERROR)
    logging.getLogger("flwr").setLevel(logging.WARNING)
