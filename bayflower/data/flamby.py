"""TCGA-BRCA in FLamby's own format: two tables of patients.

    brca.csv               pid, 39 inputs, E (1 = the event was seen), T (days)
    train_test_split.csv   pid, fold (train or test), fold2 (fold and region, such as train_0)

Patients without a fold are left out. The second one may lie in dataset_creation_scripts/, as in
FLamby's repository. (Ogier du Terrail et al., FLamby: datasets and benchmarks for cross-silo
federated learning.)
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .source import Names, Source

FILE, SPLIT = "brca.csv", "train_test_split.csv"
FOLDERS = ("", "dataset_creation_scripts")


def file_of(dataset: str, data_dir: str) -> Path | None:
    """Return the file of a data set in FLamby's format; None if there is none."""
    path = Path(data_dir) / FILE
    return path if dataset == "brca" and path.is_file() else None


def read(path: Path) -> Source:
    """Return TCGA-BRCA with its six regions and FLamby's split."""
    splits = [path.parent / folder / SPLIT for folder in FOLDERS]
    split = next((one for one in splits if one.is_file()), None)
    if split is None:
        raise ConfigError(f"{path} needs FLamby's {SPLIT} beside it, or in {FOLDERS[1]}/")
    try:
        head, *rows = table(path)
        inputs = [place for place, name in enumerate(head) if name not in ("pid", "E", "T")]
        event, days, pid = head.index("E"), head.index("T"), head.index("pid")
        names, *parts = table(split)
        places = [names.index(name) for name in ("pid", "fold", "fold2")]
        folds = {row[places[0]]: (row[places[1]], row[places[2]]) for row in parts}
        rows = [row for row in rows if row[pid] in folds]
        x = np.array([[float(row[place]) for place in inputs] for row in rows])
        y = np.array([[float(row[days]), float(row[event])] for row in rows])
        test = np.array([folds[row[pid]][0] == "test" for row in rows])
        region = np.array([int(folds[row[pid]][1].rsplit("_", 1)[1]) for row in rows])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} and {split} are not FLamby's tables ({error})") from None
    if not len(rows):
        raise ConfigError(
            f"no patient of {path} is in {split}; take both from one version of FLamby"
        )
    sites, client = np.unique(region, return_inverse=True)
    return Source(
        "brca",
        x.astype(np.float32),
        y,
        1,
        client.reshape(-1).astype(np.int64),
        test,
        names=Names(tuple(map(str, sites)), (), tuple(head[place] for place in inputs)),
        kind="times",
    )


def table(path: Path) -> list[list[str]]:
    """Return the rows of a table, the names of its columns first."""
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row]
