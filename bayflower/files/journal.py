"""What a run tells: faults for the result file, and log lines that name run, round and client as
fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

log = logging.getLogger("bayflower")
LONGEST = 500  # characters of a line: part of it may come from a peer


class Journal:
    """The faults of one run, and its voice in the log."""

    def __init__(self, run: str, faults: list[str]) -> None:
        self.run, self.faults, self.round = run, faults, 0
        self.blamed: set[int] = set()  # clients of which a fault was reported in this round

    def begin(self, round: int) -> None:
        """Take note of the round that what follows belongs to."""
        self.round, self.blamed = round, set()

    def fault(self, text: str, client: int | None = None) -> None:
        """Keep one line for the result file, and log it."""
        text = one_line(text)
        self.faults.append(text)
        if client is not None:
            self.blamed.add(client)
        log.warning("%s", text, extra=self.fields(client))

    def event(self, text: str, client: int | None = None) -> None:
        """Log what is no fault."""
        log.info("%s", one_line(text), extra=self.fields(client))

    def fields(self, client: int | None) -> dict[str, object]:
        """Return what a log line is about."""
        return {"run": self.run, "round": self.round, "client": client}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, message, and run, round and client where a line has
    them.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": one_line(record.getMessage()),
        }
        more = {name: getattr(record, name, None) for name in ("run", "round", "client")}
        return json.dumps(
            {**line, **{name: value for name, value in more.items() if value is not None}},
            ensure_ascii=False,
        )


def set_up() -> None:
    """Let the log be JSON lines on standard error if the environment says BAYFLOWER_LOG=json."""
    if os.environ.get("BAYFLOWER_LOG", "").lower() != "json" or any(
        isinstance(one.formatter, JsonLines) for one in log.handlers
    ):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def one_line(text: str) -> str:
    """Return the text as one printable line that is not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
