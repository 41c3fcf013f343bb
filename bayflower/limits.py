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
    ask_again_seconds: float = 120.0  # silence after which a node that is online is asked again, then after twice that time; 0 = never
    max_message_mb: int = 2048  # largest content of a reply, in millions of bytes; a larger one is not unpacked
    max_examples: int = 100_000_000  # most training samples that a client may claim
    max_share: float = 1.0  # largest share of a round's samples (pFedVMP: also of a class's precision) one client may have; 1 = no limit
    max_change: float = 1e4  # largest norm of a client's change of the model, as a multiple of 1 + the model's own norm
    max_precision: float = 1e6  # largest precision that a client may claim for one number (FedLA, FedNP)
    max_value: float = 1e12  # largest size of any other number in an update

    def __post_init__(self) -> None:
        for name in ("max_faults", "leave_after", "max_message_mb", "max_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, none in (("rejoin_seconds", "not to wait"), ("ask_again_seconds", "never")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and not negative, got {getattr(self, name)}; 0 means {none}")
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"max_share must be in (0, 1], got {self.max_share}; 1 means no limit")
        for name in ("max_change", "max_precision", "max_value"):
            if not 0 < getattr(self, name) <= 1e30:
                raise ConfigError(f"{name} must be in (0, 1e30], got {getattr(self, name)}")
