"""How much a server puts up with: bounds on what a client may send, and when a client no longer counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds for peers; `SECURITY.md` says what each protects. The fused engine, which has no peers, does not look at them."""

    max_faults: int = 5  # replies in a row that cannot be used after which a client is excluded from the run
    leave_after: int = 3  # rounds in a row without a reply after which a client counts as gone; it may come back
    rejoin_seconds: float = 90.0  # how long a client whose node is lost is waited for before the round goes on without it

    def __post_init__(self) -> None:
        for name in ("max_faults", "leave_after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rejoin_seconds < math.inf:
            raise ConfigError(f"rejoin_seconds must be finite and not negative, got {self.rejoin_seconds}; 0 means not to wait")
