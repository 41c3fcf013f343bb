"""Settings of privacy: secure sums (the server sees the sum of the clients' statistics, and no
client's) and differential privacy (nobody can tell from the models whether a client took part).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

    dp: Literal["off", "client", "local", "sample"] = setting(
        "off",
        "differential privacy: noise hides whether a client took part (client), also from the "
        "server (local), or single samples of a client (sample); the run stops before dp_epsilon "
        "is overspent",
    )
    dp_epsilon: float = setting(8.0, "dp: the budget; a run stops before it spends more")
    dp_delta: float = setting(1e-5, "dp: probability with which the bound dp_epsilon may fail")
    dp_clip: float = setting(
        1.0, "dp: norm to which a client's change, or a sample's gradient, is cut before the sum"
    )
    dp_noise: float = setting(
        0.0,
        "dp: standard deviation of the noise in units of dp_clip; 0 = found so that all rounds "
        "just fit into the budget",
    )

    def __post_init__(self) -> None:
        if self.secure not in ("off", "sum"):
            raise ConfigError(f"secure must be off or sum, got {self.secure!r}")
        if self.dp not in ("off", "client", "local", "sample"):
            raise ConfigError(f"dp must be off, client, local or sample, got {self.dp!r}")
        for name, most in (("dp_epsilon", 1e3), ("dp_clip", 1e6)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} must be in (0, {most:g}], got {getattr(self, name)}")
        if not 0 < self.dp_delta < 0.1:
            raise ConfigError(
                f"dp_delta must be in (0, 0.1), got {self.dp_delta}; choose less than one in the "
                "number of clients"
            )
        if not (self.dp_noise == 0 or 0.01 <= self.dp_noise < math.inf):
            raise ConfigError(
                f"dp_noise must be 0 or at least 0.01, got {self.dp_noise}; 0 means that it is "
                "found from dp_epsilon"
            )
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

    @property
    def private(self) -> bool:
        """Return whether models are differentially private."""
        return self.dp != "off"

    @property
    def hides_clients(self) -> bool:
        """Return whether noise hides whole clients."""
        return self.dp in ("client", "local")

    def refuses(self, row: Any, options: Any, limits: Any, training: Any) -> str | None:
        """Return why a method cannot have secure or private sums with these settings, or None."""
        if self.hides_clients and (why := self.unbounded(row, options, limits)):
            return why
        if self.dp == "sample" and (why := self.mingled(row, training)):
            return why
        if not self.on:
            return None
        if why := barred("secure=sum", row, options, row.additive):
            return why
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

    def unbounded(self, row: Any, options: Any, limits: Any) -> str | None:
        """Return why one client's part in a method's sums cannot be bounded, or None."""
        name = f"dp={self.dp}"
        if why := barred(name, row, options, row.private or row.additive, row.private_unless):
            return why
        if self.dp == "local" and not self.on and row.server.portions:
            return (
                f"dp=local is not for {row.name} without masks: what its clients add to a sum "
                "is no update that they could send; set secure=sum, or dp=client"
            )
        if limits.max_share < 1:
            return f"dp={self.dp} counts every client the same; remove max_share"
        return None

    def mingled(self, row: Any, training: Any) -> str | None:
        """Return why one sample's part in a client's training cannot be bounded, or None."""
        if not row.in_loss_alone:
            return (
                f"dp=sample is not for {row.name}: its clients use samples outside the loss, or "
                "train in several phases"
            )
        wanted = {
            "task": ("classification", "other tasks look at all targets of a client"),
            "local_steps": (0, "a sample must be seen once an epoch; set local_epochs"),
            "mixup": (0.0, "it mixes samples"),
            "class_weights": ("none", "they are counts of a client's labels"),
            "input_scale": ("none", "means of a client's columns would show its samples"),
        }
        for name, (value, why) in wanted.items():
            if (given := vars(training)[name]) != value:
                return f"dp=sample needs {name}={value}, got {name}={given}: {why}"
        return None


# runs of an earlier version did not have these settings
SECRECY = {field.name: field.default for field in fields(Privacy)}


def barred(
    what: str, row: Any, options: Any, always: str, more: Mapping[str, str] | None = None
) -> str | None:
    """Return why `what` is not for a method: always, or with one of its settings; or None."""
    if always:
        return f"{what} is not for {row.name}: {always}"
    for name, why in {**row.unless, **(more or {})}.items():
        key, _, value = name.partition("=")
        if str(vars(options)[key]) == value:
            return f"{what} is not for {row.name} with {name}: {why}"
    return None
