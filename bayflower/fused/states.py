"""Where the clients' states of a run are kept between rounds: on the device, or on disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import Run
from ..errors import ConfigError
from ..files import vault
from ..files.checkpoint import Checkpoint
from ..files.shards import WORD, check_space
from ..rounds.sampling import number_of
from ..tree import flatten
from .bank import Bank
from .choice import free_memory
from .disk import DiskBank
from .earlier import is_earlier, renewed

log = logging.getLogger("bayflower")
SHARE = 0.25  # of free memory that the states of all clients may take


def bank_of(
    run: Run,
    fresh: Any,
    device: torch.device,
    clients: Sequence[int],
    out: Path | None,
    name: str,
    resume: Checkpoint | None,
) -> Bank | None:
    """Return the store on disk if the states are to be there; None = on the device. A resumed run
    with client_states=auto goes on where its states are.
    """
    where, home = run.settings.client_states, (out or Path("runs")) / "states"
    size = sum(leaf.numel() * leaf.element_size() for leaf in flatten(fresh).values())
    there = resume is not None and resume.config.get("client_states") == "disk"
    if where == "device" and there:
        raise ConfigError(
            f"the clients' states of this run are on disk, in {home}; resume with "
            "client_states=auto or disk"
        )
    begin = where == "auto" and resume is None and too_many(size, clients, device, out)
    if not (there or begin or where == "disk"):
        return None
    done = resume.round if resume is not None else 0
    rounds, share = run.settings.rounds - done, run.settings.fraction_train
    often = run.settings.checkpoint_every or rounds
    records = needed(len(clients), number_of(len(clients), share), rounds, often, there)
    check_space(home, (size + 4 * WORD) * records)
    number = max(clients) + 1
    if there and is_earlier(home, done):
        log.info("the clients' states of an earlier version in %s are made records", home)
        renewed(home, fresh, done, number, name)
    return DiskBank(home, fresh, device, done if there else None, number, name)


def too_many(size: int, clients: Sequence[int], device: torch.device, out: Path | None) -> bool:
    """Return whether the states of all clients take too much of the free memory."""
    if out is None or vault.key() is not None or size * len(clients) <= SHARE * free_memory(device):
        return False
    log.info(
        "the clients' states, %.1f GB, are kept on disk in %s",
        size * len(clients) / 1e9,
        out / "states",
    )
    return True


def needed(clients: int, each_round: int, rounds: int, often: int, resumed: bool) -> float:
    """Return how many more records a run will need on disk: one for each client that will have
    trained, and one for each that changes between two checkpoints.
    """
    absent = 1 - each_round / clients
    changed = clients * (1 - absent ** min(often, rounds))
    return changed if resumed else clients * (1 - absent**rounds) + changed
