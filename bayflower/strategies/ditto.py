"""Ditto, server half (Li, Hu, Beirami and Smith 2021, ICML): FedAvg's average; the personal models
stay on the clients.

    paper      here                  shape
    w          state.params          by name
    v_k        (none)                by name: personal models are never sent
    lambda     config.ditto_weight   ()

Values of the paper: lambda in {0.1, 1, 2}, each client by its validation data.

Departs: one lambda for all clients. Clients are drawn alike and weighted by sample count; the
authors' code draws them by sample count and weights them alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting
from . import fedavg


@dataclass(frozen=True)
class Config:
    """What the user sets for Ditto."""

    ditto_weight: float = setting(
        1.0, "strength of the tie between personal and global model; 0 is training alone"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.ditto_weight < float("inf"):
            raise ConfigError(
                f"ditto_weight must be finite and not negative, got {self.ditto_weight}; 0 is "
                "training alone"
            )


class Server(fedavg.Server):
    """Averages the clients' copies of the global model, weighted by sample count."""
