"""FedPer, server half (Arivazhagan et al. 2019, arXiv 1912.00818): FedAvg of the base, heads stay
on the clients.

    paper      here            shape
    W_B        state.params    by name: base layers
    W_P        (none)          personalisation layers are never sent

Departs: one personalisation layer, the model's head (the paper varies their number).
"""

from __future__ import annotations

from dataclasses import dataclass

from . import fedavg


@dataclass(frozen=True)
class Config:
    """Nothing to set."""


class Server(fedavg.Server):
    """Averages what does not belong to the head."""

    averages_models = False

    def is_shared(self, name: str) -> bool:
        """Return whether `name` lies outside the head."""
        return name not in self.anatomy.head_names
