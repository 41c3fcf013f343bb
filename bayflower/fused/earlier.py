"""States on disk as an earlier version kept them: files `round-ROUND-PART.safetensors` of stacked
states, of which the newest of each client counts. They are made records once.

The records are written in a folder of their own and moved at the end, the index last. A process
that dies in between leaves the old files, and the next one begins again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ..files.atomic import load_tensors, sync_folder
from ..files.shards import OLD, index_name
from ..tree import unflatten
from .disk import DiskBank

FORMAT = "bayflower-states-1"


def is_earlier(home: Path, until: int) -> bool:
    """Return whether the states after round `until` are kept as an earlier version did."""
    return not (home / index_name(until)).exists() and any(home.glob(OLD))


def renewed(home: Path, fresh: Any, until: int, clients: int, run: str) -> None:
    """Make records of the states up to round `until`, in place of the old files."""
    made = home.with_name(home.name + "-renewed")
    bank = DiskBank(made, fresh, torch.device("cpu"), None, clients, run)
    try:
        for path in sorted(home.glob(OLD)):
            if round_of(path) <= until:
                tensors, head = load_tensors(path, FORMAT, "client states")
                states = unflatten(type(fresh), tensors)
                bank.put(json.loads(head["clients"]), states, until)
        bank.save(until)
    finally:
        bank.shut()
    for path in sorted(made.iterdir(), key=lambda one: one.name == index_name(until)):
        path.replace(home / path.name)
        sync_folder(home)
    for path in home.glob(OLD):
        path.unlink()
    shutil.rmtree(made)


def round_of(path: Path) -> int:
    """Return the round in a file's name."""
    return int(path.stem.split("-")[1])
