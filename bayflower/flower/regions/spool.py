"""Requests to a region and its answers as files: two programs of a region share a folder.

SPOOL/RUN/config.json                 the run-config of the server's run, for the region's own run
SPOOL/RUN/requests/NUMBER.safetensors a request, removed when it is answered
SPOOL/RUN/answers/NUMBER.safetensors  its answer; or NUMBER.json, why there is none

NUMBER is the digest of the request, with its run, round and nonce. So an answer can belong to no
other request, and a request that comes again gets the answer that is there. Files are whole or
absent at every moment, and have checksums.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ...errors import BayflowerError
from ...files.atomic import load_tensors, save_tensors
from ...files.texts import read_json, write_json
from ...tree import Tensors
from .. import records
from ..guard import digest

FORMAT = "bayflower-spool-1"
CONFIG = "config.json"
KEPT = 4  # answers; older ones are removed
KINDS = {"config": ConfigRecord, "metric": MetricRecord}
NUMBER = re.compile(r"[0-9a-f]{64}")


class Spool:
    """The requests and answers of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self) -> dict[str, Any]:
        """Return the run-config of the server's run; {} before its first request."""
        return read_json(self.folder / CONFIG)

    def request(self, content: RecordDict, config: Mapping[str, Any]) -> str:
        """Write a request if it is not there; return its number."""
        number = digest(content)
        if not self.answered(number):
            if not (self.folder / CONFIG).exists():
                write_json(self.folder / CONFIG, {k: v for k, v in config.items() if v != ""})
            if not (path := self._at("requests", number)).exists():
                save(path, content)
        return number

    def waiting(self) -> list[str]:
        """Return the requests that have no answer, the oldest first."""
        found = []
        for path in (self.folder / "requests").glob("*.safetensors"):
            with suppress(FileNotFoundError):
                if NUMBER.fullmatch(path.stem):
                    found.append((path.stat().st_mtime, path.stem))
        return [number for _, number in sorted(found)]

    def read(self, number: str) -> RecordDict:
        """Return a request; raise if its content is not what its number says."""
        content = load(self._at("requests", number))
        if digest(content) != number:
            raise BayflowerError(f"the request {number[:12]} is not what its name says")
        return content

    def answer(self, number: str, content: RecordDict | None, why: str = "") -> None:
        """Write the answer to a request, or why there is none, and remove the request."""
        if content is not None and not self._at("answers", number).exists():
            save(self._at("answers", number), content)
        elif content is None:
            write_json(self._at("answers", number, "json"), {"why": why})
        self.drop(number)
        known = (self.folder / "answers").glob("*.safetensors")
        for path in sorted(known, key=lambda one: one.stat().st_mtime)[:-KEPT]:
            path.unlink(missing_ok=True)

    def drop(self, number: str) -> None:
        """Remove a request."""
        self._at("requests", number).unlink(missing_ok=True)

    def answered(self, number: str) -> bool:
        """Return whether an answer is there."""
        return self._at("answers", number).exists()

    def take(self, number: str, until: float) -> RecordDict:
        """Wait for an answer until this moment of the system's clock, and return it; raise if there
        is none.
        """
        failed = self._at("answers", number, "json")
        while True:
            if self.answered(number):
                return load(self._at("answers", number))
            if failed.exists():
                why = str(read_json(failed).get("why") or "its region failed")
                failed.unlink(missing_ok=True)  # the next request of this kind is tried again
                raise BayflowerError(why)
            if time.time() >= until:
                raise BayflowerError("the region's own server did not answer in time; see its log")
            time.sleep(0.1)

    def _at(self, kind: str, number: str, suffix: str = "safetensors") -> Path:
        return self.folder / kind / f"{number}.{suffix}"


def save(path: Path, content: RecordDict) -> None:
    """Write the records of a message."""
    flat: Tensors = {}
    index: list[Any] = []
    for place, (name, record) in enumerate(content.items()):
        if isinstance(record, ArrayRecord):
            for number, array in enumerate(records.to_tensors(record).values()):
                flat[f"{place}/{number}"] = array
            index.append([name, "arrays", list(record)])
        else:
            kind = "config" if isinstance(record, ConfigRecord) else "metric"
            index.append([name, kind, dict(record)])
    flat = flat or {"none": torch.zeros(1)}  # the format has no empty file
    save_tensors(path, flat, {"format": FORMAT, "index": json.dumps(index)}, sealed=True)


def load(path: Path) -> RecordDict:
    """Return the records of a message."""
    flat, head = load_tensors(path, FORMAT, "the file of a region")
    content = RecordDict()
    for place, (name, kind, known) in enumerate(json.loads(head["index"])):
        if kind == "arrays":
            record = ArrayRecord()
            for number, key in enumerate(known):
                record[key] = records.to_array(flat[f"{place}/{number}"])
            content[name] = record
        else:
            content[name] = KINDS[kind](known)
    return content
