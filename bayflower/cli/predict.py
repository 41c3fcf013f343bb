"""`bayflower predict`: a personal model's predictions for new samples in a file."""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..errors import ConfigError
from .options import AsJson

EMPTY = {"", "na", "nan", "null", "none", "?"}  # a missing value in a .csv file


def predict(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="folder that `export` or `personalise` wrote")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="new samples: .csv with a header row, .npy, or .npz with x"
        ),
    ],
    out: Annotated[Path, typer.Option(help="the .csv file to write, a row for each sample")],
    abstain: Annotated[
        float | None,
        typer.Option(
            help="share of errors to allow among the answers; by default the model abstains where "
            "its set does not hold exactly one class"
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="column of the .csv that is no input; it is copied to the output"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the output if it exists")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write labels, calibrated probabilities, sets, abstention and alarms for new samples.

    Example: `bayflower predict models/client-3 new.csv --out scores.csv`
    """
    from ..files.atomic import write_text
    from ..personal import load_personal
    from ..personal.doubt import drift as drifted

    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists; choose another --out, or add --overwrite")
    model = load_personal(folder)
    x, kept = samples(data, model.card["network"], keep or [])
    found = model.uncertainty(x, abstain)
    drift = drifted(found.alarms, model.card["uncertainty"]["alarms"])
    write_text(out, scores(found, kept))
    number, sets = len(found.label), found.sets
    said: dict[str, Any] = {
        "samples": number,
        "abstains": float(found.abstains.mean()),
        "mean_set_size": None if sets is None else float(sets.sum(1).mean()),
        "mean_doubt": float(found.doubt.mean()),
        "alarms": drift.rates,
        "drift": drift.warning,
        "promise": found.promise,
        "out": str(out),
    }
    if as_json:
        print(json.dumps(said))
        return
    size = "" if sets is None else f", sets of {said['mean_set_size']:.2f} classes on average"
    print(f"{number} samples: {said['abstains']:.1%} abstained{size}")
    for label, count in zip(*np.unique(found.label, return_counts=True), strict=True):
        print(f"  label {label}: {count}")
    print(f"sets: {found.promise}")
    if drift.warning:
        print(f"warning: {drift.warning}")
    print(f"scores: {out}")


def samples(
    path: Path, network: dict[str, Any], keep: list[str]
) -> tuple[np.ndarray, dict[str, list[str]]]:
    """Return the samples of a file, and the columns that are copied to the output."""
    if path.suffix == ".csv":
        return table(path, network, keep)
    if keep:
        raise ConfigError(f"--keep names columns of a .csv file, got {path}; leave it out")
    if path.suffix not in (".npy", ".npz"):
        raise ConfigError(f"{path} must end in .csv, .npy or .npz; convert it to one of them")
    try:
        with path.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content, {}
            with content:
                if "x" not in content.files:
                    names = ", ".join(content.files) or "nothing"
                    raise ConfigError(f"{path} has {names}, but no array x with the samples")
                return content["x"], {}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} cannot be read as arrays ({' '.join(str(error).split())}); write it with "
            "numpy.save or numpy.savez(path, x=...)"
        ) from None


def table(
    path: Path, network: dict[str, Any], keep: list[str]
) -> tuple[np.ndarray, dict[str, list[str]]]:
    """Return the inputs of a .csv file, and the columns to copy."""
    from ..personal.inputs import in_order

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table ({error}); save it as CSV") from None
    head = [name.strip() for name in head]
    if not rows:
        raise ConfigError(f"{path} has no samples; it needs a header row and a row for each sample")
    if len(set(head)) < len(head) or all(is_number(name) for name in head):
        raise ConfigError(
            f"the first row of {path} must name the columns, each once, got {', '.join(head[:5])}…"
        )
    if unknown := [name for name in keep if name not in head]:
        raise ConfigError(
            f"{path} has no column {', '.join(unknown)} to keep; it has {', '.join(head[:8])}"
        )
    for place, row in enumerate(rows):
        if len(row) != len(head):
            raise ConfigError(
                f"row {place + 1} of {path} has {len(row)} values, the header {len(head)}; a "
                "missing value is empty, between its commas"
            )
    names, shape = [name for name in head if name not in keep], tuple(network["input_shape"])
    if network.get("columns"):
        names = in_order(names, network["columns"])
    if len(names) != math.prod(shape):
        raise ConfigError(
            f"{path} has {len(names)} input columns, but the model needs {math.prod(shape)}; name "
            "columns that are no inputs with --keep, such as an id or the label"
        )
    places = [head.index(name) for name in names]
    x = np.array(
        [[number(row[at], head[at], line, path) for at in places] for line, row in enumerate(rows)]
    )
    return x.reshape(-1, *shape), {name: [row[head.index(name)] for row in rows] for name in keep}


def number(text: str, column: str, line: int, path: Path) -> float:
    """Return one value of a table."""
    if text.strip().lower() in EMPTY:
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"column {column!r} of {path} must hold numbers, got {text!r} in row {line + 1}; "
            "encode it as in training, or name it with --keep"
        ) from None


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def scores(found: Any, kept: dict[str, list[str]]) -> str:
    """Return the output as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    classes = found.probabilities.shape[1]
    writer.writerow(
        [*kept, "label", *(f"p{k}" for k in range(classes)), "doubt", "set", "abstains", "alarms"]
    )
    for place, inside in enumerate(found.set_labels()):
        sounding = [name for name, above in found.alarms.items() if above[place]]
        writer.writerow(
            [
                *(values[place] for values in kept.values()),
                found.label[place],
                *(f"{p:.6g}" for p in found.probabilities[place]),
                f"{found.doubt[place]:.6g}",
                "|".join(map(str, inside)),
                "yes" if found.abstains[place] else "no",
                "|".join(sounding),
            ]
        )
    return file.getvalue()
