"""Data sets as pooled arrays: scikit-learn's digits, torchvision's MNIST and CIFAR families,
FEMNIST's and CelebA's own files, and a user's own data (`doors`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import flamby, posteriordb
from .doors import State as State  # part of what this module offers
from .doors import paths_of, read_path, stamps
from .doors import state_of as state_of_path
from .folders import FOLDERS, folder_of, read_folder
from .known import GENERATED
from .npz import read_npz
from .settings import KNOWN, DataSettings
from .source import Source


def at_hand(settings: DataSettings) -> bool:
    """Return whether a user's own data are on this machine."""
    if not settings.is_path:
        return True
    try:
        return all(path.exists() for path in paths_of(settings.dataset))
    except ConfigError:
        return False


def state_of(settings: DataSettings) -> State:
    """Return what changes when the files of a data set change, for what is kept of it."""
    if settings.dataset in GENERATED:
        return ()
    names = settings.domains or (settings.dataset,)
    if set(names) <= set(KNOWN):
        return stamps([Path(settings.data_dir) / f"{name}.npz" for name in names])
    try:
        return state_of_path(settings.dataset, settings.options())
    except ConfigError:  # no such file: reading it says so
        return ()


def source_of(settings: DataSettings) -> Source | None:
    """Return the data set of a run, kept while its files are the same; None if it is generated."""
    return _source_of(settings, state_of(settings))


@lru_cache(maxsize=2)
def _source_of(settings: DataSettings, state: State) -> Source | None:
    return None if settings.dataset in GENERATED else load_source(settings)


def load_source(settings: DataSettings) -> Source:
    """Return the pooled data set (train and test together) that `settings` names; data that
    are generated have none.
    """
    if settings.domains:
        from .domains import joined  # which needs what is here

        return joined(
            [
                load_source(
                    replace(settings, dataset=name, partition="dirichlet", test_fraction=None)
                )
                for name in settings.domains
            ]
        )
    if settings.dataset == "digits":
        return _digits()
    if settings.dataset not in KNOWN:
        return read_path(settings.dataset, settings.options())
    path = Path(settings.data_dir) / f"{settings.dataset}.npz"
    folder = folder_of(settings.dataset, settings.data_dir)
    if path.exists():
        source = read_npz(path, settings.options(), numbers=True)
    elif (file := posteriordb.file_of(settings.dataset, settings.data_dir)) is not None:
        source = posteriordb.read(file, settings.dataset)
    elif (file := flamby.file_of(settings.dataset, settings.data_dir)) is not None:
        source = flamby.read(file)
    else:
        source = (
            Source("", *read_folder(settings.dataset, folder))
            if folder
            else _torchvision(settings, path)
        )
    full, _, note = KNOWN[settings.dataset]
    if not note and len(source.y) != full:
        note = f"{len(source.y)} samples of {settings.dataset}'s {full}"
    return replace(source, name=settings.dataset, note=note)


def _digits() -> Source:
    """Return scikit-learn's digits, read from its file: importing it takes as long as torch."""
    found = find_spec("sklearn")
    path = Path((found and found.origin) or "", "..", "datasets", "data", "digits.csv.gz").resolve()
    if path.is_file():
        table = np.loadtxt(path, delimiter=",")
        images, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    else:  # another layout of the package
        from sklearn.datasets import load_digits

        data = load_digits()
        images, target = data.images, data.target
    return Source(
        "digits", (images / 16.0).astype(np.float32)[:, None], target.astype(np.int64), 10
    )


def _torchvision(settings: DataSettings, path: Path) -> Source:
    """Return both splits of a data set of torchvision (whose CIFAR loaders unpickle files after
    checking their published md5 sums).
    """
    from .vision import import_torchvision

    kind = KNOWN[settings.dataset][1]
    if not kind:
        own = (
            f" and no folder {path.with_name(FOLDERS[settings.dataset])}"
            if settings.dataset in FOLDERS
            else ""
        )
        raise ConfigError(
            f"dataset {settings.dataset!r} was not found: no file {path}{own}; set data_dir "
            "(--data-dir) to the folder that holds it"
        )
    extra: dict[str, Any] = {"split": "balanced"} if kind == "EMNIST" else {}
    make = getattr(import_torchvision().datasets, kind)
    try:
        parts = [
            make(root=settings.data_dir, train=train, download=settings.download, **extra)
            for train in (True, False)
        ]
    except (RuntimeError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "check the network" if settings.download else "set download=true"
        raise ConfigError(
            f"dataset {settings.dataset!r} was not found: neither {path} nor torchvision's {kind} "
            f"under {settings.data_dir} ({reason}); "
            f"{remedy}, or data_dir to its folder, or dataset to the path of an .npz file"
        ) from error
    x = np.concatenate([np.asarray(part.data, dtype=np.uint8) for part in parts])
    y = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    if kind == "EMNIST":  # its files hold the images transposed
        x = x.transpose(0, 2, 1)
    test = np.arange(len(y)) >= len(parts[0].targets)
    return Source(settings.dataset, x, y, len(parts[0].classes), None, test)
