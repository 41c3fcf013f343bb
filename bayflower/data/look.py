"""A look at data before training: how they were read, in words, and what looks wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import images
from .settings import DataSettings
from .source import Source

FEW = 30  # rows of a site, or of a class, below which results say little
TELLS = 0.99  # share of rows whose class one column tells alone
BINS = 20
CODES = 10  # whole numbers with at most so many values may be codes


def in_words(source: Source) -> str:
    """Return in one sentence how a data set was read."""
    rows, classes = len(source.y), source.class_names()
    if source.encoder is not None:
        used, inputs = len(source.encoder.inputs), len(source.names.columns)
        hot = sum(one.kind == "category" for one in source.encoder.inputs)
        gaps = sum(one.missing for one in source.encoder.inputs)
        said = f"table of {rows} rows, {used} columns as {inputs} inputs"
        more = [f"{hot} by category"] * bool(hot) + [f"{gaps} with missing values"] * bool(gaps)
        said += f" ({', '.join(more)})" if more else ""
    elif source.x.ndim == 2:
        said = f"table of {rows} rows, {source.x.shape[1]} columns"
    elif source.images is not None:
        said = f"{rows} {images.in_words(source.images, shape_of(source))}"
    else:
        said = f"{rows} samples of shape {'×'.join(map(str, shape_of(source)))}"
    if source.measured:
        sites = source.site_names()
        where = f"; {len(sites)} sites" if sites else ""
        return f"{source.name}: {said}; {targets(source)}{where}"
    known = ", ".join(classes) if len(classes) <= 5 else f"{classes[0]} … {classes[-1]}"
    sites = source.site_names()
    where = f"; {len(sites)} sites" if sites else ""
    return f"{source.name}: {said}; {len(classes)} classes ({known}){where}"


def targets(source: Source) -> str:
    """Return in words what targets that are no classes are like."""
    if source.kind == "times":
        events, longest = int((source.y[:, 1] > 0).sum()), float(source.y[:, 0].max())
        return f"targets are times up to {longest:g}, {events} of them with an event"
    if source.kind == "labels":
        names = source.class_names()
        known = ", ".join(names) if len(names) <= 5 else f"{names[0]} … {names[-1]}"
        gone = int((source.y < 0).sum())
        said = f"; {gone} are missing" if gone else ""
        return f"{source.y.shape[1]} labels" + (f" ({known}{said})" if names else said)
    return f"targets are numbers from {float(source.y.min()):g} to {float(source.y.max()):g}"


def of_site(source: Source, y: np.ndarray) -> dict[str, Any]:
    """Return what a site's targets are like, where they are no classes."""
    if source.kind == "times":
        return {"events": int((y[:, 1] > 0).sum()), "longest": round(float(y[:, 0].max()), 4)}
    if source.kind == "labels":
        names = source.class_names() or [f"label {k}" for k in range(y.shape[1])]
        return {f"{name} true": int((y[:, k] > 0).sum()) for k, name in enumerate(names)}
    return {"mean": round(float(y.mean()), 4), "std": round(float(y.std()), 4)}


def shape_of(source: Source) -> tuple[int, ...]:
    """Return the shape of one sample as a network sees it."""
    return tuple(source.samples(np.arange(1)).shape[1:])


def columns(source: Source) -> list[dict[str, Any]]:
    """Return a row for each column of a table with named columns: how it is read."""
    if source.encoder is None:
        return []
    names, found = list(source.names.columns), []
    for one in source.encoder.inputs:
        first = names.index(one.labels()[0])
        x = source.x[:, first : first + len(one.labels())]
        if one.kind == "number":
            gone = int(np.isnan(x[:, 0]).sum())
            known = x[~np.isnan(x[:, 0]), 0]
            said = f"{known.min():g} … {known.max():g}" if len(known) else ""
        else:
            gone = int(x[:, -1].sum()) if one.missing else 0
            counts = x[:, : len(one.values) + 1].sum(axis=0).astype(int)
            pairs = sorted(zip(counts, (*one.values, "other"), strict=True), reverse=True)
            said = ", ".join(f"{value} {count}" for count, value in pairs[:4] if count)
            said += f", … ({len(one.values)} values)" if len(one.values) > 4 else ""
        row = {"column": one.name, "read as": one.kind, "inputs": len(one.labels())}
        found.append({**row, "missing": gone, "values": said})
    return found


def sites(source: Source) -> list[dict[str, Any]]:
    """Return a row for each site, or one for all: its samples by class."""
    classes = source.class_names()
    groups = [("all", np.arange(len(source.y)))]
    if source.client is not None:
        groups = [
            (name, np.flatnonzero(source.client == owner))
            for name, owner in zip(source.site_names(), source.owners(), strict=True)
        ]
    found = []
    for name, rows in groups:
        row: dict[str, Any] = {"site": name, "rows": len(rows)}
        if source.test is not None:
            row["test"] = int(source.test[rows].sum())
        if source.measured:
            found.append({**row, **of_site(source, source.y[rows])})
            continue
        counts = np.bincount(source.y[rows], minlength=len(classes))
        found.append({**row, **{label: int(n) for label, n in zip(classes, counts, strict=True)}})
    return found


def wrong(source: Source, settings: DataSettings) -> list[str]:
    """Return what looks wrong, a line each."""
    return [*sizes(source, settings), *rows_twice(source), *odd_columns(source), *pictures(source)]


