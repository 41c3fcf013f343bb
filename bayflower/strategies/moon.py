"""MOON, server half (Li, He and Song 2021, CVPR): FedAvg's average; the method is in the client's
objective.

    paper      here                     shape
    mu         config.mu                ()
    tau        config.moon_temperature  ()

Defaults of the paper: tau = 0.5; mu is tuned in {0.1, 1, 5, 10} (FedNP's authors find 1).

Departs: nothing on this side.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting
from . import fedavg


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for MOON."""

    mu: float = setting(1.0, "weight of the contrastive term; 0 is FedAvg")
    moon_temperature: float = setting(0.5, "temperature of the contrastive term")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu >= 0:
            raise ConfigError(f"mu must not be negative, got {self.mu}; 0 is FedAvg")
        if not self.moon_temperature > 0:
            raise ConfigError(f"moon_temperature must be positive, got {self.moon_temperature}")


class Server(fedavg.Server):
    """Averages the clients' models, weighted by sample count."""
