"""Settings: what a client may send, and what happens if it sends something else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, check_choices
from ..settings import setting


@dataclass(frozen=True)
class Limits:
    """Limits on what a client may send, and when it is dropped (`SECURITY.md`). The fused engine
    trains all clients itself and ignores them, but for `robust`."""

    max_faults: int = setting(
        5, "invalid replies in a row after which a client is excluded from the run"
    )
    leave_after: int = setting(
        3, "rounds in a row without a reply after which a client is dropped; it may rejoin"
    )
    rejoin_seconds: float = setting(
        90.0,
        "timeout for a client whose node is lost to rejoin; then the round continues without it",
    )
    ask_again_seconds: float = setting(
        120.0,
        "seconds without a reply after which a message to an online node is sent again; the time "
        "doubles with each retry; 0 = never",
    )
    max_message_mb: int = setting(
        2048, "cap on the size of a reply, in millions of bytes; larger replies are rejected"
    )
    max_examples: int = setting(100_000_000, "cap on the training samples a client may claim")
    max_share: float = setting(
        1.0,
        "cap on one client's share of a round's samples (pFedVMP: also of a class's precision); 1 "
        "= no cap",
    )
    max_change: float = setting(
        1e4,
        "cap on the norm of a client's change of the model, as a multiple of 1 + the model's norm",
    )
    max_precision: float = setting(
        1e6, "cap on any precision that a client may claim (FedLA, FedNP)"
    )
    max_value: float = setting(1e12, "cap on the absolute value of any other number in an update")
    robust: Literal["gate", "clip", "off", "median", "trimmed", "krum"] = setting(
        "gate",
        "bound on one client next to the others, on every engine: gate (change, count, certainty: "
        "by medians of earlier rounds; clients far beyond, or whose changes oppose the others' or "
        "their own past, are left out); clip (nobody is left out); off; or clip and a rule on all "
        "replies of a round: median, trimmed, krum",
    )
    continuity: Literal["report", "refuse"] = setting(
        "report",
        "a reply that does not start from the client's last state, or has other data: report it as "
        "a fault and use it, or refuse it",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("max_faults", "leave_after", "max_message_mb", "max_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, none in (("rejoin_seconds", "no waiting"), ("ask_again_seconds", "no retries")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}; 0 means "
                    f"{none}"
                )
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"max_share must be in (0, 1], got {self.max_share}; 1 means no cap")
        check_choices(self)
        for name in ("max_change", "max_precision", "max_value"):
            if not 0 < getattr(self, name) <= 1e30:
                raise ConfigError(f"{name} must be in (0, 1e30], got {getattr(self, name)}")
