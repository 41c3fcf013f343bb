"""`bayflower predict`: a personal model's predictions for new samples in a file."""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from ..errors import ConfigError, in_one_line
from .options import AsJson


class Samples(NamedTuple):
    """New samples, the columns that are copied to the output, and what is unusual about them."""

    x: Any
    kept: dict[str, list[str]]
    unusual: list[str] = []


def predict(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="folder that `export` or `personalise` wrote")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="new samples: .csv or .parquet with the columns of training, .npy, .npz with x, "
            "or a folder of images",
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
    level: Annotated[
        float | None,
        typer.Option(help="models of numbers and counts: level of the intervals [0.9]"),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="column of the table that is copied to the output, such as an id"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the output if it exists")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write labels, calibrated probabilities, sets, abstention and alarms for new samples; of
    numbers and counts mean, lower and upper end of an interval.

    Example: `bayflower predict models/client-3 new.csv --out scores.csv`
    """
    from ..files.texts import writing
    from ..personal import load_personal

    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists; choose another --out, or add --overwrite")
    model = load_personal(folder)
    x, kept, unusual = samples(data, model, keep or [])
    if "task" in model.card:
        if abstain is not None:
            raise ConfigError("abstain is for models of classes; leave it out")
        with writing(out):
            if model.card["task"]["name"] in ("survival", "labels"):
                said = predict_events(model, x, kept, out, as_json)
            else:
                said = predict_numbers(model, x, kept, out, level or 0.9, as_json)
        return finish(said, unusual, out, as_json)
    if level is not None:
        raise ConfigError("level is for models of numbers and counts; leave it out")
    with writing(out):
        said = predict_classes(model, x, kept, out, abstain, as_json)
    finish(said, unusual, out, as_json)


def finish(said: dict[str, Any], unusual: list[str], out: Path, as_json: bool) -> None:
    """Print what was said as JSON, or the warnings and where the scores are."""
    said |= {"unusual": unusual, "out": str(out)}
    if as_json:
        print(json.dumps(said))
        return
    for line in unusual:
        print(f"warning: {line}")
    print(f"scores: {out}")


def predict_classes(
    model: Any,
    x: Any,
    kept: dict[str, list[str]],
    out: Path,
    abstain: float | None,
    as_json: bool,
) -> dict[str, Any]:
    """Write labels, probabilities, sets, abstention and alarms for each sample."""
    from ..files.texts import write_text
    from ..personal.doubt import drift as drifted

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
    }
    if as_json:
        return said
    size = "" if sets is None else f", sets of {said['mean_set_size']:.2f} classes on average"
    print(f"{number} samples: {said['abstains']:.1%} abstained{size}")
    for label, count in zip(*np.unique(found.label, return_counts=True), strict=True):
        print(f"  label {label}: {count}")
    print(f"sets: {found.promise}")
    if drift.warning:
        print(f"warning: {drift.warning}")
    return said


def predict_events(
    model: Any, x: Any, kept: dict[str, list[str]], out: Path, as_json: bool
) -> dict[str, Any]:
    """Write risk, median time and the curve of each sample, or the probability of each label."""
    from ..files.texts import write_text

    found: dict[str, Any] = {}
    if model.card["task"]["name"] == "labels":
        shares = model.predict_proba(x)
        names = (model.card.get("reading") or {}).get("classes") or range(shares.shape[1])
        found = {f"p_{name}": shares[:, k] for k, name in enumerate(names)}
    else:
        found = {"risk": model.predict(x), "median": model.predict_median(x)}
        curves = model.predict_survival(x)
        found |= {f"survival_{t:g}": curves[:, k] for k, t in enumerate(model.times)}
    columns = {**kept, **{name: [f"{one:.6g}" for one in some] for name, some in found.items()}}
    write_text(out, as_csv(columns))
    number = len(next(iter(found.values())))
    if not as_json:
        more = ", …" if len(found) > 3 else ""
        print(f"{number} samples: {', '.join(list(found)[:3])}{more}")
    return {"samples": number, "columns": list(found)}


def predict_numbers(
    model: Any, x: Any, kept: dict[str, list[str]], out: Path, level: float, as_json: bool
) -> dict[str, Any]:
    """Write mean, lower and upper for each sample; of ordered classes also probabilities."""
    from ..files.texts import write_text

    found = model.uncertainty(x, level)
    names = (model.card.get("reading") or {}).get("classes") or []
    columns: dict[str, list[str]] = dict(kept)
    if model.task.whole:
        shares = model.predict_proba(x)
        known = names or [str(k) for k in range(shares.shape[1])]
        columns["label"] = [known[int(one)] for one in found.mean]
        columns |= {
            f"p_{name}": [f"{one:.6g}" for one in shares[:, k]] for k, name in enumerate(known)
        }
        columns |= {
            name: [known[int(one)] for one in ends]
            for name, ends in (("lower", found.lower), ("upper", found.upper))
        }
    else:
        for name in ("mean", "lower", "upper"):
            columns[name] = [f"{one:.6g}" for one in getattr(found, name)]
    write_text(out, as_csv(columns))
    width = float((found.upper - found.lower).mean())
    said: dict[str, Any] = {"samples": len(found.mean), "level": level, "mean_width": width}
    said |= {"promise": found.promise, "units": model.card["units"]}
    if as_json:
        return said
    print(f"{len(found.mean)} samples: {level:.0%} intervals of width {width:.4g} on average")
    print(f"intervals: {found.promise}")
    print(f"units: {model.card['units']}")
    return said


def as_csv(columns: dict[str, list[str]]) -> str:
    """Return columns as CSV, with their names."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()


def samples(path: Path, model: Any, keep: list[str]) -> Samples:
    """Return the samples of a file or a folder of images."""
    from ..data.tables import is_table

    if is_table(path):
        return table(path, model, keep)
    if keep:
        raise ConfigError(f"--keep names columns of a table, got {path}; leave it out")
    if path.is_dir():
        return pictures(path, model.card["network"])
    if path.suffix not in (".npy", ".npz"):
        raise ConfigError(
            f"{path} must be a .csv, .parquet, .npy or .npz file, or a folder of images; convert "
            "it to one of them"
        )
    try:
        with path.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return Samples(content, {})
            with content:
                if "x" not in content.files:
                    names = ", ".join(content.files) or "nothing"
                    raise ConfigError(f"{path} has {names}, but no array x with the samples")
                return Samples(content["x"], {})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} cannot be read as arrays ({in_one_line(error)}); write it with "
            "numpy.save or numpy.savez(path, x=...)"
        ) from None


