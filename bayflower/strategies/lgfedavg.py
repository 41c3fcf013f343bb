"""LG-FedAvg, server half (Liang et al. 2020, arXiv 2001.01523): FedAvg of the head; feature
extractors stay on the clients.

    paper      here            shape
    theta^g    state.params    by name: the global part, here the classifier
    theta^l_k  (none)          local representations are never sent

Departs: the global part is the model's head (as in FedBPS's comparison); the paper's auxiliary
losses on the representation are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import fedavg


@dataclass(frozen=True)
class Config:
    """Nothing to set."""


class Server(fedavg.Server):
    """Averages the head."""

    averages_models = False

    def is_shared(self, name: str) -> bool:
        """Return whether `name` belongs to the head."""
        return name in self.anatomy.head_names
