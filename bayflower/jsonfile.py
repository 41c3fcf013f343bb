"""JSON files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty if there is none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
