"""Faults for the result file, and log lines with run, round and client as fields."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..errors import BayflowerError
from . import audit

log = logging.getLogger("bayflower")
NO_REPLY = "no valid reply"
LONGEST = 500  # cap on the characters of a line: parts of it may come from a client


class Journal:
    """The faults and log lines of one run."""

    def __init__(self, run: str, faults: list[str]) -> None:
        self.run, self.faults, self.round = run, faults, 0
        self.audit = audit.here()
        self.blamed: set[int] = set()  # clients with a reported fault in this round

    def begin(self, round: int) -> None:
        """Start a round: later faults and events belong to it."""
        self.round, self.blamed = round, set()

    def fault(self, text: str, client: int | None = None) -> None:
        """Record a fault for the result file and log it as a warning."""
        text = one_line(text)
        self.faults.append(text)
        if client is not None:
            self.blamed.add(client)
        log.warning("%s", text, extra=self.fields(client))
        self.write("fault", client=client, why=text)

    def write(self, event: str, **facts: Any) -> None:
        """Write a line to the server's audit log, if there is one."""
        if self.audit is not None:
            self.audit.write(event, side="server", run=self.run, round=self.round, **facts)

    def no_reply(self, round: int) -> None:
        """Record that a round had no valid reply."""
        self.fault(f"round {round}: {NO_REPLY}; the global state is unchanged")

    def cause(self) -> str:
        """Return the last fault that says why: not only that no reply was valid."""
        why = [text for text in self.faults if f": {NO_REPLY};" not in text]
        return (why or self.faults or ["none was reported"])[-1]

    def event(self, text: str, client: int | None = None) -> None:
        """Log an event that is not a fault."""
        log.info("%s", one_line(text), extra=self.fields(client))

    def fields(self, client: int | None) -> dict[str, object]:
        """Return the extra fields of a log line."""
        return {"run": self.run, "round": self.round, "client": client}


def origin_of(error: Exception) -> str:
    """Return the file and line where an error arose; "" for those that say all themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, BayflowerError) or not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, message and, if known, run, round and client."""

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
    """Log JSON lines to standard error if the environment variable BAYFLOWER_LOG is json."""
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
    """Return the text as one printable line of at most LONGEST characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
