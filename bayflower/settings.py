"""Settings as fields of frozen dataclasses, each with a default and a meaning for the user."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(default: Any, meaning: str) -> Any:
    """Return a field of a settings class; `bayflower settings` shows its meaning."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each field of a settings class."""
    return {field.name: field.metadata.get("meaning", "") for field in dataclasses.fields(kind)}
