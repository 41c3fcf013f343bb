"""FedBN, server half (Li et al. 2021, ICLR): FedAvg of everything but the normalisation layers.

    paper      here            shape
    w^l        state.params    by name, without normalisation layers

Departs: on a network without normalisation layers nothing stays local and the method equals FedAvg;
the run says so. All normalisation layers stay local (BatchNorm in the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

from . import fedavg


@dataclass(frozen=True)
class Config:
    """Nothing to set."""


class Server(fedavg.Server):
    """Averages what does not belong to a normalisation layer."""

    averages_models = False

    def is_shared(self, name: str) -> bool:
        """Return whether `name` lies outside the normalisation layers."""
        return name not in self.anatomy.norm_names
