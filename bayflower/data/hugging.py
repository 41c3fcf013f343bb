"""Hugging Face data sets, and whatever has the same names; the library itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, in_one_line
from . import doors, loaders
from .parts import Part, Reading, of_parts, shown
from .source import Source
from .tables import frame


def is_hugging(given: Any) -> bool:
    """Return whether an object is one Hugging Face Dataset, or has the same names."""
    names = hasattr(given, "column_names") and hasattr(given, "with_format")
    return names and not isinstance(given, Mapping)


def of_hugging(given: Any, how: Reading) -> Source:
    """Return the data in one Hugging Face Dataset: a column of labels, and one of samples or
    several of numbers and texts; a column of sites divides them into clients.
    """
    columns = [str(name) for name in given.column_names]
    label = label_of(columns, how, "the data set")
    site = how.options.site or next((one for one in columns if one.lower() in doors.SITES), "")
    if site == "off":
        site = ""
    if site and site not in columns:
        raise ConfigError(f"the data set has no column {site!r} for site; it has {shown(columns)}")
    if is_tabular(given, how, "the data set"):
        options = how.options._replace(target=label, site=site or "off")
        return doors.of_tables([frame(data_frame(given), "the data set")], "table", options)
    part, owners = hugging_part(given, "the data set", how)
    if owners is None:
        return of_parts({"": (part, None)}, how)
    return of_parts({name: (one, None) for name, one in by_site(part, owners).items()}, how)


def of_splits(given: Mapping[str, Any], how: Reading) -> Source:
    """Return the data in a training and a test Dataset, whose column of sites divides both."""
    (train, owners), (test, others) = (
        hugging_part(given[name], f"the part {name!r}", how) for name in ("train", "test")
    )
    if owners is None or others is None:
        return of_parts({"": (train, test)}, how)
    tests = by_site(test, others)
    return of_parts(
        {name: (one, tests.get(name)) for name, one in by_site(train, owners).items()}, how
    )


def by_site(part: Part, owners: np.ndarray) -> dict[str, Part]:
    """Return the samples of each site by its name."""
    found = {}
    for name in np.unique(owners):
        rows = owners == name
        found[str(name)] = Part(part.x[rows], part.y[rows], part.classes)
    return found


# -- tables ----------------------------------------------------------------------------------------
def as_tables(given: Any, how: Reading) -> Any:
    """Return clients' data with each Hugging Face Dataset of several columns as a data frame."""
    if isinstance(given, Mapping):
        return {name: as_tables(one, how) for name, one in given.items()}
    if isinstance(given, list) or (isinstance(given, tuple) and any(map(is_hugging, given))):
        return type(given)(as_tables(one, how) for one in given)
    if is_hugging(given) and is_tabular(given, how, "the data set"):
        return data_frame(given)
    return given


def is_tabular(given: Any, how: Reading, what: str) -> bool:
    """Return whether a Dataset has several columns of numbers and texts, and none of samples."""
    columns = [str(name) for name in given.column_names]
    away = (label_of(columns, how, what), how.options.site, *doors.SITES)
    rest = [one for one in columns if one not in away and one.lower() not in away]
    if any(is_block(given, one) for one in rest):
        return False
    if not hasattr(given, "to_pandas"):
        raise ConfigError(f"{what} has columns {shown(columns)}; keep one of samples")
    return True


def data_frame(given: Any) -> Any:
    """Return a Dataset as a data frame, with classes by their names."""
    found = given.to_pandas()
    features: Any = getattr(given, "features", None)
    for column in given.column_names:
        kind = features.get(column) if hasattr(features, "get") else None
        if names := list(map(str, getattr(kind, "names", None) or ())):
            known = dict(enumerate(names))  # −1 is a label that is missing
            found[column] = [known.get(int(one)) if one == one else None for one in found[column]]
    return found


# -- Flower's partitioners -------------------------------------------------------------------------
def is_partitioner(given: Any) -> bool:
    """Return whether an object is a partitioner of Flower Datasets, or a FederatedDataset."""
    return hasattr(given, "load_partition") and (
        hasattr(given, "partitioners") or hasattr(type(given), "num_partitions")
    )


