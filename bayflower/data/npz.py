"""Data sets in .npz files.

An .npz file holds x, y and optionally test (which samples the original marks as test), client
(natural owner, a number or a name; negative or "" = none), a 0-d num_classes, class_names,
site_names and columns, time (what orders a client's samples), and a 0-d plain: x is what a network
sees, neither scaled nor standardised, and whole numbers stay so. Labels are the classes that occur,
in order; with num_classes they are class numbers from 0. Anything (N, D) is a table, in which NaN
means missing; `images` says how other arrays are read. Arrays of Python objects
are refused: they would need pickle.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from . import cells, columns, images, labels, outcomes
from .source import Names, Source

ALSO = ("num_classes", "class_names", "site_names", "columns", "encoding", "images", "plain")


class Options(NamedTuple):
    """How a user's data are to be read; "" and None = found by rule."""

    target: str = ""  # column (or array) of the labels
    site: str = ""  # column (or array) of the sites; off = none; a manifest for a folder of images
    test: str = ""  # column (or array) of test marks, a file of test samples, or a share
    categorical: str = ""  # columns whose numbers are categories, separated by commas
    drop: str = ""  # columns to leave out
    layout: str = "auto"  # of images
    white: float | None = None  # value of a white pixel
    image_side: int = 0  # pixels that images of a folder are brought to
    unseen: str = ""  # sites whose rows decide nothing: those that are new or left out
    kind: str = "classes"  # what the targets are (`outcomes.KINDS`)
    time: str = ""  # column (or array) that orders samples

    @property
    def measured(self) -> bool:
        """Return whether targets are no classes."""
        return self.kind != "classes"


PLAIN = Options()


def read_npz(path: Path, options: Options = PLAIN, numbers: bool = False) -> Source:
    """Return the data set in an .npz file, checked. `numbers` says that labels are class numbers
    from 0, of which some may not occur.
    """
    return of_arrays(arrays_of(path, options), path.stem, str(path), options, numbers)


def read_numbered(path: Path, num_classes: int) -> Source:
    """Return the data set in an .npz file of a client whose federation knows the number of classes;
    some may not occur.
    """
    arrays = arrays_of(path, PLAIN)
    arrays.setdefault("num_classes", np.array(num_classes))
    return of_arrays(arrays, path.stem, str(path), PLAIN, True)


def read_several(paths: Sequence[Path], name: str, options: Options) -> Source:
    """Return the data set in several .npz files, each a site named after it unless all have
    `client`.
    """
    parts = [arrays_of(path, options) for path in paths]
    shared = set.intersection(*(set(part) for part in parts))
    for path, part in zip(paths, parts, strict=True):
        if lost := [key for key in ("x", "y") if key not in part]:
            raise ConfigError(f"{path} has no array {lost[0]!r}; it needs x and y")
        if part["x"].shape[1:] != parts[0]["x"].shape[1:]:
            raise ConfigError(
                f"x in {path} has samples of shape {part['x'].shape[1:]}, in {paths[0]} "
                f"{parts[0]['x'].shape[1:]}; give all files the same"
            )
        if part["x"].ndim == 0 or part["y"].ndim == 0 or len(part["x"]) != len(part["y"]):
            raise ConfigError(f"x in {path} must have one entry for each label")
    rows = [len(part["y"]) for part in parts]
    whole = {
        key: np.concatenate([part[key] for part in parts]) for key in shared & {"x", "y", "test"}
    }
    if "client" in shared:
        whole["client"] = np.concatenate([part["client"] for part in parts])
    elif options.site != "off":
        whole["client"] = np.repeat(np.array([path.stem for path in paths]), rows)
    for key in ("num_classes", "class_names", "columns", "encoding", "images", "plain"):
        if key in shared:
            if any(not np.array_equal(part[key], parts[0][key]) for part in parts):
                raise ConfigError(f"{key} differs between the files of {name}; make them the same")
            whole[key] = parts[0][key]
    return of_arrays(whole, name, f"the {len(paths)} files of {name}", options, False)


