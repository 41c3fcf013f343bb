"""Commands that start Flower's own programs, and what they leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bayflower.files.children import marked

WORK = {
    "dataset": "digits",
    "num_clients": 2,
    "keep": 0.1,
    "min_size": 8,
    "batch_size": 16,
    "local_epochs": 1,
    "rounds": 2,
    "model": "mlp-bn",
    "device": "cpu",
    "evaluate_every": 1,
}


def words(command: list[str], out: Path, engine: str, *more: str, **settings) -> list[str]:
    sets = [
        word for key, value in {**WORK, **settings}.items() for word in ("--set", f"{key}={value}")
    ]
    return [
        sys.executable,
        "-m",
        "bayflower",
        *command,
        "--engine",
        engine,
        "--out",
        str(out),
        *sets,
        *more,
    ]


def bayflower(
    command: list[str], out: Path, engine: str, *more: str, timeout: float = 1500, **settings
) -> subprocess.CompletedProcess:
    return subprocess.run(
        words(command, out, engine, *more, **settings),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=out.parent,
    )


def clean(out: Path) -> bool:
    """Return whether no process of the run in `out` is left."""
    return marked((out / "logs" / "mark").read_text()) == []


def personal(result: dict) -> list:
    """Return the rows of clients without their names."""
    rows = result["final"]["personal"]["per_client"]
    return [{key: value for key, value in row.items() if key != "name"} for row in rows]