def pictures(root: Path, network: dict[str, Any]) -> Samples:
    """Return the images below a folder, brought to the model's size, and their file names."""
    from ..data.photos import Files, listed

    shape = network["input_shape"]
    if len(shape) != 3 or not network.get("pixels") or shape[0] not in (1, 3):
        raise ConfigError(f"{root} is a folder of images, but the model takes no image files")
    files = listed(root)
    read = Files([root / file for file in files], (shape[1], shape[2]), shape[0] == 3)
    return Samples(read[np.arange(len(files))], {"file": files})


def table(path: Path, model: Any, keep: list[str]) -> Samples:
    """Return the inputs of a table, read as the training data were."""
    from ..data.alike import rows
    from ..data.columns import check_numbers, from_json
    from ..data.tables import read_table
    from ..personal.inputs import in_order
    from ..personal.unusual import far_numbers, new_values

    card, moments = model.card, model.moments
    network, known = card["network"], (card.get("reading") or {}).get("table")
    found = read_table(path)
    head = list(found.columns)
    if unknown := [name for name in keep if name not in head]:
        raise ConfigError(
            f"{path} has no column {', '.join(unknown)} to keep; it has {', '.join(head[:8])}"
        )
    kept = {name: [str(text) for text in found.columns[name].texts] for name in keep}
    if known:
        encoder = from_json(known)
        x = rows(found, encoder, keep)
        far = far_numbers(x, encoder.columns(), encoder.flags(), moments)
        return Samples(x, kept, [*new_values(encoder, found.columns), *far])
    names, shape = [name for name in head if name not in keep], tuple(network["input_shape"])
    if network.get("columns"):
        names = in_order(names, network["columns"])
    if len(names) != math.prod(shape):
        raise ConfigError(
            f"{path} has {len(names)} input columns, but the model needs {math.prod(shape)}; name "
            "columns that are no inputs with --keep, such as an id or the label"
        )
    for name in names:
        check_numbers(found.columns[name], f"column {name!r} of {path}")
    x = np.stack([found.columns[name].numbers for name in names], axis=1)
    far = far_numbers(x, names, np.zeros(len(names), bool), moments)
    return Samples(x.reshape(-1, *shape), kept, far)


def scores(found: Any, kept: dict[str, list[str]]) -> str:
    """Return the output as CSV, with classes as the data have them."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    known = found.classes.tolist()
    plain = known == list(range(len(known)))
    heads = [f"p{name}" if plain else f"p_{name}" for name in known]
    writer.writerow([*kept, "label", *heads, "doubt", "set", "abstains", "alarms"])
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
