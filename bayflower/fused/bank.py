"""The store of the fused engine's client states between rounds: stacked on the device, or on disk
with only a round's clients in memory.

On disk every round adds a file, `<folder>/round-<r>-<part>.safetensors`, with the states of the
clients that trained in it. A client's state is in the newest file that contains it. So a checkpoint
copies no states, and a run resumed from round r ignores later files. At checkpoints, files without
any current state are deleted and many old files are merged into one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ConfigError
from ..files import vault
from ..files.atomic import load_tensors, save_tensors
from ..tree import Rows, flatten, map_tree, stack, take, to, unflatten
from .fixed import leaves

FORMAT = "bayflower-states-1"
MOST_FILES = 256


class Bank(Protocol):
    """The states of all clients."""

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients, on the device."""

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the stacked states of some clients after `round`."""

    def tidy(self) -> None:
        """Delete what is no longer needed after a checkpoint was written."""

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state) of every client whose state is in memory."""


class DeviceBank:
    """All states stacked on the device."""

    def __init__(self, fresh: Any, clients: Sequence[int], device: torch.device) -> None:
        self.rows = Rows(clients, device)
        self.device = device
        self.tree = map_tree(
            lambda leaf: leaf.to(device).expand(len(clients), *leaf.shape).clone(), fresh
        )

    def load(self, known: Mapping[int, Any]) -> None:
        """Load states from a checkpoint."""
        self.put(
            sorted(known), to(stack([known[client] for client in sorted(known)]), self.device), 0
        )

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients."""
        return take(self.tree, self.rows.index(chosen))

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the stacked states of some clients."""
        index = self.rows.index(chosen)
        for mine, new in zip(leaves(self.tree), leaves(states), strict=True):
            mine.index_copy_(0, index, new.detach().to(mine.dtype))

    def tidy(self) -> None:
        """Do nothing: a checkpoint contains all states."""

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state), copied to the CPU."""
        there = to(self.tree, "cpu")
        for client, row in self.rows.of.items():
            yield client, map_tree(lambda leaf, row=row: leaf[row].clone(), there)


class DiskBank:
    """States in files; a client that has not trained yet has the initial state."""

    def __init__(self, folder: Path, fresh: Any, device: torch.device, until: int | None) -> None:
        """Start with the files up to round `until`; with no files if it is None."""
        if vault.key() is not None:
            raise ConfigError(
                f"client_states=disk cannot be encrypted, and {vault.VARIABLE} is set; use "
                "client_states=device"
            )
        self.folder, self.fresh, self.device = folder, to(fresh, "cpu"), device
        self.home: dict[int, tuple[Path, int]] = {}  # client → file and place in it
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("round-*.safetensors")):
            if until is None or number(path) > until:
                path.unlink()
                continue
            with safe_open(path, framework="pt") as file:
                for place, client in enumerate(json.loads(file.metadata()["clients"])):
                    self.home[client] = (path, place)

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients, each file opened once."""
        found: dict[int, Any] = {}
        by_file: dict[Path, list[int]] = {}
        for client in chosen:
            if client in self.home:
                by_file.setdefault(self.home[client][0], []).append(client)
            else:
                found[client] = self.fresh
        for path, clients in by_file.items():
            with safe_open(path, framework="pt") as file:
                # not a dict
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for client in clients:
                    place = self.home[client][1]
                    found[client] = unflatten(
                        type(self.fresh),
                        {name: part[place : place + 1][0] for name, part in slices.items()},
                    )
        return to(stack([found[client] for client in chosen]), self.device)

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Write the states of some clients after `round`."""
        part = len(list(self.folder.glob(f"round-{round:08d}-*.safetensors")))
        path = self.folder / f"round-{round:08d}-{part:04d}.safetensors"
        self._write(path, list(chosen), flatten(to(states, "cpu")))

    def _write(self, path: Path, clients: list[int], flat: Mapping[str, Tensor]) -> None:
        save_tensors(path, dict(flat), {"format": FORMAT, "clients": json.dumps(clients)})
        self.home.update({client: (path, place) for place, client in enumerate(clients)})

    def tidy(self) -> None:
        """Delete files without any current state; merge many old files into one."""
        used = {path for path, _ in self.home.values()}
        files = sorted(self.folder.glob("round-*.safetensors"))
        for path in files:
            if path not in used:
                path.unlink()
        files = [path for path in files if path in used]
        if len(files) <= MOST_FILES:
            return
        old = files[: len(files) // 2]
        parts: list[dict[str, Tensor]] = []
        clients: list[int] = []
        for path in old:
            own = sorted(
                (place, client) for client, (home, place) in self.home.items() if home == path
            )
            tensors, _ = load_tensors(path, FORMAT, "client states")
            places = torch.tensor([place for place, _ in own])
            parts.append({name: tensor[places] for name, tensor in tensors.items()})
            clients += [client for _, client in own]
        self._write(
            old[-1], clients, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        )
        for path in old[:-1]:
            path.unlink()

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield nothing: the states are in their files."""
        return iter(())


def number(path: Path) -> int:
    """Return the round in a file's name."""
    return int(path.stem.split("-")[1])
