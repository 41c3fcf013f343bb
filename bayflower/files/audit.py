"""A tamper-evident log: JSON lines, each with the hash of the line before it.

A line is {"number", "time", "event", …, "before", "hash"}. `hash` is the SHA-256 of the line
without it, `before` the hash of the previous line. So a line that is changed, removed, added or
moved breaks the chain at its place. The end of a log can be cut off without a trace, and the whole
log can be written anew. Whoever kept the last hash elsewhere notices both.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BayflowerError

FIRST = "0" * 64  # `before` of the first line
LONGEST = 16_000_000  # cap on the bytes of a line
VARIABLE = "BAYFLOWER_AUDIT"
OWN = ("number", "time", "event", "before", "hash")


class Checked(NamedTuple):
    """A log that was verified to its end."""

    lines: int
    last: str  # hash of the last line


class Audit:
    """One log, to which several processes may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **facts: Any) -> str:
        """Append a line and flush it to disk; return its hash. Raise if the last line was
        changed.
        """
        if taken := sorted(set(facts) & set(OWN)):
            raise ValueError(f"{taken[0]} is a field of every line")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                return self._append(event, facts)
        except OSError as error:
            raise BayflowerError(
                f"the audit log {self.path} cannot be written ({error.strerror}); free some disk "
                "space or make the folder writable"
            ) from None

    def _append(self, event: str, facts: Mapping[str, Any]) -> str:
        new = not self.path.exists()
        with self.path.open("a+b") as file:
            if new:
                os.fchmod(file.fileno(), 0o600)
            number, before, torn = self._end(file)
            if torn:  # the process that wrote it died: what is left of its line is cut off
                file.truncate(file.seek(0, os.SEEK_END) - len(torn))
                lost = {"bytes": len(torn), "digest": hashlib.sha256(torn).hexdigest()}
                number, before = number + 1, put(file, number + 1, before, "torn", lost)
            told = put(file, number + 1, before, event, facts)
            file.flush()
            os.fsync(file.fileno())
            return told

    def _end(self, file: Any) -> tuple[int, str, bytes]:
        """Return the number and the hash of the last whole line, and what follows it."""
        size, block = file.seek(0, os.SEEK_END), 65536
        while True:
            start = max(0, size - block)
            file.seek(start)
            *lines, torn = file.read(size - start).split(b"\n")
            if lines and (start == 0 or len(lines) > 1):
                break
            if start == 0:
                return 0, FIRST, torn
            block *= 4
        known = read_line(lines[-1])
        if isinstance(known, str):
            raise BayflowerError(
                f"the last line of the audit log {self.path} {known}; look into it with: bayflower "
                "audit verify, then move the file away so that a new log can begin"
            )
        return int(known["number"]), str(known["hash"]), torn


def here() -> Audit | None:
    """Return the server's log, if the environment variable BAYFLOWER_AUDIT names a file."""
    path = os.environ.get(VARIABLE, "")
    return Audit(Path(path)) if path else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a file; other processes that ask for it wait."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def put(file: Any, number: int, before: str, event: str, facts: Mapping[str, Any]) -> str:
    """Append one line to an open file; return its hash."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    line = {"number": number, "time": now, "event": event, **facts, "before": before}
    told = digest(line)
    file.write(canonical({**line, "hash": told}) + b"\n")
    return told


def canonical(line: Mapping[str, Any]) -> bytes:
    """Return the only way to write a line."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(line: Mapping[str, Any]) -> str:
    """Return the hash of a line without the field `hash`."""
    plain = {name: value for name, value in line.items() if name != "hash"}
    return hashlib.sha256(canonical(plain)).hexdigest()


def read_line(text: bytes) -> dict[str, Any] | str:
    """Return a line, or what is wrong with it alone."""
    try:
        line = json.loads(text)
    except ValueError:
        return "is not JSON"
    if not isinstance(line, dict) or any(name not in line for name in OWN):
        return "lacks a field that every line has"
    if digest(line) != line["hash"] or canonical(line) != text:
        return "was changed: its content does not have its hash"
    return line


def verify(path: Path, last: str = "") -> Checked:
    """Return how long a log is if its chain is whole; raise with the first line that was changed,
    removed, added or moved. With `last`, the hash of the last line that was seen before, a log
    that was cut off before it, or written anew, is an error too.
    """
    before, number, found = FIRST, 0, not last or last == FIRST
    try:
        with path.open("rb") as file:
            while text := file.readline(LONGEST):
                number += 1
                where = f"{path}, line {number}"
                if not text.endswith(b"\n"):
                    raise BayflowerError(f"{where} is not complete: the log was cut off in it")
                line = read_line(text[:-1])
                if isinstance(line, str):
                    raise BayflowerError(f"{where} {line}")
                if line["before"] != before or line["number"] != number:
                    raise BayflowerError(
                        f"{where} does not follow the line before it (it was line "
                        f"{line['number']}): lines were removed, added or moved here"
                    )
                before = line["hash"]
                found = found or before == last
    except OSError as error:
        raise BayflowerError(f"{path} cannot be read ({error.strerror})") from None
    if not found:
        raise BayflowerError(
            f"{path} has {number} whole lines, but not the one with hash {last[:16]}…: the log was "
            "cut off before it, or written anew"
        )
    return Checked(number, before)
