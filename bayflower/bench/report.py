"""The benchmark's JSON file and table."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..files.texts import write_json
from ..report.text import bare_table, number, size
from .cases import Options

FORMAT = "bayflower-bench-1"


def environment(device: torch.device | None) -> dict[str, Any]:
    """Return what the numbers depend on besides the code: machine, versions, commit."""
    gpu = device is not None and device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu ({platform.machine()})",
        "device_memory": torch.cuda.get_device_properties(device).total_memory if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this code, with a + if files were changed since; None outside of a
    repository.
    """

    def git(*words: str) -> str:
        call = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(
            call, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


class Report:
    """The rows so far, in a file if there is one: an interruption loses nothing."""

    def __init__(self, suite: str, options: Options, file: Path | None) -> None:
        self.file = file
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "suite": suite,
            "environment": environment(options.found_device()),
            "options": dataclasses.asdict(options),
            "rows": [],
        }
        self._write()

    def add(self, row: dict[str, Any]) -> None:
        """Take a row in; the ratios between rows are computed anew."""
        from .suites import with_ratios

        self.content["rows"] = with_ratios(self.content["suite"], [*self.content["rows"], row])
        self._write()

    def _write(self) -> None:
        if self.file is not None:
            write_json(self.file, self.content)


def milliseconds(value: float | None) -> str:
    """Return a time with three significant digits or so."""
    return number(
        value,
        0
        if value is not None and value >= 1000
        else 1
        if value is not None and value >= 100
        else 2,
    )


def times(value: float | None) -> str:
    """Return a ratio, e.g. "42.1×"."""
    return "–" if value is None else f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def share(value: float | None) -> str:
    """Return per cent."""
    return "–" if value is None else f"{value:.1f} %"


def memory(value: float | None) -> str:
    """Return a number of bytes, or a dash."""
    return "–" if value is None else size(value)


