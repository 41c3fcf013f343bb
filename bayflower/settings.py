"""Settings as fields of frozen dataclasses, each with a default and a meaning for the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConfigError

Presets = dict[str, dict[str, Any]]  # settings by name, by the name of the preset


def setting(default: Any, meaning: str, **before: Any) -> Any:
    """Return a field of a settings class; `bayflower settings` shows its meaning. A setting that
    came later names with `before` what runs had that did not know it, if not its default.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, **before})


def earlier(kind: Any) -> dict[str, Any]:
    """Return what settings were in runs that did not know them, where that is not the default."""
    named = {one.name: one.metadata for one in dataclasses.fields(kind)}
    return {name: known["before"] for name, known in named.items() if "before" in known}


def meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each field of a settings class."""
    return {field.name: field.metadata.get("meaning", "") for field in dataclasses.fields(kind)}


def with_pairs(
    given: Mapping[str, Any],
    texts: Iterable[str],
    wrong: str = "--set needs KEY=VALUE",
    example: str = "--set lr=0.01",
) -> dict[str, Any]:
    """Return `given` with the settings in KEY=VALUE texts; the rest is for the error text."""
    found = dict(given)
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"{wrong}, got {text!r}; for example {example}")
        name = key.replace("-", "_")
        if name in found:
            raise ConfigError(f"setting {key!r} was given twice; give it once")
        found[name] = value
    return found


def paper(
    optimizer: str, lr: float, batch_size: int, local_epochs: int, **others: Any
) -> dict[str, dict[str, Any]]:
    """Return the preset `paper`: how a method's paper trains clients, and its other settings."""
    return {
        "paper": {
            "optimizer": optimizer,
            "lr": lr,
            "batch_size": batch_size,
            "local_epochs": local_epochs,
            **others,
        }
    }
