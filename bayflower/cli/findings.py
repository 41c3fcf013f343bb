"""What `bayflower doctor` found."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line: what was looked at, how it is, what was seen, and what to do."""

    what: str
    # missing: something does not work without it; wrong: it must be repaired
    state: Literal["ok", "missing", "wrong"]
    seen: str
    remedy: str = ""
