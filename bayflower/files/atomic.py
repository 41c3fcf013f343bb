"""Atomic writing of tensor files: a reader sees a complete file or none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from ..errors import BayflowerError, FormatError, in_one_line
from ..tree import Tensors, digest
from . import vault


def below(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`/, without it."""
    return {
        name[len(prefix) + 1 :]: tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix + "/")
    }


def save_tensors(path: Path, tensors: Tensors, head: dict[str, str], sealed: bool = False) -> None:
    """Write a safetensors file atomically, even if the process dies meanwhile; with `sealed`, add a
    checksum.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if sealed:
        head = {**head, "checksum": seal(tensors, head)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # cloned: a state and an update may share memory, which the file format does not allow
        plain = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        if (secret := vault.key()) is None:
            save_file(plain, part, metadata=head)
        else:  # what is not encrypted never reaches the disk
            part.write_bytes(vault.seal(save(plain, metadata=head), secret))
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, (SafetensorError, OSError)):
            what = in_one_line(error)
            raise BayflowerError(
                f"{path} cannot be written ({what}); free some disk space or make the folder "
                "writable"
            ) from None
        raise


def sync_folder(folder: Path) -> None:
    """Flush a renaming in `folder` to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def seal(tensors: Tensors, head: Mapping[str, str]) -> str:
    """Return a checksum over all tensors and the head without the checksum itself."""
    facts = json.dumps(
        {name: value for name, value in head.items() if name != "checksum"}, sort_keys=True
    )
    return hashlib.sha256(f"{digest(tensors)}|{facts}".encode()).hexdigest()


def head_of(content: bytes) -> dict[str, str]:
    """Return the head of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]).get("__metadata__") or {}


def damaged(tensors: Tensors, head: Mapping[str, str]) -> bool:
    """Return whether the tensors of a file are not those that were written, if it has a seal."""
    return "checksum" in head and head["checksum"] != seal(tensors, head)


def load_tensors(path: Path, kind: str, what: str, *older: str) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the head of a file of the format `kind`, or of an `older` one that can
    still be read; `what` names the file in error texts.

    The file is opened once. safetensors itself opens it twice, for the head and for the tensors,
    and a running process could replace it in between.
    """
    try:
        content = vault.opened(path.read_bytes(), f"{what} {path}")
        # cloned for torch's alignment, which affects how sums are split and thus their bits
        tensors = {name: value.clone() for name, value in sorted(load(content).items())}
        head = head_of(content)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BayflowerError(
            f"{what} {path} cannot be read ({error}); restore it from a back-up, or remove it to "
            "start anew"
        ) from None
    if damaged(tensors, head):
        raise BayflowerError(
            f"{what} {path} is damaged (its checksum is wrong); restore it from a back-up, or "
            "remove it to start anew"
        )
    if head.get("format") not in (kind, *older):
        raise FormatError(
            f"{what} {path} has format {head.get('format')!r}, expected {kind!r}; another program "
            "or another version of Bayflower wrote it: install that version, or move the file away"
        )
    return tensors, head
