"""Hugging Face data sets, and whatever has the same names; the library itself is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import doors, loaders
from .parts import Part, Reading, of_parts, shown
from .source import Source
from .tables import frame


def is_hugging(given: Any) -> bool:
    """Return whether an object is a Hugging Face Dataset, or has the same names."""
    return hasattr(given, "column_names") and hasattr(given, "with_format")


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
    rest = [one for one in columns if one not in (label, site)]
    if len(rest) != 1 or not is_block(given, rest[0]):
        if not hasattr(given, "to_pandas"):
            raise ConfigError(f"the data set has columns {shown(columns)}; keep one of samples")
        options = how.options._replace(target=label, site=site or "off")
        return doors.of_tables([frame(given.to_pandas(), "the data set")], "table", options)
    part, owners = hugging_part(given, "the data set", how)
    if owners is None:
        return of_parts({"": (part, None)}, how)
    clients: dict[str, tuple[Part, Part | None]] = {}
    for name in np.unique(owners):
        rows = owners == name
        clients[str(name)] = (Part(part.x[rows], part.y[rows], part.classes), None)
    return of_parts(clients, how)


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
    first = given.with_format("numpy")[:1][column]
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
