"""Settings of secure sums: the server sees the sum of the clients' statistics, and no client's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import ConfigError
from ..settings import setting

LIMBS = (1, 4)


@dataclass(frozen=True)
class Privacy:
    """What the server may see. `docs/privacy.md` says what leaves a client."""

    secure: Literal["off", "sum"] = setting(
        "off",
        "sum: clients mask their updates so that the server learns only the sum over all of them; "
        "at least 3 clients a round",
    )
    secure_limbs: int = setting(
        2,
        "secure=sum: numbers of 8 bytes for each real number; 1 halves the bytes and rounds small "
        "values, 2 or 3 lose no bit of a usual model",
    )
    secure_range: float = setting(
        1048576.0,
        "secure=sum: bound on the numbers of an update, a sample; a client with larger ones stays "
        "out of the round",
    )
    secure_threshold: float = setting(
        2 / 3,
        "secure=sum: more than this share of the clients must send an update and help to unmask "
        "the sum, or the round is refused",
    )

    def __post_init__(self) -> None:
        if self.secure not in ("off", "sum"):
            raise ConfigError(f"secure must be off or sum, got {self.secure!r}")
        if not LIMBS[0] <= self.secure_limbs <= LIMBS[1]:
            raise ConfigError(f"secure_limbs must be 1 to {LIMBS[1]}, got {self.secure_limbs}")
        if not 2.0**-20 <= self.secure_range <= 2.0**60:
            raise ConfigError(
                f"secure_range must be in [2^-20, 2^60], got {self.secure_range}; it bounds the "
                "numbers of an update"
            )
        if not 0.5 <= self.secure_threshold < 1:
            raise ConfigError(
                f"secure_threshold must be in [0.5, 1), got {self.secure_threshold}; with less "
                "than half two groups of clients could be told different things"
            )

    @property
    def on(self) -> bool:
        """Return whether sums are secure."""
        return self.secure != "off"

    def refuses(self, row: Any, options: Any, limits: Any) -> str | None:
        """Return why a method cannot have secure sums with these settings, or None."""
        if not self.on:
            return None
        if row.additive:
            return f"secure=sum is not for {row.name}: {row.additive}"
        for name, why in row.unless.items():
            key, _, value = name.partition("=")
            if str(vars(options)[key]) == value:
                return f"secure=sum is not for {row.name} with {name}: {why}"
        if limits.max_share < 1:
            return (
                "secure=sum hides how large a client's part is, so max_share cannot cap it; remove "
                "one of the two settings"
            )
        if limits.robust in ("median", "trimmed", "krum"):
            return (
                f"secure=sum hides each client's update, which robust={limits.robust} compares; "
                "leave robust at its default, or set secure=off"
            )
        return None


# runs of an earlier version did not have these settings
SECRECY = {field.name: field.default for field in fields(Privacy)}
