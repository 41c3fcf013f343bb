"""Client states on a local disk, with only those of a round's clients in memory.

A state is a record of `files/shards.py`: its leaves one after another, each at a whole word. One
thread does all reading and writing, in the order in which it is asked to. So what is read sees
every write that was asked for before. While clients train, the states of the coming round's clients
are read ahead; those of clients that train at that moment are left out, and a client whose state
is put afterwards is marked. Both are taken from memory, where the newest states wait to be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..files import vault
from ..files.shards import TAIL, WORD, Shards
from ..tree import Tensors, flatten, map_tree, unflatten

WAITING = 2  # blocks of states that may wait to be written


class Leaf(NamedTuple):
    """Where a leaf is in a record, in units of its own size."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Form:
    """The states of a method as records."""

    def __init__(self, fresh: Any) -> None:
        self.kind, self.leaves, at = type(fresh), dict[str, Leaf](), 0
        for name, leaf in flatten(fresh).items():
            size = leaf.element_size()
            begin = at * WORD // size
            self.leaves[name] = Leaf(begin, begin + leaf.numel(), tuple(leaf.shape), leaf.dtype)
            at += -(-leaf.numel() * size // WORD)
        self.words = at

    def pack(self, states: Any) -> Tensor:
        """Return stacked states as records (C, words + TAIL), on their device."""
        flat = flatten(states)
        first = next(iter(flat.values()))
        rows = torch.zeros(len(first), self.words + TAIL, dtype=torch.int64, device=first.device)
        for name, leaf in self.leaves.items():
            if leaf.end > leaf.begin:
                part = rows.view(leaf.dtype)[:, leaf.begin : leaf.end]
                part.copy_(flat[name].detach().reshape(len(first), -1))
        return rows

    def unpack(self, rows: Tensor) -> Any:
        """Return records as stacked states, in memory of their own."""
        flat: Tensors = {}
        for name, leaf in self.leaves.items():
            part = rows.view(leaf.dtype)[:, leaf.begin : leaf.end]
            own = part.clone(memory_format=torch.contiguous_format)
            flat[name] = own.reshape(len(rows), *leaf.shape)
        return unflatten(self.kind, flat)


class Block:
    """Records of some clients in memory, pinned for a GPU."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.tensor = torch.zeros(rows, width, dtype=torch.int64, pin_memory=self.gpu)
        self.words = self.tensor.numpy().view(np.uint64)
        self.place: dict[int, int] = {}  # of each client
        self.stale: set[int] = set()  # clients whose records are not their newest
        self.done: Future[None] | None = None
        self.event = torch.cuda.Event() if self.gpu else None

    def begin(self, chosen: Sequence[int]) -> None:
        """Make it the block of these clients, when nothing is under way with the old ones."""
        if self.done is not None:
            self.done.result()
        self.copied()
        self.place = {client: place for place, client in enumerate(chosen)}
        self.stale, self.done = set(), None

    def copying(self) -> None:
        """Note that the device copies from it or to it."""
        if self.event is not None:
            self.event.record()

    def copied(self) -> None:
        """Wait until the device has copied."""
        if self.event is not None:
            self.event.synchronize()


class DiskBank:
    """States in files; a client that has not trained yet has the initial state."""

    def __init__(
        self,
        folder: Path,
        fresh: Any,
        device: torch.device,
        until: int | None,
        clients: int = 0,
        run: str = "",
    ) -> None:
        """Start with the states after round `until`; with none if it is None."""
        if vault.key() is not None:
            raise ConfigError(
                f"client_states=disk cannot be encrypted, and {vault.VARIABLE} is set; use "
                "client_states=device"
            )
        self.form, self.device = Form(fresh), device
        self.shards = Shards(folder, self.form.words, clients, run, until)
        self.fresh = np.zeros((1, self.shards.width), np.uint64)
        if self.form.words:
            one = map_tree(lambda leaf: leaf[None].cpu(), fresh)
            self.fresh = self.form.pack(one).numpy().view(np.uint64)
        self.io = ThreadPoolExecutor(1, "states")
        self.flusher = ThreadPoolExecutor(1, "states-flush")
        self.flushed: list[Future[None]] = []
        self.reading: list[Block] = []  # blocks to read into, the newest last
        self.writing: list[Block] = []  # the newest last

    # -- reading -----------------------------------------------------------------------------------
    def ahead(self, chosen: Sequence[int], training: Sequence[int]) -> None:
        """Read the states of the coming round's clients, but for those that are `training`."""
        if not self.form.words:
            return
        block = self._block(self.reading, len(chosen))
        block.begin(chosen)
        block.stale |= block.place.keys() & set(training)
        block.done = self.io.submit(self._read, list(chosen), block, frozenset(block.stale))

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients, on the device."""
        if not self.form.words:  # the method's clients have no state
            return self.form.unpack(torch.zeros(len(chosen), 0, dtype=torch.int64))
        block, first = self._holding(chosen)
        if block is None:
            block = self._block(self.reading, len(chosen))
            block.begin(chosen)
            block.done = self.io.submit(self._read, list(chosen), block, frozenset())
            first = 0
        assert block.done is not None
        block.done.result()
        if block.stale:
            self._renew(block, [client for client in chosen if client in block.stale])
        rows = block.tensor[first : first + len(chosen)]
        there = rows.to(self.device, non_blocking=True)
        block.copying()
        return self.form.unpack(there)

    def _holding(self, chosen: Sequence[int]) -> tuple[Block | None, int]:
        """Return the block read ahead that has these clients in a row, and where they begin."""
        for block in reversed(self.reading):
            first = block.place.get(chosen[0])
            if first is not None and all(
                block.place.get(client) == first + n for n, client in enumerate(chosen)
            ):
                return block, first
        return None, 0

    def _renew(self, block: Block, clients: list[int]) -> None:
        """Bring records up to date: from memory where the newest wait, else from disk."""
        block.copied()
        left = []
        for client in clients:
            newest = next((one for one in reversed(self.writing) if client in one.place), None)
            if newest is None:
                left.append(client)
                continue
            newest.copied()
            block.words[block.place[client]] = newest.words[newest.place[client]]
        if left:
            own = Block(len(left), self.shards.width, torch.device("cpu"))
            self.io.submit(self._read, left, own, frozenset()).result()
            block.words[[block.place[client] for client in left]] = own.words
        block.stale.difference_update(clients)

    def _read(self, clients: list[int], block: Block, besides: frozenset[int]) -> None:
        """Read some clients into a block, in the thread."""
        numbers = np.array(clients, np.int64)
        if not besides:
            self._filled(numbers, block.words[: len(numbers)])
            return
        wanted = np.array([place for place, one in enumerate(clients) if one not in besides], int)
        found = np.empty((len(wanted), self.shards.width), np.uint64)
        self._filled(numbers[wanted], found)
        block.words[wanted] = found

    def _filled(self, clients: np.ndarray, rows: np.ndarray) -> None:
        known = self.shards.read(clients, rows)
        if not known.all():
            rows[~known] = self.fresh[0]

    # -- writing -----------------------------------------------------------------------------------
    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the stacked states of some clients after `round`; they are written in the thread."""
        if not self.form.words:
            return
        block = self._block(self.writing, len(chosen))
        block.begin(chosen)
        block.tensor[: len(chosen)].copy_(self.form.pack(states), non_blocking=True)
        block.copying()
        for other in self.reading:
            other.stale |= other.place.keys() & block.place.keys()
        block.done = self.io.submit(self._write, list(chosen), block, round)

    def _write(self, clients: list[int], block: Block, round: int) -> None:
        block.copied()
        numbers = np.array(clients, np.int64)
        self.shards.write(numbers, block.words[: len(numbers)], round)
        self.flushed = [one for one in self.flushed if not one.done() or one.result()]
        self.flushed.append(self.flusher.submit(flush, self.shards.open_files()))

    def save(self, round: int) -> None:
        """Make the states of now those of the checkpoint after `round`, which is written next."""
        self._settle()
        self.io.submit(self.shards.save, round).result()

    def tidy(self, round: int) -> None:
        """Free the records that no checkpoint needs any more."""
        self.io.submit(self.shards.release, round).result()

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield nothing: the states are in their files."""
        return iter(())

    def shut(self) -> None:
        """Finish what is under way, and close the files."""
        self.io.shutdown()
        self.flusher.shutdown()
        self.shards.close()
        self.reading, self.writing = [], []

    def _settle(self) -> None:
        """Wait for all that was asked for; raise what went wrong."""
        for block in (*self.writing, *self.reading):
            if block.done is not None:
                block.done.result()
        for one in self.flushed:
            one.result()
        self.flushed = []

    def _block(self, some: list[Block], rows: int) -> Block:
        """Return a block for so many clients, the last of `some` from now on: the one that was
        used first, once there are enough.
        """
        block = some.pop(0) if len(some) >= WAITING else None
        if block is not None and len(block.words) < rows:
            block.begin([])
            block = None
        block = block or Block(rows, self.shards.width, self.device)
        some.append(block)
        return block


def flush(files: list[int]) -> None:
    """Flush files to disk."""
    for file in files:
        os.fdatasync(file)
