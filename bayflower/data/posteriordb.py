"""Data sets of posteriordb in its own format: one JSON file of vectors, packed as .json.zip or not.

    radon       radon_all.json         floor_measure, log_uranium, log_radon, county_idx
    election88  election88_full.json   black, female, age, edu, region_full, v_prev_full, y, state

(Magnusson et al., posteriordb: a database of posteriors for Bayesian inference.)
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from .source import Names, Source


class Form(NamedTuple):
    """Which vectors of a file are what."""

    file: str
    columns: dict[str, str]  # vector: name of the input
    target: str
    owner: str
    measured: bool


FORMS = {
    "radon": Form(
        "radon_all",
        {"floor_measure": "floor", "log_uranium": "log_uranium"},
        "log_radon",
        "county_idx",
        True,
    ),
    "election88": Form(
        "election88_full",
        {
            "black": "black",
            "female": "female",
            "age": "age(1-4)",
            "edu": "edu(1-4)",
            "region_full": "region(1-5)",
            "v_prev_full": "v_prev",
        },
        "y",
        "state",
        False,
    ),
}


def file_of(dataset: str, data_dir: str) -> Path | None:
    """Return the file of a data set in posteriordb's format; None if there is none."""
    if dataset not in FORMS:
        return None
    stem = Path(data_dir) / FORMS[dataset].file
    both = (stem.with_name(f"{stem.name}{end}") for end in (".json", ".json.zip"))
    return next((path for path in both if path.is_file()), None)


def read(path: Path, dataset: str) -> Source:
    """Return the data set in a file of posteriordb."""
    form = FORMS[dataset]
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                text = archive.read(archive.namelist()[0]).decode()
        else:
            text = path.read_text()
        found = json.loads(text)
        vectors = {name: np.array(found[name]) for name in (*form.columns, form.target, form.owner)}
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not posteriordb's file of {dataset} ({error})") from None
    owner = vectors[form.owner].astype(np.int64)
    x = [by_owner(vectors[name], owner) for name in form.columns]
    y = vectors[form.target].astype(np.float64 if form.measured else np.int64)
    names, client = np.unique(owner, return_inverse=True)
    return Source(
        dataset,
        np.stack(x, 1).astype(np.float32),
        y,
        1 if form.measured else 2,
        client.reshape(-1).astype(np.int64),
        names=Names(tuple(map(str, names)), (), tuple(form.columns.values())),
        kind="numbers" if form.measured else "classes",
    )


def by_owner(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return a value for each sample, of a vector by sample or by owner (numbered from 1)."""
    return values if len(values) == len(owner) else values[owner - 1]
