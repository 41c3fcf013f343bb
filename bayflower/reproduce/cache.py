"""Finished runs on disk, named by the hash of their configuration and checked when read.

A new run is one JSON file in the working folder, there as a whole or not at all. `bayflower
reproduce --collect` moves it to a file beside that folder which has one run a line, one file a
paper. Both are read; where both have a run, the working folder's counts.

The hash covers the method and every setting that differs from its default and decides the numbers;
for a default that has changed, the earlier one in `pinned.toml` counts. A file also holds the whole
configuration: if a default that is not pinned has changed since, the run is not used.
The number of the data set's samples here is part of the name, so that runs on a part of a data set
are never taken for runs on the whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..config import groups, parse
from ..data.settings import CALIBRATION_SETTINGS
from ..files.texts import write_json
from ..methods import get
from .data import images_to_keep, pooled, with_folder
from .tables import Spec, pinned

FORMAT = 1
# the files of collected runs, beside the working folder; `ours`: runs that no paper's table needs
COLLECTIONS = ("fedbps", "fedmap", "fednp", "metavd", "pfedvmp", "ours")
# how a run is done, not what comes out
HOW = frozenset(
    {
        "device",
        "data_dir",
        "download",
        "max_fused",
        "workers",
        "worker_block",
        "stacking",
        "cuda_graphs",
        "client_states",
    }
)
# what else no key depends on: `keep` is stated as a number of images, and published protocols hold
# nothing out
SILENT = HOW | {"evaluate_every", "checkpoint_every", "method", "keep", *CALIBRATION_SETTINGS}
Say = Callable[[str], None]


@cache
def defaults(method: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (the default of every setting of a method, or what is pinned for it; the names that
    are bounds on replies).
    """
    found = {
        item.name: item.default
        for kind in groups(method).values()
        for item in dataclasses.fields(kind)
    }
    settled = parse(method).flat()  # left open by their defaults: the data decide
    found |= {name: settled[name] for name in ("num_clients", "partition")}
    silent = (groups(method)[group] for group in ("limits", "privacy"))
    return {**found, **get(method).defaults, **pinned(method)}, frozenset(
        item.name for kind in silent for item in dataclasses.fields(kind)
    )


