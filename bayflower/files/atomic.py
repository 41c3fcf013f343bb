"""JSON and tensor files that are there as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from ..errors import BayflowerError
from ..tree import Tensors, digest


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty if there is none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def below(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`/, without it."""
    return {
        name[len(prefix) + 1 :]: tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix + "/")
    }


def save_tensors(path: Path, tensors: Tensors, head: dict[str, str], sealed: bool = False) -> None:
    """Write a safetensors file so that a reader sees all of it or nothing, whatever dies meanwhile;
    `sealed`: with a checksum.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if sealed:
        head = {**head, "checksum": seal(tensors, head)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # clones, because a state and an update may share memory and a file may not
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            part,
            metadata=head,
        )
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, (SafetensorError, OSError)):
            what = " ".join(str(error).split())
            raise BayflowerError(
                f"{path} cannot be written ({what}); free some space or make the folder writable"
            ) from None
        raise


def sync_folder(folder: Path) -> None:
    """Let a renaming reach the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def seal(tensors: Tensors, head: Mapping[str, str]) -> str:
    """Return a checksum over all numbers and all of the head but the checksum itself."""
    facts = json.dumps(
        {name: value for name, value in head.items() if name != "checksum"}, sort_keys=True
    )
    return hashlib.sha256(f"{digest(tensors)}|{facts}".encode()).hexdigest()


def load_tensors(path: Path, kind: str, what: str) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the head of a file of the format `kind`; `what` is what a person calls
    it.

    The file is opened once. safetensors' own way opens it twice, for its head and for its numbers,
    and a run that goes on may put another file in its place in between.
    """
    try:
        content = path.read_bytes()
        # clones, because a file's tensors lie anywhere, and alignment decides how torch splits
        # sums, hence bits
        tensors = {name: value.clone() for name, value in sorted(load(content).items())}
        size = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BayflowerError(
            f"{what} {path} cannot be read ({error}); restore it from a back-up, or remove it to "
            "start anew"
        ) from None
    if "checksum" in head and head["checksum"] != seal(tensors, head):
        raise BayflowerError(
            f"{what} {path} is damaged (its checksum is wrong); restore it from a back-up, or "
            "remove it to start anew"
        )
    if head.get("format") != kind:
        raise BayflowerError(
            f"{what} {path} has format {head.get('format')!r}, expected {kind!r}; it is not ours "
            "or of another version"
        )
    return tensors, head
