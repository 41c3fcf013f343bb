"""What a run tells: faults for the result file, and log lines that name run, round and client as fields."""

from __future__ import annotations

import logging

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


def one_line(text: str) -> str:
    """Return the text as one printable line that is not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
