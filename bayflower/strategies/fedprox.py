"""FedProx, server half (Li et al. 2020, MLSys): FedAvg's average; the method is in the client's
objective.

    paper      here            shape
    mu         config.mu       ()

Departs: clients are weighted by sample count as in FedAvg (the paper samples them by it and
averages uniformly).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting
from . import fedavg


@dataclass(frozen=True)
class Config:
    """What the user sets for FedProx."""

    mu: float = setting(0.01, "strength of the proximal term; 0 is FedAvg")
    finetune_epochs: int = setting(0, "epochs of local fine-tuning before a test")

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu must not be negative, got {self.mu}; 0 is FedAvg")
        if self.finetune_epochs < 0:
            raise ConfigError(
                f"finetune_epochs must not be negative, got {self.finetune_epochs}; 0 means no "
                "fine-tuning"
            )


class Server(fedavg.Server):
    """Averages the clients' models, weighted by sample count."""