def text(value: Any) -> str:
    """Return the value as it is, or a dash."""
    return (
        "–"
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


def digits(value: float | None) -> str:
    """Return a small number, e.g. "3e-12"."""
    return "–" if value is None else f"{value:.0e}"


def seconds(value: float | None) -> str:
    """Return seconds."""
    return "–" if value is None else f"{value:.1f} s"


def parts(value: dict[str, float] | None) -> str:
    """Return seconds by part of a run."""
    return ", ".join(f"{name} {taken:.1f}" for name, taken in (value or {}).items()) or "–"


Columns = list[tuple[str, str, Callable[[Any], str]]]
COLUMNS: dict[str, Columns] = {
    "methods": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("precision", "products", text),
        ("ms", "fused ms", milliseconds),
        ("one_by_one_ms", "one by one ms", milliseconds),
        ("one_by_one_ratio", "ratio", times),
        ("fedper_ratio", "to FedPer", times),
        ("peak_memory", "memory", memory),
        ("utilisation", "used", share),
        ("num_rounds", "rounds", text),
        ("wall", "wall", seconds),
        ("seconds", "s by part", parts),
    ],
    "scaling": [
        ("clients", "clients", text),
        ("max_fused", "at a time", text),
        ("rounds_per_second", "rounds/s", lambda v: number(v, 2)),
        ("ms", "ms a round", milliseconds),
        ("samples_per_second", "samples/s", text),
        ("peak_memory", "memory", memory),
        ("data_bytes", "of it data", memory),
        ("num_rounds", "rounds", text),
        ("wall", "wall", seconds),
    ],
    "cross-device": [
        ("method", "method", text),
        ("clients", "clients", text),
        ("sampled", "a round", text),
        ("client_states", "states on", text),
        ("ms", "ms a round", milliseconds),
        ("peak_memory", "memory", memory),
        ("data_bytes", "of it data", memory),
        ("all_states_bytes", "all states", memory),
        ("sampled_states_bytes", "a round's", memory),
        ("disk_bytes", "on disk", memory),
        ("num_rounds", "rounds", text),
        ("wall", "wall", seconds),
    ],
    "cpu": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("engine", "engine", text),
        ("chosen", "clients trained", text),
        ("ms", "ms a round", milliseconds),
        ("loop_ratio", "time to loop", times),
        ("startup", "start-up", seconds),
        ("num_rounds", "rounds", text),
        ("wall", "wall", seconds),
    ],
    "races": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("precision", "products", text),
        ("num_rounds", "rounds", text),
        ("total", "all rounds", lambda v: "–" if v is None else f"{v:.2f} s"),
        ("ms", "ms a round", milliseconds),
        ("samples_per_second", "samples/s", text),
        ("peak_memory", "memory", memory),
        ("rival", "published elsewhere", text),
    ],
    "networks": [
        ("network", "network", text),
        ("weights", "weights", text),
        ("method", "method", text),
        ("trained", "clients trained", text),
        ("ms", "ms a round", milliseconds),
        ("one_by_one_ms", "one by one ms", milliseconds),
        ("one_by_one_ratio", "ratio", times),
        ("apart", "apart", digits),
        ("peak_memory", "memory", memory),
    ],
    "profile": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("stage", "stage", text),
        ("ms", "ms", milliseconds),
        ("percent", "of a round", share),
    ],
    "steps": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("phase", "phase", text),
        ("clients", "clients", text),
        ("ms", "ms a step", lambda v: number(v, 3)),
        ("us_per_client", "µs a client", lambda v: number(v, 1)),
    ],
    "single": [
        ("workload", "workload", text),
        ("method", "method", text),
        ("precision", "products", text),
        ("way", "steps are", text),
        ("ms", "ms a round", milliseconds),
        ("steps", "steps a round", text),
        ("ms_a_step", "ms a step", lambda v: number(v, 3)),
        ("peak_memory", "memory", memory),
    ],
}
CAPTIONS = {
    "methods": "median of rounds after {warm_up} that do not count; ratio: one by one / fused",
    "scaling": "median of rounds after {warm_up} that do not count; equally many samples a "
    "client; at a time: max_fused, 0 = all",
    "cross-device": "median of rounds after {warm_up} that do not count; memory: peak; all "
    "states: what they would take in memory",
    "cpu": "median of rounds after {warm_up} that do not count; time to loop: above 1 is slower",
    "races": "all rounds: after {warm_up} that do not count; rounds: as published, fewer where the "
    "time limit ended a case",
    "networks": "median of rounds after {warm_up} that do not count; ratio: one by one / stacked; "
    "apart: the largest difference between states after a step in float64, stacked and by {beside}",
    "profile": "mean of {num_rounds} rounds; evaluation is not part of a round",
    "steps": "median; clients: those that are in the step",
    "single": "median of rounds after {warm_up} that do not count; ms a step: a whole round by the "
    "steps of its clients",
}


def table(content: dict[str, Any]) -> Table:
    """Return the rows as a table; what could not be measured is below it, with the reason."""
    suite, where, rows = content["suite"], content["environment"], content["rows"]
    good = [row for row in rows if not row.get("failed")]
    first = good[0] if good else {}
    caption = CAPTIONS[suite].format(
        warm_up=first.get("warm_up", "those"),
        num_rounds=first.get("num_rounds", "some"),
        beside=first.get("beside", "others"),
    )
    if where["cuda"] is None and suite in (
        "methods",
        "scaling",
        "cross-device",
        "races",
        "networks",
        "single",
    ):
        caption += "; memory on a CPU: peak of the whole process so far"
    versions = f"{where['device']}, torch {where['torch']}"
    grid = bare_table(
        f"{suite}, seed {content['options']['seed']}, {versions}",
        "\n".join([caption, *remarks(rows)]),
    )
    columns = COLUMNS[suite]
    for key, heading, show in columns:
        words = show is text and any(isinstance(row.get(key), str) for row in good)
        grid.add_column(heading, justify="left" if words else "right", no_wrap=key != "seconds")
    for row in good:
        grid.add_row(*(show(row.get(key)) for key, _, show in columns))
    return grid


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Return what must be said below the table, each thing once."""
    said: dict[str, None] = {}
    for row in rows:
        if row.get("failed"):
            said[f"not measured: {row['case']}: {row['failed']}"] = None
        for key in ("data", "how", "remark"):
            if row.get(key):
                said[str(row[key])] = None
    return list(said)
