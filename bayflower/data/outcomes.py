"""Targets of more than one column: a time and whether its event was seen, or several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ConfigError
from .cells import IS_MISSING, IS_NUMBER, Column

KINDS = ("classes", "numbers", "times", "labels")
TASKS = {"classification": "classes", "ordinal": "classes", "survival": "times", "labels": "labels"}
TIME = ("time", "duration", "days")
EVENT = ("event", "status", "observed")
LABEL = "label_"  # how columns of labels begin, where none are named
TRUE = frozenset({"1", "true", "yes", "y"})
FALSE = frozenset({"0", "false", "no", "n"})


def kind_of(task: str) -> str:
    """Return the kind of the targets of a task."""
    return TASKS.get(task, "numbers")


def columns_of(target: str, names: Sequence[str], kind: str, where: str) -> list[str]:
    """Return the columns of the target: those that `target` lists, else those with usual names."""
    listed = [part.strip() for part in target.split(",") if part.strip()]
    if target in names:
        listed = [target]
    if unknown := [one for one in listed if one not in names]:
        raise ConfigError(f"{where} has no column {unknown[0]!r} for --target")
    if kind == "labels":
        found = listed or [name for name in names if name.lower().startswith(LABEL)]
        if not found:
            raise ConfigError(
                f"{where} has no column that begins with {LABEL}; name the columns of the labels "
                "with --target a,b,c"
            )
        return found
    if listed and len(listed) != 2:
        raise ConfigError(f"task=survival needs --target TIME,EVENT, two columns; got {target!r}")
    for usual in (TIME, EVENT) if not listed else ():
        some = [name for name in names if name.lower() in usual]
        if len(some) != 1:
            raise ConfigError(
                f"{where} has {len(some)} columns called {', '.join(usual)}; name the time and the "
                "event with --target TIME,EVENT"
            )
        listed += some
    return listed


def true_or_not(column: Column, where: str) -> np.ndarray:
    """Return 1, 0, and −1 where it is missing (int64)."""
    words = [str(text).strip().lower() for text in column.texts]
    missing = column.kinds == IS_MISSING
    known = [word.removesuffix(".0") for word in words]
    wrong = [
        word
        for word, gone in zip(known, missing, strict=True)
        if not gone and word not in TRUE | FALSE
    ]
    if wrong:
        raise ConfigError(f"{where} must hold 1 and 0, or true and false; got {wrong[0]!r}")
    return np.where(missing, -1, [word in TRUE for word in known]).astype(np.int64)


def of_columns(
    columns: Mapping[str, Column], kind: str, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (targets, the rows that have one) from columns by name: (time, event) as float64, or
    labels as int64 with −1 where one is missing.
    """
    if kind == "labels":
        y = np.stack(
            [true_or_not(one, f"column {name!r} of {where}") for name, one in columns.items()],
            axis=1,
        )
        return y, np.flatnonzero((y >= 0).any(axis=1))
    (named, time), (other, second) = columns.items()
    event = true_or_not(second, f"the event in column {other!r} of {where}")
    there = time.kinds != IS_MISSING
    wrong = np.flatnonzero(
        there & ~((time.kinds == IS_NUMBER) & np.isfinite(time.numbers) & (time.numbers >= 0))
    )
    if len(wrong):
        raise ConfigError(
            f"the time in column {named!r} of {where} must be a number from 0, got "
            f"{time.texts[wrong[0]]!r}"
        )
    y = np.stack([np.where(there, time.numbers, 0.0), event], axis=1).astype(np.float64)
    return y, np.flatnonzero(there & (event >= 0))


def of_array(y: np.ndarray, kind: str, path: str) -> np.ndarray:
    """Return the targets in an array: (N, 2) times and events, or (N, L) labels with NaN or −1
    where one is not known.
    """
    width = "2), time and event" if kind == "times" else "labels)"
    fits = y.ndim == 2 and y.size and (kind == "labels" or y.shape[1] == 2)
    if not fits or y.dtype.kind not in "iubf":
        raise ConfigError(
            f"y in {path} must be numbers of shape (samples, {width}, got {y.dtype} of shape "
            f"{y.shape}"
        )
    known = y.astype(np.float64)
    if kind == "labels":
        known = np.where(np.isnan(known), -1, known)
        if not np.isin(known, (-1, 0, 1)).all():
            raise ConfigError(f"y in {path} must hold 0 and 1, and −1 or NaN where not known")
        return known.astype(np.int64)
    times, events = known.T
    if not (np.isfinite(times) & (times >= 0)).all() or not np.isin(events, (0, 1)).all():
        raise ConfigError(
            f"y in {path} must hold times from 0, and 1 or 0 for an event that was seen or not"
        )
    return known
