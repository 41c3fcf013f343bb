"""A client's durable state: its states after the last two rounds, with the replies it sent. A
duplicate message gets the saved reply and is not applied twice.

Each round and client has one file, `<root>/<run>/client-<k>/round-<r>.safetensors`, written
atomically; the two newest are kept. `test.safetensors` is the reply to the last test.

A damaged file is renamed and reported, and an earlier state used. A file of an older format is
read, and a file of an unknown format is an error: neither is set aside. States of later rounds than
the server knows, whose checkpoint was rolled back, are renamed to `.replaced`. In each case the
server notices by the digests in the reply (`wire/continuity.py`), whose key is `<root>/.secret`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import BayflowerError, ConfigError, FormatError
from ..tree import Tensors
from .atomic import below, load_tensors, save_tensors
from .texts import write_json

log = logging.getLogger("bayflower")
KEPT = 2
TEST = "test.safetensors"
NOTES = "secure.json"
FORMAT = "bayflower-client-2"
OLDER = ("bayflower-client-1",)  # without the thread: `read` computes it
SECRET = ".secret"  # in the root of a store; 32 bytes that never leave the client


class Saved(NamedTuple):
    """A client after one round."""

    round: int
    cause: str  # digest of the broadcast that it answers
    state: Tensors
    update: Tensors
    tally: Tensors
    numbers: dict[str, float]  # the metrics in the reply
    thread: str = ""  # what the reply says of continuity (`wire/continuity.py`)


class Store(Protocol):
    """A store of clients' states."""

    def load(self, run: str, client: int) -> list[Saved]:
        """Return the saved rounds of a client, newest first, at most two."""

    def save(self, run: str, client: int, saved: Saved) -> None:
        """Keep `saved` and the newest one before it."""

    def drop(self, run: str, client: int, after: int) -> None:
        """Delete the states of rounds later than `after`: their replies were not used."""

    def load_test(self, run: str, client: int) -> Saved | None:
        """Return the last test, in which `state` and `update` are empty."""

    def save_test(self, run: str, client: int, saved: Saved) -> None:
        """Keep the last test."""

    def notes(self, run: str, client: int) -> dict[str, Any]:
        """Return what a client remembers of a run beside its states, in JSON types."""

    def note(self, run: str, client: int, notes: dict[str, Any]) -> None:
        """Keep what `notes` returns; nobody else can read it."""

    def secret(self) -> bytes:
        """Return the key of the digests in replies; it stays here."""


