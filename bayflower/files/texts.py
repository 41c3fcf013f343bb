"""Atomic writing of JSON and text files, without torch: a reader sees a complete file or none."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise one line that names `path` if it cannot be written; for files that a person names."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); name a file in a folder that "
            "is writable and has space"
        ) from None


def write_json(path: Path, content: Any, private: bool = False) -> None:
    """Write `content` as JSON so that a reader sees the old file or the new one, never a part; with
    `private`, nobody but the owner can read it.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False), private)


def finite(content: Any) -> Any:
    """Return JSON content with None in place of numbers that are not finite."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return content


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part; with `private`,
    nobody but the owner can read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or unreadable."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
