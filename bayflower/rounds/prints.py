"""Fingerprints of the clients' data in a checkpoint of an engine that has them in its own process.

They tell a resumed run whether its data are those it began with. They are salted: a reader of the
file can test a guess of the data, as somebody who has the salt, but cannot compare two runs.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data import Federation
from ..data.crowd import Crowd
from ..errors import ConfigError
from ..files.checkpoint import Checkpoint
from ..tree import flatten
from ..wire.continuity import mark
from .halves import Halves

log = logging.getLogger("bayflower")


def of(federation: Federation, salt: str = "") -> dict[str, Any]:
    """Return a fingerprint of each training client's data, and the salt."""
    salt = salt or secrets.token_hex(16)
    found: dict[str, str] = {}
    if isinstance(federation.clients, Crowd):  # generated from the settings, so they cannot change
        return {"salt": salt, "clients": found}
    for data in federation.clients:
        seal = hashlib.sha256()
        for name, part in zip(data._fields[1:], data[1:], strict=True):
            if part is not None:
                seal.update(f"{name}|{part.dtype}|{part.shape}|".encode())
                seal.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        content = seal.hexdigest()
        found[str(data.client)] = mark(bytes.fromhex(salt), "data", "", data.client, content)
    return {"salt": salt, "clients": found}


def differing(federation: Federation, known: Mapping[str, Any]) -> list[int]:
    """Return the training clients whose data are not those of a checkpoint."""
    if not known:  # written by an earlier version, or by clients in other processes
        return []
    now, before = of(federation, known["salt"])["clients"], known["clients"]
    return sorted(int(one) for one in {*now, *before} if now.get(one) != before.get(one))


def changed(federation: Federation, known: Mapping[str, Any]) -> list[str]:
    """Return one line for each client whose data are not those of a checkpoint."""
    found = []
    for client in differing(federation, known):
        text = (
            f"client {client}: its data have changed since the checkpoint, so results before "
            "and after are not those of one data set; restore the data, or start a new run"
        )
        log.warning("%s", text)
        found.append(text)
    return found


def check_states(resume: Checkpoint, halves: Halves, here: bool) -> None:
    """Raise if the clients' states are not where the engine looks: in the checkpoint (`here`), or
    in the clients' own files.
    """
    if bool(resume.clients) == here or not flatten(halves.client.init(*halves.initial)):
        return
    if resume.config.get("client_states") == "disk":
        return
    where, who = (
        ("in the clients' own files", "ray or deployment")
        if here
        else ("in the checkpoint", "fused or loop")
    )
    raise ConfigError(
        f"the clients' states of this run are {where}, and this engine would start them from "
        f"nothing; resume with --engine {who}, which began it"
    )