def sizes(source: Source, settings: DataSettings) -> list[str]:
    """Return what looks wrong about the sizes of sites and classes."""
    found, classes = [], source.class_names()
    by_site = source.client is not None and settings.partition == "natural"
    for row in sites(source) if by_site else []:
        name, number = row["site"], row["rows"]
        present = [] if source.measured else [label for label in classes if row[label]]
        if number < settings.min_size:
            found.append(
                f"site {name!r} has {number} rows, fewer than min_size {settings.min_size}: leave "
                f"it out (leave_out={name}) or lower min_size"
            )
        elif number < FEW:
            found.append(f"site {name!r} has {number} rows only: its own results say little")
        if len(present) == 1 and not source.measured:
            found.append(f"site {name!r} has one class only, {present[0]!r}")
    counts: Any = [] if source.measured else np.bincount(source.y, minlength=len(classes))
    for label, count in zip(classes, counts, strict=False):
        if count < FEW:
            found.append(f"class {label!r} has {count} rows only")
    if by_site and len(source.site_names()) == 1:
        found.append("there is one site only; a federation needs two or more")
    return found


def rows_twice(source: Source) -> list[str]:
    """Return whether samples occur twice, and in training and test."""
    if not isinstance(source.x, np.ndarray) or not len(source.y):
        return []
    flat = np.ascontiguousarray(source.x).reshape(len(source.y), -1)
    keys = [row.tobytes() + y.tobytes() for row, y in zip(flat, source.y, strict=True)]
    seen: dict[bytes, int] = {}
    for key in keys:
        seen[key] = seen.get(key, 0) + 1
    copies = sum(count - 1 for count in seen.values())
    found = []
    if source.test is not None and source.test.any():
        train = {key for key, mark in zip(keys, source.test, strict=True) if not mark}
        both = sum(key in train for key, mark in zip(keys, source.test, strict=True) if mark)
        if both:
            found.append(f"{both} test samples are also in training, value for value")
    elif copies:
        found.append(
            f"{copies} of {len(keys)} samples {'is a copy' if copies == 1 else 'are copies'} of "
            "others, value for value: a copy may be in training and in test"
        )
    return found


def odd_columns(source: Source) -> list[str]:
    """Return what looks wrong about the columns of a table."""
    if source.x.ndim != 2:
        return []
    found = []
    flags = source.flags()
    names = source.names.columns or tuple(f"column {k}" for k in range(source.x.shape[1]))
    for place, name in enumerate(names):
        x = source.x[:, place].astype(np.float64)
        known = x[~np.isnan(x)]
        if not len(known):
            found.append(f"{name!r} has no value")
            continue
        flag = flags is not None and flags[place]
        distinct = len(np.unique(known))
        if distinct == 1 and not flag:
            found.append(f"{name!r} is constant: it tells nothing")
        if 2 * len(known) < len(x):
            found.append(f"{name!r} is missing in {1 - len(known) / len(x):.0%} of the rows")
        whole = bool((known == np.round(known)).all())
        if whole and not flag and distinct == len(known) > FEW and np.ptp(known) < 10 * len(known):
            found.append(f"{name!r} has another whole number in every row, like an id: drop it")
        if whole and not flag and len(known) > FEW and 19e6 < known.min() <= known.max() < 21.1e6:
            found.append(f"{name!r} looks like dates written as numbers: drop it")
        if whole and not flag and 2 < distinct <= CODES and len(known) > FEW:
            remedy = "one column for each" if source.encoder is None else f"categorical={name}"
            found.append(f"{name!r} has {distinct} whole numbers; if they are codes, {remedy}")
        if not source.measured and tells(x, source.y) and distinct > 1:
            found.append(
                f"{name!r} alone tells the class in at least {TELLS:.0%} of the rows: does it know "
                "the outcome?"
            )
    return found


def tells(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether a column alone tells the class: by the commonest class in each of 20 bins, or
    of each value if there are fewer.
    """
    counts = np.bincount(y)
    if len(y) < FEW or counts.max() > TELLS * len(y) - 1 or counts.max() > 0.95 * len(y):
        return False
    filled = np.where(np.isnan(x), np.nanmin(x) - 1.0, x)
    values = np.unique(filled)
    cuts = (
        values[1:]
        if len(values) <= BINS
        else np.unique(np.quantile(filled, np.linspace(0, 1, BINS + 1)[1:-1]))
    )
    bins = np.searchsorted(cuts, filled, side="right")
    table = np.zeros((len(cuts) + 1, len(counts)), np.int64)
    np.add.at(table, (bins, y), 1)
    return bool(table.max(axis=1).sum() >= TELLS * len(y))


def pictures(source: Source) -> list[str]:
    """Return what looks wrong about images."""
    x = source.x
    if not isinstance(x, np.ndarray) or not len(source.y):
        return []
    if x.ndim == 2:
        side = int(np.sqrt(x.shape[1]))
        if side * side == x.shape[1] and side >= 8 and source.encoder is None:
            known = x[~np.isnan(x)] if x.dtype.kind == "f" else x
            if len(known) and known.min() >= 0 and (known == np.round(known)).all():
                return [
                    f"rows of {side}×{side} whole numbers look like flattened images: "
                    f"x.reshape(-1, {side}, {side})"
                ]
        return []
    if x.dtype == np.uint8 and int(x.max()) < 32:
        return [f"pixels reach {int(x.max())} only, where white is 255: set white"]
    return []
