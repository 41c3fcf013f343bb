"""Finished runs of the working folder, moved to the files of collected runs: one run a line, one
file a paper, sorted by the runs' names.

A run belongs to the paper whose tables need it, else to the paper of its method, else to `ours`.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.texts import write_json, write_text
from .cache import COLLECTIONS, Cache, Say, whole
from .sweep import Plan, jobs
from .tables import FORMS, load_tables

NAME = re.compile(r"[0-9a-f]{20}-[0-9]+")  # of a run


def collect(cache: Cache, say: Say) -> int:
    """Move the whole runs of the working folder to the files of collected runs; return how many.

    A single file is deleted only when its run has been read back from the file it went to.
    """
    with locked(cache.folder):
        single = {path.stem: cache.load(path) for path in sorted(cache.folder.glob("*.json"))}
        moved = {name: record for name, record in single.items() if record is not None}
        runs = {**cache.collected(), **moved}
        if cache.broken:
            raise ConfigError(
                f"{cache.broken[0]} is broken; restore it or delete the line, then collect again"
            )
        place = places(cache, runs)
        for collection, path in cache.collections().items():
            mine = {name: runs[name] for name in sorted(runs) if place[name] == collection}
            new = sum(name in moved for name in mine)
            text = "".join(map(line, mine, mine.values()))
            if text != (path.read_text(encoding="utf-8") if path.exists() else ""):
                write_text(path, text)
            if new:
                say(f"{path}: {new} runs collected, {len(mine)} in all")
        written = Cache(cache.folder, say).collected()
        for name, record in moved.items():
            path = cache.folder / f"{name}.json"
            # another process may have done the run again meanwhile
            with suppress(FileNotFoundError):
                if written.get(name) == record == json.loads(path.read_text()):
                    path.unlink()
    say(f"{len(moved)} runs collected")
    return len(moved)


def take(cache: Cache, paths: list[Path], say: Say) -> int:
    """Bring the runs of files with one run a line, as another machine wrote them, into the working
    folder; return how many. A line that is not whole is left out.
    """
    taken = 0
    for path in paths:
        try:
            texts = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
        for number, text in enumerate(texts, 1):
            try:
                record = json.loads(text)
                name = record.pop("name")
            except (ValueError, KeyError, TypeError, AttributeError):
                record, name = None, ""
            if not whole(record) or not NAME.fullmatch(name):
                say(f"{path}, line {number} is broken and left out")
                continue
            write_json(cache.folder / f"{name}.json", record)
            taken += 1
    say(f"{taken} runs taken")
    return taken


def line(name: str, record: dict[str, Any]) -> str:
    """Return a run as a line of a file of collected runs."""
    return json.dumps({"name": name, **record}, ensure_ascii=False, allow_nan=False) + "\n"


def places(cache: Cache, runs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the collection of each run, by the run's name."""
    seeds = 1 + max((record["seed"] for record in runs.values()), default=0)
    needed: dict[str, str] = {}
    for table in load_tables().values():
        stem = table.id.partition("-")[0]
        paper = stem if stem in COLLECTIONS else "ours"
        for form in FORMS:
            for job in jobs(table, Plan(form, seeds)):
                key = cache.key(job.spec, job.seed)
                if needed.get(key, "ours") == "ours":  # a paper comes before our own tables
                    needed[key] = paper
    found = {}
    for name, record in runs.items():
        method = record["method"].partition("-")[0]
        fallback = method if method in COLLECTIONS else "ours"
        found[name] = needed.get(name.rpartition("-")[0], fallback)
    return found


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time collect the runs of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".collect.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
