"""Progress over rounds: a bar at a terminal and in a notebook, lines in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Literal

from rich.console import Console

from ..errors import ConfigError

LINE_SECONDS = 15.0  # between two lines of progress where there is no terminal
DRAW_SECONDS = 0.2  # between two pictures of the bar in a notebook

Shown = bool | Literal["auto"]


def is_hidden(shown: Shown) -> bool:
    """Return whether nothing is to be shown: auto = a bar where somebody looks, at a terminal or in
    a notebook, and nothing in a script.
    """
    if shown not in (True, False, "auto"):
        raise ConfigError(f"progress must be 'auto', True or False, got {shown!r}")
    if shown == "auto":
        return not (in_notebook() or Console(stderr=True).is_terminal)
    return not shown


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this process."""
    shell = sys.modules.get("IPython")
    found = shell and shell.get_ipython()
    return found is not None and type(found).__name__ == "ZMQInteractiveShell"


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
        self.page = None if hidden or not in_notebook() else Page()
        self.task = self.bar.add_task(title, total=rounds, now="")
        self.accuracy = ""
        self.title, self.rounds = title, rounds
        # a log file gets a line now and then instead of a bar
        self.lines = not hidden and not console.is_terminal and self.page is None
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
                self.accuracy = now_of(record["personal"])
        loss, done = records[-1]["train_loss"], records[-1]["round"]
        now = f"loss {loss:.4f} {self.accuracy}" if loss is not None else self.accuracy
        if "stacked" in records[-1]:  # the fused engine says how it trains
            together = records[-1]["stacked"]
            now += f" ({f'{together} clients in a stack' if together else 'one by one'})"
        self.bar.update(self.task, completed=done, now=now)
        if self.page is not None:
            self.page.draw(self.title, done, self.rounds, now)
        if self.lines and (self.first or time.monotonic() - self.said > LINE_SECONDS):
            self.said, self.first = time.monotonic(), False
            print(f"{self.title}: round {done} of {self.rounds}, {now}", flush=True)


def now_of(point: Mapping[str, Any]) -> str:
    """Return the first metric of a test as text."""
    name, value = next(iter(point.items()))
    if value is None:
        return ""
    return f"{name} {value:.1%}" if name == "accuracy" else f"{name.upper()} {value:.4f}"


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


class Page:
    """A bar in a notebook's output, drawn with what every notebook has."""

    def __init__(self) -> None:
        self.display: Any = sys.modules["IPython"].display
        self.handle: Any = None
        self.drawn = -DRAW_SECONDS

    def draw(self, title: str, done: int, rounds: int, now: str) -> None:
        """Draw the bar, unless it was drawn just now."""
        if time.monotonic() - self.drawn < DRAW_SECONDS and done < rounds:
            return
        self.drawn = time.monotonic()
        text = f"{escape(title)} <progress value={done} max={rounds}></progress> "
        picture = self.display.HTML(f"{text} {done} of {rounds} rounds {escape(now)}")
        if self.handle is None:
            self.handle = self.display.display(picture, display_id=True)
        else:
            self.handle.update(picture)
