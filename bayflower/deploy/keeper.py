"""The keeper of a region: a run of its own server for each run of the server above that has asked
something, and another one if it has died.

The region's run has the settings of the run above, so that clients check them against their
policies as ever. It ends by itself when nothing was asked for a while.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import BayflowerError
from ..files.texts import read_json, write_json
from ..flower import control
from ..flower.bundle import write_app
from .server import Server

POLL_SECONDS = 2.0
# a run that answers touches its lease every few seconds. Only if it has not done so for a while the
# SuperLink is asked; one that should run, and has not done so for longer, is stopped
QUIET_SECONDS, DEAD_SECONDS = 20.0, 120.0
KEPT = 8  # folders of runs; older ones are removed
CONFIG, RECORD, LEASE = "config.json", "run.json", ".serving"
DROPPED = (
    "out",
    "resume",
    "min_nodes",
    "wait",
    "timeout",
    "tree",
    "spool",
)  # keys of the run above


def keep(server: Server, spool: Path, note: Callable[[str], None]) -> None:
    """Keep the region's runs going, for ever."""
    note(f"waiting for requests in {spool}")
    while True:
        try:
            look(server, spool, note)
        except BayflowerError as error:  # the SuperLink may be starting
            note(str(error))
        time.sleep(POLL_SECONDS)


def look(server: Server, spool: Path, note: Callable[[str], None]) -> None:
    """Start a run for each folder in which a request waits and no run answers."""
    spool.mkdir(parents=True, exist_ok=True)
    found = sorted(
        (path.parent for path in spool.glob(f"*/{CONFIG}")),
        key=lambda folder: (folder / CONFIG).stat().st_mtime,
    )
    for folder in found[:-KEPT]:
        if not waits(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in found:
        if waits(folder) and not answers(server, folder, note):
            start(server, folder, note)


def waits(folder: Path) -> bool:
    """Return whether a request waits for its answer."""
    return any((folder / "requests").glob("*.safetensors"))


def answers(server: Server, folder: Path, note: Callable[[str], None]) -> bool:
    """Return whether a run answers the requests in a folder; a run that seems dead is stopped."""
    record = read_json(folder / RECORD)
    if not record:
        return False
    run, beats = str(record["run"]), [float(record["at"])]
    with suppress(FileNotFoundError):
        beats.append((folder / LEASE).stat().st_mtime)
    silent = time.time() - max(beats)
    if silent < QUIET_SECONDS:
        return True
    try:
        status = control.run_status(server.flwr, run)
    except (BayflowerError, KeyError, IndexError):
        return False  # the SuperLink has lost the run
    if status.startswith("finished"):
        return False
    if silent < DEAD_SECONDS:
        time.sleep(POLL_SECONDS)
        return True
    note(f"run {run} does not answer; it is stopped")
    server.flwr("stop", run, "bayflower")
    return False


def start(server: Server, folder: Path, note: Callable[[str], None]) -> None:
    """Start the region's run for the requests in a folder."""
    from ..flower.app import folded  # which imports torch

    above = read_json(folder / CONFIG)
    config: dict[str, Any] = {k: v for k, v in above.items() if k not in DROPPED}
    config |= {"spool": str(folder), "min_nodes": server.deployment.clients}
    work = Path(tempfile.mkdtemp(prefix="bayflower-app-"))
    try:
        run = control.submit(server.flwr, write_app(work / "app"), folded(config))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_json(folder / RECORD, {"run": run, "at": time.time()})
    note(f"run {run} of this region answers the server's run {folder.name}")
