"""Which samples a site has used, so that the difference of two answers tells of no single one.

If one sample is added to or withdrawn from the data of a client, the answers before and after may
differ by that sample alone: for a mean feature of a class, n·mean − (n − 1)·mean' is the sample's
feature. A server can also bring this about by its own settings (`train_rows`, `keep`, `seed`). A
site therefore remembers the samples behind its earlier answers, as keyed hashes. New data must, in
every group (all samples; the training and the test samples of each class), either be the same as
any that were used before, or differ from them in at least `min_change` samples.

This bounds the difference of two answers. It does not bound what several answers together tell,
nor what one answer tells.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..files.atomic import load_tensors, save_tensors
from ..files.audit import locked

KIND = "bayflower-rows-1"
KEPT = 64  # data sets that a site remembers
ALL = "all samples"
Groups = dict[str, np.ndarray]  # sorted hashes by group


class Part(NamedTuple):
    """Samples of a client: inputs and targets, as they were read."""

    x: np.ndarray
    y: np.ndarray


class Change(NamedTuple):
    """A small change between two data sets that a site has used."""

    group: str
    samples: int  # that were added or withdrawn
    since: str  # digest of the earlier data set

    def __str__(self) -> str:
        number = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        return f"{number} changed in {self.group} since data {self.since[:12]} were used"


def hashes(part: Part, key: bytes) -> np.ndarray:
    """Return a keyed hash of 64 bits for each sample."""
    x = np.ascontiguousarray(part.x).reshape(len(part.x), -1)
    y = np.ascontiguousarray(part.y).reshape(len(part.y), -1)
    found = np.empty(len(x), np.int64)
    for i, (inputs, target) in enumerate(zip(x, y, strict=True)):
        seal = hashlib.blake2b(inputs.tobytes(), key=key, digest_size=8)
        seal.update(target.tobytes())
        found[i] = int.from_bytes(seal.digest(), "little", signed=True)
    return found


def groups(parts: Mapping[str, Part], key: bytes) -> Groups:
    """Return the sorted hashes of all samples, and of each part: by class where targets are whole
    numbers.
    """
    found: dict[str, list[np.ndarray]] = {ALL: []}
    for name, part in parts.items():
        known = hashes(part, key)
        found[ALL].append(known)
        classes = part.y.ndim == 1 and part.y.dtype.kind in "iu"
        for label in np.unique(part.y) if classes else [None]:
            group = name if label is None else f"{name}, class {label}"
            own = known if label is None else known[part.y == label]
            found.setdefault(group, []).append(own)
    return {group: np.sort(np.concatenate(some)) for group, some in found.items() if some}


def difference(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many samples are in one of two lists and not in the other, repeated ones counted
    each time.
    """
    values, places = np.unique(np.concatenate([one, other]), return_inverse=True)
    counts = np.bincount(places[: len(one)], minlength=len(values))
    return int(np.abs(counts - np.bincount(places[len(one) :], minlength=len(values))).sum())


def small_changes(now: Groups, before: Groups, since: str, least: int) -> list[Change]:
    """Return the groups in which more than 0 and fewer than `least` samples changed."""
    nothing = np.empty(0, np.int64)
    found = []
    for group in sorted({*now, *before}):
        number = difference(now.get(group, nothing), before.get(group, nothing))
        if 0 < number < least:
            found.append(Change(group, number, since))
    return found


def version(known: Groups) -> str:
    """Return a digest of a data set."""
    seal = hashlib.sha256()
    for group, some in sorted(known.items()):
        seal.update(f"{group}|{len(some)}|".encode() + some.tobytes())
    return seal.hexdigest()


class Memory:
    """The data sets that a site has used, in a folder of the site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self) -> bytes:
        """Return the secret of this site, made on first use: without it nobody can look up whether
        a sample is among the hashes.
        """
        path = self.folder / "key"
        with locked(path):
            if not path.exists():
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(32))
            return path.read_bytes()

    def used(self, parts: Mapping[str, Part], least: int, refuse: bool) -> list[Change]:
        """Return the small changes from every data set that was used before, each once; the new
        one is remembered, unless it has such changes and they are to be refused.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        now = groups(parts, self.key())
        path = self.folder / f"{version(now)[:32]}.safetensors"
        with locked(self.folder / "rows"):
            if path.exists():
                os.utime(path)
                return []
            found = []
            files = sorted(self.folder.glob("*.safetensors"), key=lambda one: one.stat().st_mtime)
            for file in files:
                tensors, _ = load_tensors(file, KIND, "the samples that were used")
                before = {name: tensor.numpy() for name, tensor in tensors.items()}
                found += small_changes(now, before, file.stem, least)
            if not (refuse and found):
                tensors = {name: torch.from_numpy(some) for name, some in now.items()}
                save_tensors(path, tensors, {"format": KIND})
                for file in files[: len(files) + 1 - KEPT] if len(files) >= KEPT else []:
                    file.unlink()
        return found
