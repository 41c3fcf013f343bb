"""Checks that the settings of data share."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError
from .tables import is_table


def is_path(text: str) -> bool:
    """Return whether a data set is a user's own: a file, several, or a folder."""
    return (
        text.endswith(".npz")
        or is_table(text)
        or any(mark in text for mark in ("/", os.sep, "*", "?", "[", ","))
        or Path(text).is_dir()
    )


def names_in(text: str) -> list[str]:
    """Return the names in a list, separated by commas, or by semicolons if there is one."""
    parts = text.split(";" if ";" in text else ",")
    return [part.strip() for part in parts if part.strip()]


def member(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise unless a value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def at_least(name: str, value: int, least: int, remedy: str) -> None:
    """Raise unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}{remedy}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}{remedy}")


BY_COUNT = ("natural", "iid", "quantity")  # partitions that need no classes


def numeric(targets: str, dataset: str, own: bool, partition: str) -> None:
    """Raise if targets are to be numbers and the data set or the partition needs classes."""
    member("targets", targets, ("classes", "numbers"))
    if targets == "classes":
        return
    if not own:
        raise ConfigError(f"dataset {dataset!r} has classes; leave task=classification")
    if partition not in ("auto", *BY_COUNT):
        raise ConfigError(
            f"partition must be {', '.join(BY_COUNT)} or auto for targets that are numbers, got "
            f"{partition!r}"
        )