class MemoryStore:
    """States in this process only."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], list[Saved]] = {}
        self.tests: dict[tuple[str, int], Saved] = {}
        self.secrets: dict[tuple[str, int], str] = {}
        self._secret = secrets.token_bytes(32)

    def secret(self) -> bytes:
        """Return the key of the digests in replies."""
        return self._secret

    def load(self, run: str, client: int) -> list[Saved]:
        """Return what is known of a client, newest first."""
        return self.kept.get((run, client), [])

    def save(self, run: str, client: int, saved: Saved) -> None:
        """Keep `saved` and the newest one before it."""
        older = [one for one in self.load(run, client) if one.round < saved.round]
        self.kept[run, client] = [saved, *older][:KEPT]

    def drop(self, run: str, client: int, after: int) -> None:
        """Forget the states of rounds later than `after`."""
        self.kept[run, client] = [one for one in self.load(run, client) if one.round <= after]

    def load_test(self, run: str, client: int) -> Saved | None:
        """Return the last test."""
        return self.tests.get((run, client))

    def save_test(self, run: str, client: int, saved: Saved) -> None:
        """Keep the last test."""
        self.tests[run, client] = saved

    def notes(self, run: str, client: int) -> dict[str, Any]:
        """Return what a client remembers of a run beside its states."""
        return dict(json.loads(self.secrets.get((run, client), "{}")))

    def note(self, run: str, client: int, notes: dict[str, Any]) -> None:
        """Keep what `notes` returns."""
        self.secrets[run, client] = json.dumps(notes)


class DiskStore:
    """States in files under `root`."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, run: str, client: int) -> Path:
        """Return the folder of a client; raise if `run`, which comes from the network, is not a
        plain word.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
            raise BayflowerError(f"run must be 1 to 64 letters, digits, - or _, got {run!r}")
        return self.root / run / f"client-{client}"

    def load(self, run: str, client: int) -> list[Saved]:
        """Return the saved rounds of a client, newest first; a damaged file is renamed and
        reported, one of an unknown format is an error.
        """
        found = []
        for path in rounds(self.folder(run, client))[:KEPT]:
            try:
                found.append(read(path))
            except (FormatError, ConfigError):  # the file is whole
                raise
            except BayflowerError as error:
                with suppress(OSError):
                    path.rename(path.with_suffix(".damaged"))
                log.warning(
                    "client %d: %s; the file was renamed to %s",
                    client,
                    error,
                    path.with_suffix(".damaged").name,
                )
        return found

    def save(self, run: str, client: int, saved: Saved) -> None:
        """Keep `saved` and the newest one before it."""
        folder = self.folder(run, client)
        write(folder / f"round-{saved.round}.safetensors", saved)
        files = rounds(folder)
        set_aside([path for path in files if number(path) > saved.round], client)
        for path in [path for path in files if number(path) <= saved.round][KEPT:]:
            path.unlink(missing_ok=True)

    def drop(self, run: str, client: int, after: int) -> None:
        """Forget the states of rounds later than `after`."""
        files = rounds(self.folder(run, client))
        later = [path for path in files if number(path) > after]
        if after and later and later == files:  # none is left: the server's checkpoint is older
            set_aside(later, client)
            return
        for path in later:
            path.unlink(missing_ok=True)

    def load_test(self, run: str, client: int) -> Saved | None:
        """Return the last test, or None if it is missing or unreadable."""
        with suppress(BayflowerError):
            return read(self.folder(run, client) / TEST)
        return None

    def save_test(self, run: str, client: int, saved: Saved) -> None:
        """Keep the last test."""
        write(self.folder(run, client) / TEST, saved)

    def notes(self, run: str, client: int) -> dict[str, Any]:
        """Return what a client remembers of a run beside its states; raise if it is damaged: a
        client that forgets could give a secret away.
        """
        path = self.folder(run, client) / NOTES
        try:
            return dict(json.loads(path.read_text())) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise BayflowerError(f"{path} cannot be read ({error}); start a new run") from None

    def note(self, run: str, client: int, notes: dict[str, Any]) -> None:
        """Keep what `notes` returns; nobody else can read it."""
        write_json(self.folder(run, client) / NOTES, notes, private=True)

    def secret(self) -> bytes:
        """Return the key of the digests in replies, made when it is first needed."""
        path = self.root / SECRET
        try:
            if not path.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f"{SECRET}.{os.getpid()}.{secrets.token_hex(4)}")
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(32))
                with suppress(FileExistsError):  # of two processes one wins, and both read its key
                    os.link(part, path)
                part.unlink()
            found = path.read_bytes()
        except OSError as error:
            raise BayflowerError(
                f"{path} cannot be written or read ({error.strerror}); make the folder writable"
            ) from None
        if len(found) != 32:
            raise BayflowerError(f"{path} is damaged; restore it from a back-up, or remove it")
        return found


class RunStore(DiskStore):
    """States in memory while a run lasts. After a client's test, its last state and the test are on
    disk, as after a run of Flower's programs.
    """

    def __init__(self, disk: DiskStore) -> None:
        super().__init__(disk.root)
        self.memory = MemoryStore()

    def load(self, run: str, client: int) -> list[Saved]:
        """Return the saved rounds of a client, newest first."""
        if (run, client) not in self.memory.kept:
            self.memory.kept[run, client] = super().load(run, client)
        return self.memory.load(run, client)

    def save(self, run: str, client: int, saved: Saved) -> None:
        """Keep `saved` and the newest one before it."""
        self.memory.save(run, client, saved)

    def drop(self, run: str, client: int, after: int) -> None:
        """Forget the states of rounds later than `after`."""
        self.memory.drop(run, client, after)

    def load_test(self, run: str, client: int) -> Saved | None:
        """Return the last test."""
        return self.memory.load_test(run, client) or super().load_test(run, client)

    def save_test(self, run: str, client: int, saved: Saved) -> None:
        """Write the last test, and the last state before it."""
        for one in self.memory.load(run, client)[:1]:
            super().save(run, client, one)
        self.memory.save_test(run, client, saved)
        super().save_test(run, client, saved)


def number(path: Path) -> int:
    """Return the round in a file's name."""
    return int(path.stem.split("-")[1])


def rounds(folder: Path) -> list[Path]:
    """Return the files of a client, newest round first."""
    return sorted(folder.glob("round-*.safetensors"), key=number, reverse=True)


def set_aside(files: list[Path], client: int) -> None:
    """Rename states of later rounds than the server knows; the newest two of them are kept."""
    for path in files:
        path.replace(path.with_suffix(".replaced"))
        log.warning(
            "client %d: its state of round %d is newer than the server's checkpoint; the file was "
            "renamed to %s",
            client,
            number(path),
            path.with_suffix(".replaced").name,
        )
    if files:
        kept = sorted(files[0].parent.glob("round-*.replaced"), key=number, reverse=True)
        for path in kept[KEPT:]:
            path.unlink(missing_ok=True)


def write(path: Path, saved: Saved) -> None:
    """Write one file of a client."""
    parts = {
        f"{part}/{name}": tensor
        for part in ("state", "update", "tally")
        for name, tensor in getattr(saved, part).items()
    }
    head = {
        "format": FORMAT,
        "round": str(saved.round),
        "cause": saved.cause,
        "numbers": json.dumps(saved.numbers),
        "thread": saved.thread,
    }
    save_tensors(path, parts, head, sealed=True)


def read(path: Path) -> Saved:
    """Return the content of one file of a client; a file of an older format has no thread."""
    tensors, head = load_tensors(path, FORMAT, "client state", *OLDER)
    parts = {part: below(tensors, part) for part in ("state", "update", "tally")}
    numbers, thread = json.loads(head["numbers"]), head.get("thread", "")
    return Saved(int(head["round"]), head["cause"], numbers=numbers, thread=thread, **parts)
