"""Which data are here, without loading them."""

from __future__ import annotations

import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..data.folders import FOLDERS, folder_of
from ..data.settings import KNOWN
from ..errors import ConfigError


@cache
def pooled(dataset: str, data_dir: str) -> int | None:
    """Return how many samples of a data set are here; 0 where there is nothing to count, None where
    it is not here.
    """
    if dataset in ("digits", "synthetic", ""):
        return 0
    if "+" in dataset and not dataset.endswith(".npz"):
        each = [pooled(name, data_dir) for name in dataset.split("+")]
        return None if None in each else sum(number or 0 for number in each)
    path = Path(data_dir) / (dataset if dataset.endswith(".npz") else f"{dataset}.npz")
    if path.exists():
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return len(arrays["y"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None  # what is wrong with it is said when it is loaded
    if dataset not in KNOWN or not (KNOWN[dataset][1] or folder_of(dataset, data_dir)):
        return None
    from ..data.settings import DataSettings
    from ..data.sources import load_source

    try:
        return len(load_source(DataSettings(dataset=dataset, data_dir=data_dir)).y)
    except ConfigError:
        return None


def with_folder(values: dict[str, Any], data_dir: str) -> dict[str, Any]:
    """Return the settings with a data set that is a bare file name put into `data_dir`."""
    name = str(values.get("dataset", ""))
    return (
        {**values, "dataset": str(Path(data_dir) / name)} if name.endswith(".npz") else dict(values)
    )


def images_to_keep(images: int, dataset: str, data_dir: str) -> float:
    """Return the share of the data that are here which makes `images`, at most all of them."""
    here = pooled(dataset, data_dir)
    return min(1.0, images / here) if here else 1.0


def remedy(dataset: str, data_dir: str) -> str:
    """Return what a person can do about a data set that is not here."""
    if dataset.endswith(".npz"):
        return f"put {dataset} with x and y (docs/data.md) into {data_dir}"
    if "+" in dataset:
        return "; ".join(
            remedy(name, data_dir) for name in dataset.split("+") if pooled(name, data_dir) is None
        )
    if dataset in FOLDERS:
        return (
            f"put the files of {dataset} (docs/data.md) into {data_dir}/{FOLDERS[dataset]}, or "
            "name the folder above by --data-dir"
        )
    if KNOWN[dataset][1]:
        return (
            f"put {dataset}.npz or torchvision's folders into {data_dir}, or name their folder "
            "by --data-dir"
        )
    return f"put {dataset}.npz (docs/data.md) into {data_dir}, or name its folder by --data-dir"