def arrays_of(path: Path, options: Options) -> dict[str, np.ndarray]:
    """Return the known arrays of an .npz file, by the names x, y, test, client, …"""
    marks = options.test if options.test and not is_share(options.test) else "test"
    site = "client" if options.site in ("", "off") else options.site
    wanted = {"x": "x", "y": options.target or "y", "test": marks, "client": site}
    known = {**wanted, **{key: key for key in ALSO}}
    found = content(path, {*known.values(), options.time or "time", "labels"})
    if "labels" in found and found["labels"].dtype.kind == "U":
        found.setdefault("class_names", found["labels"])
    for key, name in known.items():
        if name != key and name not in found:
            raise ConfigError(
                f"{path} has no array {name!r}, only {', '.join(sorted(found)) or 'nothing known'}"
            )
    there = {key: found[name] for key, name in known.items() if name in found}
    if options.site == "off":
        there.pop("client", None)
    if (order := time_of(found, options.time, path)) is not None:
        there["time"] = order
    return there


def time_of(found: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray | None:
    """Return what orders the samples: an array, or a column of x by its name; None if there is
    none.
    """
    if (name or "time") in found:
        return found[name or "time"]
    if not name:
        return None
    head = [str(one) for one in found.get("columns", ())]
    if name not in head:
        raise ConfigError(f"{path} has no array or column {name!r} for time")
    return np.asarray(found["x"][:, head.index(name)])


def is_share(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def content(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    """Return the wanted arrays of an .npz file."""
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
                return {key: archive[key] for key in archive.files if key in wanted}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "Object arrays" in reason:
            raise ConfigError(
                f"{path} has an array of Python objects, such as names from a data frame; store "
                "numbers, or texts with .astype(str)"
            ) from None
        raise ConfigError(
            f"{path} is not an .npz file of plain arrays ({reason}); write it with "
            "numpy.savez(path, x=..., y=...)"
        ) from error


def of_arrays(
    arrays: dict[str, np.ndarray], name: str, path: str, options: Options, numbers: bool
) -> Source:
    """Return the data set in some arrays, checked; `path` is what errors call it."""
    for key in ("x", "y"):
        if key not in arrays:
            raise ConfigError(
                f"{path} has no array {key!r}, only "
                f"{', '.join(sorted(arrays)) or 'nothing known'}; it needs x and y"
            )
    x, y = arrays["x"], arrays["y"]
    several, numbers_too = options.kind in ("times", "labels"), options.kind == "numbers"
    rows = y.ndim == 1 or (numbers_too and y.ndim == 2 and y.dtype.kind in "iubf")
    if not several and (not rows or y.dtype.kind not in "iubfU" or len(y) == 0):
        raise ConfigError(
            f"y in {path} must be a non-empty vector of class numbers or names, got {y.dtype} of "
            f"shape {y.shape}"
        )
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise ConfigError(
            f"x in {path} must be numbers with a sample axis and at least one more, got {x.dtype} "
            f"of shape {x.shape}"
        )
    for key in ("x", "test", "client", "time"):
        if key in arrays and (len(arrays[key].shape) == 0 or len(arrays[key]) != len(y)):
            raise ConfigError(
                f"{key} in {path} must have one entry for each of the {len(y)} labels, got shape "
                f"{arrays[key].shape}"
            )
    owners, sites = owners_of(arrays.get("client"), path)
    sites = texts_of(arrays, "site_names", path, len(sites)) or sites
    classes: tuple[str, ...] | None = None
    if several:
        y = outcomes.of_array(y, options.kind, path)
        number = y.shape[1] if options.kind == "labels" else 1
    elif numbers_too and y.ndim == 2:  # several numbers a sample
        y, number = y.astype(np.float64), 1
    elif numbers_too:
        y, number = labels.measured(cells.read(y, f"y in {path}"), f"y in {path}"), 1
    if options.measured:
        if not np.isfinite(y).all():
            raise ConfigError(f"y in {path} has missing targets; leave those samples out")
    elif numbers or "num_classes" in arrays:
        y = y.astype(np.int64) if y.dtype.kind in "iub" else whole(y, path)
        number = num_classes(path, y, arrays.get("num_classes"))
    else:
        y, classes = labels.classes(cells.read(y, f"y in {path}"), f"y in {path}", counted=True)
        number = len(classes)
        if (y < 0).any():
            raise ConfigError(
                f"y in {path} has {int((y < 0).sum())} missing labels; leave those samples out"
            )
    if options.kind in ("classes", "labels"):
        classes = texts_of(arrays, "class_names", path, number) or classes
    found: images.Images | None
    plain = bool(arrays.get("plain", np.array(False)).any())
    if plain:
        stored, found = as_they_are(x, f"x in {path}"), None
    elif "images" in arrays:  # written by `save`: prepared already
        stored, found = x, images.Images(**json.loads(str(arrays["images"])))
    else:
        stored, found = samples(x, path, options)
    encoder = None
    if "encoding" in arrays:
        encoder = columns.from_json(json.loads(str(arrays["encoding"])))
    inputs = texts_of(arrays, "columns", path, x.shape[1] if x.ndim == 2 else 0) or ()
    return Source(
        name,
        stored,
        y,
        number,
        owners,
        marks_of(arrays.get("test"), path),
        names=Names(sites, classes or (), inputs),
        encoder=encoder,
        images=found,
        plain=plain,
        kind=options.kind,
        time=ordered(arrays.get("time"), path),
    )


def ordered(time: np.ndarray | None, path: str) -> np.ndarray | None:
    """Return what orders samples as numbers; texts such as dates in the order of the alphabet."""
    if time is None:
        return None
    if time.ndim != 1 or time.dtype.kind not in "iubfUM":
        raise ConfigError(f"time in {path} must be a vector of numbers or dates, got {time.dtype}")
    if time.dtype.kind in "UM":
        return np.unique(time, return_inverse=True)[1].reshape(-1).astype(np.float64)
    if np.isnan(time.astype(np.float64)).any():
        raise ConfigError(f"time in {path} has missing values; leave those samples out")
    return time.astype(np.float64)


def as_they_are(x: np.ndarray, where: str) -> np.ndarray:
    """Return samples for a network without any change: float32, or int64 if they are whole."""
    if x.dtype.kind in "iub":
        return x.astype(np.int64)
    with np.errstate(over="ignore"):
        return images.finite(x.astype(np.float32), where)


def texts_of(
    arrays: dict[str, np.ndarray], key: str, path: str, number: int
) -> tuple[str, ...] | None:
    """Return the texts of an array of names; None if there is none."""
    if key not in arrays:
        return None
    found = arrays[key]
    if found.shape != (number,) or len(set(found.tolist())) < number:
        raise ConfigError(
            f"{key} in {path} must be {number} different names, got shape {found.shape}"
        )
    return tuple(str(one) for one in found)


def owners_of(client: np.ndarray | None, path: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return (the owner's number of each sample, −1 = nobody; the owners' names)."""
    if client is None:
        return None, ()
    if client.ndim != 1 or client.dtype.kind not in "iuU":
        raise ConfigError(
            f"client in {path} must be a vector of integers or names, got {client.dtype} of shape "
            f"{client.shape}"
        )
    if client.dtype.kind == "U":
        names, place = np.unique(client[client != ""], return_inverse=True)
        found = np.full(len(client), -1, np.int64)
        found[client != ""] = place.reshape(-1)
        return (found, tuple(str(one) for one in names)) if len(names) else (None, ())
    if not (client >= 0).any():
        return None, ()
    return client.astype(np.int64), tuple(str(one) for one in np.unique(client[client >= 0]))


def marks_of(test: np.ndarray | None, path: str) -> np.ndarray | None:
    """Return which samples are test."""
    if test is None:
        return None
    if test.ndim != 1 or test.dtype.kind not in "iub" or not np.isin(test, (0, 1)).all():
        raise ConfigError(
            f"test in {path} must be a vector of true and false, got {test.dtype} of shape "
            f"{test.shape}"
        )
    return test.astype(bool)


def samples(x: np.ndarray, path: str, options: Options) -> tuple[Any, images.Images | None]:
    """Return (x as it is stored, how images were read)."""
    if x.ndim > 2:
        return images.read(x, options.layout, options.white, f"x in {path}")
    if x.dtype == np.uint8:
        return x, None
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if np.isinf(x).any():
        raise ConfigError(
            f"x in {path} must be finite in float32, got infinite entries; mark missing values of "
            "a table with NaN"
        )
    return x, None


def whole(y: np.ndarray, path: str) -> np.ndarray:
    """Return class numbers as integers."""
    if y.dtype.kind != "f" or not (np.isfinite(y) & (y == np.round(y))).all():
        raise ConfigError(f"y in {path} must be class numbers from 0, as num_classes is given")
    return y.astype(np.int64)


def num_classes(path: str, y: np.ndarray, stated: np.ndarray | None) -> int:
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
