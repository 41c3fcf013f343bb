"""Several messages in one: what many of them share travels once, and an error is one too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Error, RecordDict

from ...errors import WireError
from ...wire.hello import is_whole

LONGEST = 2000  # characters of an error's text
Part = RecordDict | Error


def bundled(parts: Sequence[Part]) -> tuple[RecordDict, list[Any]]:
    """Return the records of some messages, and by message the names of its records there (or the
    code and text of an error).
    """
    content, index = RecordDict(), list[Any]()
    known: dict[str, str] = {}  # by digest of a record of arrays: its name
    digests: dict[int, str] = {}  # by identity: broadcasts to all are one object
    for place, part in enumerate(parts):
        if isinstance(part, Error):
            index.append([int(part.code), str(part.reason or "")[:LONGEST]])
            continue
        names = {}
        for name, record in part.items():
            own = f"{place}/{name}"
            if isinstance(record, ArrayRecord):
                if id(record) not in digests:
                    digests[id(record)] = digest(record)
                own = known.setdefault(digests[id(record)], own)
            if own not in content:
                content[own] = record
            names[name] = own
        index.append(names)
    return content, index


def opened(content: RecordDict, index: Any, number: int) -> list[Part]:
    """Return the messages of a bundle; raise unless there are `number` of them."""
    if not isinstance(index, list) or len(index) != number:
        raise WireError(f"the bundle must have {number} messages")
    return [one(content, names) for names in index]


def one(content: RecordDict, names: Any) -> Part:
    """Return one message of a bundle. Arrays may be in several, so each has a record of its own."""
    if isinstance(names, list):
        if len(names) != 2 or not is_whole(names[0], 0, 10_000):
            raise WireError("an error in the bundle has no code and text")
        return Error(names[0], str(names[1])[:LONGEST])
    if not isinstance(names, Mapping):
        raise WireError("the names of a message in the bundle are missing")
    found = RecordDict()
    for name, own in names.items():
        record = content.get(own) if isinstance(own, str) else None
        if record is None:
            raise WireError(f"the bundle lacks the record {str(own)[:80]!r}")
        found[str(name)] = type(record)(dict(record))  # type: ignore[arg-type]
    return found


def digest(record: ArrayRecord) -> str:
    """Return a SHA-256 over names, types, shapes and bytes of a record's arrays, in their order."""
    seal = hashlib.sha256()
    for name, array in record.items():
        seal.update(f"{name}|{array.dtype}|{list(array.shape)}|{len(array.data)}|".encode())
        seal.update(array.data)
    return seal.hexdigest()
