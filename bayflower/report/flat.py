"""Results as flat rows, for spreadsheets and programs: CSV, Parquet or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.texts import write_text, writing
from .collect import ALIKE, Found

ABOUT = ("folder", "method", "dataset", "partition", "engine", "seed", "rounds")
NUMBERS = ("num_examples", "accuracy", "balanced_accuracy", "nll", "ece")
TWO = ("auroc", "sensitivity", "specificity")  # columns where some run has two classes
TOTALS = (
    *("num_examples", "num_clients", "accuracy", "accuracy_mean", "balanced_accuracy"),
    *("balanced_accuracy_mean", "nll", "ece", "ece_allclass", "mce", "mce_allclass"),
    *("fairness_std", "fairness_cv", "worst_client_accuracy"),
)
OF_NUMBERS = (
    *("rmse", "mae", "nll", "crps", "deviance"),
    *("coverage_50", "width_50", "coverage_90", "width_90"),
    *("events", "c_index", "c_index_uno", "c_index_within", "integrated_brier", "brier"),
    *("label_accuracy", "macro_auroc", "macro_auprc", "micro_auroc", "micro_auprc"),
    "calibration_error",
)
KINDS = (".csv", ".parquet", ".json")

Row = dict[str, Any]


def about(run: Found, differing: Sequence[str]) -> Row:
    """Return what a run is: its folder, method, data, and the settings that differ among runs."""
    result = run.result
    facts = {
        "folder": str(run.folder),
        **{key: result.get(key) for key in ("method", "dataset", "engine", "seed")},
        "partition": result["partition"].get("kind"),
        "rounds": len(result["rounds"]),
    }
    return {
        **{key: facts[key] for key in ABOUT},
        **{f"set_{key}": result["config"].get(key) for key in differing},
    }


def differing(runs: Sequence[Found]) -> list[str]:
    """Return the settings in which some runs of a method differ, but for those that have a column
    of their own.
    """
    found = set()
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        config = run.result["config"]
        base = first.setdefault(str(run.result["method"]), config)
        found |= {key for key in {*config, *base} if config.get(key) != base.get(key)}
    return sorted(found - {*ALIKE, "method", "rounds", "dataset", "partition"})


def two_classes(runs: Sequence[Found]) -> tuple[str, ...]:
    """Return the numbers that only two classes have, if some run has them."""
    return TWO if any("scores" in run.result["final"]["personal"] for run in runs) else ()


def kept(runs: Sequence[Found], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of runs: those of classes where some run has them, and of numbers."""
    blocks = [run.result["final"]["personal"] for run in runs]
    if all("accuracy" in block for block in blocks):
        return tuple(columns)
    every = [*columns, *(name for name in OF_NUMBERS if name not in columns)]
    return tuple(
        name for name in every if any(name in block for block in blocks) or name == "num_examples"
    )


def of_clients(runs: Sequence[Found]) -> list[Row]:
    """Return one row for each client of each tested model."""
    rows, settings = [], differing(runs)
    columns = kept(runs, (*NUMBERS, *two_classes(runs)))
    for run in runs:
        for view, block in run.result["final"].items():
            if not block or view == "after":  # `personal` under a second name
                continue
            for one in block["per_client"]:
                known = run.clients.get(int(one["client"]))
                rows.append(
                    {
                        **about(run, settings),
                        "model": view,
                        "client": one["client"],
                        "name": known.name if known else None,
                        "id": known.id if known else None,
                        "new": known.new if known else view == "new_clients",
                        **{key: one.get(key) for key in columns},
                    }
                )
    return rows


def of_runs(runs: Sequence[Found]) -> list[Row]:
    """Return one row for each tested model of each run, with what the run cost."""
    rows, settings = [], differing(runs)
    columns = kept(runs, (*TOTALS, *two_classes(runs)))
    for run in runs:
        rounds = run.result["rounds"]
        cost = {
            "bytes_up": sum(record["bytes_up"] for record in rounds),
            "bytes_down": sum(record["bytes_down"] for record in rounds),
            "seconds": sum(record["seconds"] for record in rounds),
        }
        if any("simulated_seconds" in record for run in runs for record in run.result["rounds"]):
            cost["simulated_seconds"] = sum(one.get("simulated_seconds", 0.0) for one in rounds)
        for view, block in run.result["final"].items():
            if block and view != "after":
                numbers = {key: block.get(key) for key in columns}
                rows.append({**about(run, settings), "model": view, **numbers, **cost})
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file whose ending says how."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--out must end in {', '.join(KINDS)}, got {path.name!r}")
    if path.is_dir() or not path.parent.exists():
        raise ConfigError(f"{path} cannot be written; name a file in a folder that exists")
    with writing(path):
        if path.suffix == ".parquet":
            write_parquet(path, rows)
            return
        text = json.dumps(rows, indent=1) + "\n" if path.suffix == ".json" else as_csv(rows)
        write_text(path, text)


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV with a header; what is not defined is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write a Parquet file; pyarrow does it."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed; pip install pyarrow, or write a .csv"
        ) from None
    part = path.with_name(f".{path.name}.part")
    parquet.write_table(arrow.Table.from_pylist(list(rows)), part)
    part.replace(path)
