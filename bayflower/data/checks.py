"""Checks that the settings of data share."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError
from .known import CROWD, KNOWN, MEASURED
from .outcomes import KINDS
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
    """Raise if targets are to be no classes and the data set or the partition needs classes."""
    member("targets", targets, KINDS)
    if targets == "classes":
        return
    if not own:
        raise ConfigError(f"dataset {dataset!r} has classes; leave task=classification")
    if partition not in ("auto", *BY_COUNT):
        raise ConfigError(
            f"partition must be {', '.join(BY_COUNT)} or auto for targets that are no classes, got "
            f"{partition!r}"
        )


def measured(dataset: str, task: str) -> None:
    """Raise if a known data set is for another task."""
    if (known := MEASURED.get(dataset)) and known != task:
        raise ConfigError(f"dataset {dataset!r} is for task={known}, got task={task}")


def domains(dataset: str, names: tuple[str, ...], partition: str, num_clients: int) -> None:
    """Raise unless several data sets can be joined."""
    if unknown := [name for name in names if name not in KNOWN or name in MEASURED]:
        raise ConfigError(
            f"dataset must be names joined by +, each one of {', '.join(KNOWN)}, got "
            f"{unknown[0]!r} in {dataset!r}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"dataset must name each data set once, got {dataset!r}")
    if partition not in ("dirichlet", "natural", "iid"):
        raise ConfigError(
            f"partition must be dirichlet, natural or iid for several data sets, got {partition!r}"
        )
    if num_clients < len(names):
        raise ConfigError(
            f"num_clients must be at least {len(names)}, one for each data set, got "
            f"{num_clients}; raise num_clients or name fewer data sets"
        )


def generated(dataset: str, partition: str, keep: float, test_fraction: float | None) -> None:
    """Raise unless settings suit a data set that is generated."""
    sizes = "samples_per_client" if dataset == CROWD else "scenario"
    if partition not in ("dirichlet", "natural"):  # the default, and what it is
        raise ConfigError(
            f"partition must not be set for dataset {dataset!r}, got {partition!r}; set "
            f"{sizes} instead"
        )
    if keep != 1:
        raise ConfigError(
            f"keep must be 1 for dataset {dataset!r}, got {keep}; its sizes are set by {sizes}"
        )
    if test_fraction == 0:
        raise ConfigError(
            f"test_fraction must be in (0, 1) for dataset {dataset!r}, got 0; this data set "
            "marks no samples as test"
        )
