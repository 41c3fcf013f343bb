"""What every command does at a terminal: read KEY=VALUE, show a table or a progress bar, keep logs
quiet.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..settings import with_pairs

LINE_SECONDS = 15.0  # between two lines of progress where there is no terminal


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


class bar:  # noqa: N801 (reads as a verb: with bar(...))
    """A progress bar over rounds with the current loss and accuracy; nothing where no one looks."""

    def __init__(self, rounds: int, title: str, hidden: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            disable=hidden or not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=rounds, now="")
        self.accuracy = ""
        self.title, self.rounds = title, rounds
        # a log file gets a line now and then instead of a bar
        self.lines = not hidden and not console.is_terminal
        self.said = time.monotonic()
        self.first = False  # whether the first round gets a line at once

    def __enter__(self) -> Callable[[list[Any]], None]:
        self.bar.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, records: list[Any]) -> None:
        """Show the last round."""
        if not records:
            return
        for record in records[-2:]:
            if "personal" in record:
                self.accuracy = f"accuracy {record['personal']['accuracy']:.1%}"
        loss, done = records[-1]["train_loss"], records[-1]["round"]
        now = f"loss {loss:.4f} {self.accuracy}" if loss is not None else self.accuracy
        if "stacked" in records[-1]:  # the fused engine says how it trains
            together = records[-1]["stacked"]
            now += f" ({f'{together} clients in a stack' if together else 'one by one'})"
        self.bar.update(self.task, completed=done, now=now)
        if self.lines and (self.first or time.monotonic() - self.said > LINE_SECONDS):
            self.said, self.first = time.monotonic(), False
            print(f"{self.title}: round {done} of {self.rounds}, {now}", flush=True)


class bars:  # noqa: N801 (reads as a verb: with bars(...))
    """Progress of several methods that run one after another: a bar each, named after it."""

    def __init__(self, rounds: Mapping[str, int], hidden: bool) -> None:
        """Take the rounds of each method by its title, in the order in which they run."""
        self.rounds, self.hidden = dict(rounds), hidden
        self.now: bar | None = None

    def __enter__(self) -> Callable[[str, list[Any]], None]:
        return self.update

    def __exit__(self, *_: object) -> None:
        if self.now is not None:
            self.now.__exit__()

    def update(self, title: str, records: list[Any]) -> None:
        """Show the last round of the method called `title`."""
        if self.now is None or self.now.title != title:
            if self.now is not None:
                self.now.__exit__()
            self.now = bar(self.rounds[title], title, self.hidden)
            self.now.first = len(self.rounds) > 1  # say at once that another method runs
            self.now.__enter__()
        self.now.update(records)


def quiet_logs(verbose: bool) -> None:
    """Show warnings only, or everything of ours with --verbose."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("bayflower").setLevel(logging.INFO if verbose else logging.ERROR)
    logging.getLogger("flwr").setLevel(logging.WARNING)
