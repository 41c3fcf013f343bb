"""Flower's command line, `flwr`: start a run of an app and query its status."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BayflowerError, ConfigError


def flwr_json(words: Sequence[str], env: Mapping[str, str], folder: Path) -> Any:
    """Return the JSON a flwr command prints."""
    done = subprocess.run(
        [shutil.which("flwr", path=env["PATH"]) or "flwr", *words, "--format", "json"],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    start = done.stdout.find("{")
    try:
        return json.loads(done.stdout[start:])
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BayflowerError(
            f"flwr {words[0]} failed (code {done.returncode}): "
            f"{said[-1] if said else 'nothing was printed'}"
        ) from None


def submit(flwr: Callable[..., Any], app: Path, config: Mapping[str, Any], *more: str) -> str:
    """Start a run of `app` with `config` through `flwr`; return its id."""
    answer = flwr(
        "run",
        str(app),
        "bayflower",
        *more,
        "--run-config",
        " ".join(f"{key}={toml(value)}" for key, value in config.items()),
    )
    if not answer.get("success"):
        raise BayflowerError(f"Flower refused the run: {answer.get('error-message') or answer}")
    return str(answer["run-id"])


def run_status(flwr: Callable[..., Any], run: str) -> str:
    """Return e.g. "running", "finished:completed" or "finished:failed"."""
    answer = flwr("list", "--run-id", run)
    if not answer.get("runs"):
        raise BayflowerError(
            f"flwr list has no run {run}: {answer.get('error-message') or 'no answer'}"
        )
    return str(answer["runs"][0]["status"])


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if '"' in str(value):
        raise ConfigError(f"a setting must not contain a quotation mark, got {value!r}; remove it")
    return f'"{value}"'
