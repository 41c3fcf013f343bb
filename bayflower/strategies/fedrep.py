"""FedRep, server half (Collins et al. 2021, ICML): FedAvg of the representation, heads stay on the
clients.

    paper      here            shape
    phi        state.params    by name: the representation
    h_i        (none)          heads are never sent

Departs: clients are weighted by sample count (the paper averages equally).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting
from . import fedper


@dataclass(frozen=True)
class Config:
    """What the user sets for FedRep."""

    head_epochs: int = setting(
        5, "epochs on the head alone, before `local_epochs` on the representation alone"
    )

    def __post_init__(self) -> None:
        if self.head_epochs < 1:
            raise ConfigError(f"head_epochs must be at least 1, got {self.head_epochs}")


class Server(fedper.Server):
    """Averages the representation, as FedPer does."""
