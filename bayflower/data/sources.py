"""Data sets as pooled arrays: scikit-learn's digits, .npz files, torchvision's MNIST and CIFAR
families, FEMNIST's and CelebA's own files.

An .npz file holds x, y and optionally test (which samples the original marks as test), client
(natural owner, negative = none) and a 0-d num_classes. Images of type uint8 are (N, H, W) or (N, H,
W, C); floating-point images are taken as they are, (N, C, H, W); anything (N, D) is a table, in
which NaN means missing. Arrays of Python objects are refused: they would need pickle.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .folders import FOLDERS, folder_of, read_folder
from .settings import KNOWN, DataSettings
from .source import Source

KEYS = ("x", "y", "test", "client", "num_classes")


def load_source(settings: DataSettings) -> Source:
    """Return the pooled data set (train and test together) that `settings` names; `synthetic` has
    none.
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
        return read_npz(Path(settings.dataset))
    path = Path(settings.data_dir) / f"{settings.dataset}.npz"
    folder = folder_of(settings.dataset, settings.data_dir)
    if path.exists():
        source = read_npz(path)
    else:
        source = (
            Source("", *read_folder(settings.dataset, folder))
            if folder
            else _torchvision(settings, path)
        )
    full, _, note = KNOWN[settings.dataset]
    if not note and len(source.y) != full:
        note = f"{len(source.y)} samples of {settings.dataset}'s {full}"
    return Source(
        settings.dataset, source.x, source.y, source.num_classes, source.client, source.test, note
    )


def read_npz(path: Path) -> Source:
    """Return the data set in an .npz file, checked."""
    arrays = _arrays(path)
    for key in ("x", "y"):
        if key not in arrays:
            raise ConfigError(
                f"{path} has no array {key!r}, only "
                f"{', '.join(sorted(arrays)) or 'nothing known'}; it needs x and y"
            )
    x, y = arrays["x"], arrays["y"]
    if y.ndim != 1 or y.dtype.kind not in "iub" or len(y) == 0:
        raise ConfigError(
            f"y in {path} must be a non-empty vector of integers, got {y.dtype} of shape {y.shape}"
        )
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise ConfigError(
            f"x in {path} must be numbers with a sample axis and at least one more, got {x.dtype} "
            f"of shape {x.shape}"
        )
    for key in ("x", "test", "client"):
        if key in arrays and (len(arrays[key].shape) == 0 or len(arrays[key]) != len(y)):
            raise ConfigError(
                f"{key} in {path} must have one entry for each of the {len(y)} labels, got shape "
                f"{arrays[key].shape}"
            )
    client, test = arrays.get("client"), arrays.get("test")
    if client is not None and (client.ndim != 1 or client.dtype.kind not in "iu"):
        raise ConfigError(
            f"client in {path} must be a vector of integers, got {client.dtype} of shape "
            f"{client.shape}"
        )
    if test is not None and (
        test.ndim != 1 or test.dtype.kind not in "iub" or not np.isin(test, (0, 1)).all()
    ):
        raise ConfigError(
            f"test in {path} must be a vector of true and false, got {test.dtype} of shape "
            f"{test.shape}"
        )
    y = y.astype(np.int64)
    owners = client.astype(np.int64) if client is not None and (client >= 0).any() else None
    marks = test.astype(bool) if test is not None else None
    return Source(
        path.stem,
        _checked_samples(path, x),
        y,
        _num_classes(path, y, arrays.get("num_classes")),
        owners,
        marks,
    )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the known arrays of an .npz file."""
    if not path.is_file():
        raise ConfigError(f"no file {path}; give the path of an .npz file with arrays x and y")
    try:
        with path.open("rb") as stream:  # opened here, because numpy leaves a broken archive open
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ConfigError(
                    f"{path} holds one bare array; write it with numpy.savez(path, x=..., y=...)"
                )
            with archive:
                return {key: archive[key] for key in archive.files if key in KEYS}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is not an .npz file of plain arrays ({reason}); write it with "
            "numpy.savez(path, x=..., y=...)"
        ) from error


def _checked_samples(path: Path, x: np.ndarray) -> np.ndarray:
    """Return x, in float32 unless it is uint8; NaN is allowed in tables only, where it means
    missing.
    """
    if x.dtype == np.uint8:
        if x.ndim > 4 or (x.ndim == 4 and x.shape[3] not in (1, 3, 4)):
            raise ConfigError(
                f"x in {path} must be (N, D), (N, H, W) or (N, H, W, channels) for type uint8, "
                f"got shape {x.shape}"
            )
        return x
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if np.isinf(x).any():
        raise ConfigError(
            f"x in {path} must be finite in float32, got infinite entries; mark missing values of "
            "a table with NaN"
        )
    if x.ndim > 2 and np.isnan(x).any():
        raise ConfigError(
            f"x in {path} must not have NaN unless it is a table (N, D), got shape {x.shape}"
        )
    return x


def _num_classes(path: Path, y: np.ndarray, stated: np.ndarray | None) -> int:
    """Return C with labels in 0..C-1: what the file states, else the largest label + 1."""
    low, high = int(y.min()), int(y.max())
    if low < 0:
        raise ConfigError(
            f"labels in {path} must be at least 0, got {low}; number the classes from 0"
        )
    if stated is not None:
        if stated.ndim != 0 or stated.dtype.kind not in "iu":
            raise ConfigError(
                f"num_classes in {path} must be one integer, got {stated.dtype} of shape "
                f"{stated.shape}"
            )
        if high >= int(stated):
            raise ConfigError(
                f"labels in {path} must be in [0, {int(stated) - 1}] for num_classes "
                f"{int(stated)}, got {high}"
            )
        return int(stated)
    distinct = len(np.unique(y))
    if high == 0 or 2 * distinct < high + 1:
        raise ConfigError(
            f"labels in {path} have {distinct} values up to {high}; number the classes 0, 1, ... "
            "or store num_classes in the file"
        )
    return high + 1


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
            f"dataset {settings.dataset!r} was not found: no file {path}{own}; set data_dir to "
            "the folder that holds it"
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
