"""Records of fixed size on a local disk, one a client: more of them than fit into memory.

    shard-00000.bin, …        records one after another; a client's record is in some slot
    index-<round>.safetensors where each client's record was after that round, with a checksum

A record is its content, then client, round and a checksum over all of it. A checkpoint of a run
names a round, and the index of that round says which slots it needs. Such a slot is not written
again until a later checkpoint is complete: a changed record goes to a free slot. So a process that
dies at any moment leaves the records of its last checkpoint as they were, and nothing is copied for
a checkpoint. The files have one slot for each client that has a record, and one for each that
changed since the last checkpoint.

Nothing here is safe for two threads at once: the owner calls from one thread (`fused/bank.py`).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from ..errors import BayflowerError, ConfigError
from .atomic import load_tensors, save_tensors, sync_folder

FORMAT = "bayflower-states-2"
SHARD = 2**30  # bytes of a file
TAIL = 3  # words of a record behind its content: client, round, checksum
WORD = 8
OLD = "round-*.safetensors"  # files of an earlier version
ODD = 0x9E3779B97F4A7C15
Rows = np.ndarray  # (records, words) uint64


class View(NamedTuple):
    """The records of a file, as memory."""

    file: mmap.mmap
    rows: Rows


class Shards:
    """The records of some clients, numbered from 0."""

    def __init__(
        self, folder: Path, words: int, clients: int, run: str = "", until: int | None = None
    ) -> None:
        """Go on from the index of round `until`; without one, start with no records. A record has
        `words` words of content.
        """
        self.folder, self.run, self.words = folder, run, words
        self.width = words + TAIL
        self.per_shard = max(1, SHARD // (self.width * WORD))
        self.slot = np.full(clients, -1, np.int64)  # of each client; −1 = none
        self.round = np.zeros(clients, np.int64)  # after which its record was written
        self.top = 0  # slots in the files
        self.files: dict[int, int] = {}  # descriptors by shard
        self.views: dict[int, View] = {}
        self.unsynced: set[int] = set()
        self.factors = factors(self.width - 1)
        folder.mkdir(parents=True, exist_ok=True)
        if until is None:
            self._clear()
        else:
            self._go_on(until)
        self.saved = self.slot.copy()  # slots that the last checkpoint needs
        self.free = np.setdiff1d(np.arange(self.top), self.slot)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of a record on disk."""
        return self.width * WORD

    def read(self, clients: np.ndarray, into: Rows) -> np.ndarray:
        """Read the records of some clients into the rows of `into`, and return which of them have
        one. Raise if a record is damaged, or not the client's newest.
        """
        slots = self.slot[clients]
        known = np.flatnonzero(slots >= 0)
        shards, places = np.divmod(slots[known], self.per_shard)
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            view = self._view(shard, int(places[here].max()) + 1)
            if view is None:  # the file is too short
                self._damaged(int(clients[known[here[places[here].argmax()]]]))
            size = self.record_bytes
            for begin in np.sort(places[here] * size).tolist():  # the disk reads many at once
                start = begin // mmap.PAGESIZE * mmap.PAGESIZE
                view.file.madvise(mmap.MADV_WILLNEED, start, begin - start + size)
            # one call for all of them, in which other threads can work
            into[known[here]] = np.take(view.rows, places[here], axis=0, mode="clip")
            view.file.madvise(mmap.MADV_DONTNEED)  # what was read counts to this process no more
        found = into[: len(clients)] if len(known) == len(clients) else into[known]
        good = found[:, -1] == sums(found, self.factors)
        good &= found[:, -3] == clients[known].astype(np.uint64)
        good &= found[:, -2] == self.round[clients[known]].astype(np.uint64)
        if not good.all():
            self._damaged(int(clients[known][~good][0]))
        return slots >= 0

    def write(self, clients: np.ndarray, rows: Rows, round: int) -> None:
        """Write the records of some clients after `round`; their last words are filled in here."""
        rows[:, -3], rows[:, -2] = clients, round
        rows[:, -1] = sums(rows, self.factors)
        slots = self.slot[clients]
        new = slots == self.saved[clients]  # the checkpoint needs the old slot, or there is none
        slots[new] = self._take(int(new.sum()))
        order = np.argsort(slots, kind="stable")
        ordered = rows if bool((np.diff(order) == 1).all()) else rows[order]
        shards, places = np.divmod(slots[order], self.per_shard)
        ends = np.flatnonzero((np.diff(places) != 1) | (np.diff(shards) != 0)) + 1
        try:
            for begin, end in zip([0, *ends], [*ends, len(order)], strict=True):
                self._put(int(shards[begin]), int(places[begin]), ordered[begin:end])
        except OSError as error:
            raise BayflowerError(full(self.folder, error)) from None
        self.slot[clients], self.round[clients] = slots, round

    def save(self, round: int) -> None:
        """Make the records of now those of a checkpoint after `round`, which comes next."""
        try:
            for shard in sorted(self.unsynced):
                os.fdatasync(self._file(shard))
        except OSError as error:
            raise BayflowerError(full(self.folder, error)) from None
        self.unsynced.clear()
        content = {"slot": torch.from_numpy(self.slot), "round": torch.from_numpy(self.round)}
        head = {"format": FORMAT, "run": self.run, "words": str(self.words)}
        save_tensors(self.folder / index_name(round), content, head, sealed=True)

    def release(self, round: int) -> None:
        """Free what the checkpoints before that of `round` needed."""
        gone = self.saved[(self.saved >= 0) & (self.saved != self.slot)]
        self.free = np.union1d(self.free, gone)
        self.saved = self.slot.copy()
        for path in self.folder.glob("index-*.safetensors"):
            if path.name != index_name(round):
                path.unlink()

    def open_files(self) -> list[int]:
        """Return the descriptors of what was written since the last `save`, to flush early."""
        return [self._file(shard) for shard in sorted(self.unsynced)]

    def used(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())

    def close(self) -> None:
        """Close the files."""
        self.views.clear()
        for file in self.files.values():
            os.close(file)
        self.files.clear()

    # -- inside ------------------------------------------------------------------------------------
    def _go_on(self, until: int) -> None:
        path = self.folder / index_name(until)
        if not path.exists():
            raise ConfigError(
                f"the clients' states of round {until} are not in {self.folder}; bring the folder "
                "back, or start a new run"
            )
        content, head = load_tensors(path, FORMAT, "index of states")
        if head["run"] != self.run and self.run:
            raise ConfigError(
                f"{path} is of another run; give every run a folder of its own, or start a new run"
            )
        if head["words"] != str(self.words):
            raise ConfigError(
                f"{path} has states of {int(head['words']) * WORD} bytes, the method's have "
                f"{self.words * WORD}; use the same settings, or start a new run"
            )
        known = len(content["slot"])
        if known > len(self.slot):
            self.slot, self.round = np.full(known, -1, np.int64), np.zeros(known, np.int64)
        self.slot[:known], self.round[:known] = content["slot"].numpy(), content["round"].numpy()
        self.top = int(self.slot.max(initial=-1)) + 1

    def _clear(self) -> None:
        """Remove the files of an earlier run."""
        for pattern in ("index-*.safetensors", "shard-*.bin", OLD):
            for path in self.folder.glob(pattern):
                path.unlink()

    def _take(self, number: int) -> np.ndarray:
        """Return free slots, new ones at the end of the files if there are too few."""
        found, self.free = self.free[:number], self.free[number:]
        more = np.arange(self.top, self.top + number - len(found))
        self.top += len(more)
        return np.concatenate([found, more])

    def _file(self, shard: int) -> int:
        if shard not in self.files:
            path = self.folder / f"shard-{shard:05d}.bin"
            self.files[shard] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            sync_folder(self.folder)
        return self.files[shard]

    def _view(self, shard: int, records: int) -> View | None:
        """Return the records of a shard in memory that the system fills when it is looked at; None
        if there are not so many.
        """
        size = os.fstat(self._file(shard)).st_size // self.record_bytes
        if size < records:
            return None
        known = self.views.get(shard)
        if known is None or len(known.rows) < records:
            length = size * self.record_bytes
            file = mmap.mmap(self._file(shard), length, prot=mmap.PROT_READ)
            file.madvise(mmap.MADV_RANDOM)
            rows = np.frombuffer(file, np.uint64).reshape(-1, self.width)
            known = self.views[shard] = View(file, rows)
        return known

    def _put(self, shard: int, place: int, rows: Rows) -> None:
        file, content, done = self._file(shard), rows.reshape(-1).view(np.uint8).data, 0
        self.unsynced.add(shard)
        while done < len(content):
            done += os.pwrite(file, content[done:], place * self.record_bytes + done)

    def _damaged(self, client: int) -> NoReturn:
        shard, place = divmod(int(self.slot[client]), self.per_shard)
        raise BayflowerError(
            f"the state of client {client} in {self.folder / f'shard-{shard:05d}.bin'} (record "
            f"{place}) is damaged; restore the folder from a back-up, or start a new run"
        )


def index_name(round: int) -> str:
    """Return the name of the index after a round."""
    return f"index-{round:08d}.safetensors"


def factors(number: int) -> np.ndarray:
    """Return odd numbers, one a word: a changed word always changes a sum of products."""
    with np.errstate(over="ignore"):
        z = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(ODD)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def sums(rows: Rows, by: np.ndarray) -> np.ndarray:
    """Return the checksum of each record: Σ word · factor + 1 modulo 2^64, so that no record of
    zeros is a good one.
    """
    found: np.ndarray = np.einsum("ij,j->i", rows[:, :-1], by)
    return found + np.uint64(1)


def full(folder: Path, error: OSError) -> str:
    """Return the error of a disk that cannot be written."""
    what = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
    return (
        f"the clients' states cannot be written to {folder} ({what}); free some space and resume "
        "the run from its checkpoint, or choose another folder with --out"
    )


def check_space(
    folder: Path,
    need: float,
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> None:
    """Raise if a disk has fewer free bytes than a run's states will need there."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    have = free(there)
    if need > have:
        raise ConfigError(
            f"the clients' states will need about {need / 1e9:.1f} GB in {folder}, where "
            f"{have / 1e9:.1f} GB are free; free some space, or choose another folder with --out"
        )
