"""FedROD, server half (Chen and Chao 2022, ICLR): FedAvg of a network whose head is trained with a
class-balanced loss; personal heads stay on the clients.

    paper        here                  shape
    theta        state.params          by name: base
    psi          state.params          by name: the generic head (W, b)
    phi_m        (none)                personal heads are never sent
    gamma        config.rod_gamma      ()

Departs: nothing on this side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, check_choices
from ..settings import setting
from . import fedavg

Start = Literal["zero", "copy"]


@dataclass(frozen=True)
class Config:
    """What the user sets for FedROD."""

    rod_gamma: float = setting(
        1.0, "exponent of the class counts in the balanced loss; 0 is the plain loss"
    )
    rod_start: Start = setting(
        "zero", "where the personal head starts: zero, or copy = at the initial generic head"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.rod_gamma < float("inf"):
            raise ConfigError(f"rod_gamma must be finite and not negative, got {self.rod_gamma}")
        check_choices(self)


class Server(fedavg.Server):
    """Averages base and generic head, weighted by sample count."""
