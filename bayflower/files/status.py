"""The status of a running run: `status.json`, and the same numbers in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import RoundRecord
from .texts import finite, write_json

LAST = 5  # faults that are shown
PROMETHEUS = "metrics.prom"


def running(
    *,
    method: str,
    run: str,
    rounds: int,
    records: Sequence[RoundRecord],
    present: Sequence[int],
    left: Sequence[int],
    excluded: Sequence[int],
    faults: Sequence[str],
    names: Mapping[int, str],
) -> dict[str, Any]:
    """Return the content of status.json during a run."""
    seconds = [float(record["seconds"]) for record in records]
    return {
        "state": "running",
        "method": method,
        "run": run,
        "rounds": rounds,
        "completed": len(records),
        "updated": round(time.time(), 3),
        "clients": {"present": list(present), "left": list(left), "excluded": list(excluded)},
        "names": {str(client): name for client, name in names.items()},
        "seconds_per_round": sum(seconds[-10:]) / len(seconds[-10:]) if seconds else None,
        "num_faults": len(faults),
        "faults": list(faults[-LAST:]),
        "records": [dict(record) for record in records[-2:]],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write status.json and, beside it, the file for Prometheus."""
    write_json(path, finite(content))
    part = path.with_name(f".{PROMETHEUS}.part")
    part.write_text(prometheus(content))
    part.replace(path.with_name(PROMETHEUS))


def prometheus(content: Mapping[str, Any]) -> str:
    """Return the status as Prometheus reads it from a file (node_exporter's textfile collector)."""
    record = content["records"][-1] if content["records"] else {}
    clients = content["clients"]
    values = [
        ("round", "gauge", "completed rounds", [("", content["completed"])]),
        ("rounds", "gauge", "rounds of the run", [("", content["rounds"])]),
        (
            "clients",
            "gauge",
            "clients by state",
            [
                (f'{{state="{state}"}}', len(clients[state]))
                for state in ("present", "left", "excluded")
            ],
        ),
        ("round_seconds", "gauge", "seconds of the last round", [("", record.get("seconds"))]),
        (
            "bytes_up",
            "gauge",
            "bytes of the replies of the last round",
            [("", record.get("bytes_up"))],
        ),
        (
            "bytes_down",
            "gauge",
            "bytes of the messages of the last round",
            [("", record.get("bytes_down"))],
        ),
        ("train_loss", "gauge", "mean loss of the last round", [("", record.get("train_loss"))]),
        ("epsilon", "gauge", "privacy budget spent so far", [("", record.get("epsilon"))]),
        (
            "faults_total",
            "counter",
            "replies that were not used and other faults",
            [("", content["num_faults"])],
        ),
        (
            "updated_seconds",
            "gauge",
            "when this was written, in seconds since 1970",
            [("", content["updated"])],
        ),
    ]
    lines = []
    for name, kind, meaning, samples in values:
        lines += [f"# HELP bayflower_{name} {meaning}", f"# TYPE bayflower_{name} {kind}"]
        lines += [
            f"bayflower_{name}{label} {value:.10g}" for label, value in samples if value is not None
        ]
    return "\n".join(lines) + "\n"
