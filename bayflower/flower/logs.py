"""What a strategy tells while it runs, through Flower's logger and in the words of Flower's own
strategies: rounds, sampled nodes, results and failures, metrics, times, a table at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from ..files.records import RoundRecord

OURS = logging.getLogger("bayflower")
FLOWERS = logging.getLogger("flwr")
MOST_ROWS = 20  # rounds in the last table
USUAL = ("optimizer", "lr", "batch_size", "local_epochs")  # settings that are always shown
HEADINGS = ("round", "clients", "train loss", "accuracy", "MB up", "seconds")


class Bridge(logging.Handler):
    """Hands our warnings to Flower's logger, so that they look like its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record."""
        FLOWERS.handle(record)


class Teller:
    """Logs the course of one run; a quiet one logs nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.said: set[str] = set()  # what is said only once
        self.began = time.perf_counter()

    def say(self, text: str = "", *values: Any) -> None:
        """Log a line."""
        if not self.quiet:
            FLOWERS.info(text, *values)

    def warn(self, key: str, text: str) -> None:
        """Log a warning, once for each key."""
        if key not in self.said:
            self.said.add(key)
            OURS.warning("%s", text)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Show our warnings through Flower's logger, unless they have a handler of their own."""
        if self.quiet or OURS.handlers:
            yield
            return
        bridge, before = Bridge(), OURS.propagate
        OURS.addHandler(bridge)
        OURS.propagate = False  # Flower's logger hands them on
        try:
            yield
        finally:
            OURS.removeHandler(bridge)
            OURS.propagate = before

    # -- the course of a run ----------------------------------------------------------------------
    def begins(
        self,
        name: str,
        rounds: int,
        arrays: ArrayRecord,
        train: ConfigRecord,
        evaluate: ConfigRecord,
    ) -> None:
        """Say what starts."""
        self.began = time.perf_counter()
        size = sum(len(array.data) for array in arrays.values()) / 1024**2
        self.say("Starting %s strategy:", name)
        self.say("\t├── Number of rounds: %d", rounds)
        self.say("\t├── ArrayRecord (%.2f MB)", size)
        for what, config in (("train", train), ("evaluate", evaluate)):
            self.say("\t├── ConfigRecord (%s): %s", what, shown(config) if config else "(empty!)")

    def sampling(self, strategy: Any) -> None:
        """Say how clients are sampled, what records are called, and how clients train."""
        s = strategy
        self.say("\t├──> Sampling:")
        fractions = (s.fraction_train, s.fraction_evaluate)
        self.say("\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)", *fractions)
        nodes = (s.min_train_nodes, s.min_evaluate_nodes)
        self.say("\t│\t├──Minimum nodes: train (%d) | evaluate (%d)", *nodes)
        self.say("\t│\t└──Minimum available nodes: %d", s.min_available_nodes)
        self.say("\t├──> Keys in records:")
        self.say("\t│\t├── Weighted by: '%s'", s.weighted_by_key)
        self.say("\t│\t├── ArrayRecord key: '%s'", s.arrayrecord_key)
        self.say("\t│\t└── ConfigRecord key: '%s'", s.configrecord_key)
        self.say("\t└──> %s (%s):", s.row.title, s.row.paper)
        self.say("\t\t├── Local training: %s", chosen(s.training, USUAL))
        self.say("\t\t└── Method: %s", chosen(s.options, [one.name for one in fields(s.options)]))

    def round(self, number: int, rounds: int) -> None:
        """Say that a round begins."""
        self.say()
        self.say("[ROUND %s/%s]", number, rounds)

    def sampled(self, hook: str, chosen: int, present: int) -> None:
        """Say how many nodes get a message."""
        self.say("%s: Sampled %s nodes (out of %s)", hook, chosen, present)

    def received(self, hook: str, used: int, asked: int) -> None:
        """Say how many replies were used, and how many were missing or invalid."""
        self.say("%s: Received %s results and %s failures", hook, used, asked - used)

    def metrics(self, record: MetricRecord | None) -> None:
        """Say what was aggregated."""
        if record is not None:
            self.say("\t└──> Aggregated MetricRecord: %s", dict(record))

    def tested(self, round: int, record: MetricRecord | None) -> None:
        """Say what `evaluate_fn` returned."""
        self.say(
            "Initial global evaluation results: %s" if round == 0 else "Global evaluation: %s",
            None if record is None else dict(record),
        )

    def took(self, seconds: float) -> None:
        """Say how long a round took."""
        self.say("\t└──> Round finished in %.2fs", seconds)

    def ends(self, records: Sequence[RoundRecord], faults: int) -> None:
        """Show the table of all rounds."""
        self.say()
        self.say("Strategy execution finished in %.2fs", time.perf_counter() - self.began)
        self.say()
        self.say("Final results:")
        for line in table(records):
            self.say("\t%s", line)
        if faults:
            self.say("\t%d faults were logged", faults)
        self.say()


def chosen(settings: Any, always: Collection[str]) -> str:
    """Return settings in one line: those named in `always`, and others that are not the default."""
    found = [
        f"{one.name}={getattr(settings, one.name)}"
        for one in fields(settings)
        if one.name in always or getattr(settings, one.name) != one.default
    ]
    return ", ".join(found) or "nothing to set"


def shown(config: Mapping[str, Any]) -> str:
    """Return a ConfigRecord in one line, without bytes."""
    return str(
        {key: "<bytes>" if isinstance(value, bytes) else value for key, value in config.items()}
    )


def table(records: Sequence[RoundRecord]) -> list[str]:
    """Return the rounds as lines of equal width; of many rounds some, the last among them."""
    every = -(-len(records) // MOST_ROWS) if records else 1
    chosen = [one for number, one in enumerate(reversed(records)) if number % every == 0]
    rows = [HEADINGS, *(row(one) for one in reversed(chosen))]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEADINGS))]
    return [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in rows
    ]


def row(record: RoundRecord) -> tuple[str, ...]:
    """Return a round as texts, - for what is not known."""
    loss, point = record["train_loss"], record.get("personal")
    return (
        str(record["round"]),
        str(record["num_clients"]),
        "-" if loss is None else f"{loss:.4f}",
        f"{point['accuracy']:.4f}" if point and "accuracy" in point else "-",
        f"{record['bytes_up'] / 1e6:.2f}",
        f"{record['seconds']:.2f}",
    )