def of_partitioner(given: Any) -> Any:
    """Return the clients of a partitioner: a list, or a dict where partitions have names."""
    if hasattr(given, "partitioners"):  # a FederatedDataset
        splits = {name: divided(given, name) for name in given.partitioners}
        train = splits.get("train", next(iter(splits.values()), None))
        if train is None:
            raise ConfigError("the FederatedDataset has no partitioner; give it one for 'train'")
        return train if len(splits) == 1 or "test" not in splits else paired(train, splits["test"])
    try:
        parts = [given.load_partition(one) for one in range(int(given.num_partitions))]
    except AttributeError as error:
        reason = in_one_line(error, 120)
        raise ConfigError(
            f"the {type(given).__name__} has no data ({reason}); set partitioner.dataset first"
        ) from None
    names = getattr(given, "partition_id_to_natural_id", None) or {}
    if set(names) != set(range(len(parts))) or len({*map(str, names.values())}) < len(parts):
        return parts
    return unmarked({str(names[place]): part for place, part in enumerate(parts)})


def divided(given: Any, split: str) -> Any:
    """Return the clients of one split of a FederatedDataset."""
    given.load_partition(0, split)  # reads the data set, so that the partitioner has it
    return of_partitioner(given.partitioners[split])


def paired(train: Any, test: Any) -> Any:
    """Return clients with a training and a test part."""
    if isinstance(train, dict) and isinstance(test, dict):
        return {name: {"train": one, "test": test.get(name)} for name, one in train.items()}
    if len(train) != len(test):
        raise ConfigError(
            f"the partitioner of 'train' has {len(train)} partitions, that of 'test' {len(test)}; "
            "give both the same number"
        )
    return [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]


def unmarked(parts: dict[str, Any]) -> dict[str, Any]:
    """Return partitions without the column that holds their own names."""
    first = next(iter(parts.values()))
    found = [
        column
        for column in first.column_names
        if all(len(part) and str(part[0][column]) == name for name, part in parts.items())
    ]
    return {name: part.remove_columns(found) for name, part in parts.items()}


def hugging_part(given: Any, what: str, how: Reading) -> tuple[Part, np.ndarray | None]:
    """Return (samples and labels, the site of each or None) of a Hugging Face Dataset."""
    columns = [str(name) for name in given.column_names]
    label = label_of(columns, how, what)
    site = next((one for one in columns if one == how.options.site), None) or next(
        (one for one in columns if one.lower() in doors.SITES and how.options.site != "off"), None
    )
    rest = [one for one in columns if one not in (label, site)]
    if len(rest) != 1:
        raise ConfigError(
            f"{what} has columns {shown(columns)}; keep the labels and one column of samples "
            "(select_columns), or give data frames (to_pandas)"
        )
    rows = given.with_format("numpy")[:]
    x, y = block(rows[rest[0]], rest[0], what), np.asarray(rows[label])
    features: Any = getattr(given, "features", None)
    kind = features.get(label) if hasattr(features, "get") else None
    names = tuple(map(str, getattr(kind, "names", None) or ()))
    if not len(y):
        raise ConfigError(f"{what} has no samples; every client needs some, or leave it out")
    return Part(x, y, names), None if site is None else np.asarray(rows[site]).astype(str)


def label_of(columns: Sequence[str], how: Reading, what: str) -> str:
    """Return the column of the labels."""
    if how.options.target:
        if how.options.target not in columns:
            raise ConfigError(
                f"{what} has no column {how.options.target!r} for target; it has {shown(columns)}"
            )
        return how.options.target
    usual = (*loaders.LABELS, *doors.TARGETS)
    found = [one for one in columns if one.lower() in usual]
    if len(found) != 1:
        raise ConfigError(
            f"{what} has columns {shown(columns)}; name the column of the labels with target=…"
        )
    return found[0]


def is_block(given: Any, column: str) -> bool:
    """Return whether a column holds arrays, such as images or tokens, and no single values."""
    try:
        first = list(given.with_format("numpy")[:1][column])
    except (TypeError, NotImplementedError):
        raise ConfigError(
            f"a {type(given).__name__} is read as a stream; load it into a Dataset first, e.g. "
            "Dataset.from_generator"
        ) from None
    return len(first) > 0 and np.asarray(first[0]).ndim > 0


def block(rows: Any, column: str, what: str) -> np.ndarray:
    """Return the samples of a column as one array."""
    try:
        found = np.stack([np.asarray(one) for one in rows])
    except ValueError:
        found = np.empty(0, object)
    if found.dtype.kind not in "iubf":
        raise ConfigError(
            f"column {column!r} of {what} does not hold numbers of one shape; pad or resize its "
            "samples"
        )
    return found