@cache
def resolved(spec: Spec, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (all settings that decide the numbers, those of them
    that differ from their defaults).
    """
    values = {**spec.values(), "seed": seed}
    if spec.runner != "engine":
        return values, values
    images = values.pop("images", None)
    flat = parse(spec.method, with_folder(values, "")).flat()
    usual, bounds = defaults(spec.method)
    whole = {key: value for key, value in flat.items() if key not in SILENT | bounds}
    whole |= {"images": images, "keep": None if images else flat["keep"]}
    return whole, {
        key: value for key, value in whole.items() if value is not None and value != usual.get(key)
    }


def digest(content: Any) -> str:
    """Return the SHA-256 of JSON content."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


def key_of(spec: Spec, seed: int) -> str:
    """Return the name of a run: a hash of what decides its numbers."""
    return digest(
        {"runner": spec.runner, "method": spec.method, "settings": resolved(spec, seed)[1]}
    )[:20]


def whole(record: Any) -> bool:
    """Return whether a record is what was written."""
    try:
        return (
            record["format"] == FORMAT
            and digest(record["result"]) == record["checksum"]
            and digest(record["config"]) == record["config_checksum"]
        )
    except (KeyError, TypeError):
        return False


class Cache:
    """Finished runs: a working folder of single files, and the collected runs beside it."""

    def __init__(self, folder: Path, say: Say = lambda line: None) -> None:
        self.folder, self.say = folder, say
        self.read: dict[Path, dict[str, Any] | None] = {}
        self.keys: dict[tuple[Spec, int], str] = {}
        self.broken: list[str] = []  # where the collections have lines that are not whole
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._lines: dict[str, dict[str, Any]] = {}
        self._by_key: dict[str, list[str]] = {}

    def key(self, spec: Spec, seed: int) -> str:
        """Return the hash in the run's name, computed once."""
        if (spec, seed) not in self.keys:
            self.keys[spec, seed] = key_of(spec, seed)
        return self.keys[spec, seed]

    def get(
        self, spec: Spec, seed: int, data_dir: str = "", curve: bool = False
    ) -> dict[str, Any] | None:
        """Return a finished run on the data that are here (on any, if none are); with `curve` one
        that has points over rounds.
        """
        here = pooled(spec.values().get("dataset", ""), data_dir) if spec.runner == "engine" else 0
        key = self.key(spec, seed)
        single = {path.stem for path in self.folder.glob(f"{key}-*.json")}
        self.collected()
        for name in sorted(single | {*self._by_key.get(key, ())}, reverse=True):
            record = self.named(name)
            if (
                record is None
                or (here is not None and record["pooled"] != here)
                or (curve and len(record["result"]["curve"]) < 2)
            ):
                continue
            now = resolved(spec, seed)[0]
            changed = [
                setting
                for setting, value in record["config"].items()
                if setting in now and now[setting] != value
            ]
            if not changed:
                return record["result"]
            self.say(
                f"run {name} is not used: {changed[0]} was {record['config'][changed[0]]!r}, now "
                f"it is {now[changed[0]]!r}"
            )
        return None

    def named(self, name: str) -> dict[str, Any] | None:
        """Return the record of a run: the working folder's, else the collected one."""
        path = self.folder / f"{name}.json"
        single = self.load(path) if path in self.read or path.exists() else None
        return single or self.collected().get(name)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Return a single file's record; a broken one is renamed, with a line that says so."""
        if path not in self.read:
            try:
                record = json.loads(path.read_text())
            except FileNotFoundError:  # collected by another process a moment ago
                return None
            except (OSError, ValueError):
                record = None
            if not whole(record):
                aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
                path.rename(aside)
                self.say(f"{path} is broken; renamed to {aside.name}, its run is repeated")
                record = None
            self.read[path] = record
        return self.read[path]

    def collections(self) -> dict[str, Path]:
        """Return the files of collected runs by name, whether they are there or not."""
        return {name: self.folder.parent / f"{name}.jsonl" for name in COLLECTIONS}

    def collected(self) -> dict[str, dict[str, Any]]:
        """Return the collected records by the runs' names; files that have changed are read again.

        A line that is broken is left out, with a line that says where it is.
        """
        stamps = {}
        for path in self.collections().values():
            with suppress(OSError):
                about = path.stat()
                stamps[path] = (about.st_mtime_ns, about.st_size)
        if stamps != self._stamps:
            self._stamps, self._lines, self.broken = stamps, {}, []
            for path in stamps:
                self._read_lines(path)
            self._by_key = {}
            for name in self._lines:
                self._by_key.setdefault(name.rpartition("-")[0], []).append(name)
        return self._lines

    def _read_lines(self, path: Path) -> None:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                name = record.pop("name")
            except (ValueError, KeyError, TypeError, AttributeError):
                record = None
            if whole(record):
                self._lines[name] = record
            else:
                self.broken.append(f"{path}, line {number}")
                self.say(f"{path}, line {number} is broken and ignored; its run is repeated")

    def put(self, spec: Spec, seed: int, result: dict[str, Any], samples: int) -> Path:
        """Write a finished run to the working folder, as a whole or not at all."""
        path = self.folder / f"{self.key(spec, seed)}-{samples}.json"
        config = json.loads(json.dumps(resolved(spec, seed)[0]))
        result = json.loads(json.dumps(result, allow_nan=False))
        record = {
            "format": FORMAT,
            "runner": spec.runner,
            "method": spec.method,
            "seed": seed,
            "pooled": samples,
            "config": config,
            "config_checksum": digest(config),
            "checksum": digest(result),
            "result": result,
        }
        write_json(path, record)
        self.read[path] = record
        return path

    def names(self) -> list[str]:
        """Return the names of all runs, sorted; some may turn out to be broken."""
        single = {path.stem for path in self.folder.glob("*.json")}
        return sorted(single | self.collected().keys())

    def everything(self) -> list[dict[str, Any]]:
        """Return the records of all runs that are whole."""
        records = [self.named(name) for name in self.names()]
        return [record for record in records if record]


def engine_values(spec: Spec, seed: int, data_dir: str, device: str) -> dict[str, Any]:
    """Return what `config.parse` needs for a run: images turned into a share of the data that are
    here.
    """
    values = with_folder(
        {**spec.values(), "seed": seed, "data_dir": data_dir, "device": device}, data_dir
    )
    images = values.pop("images", None)
    if images:
        values["keep"] = images_to_keep(images, spec.values()["dataset"], data_dir)
    return {
        "evaluate_every": max(1, int(values.get("rounds", 50)) // 20),
        "checkpoint_every": 0,
        "calibration": "off",
        "robust": "off",  # published protocols trust their clients
        **values,
    }


def commit() -> str:
    """Return the commit of the checkout that this package is in, "" if it is in none;
    BAYFLOWER_COMMIT names that of a copy without git.
    """
    if stated := os.environ.get("BAYFLOWER_COMMIT"):
        return stated
    call = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
    ]
    try:
        return subprocess.run(call, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
