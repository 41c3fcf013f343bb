"""FedProx, client half (Li et al. 2020, MLSys): FedAvg's local training with a proximal term.

    paper      here                shape
    w^t        work.memo.params    by name: the broadcast, constant during the round
    mu         config.mu           ()

    h_k(w; w^t) = F_k(w) + (mu/2) ‖w − w^t‖²                                            [eq. 1]

Departs: every client does the same number of epochs (the paper's inexact local solutions are not
modelled).
"""

from __future__ import annotations

from torch import Tensor

from ..contract import Phase, Work
from ..networks.model import Batch
from ..tree import Tensors
from . import fedavg


class Client(fedavg.Client):
    """Trains from the global model and is pulled towards it."""

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return F_k(w) + (mu/2)‖w − w^t‖² on one batch [eq. 1]."""
        loss, buffers = super().loss(params, work, batch, noise, phase)
        return loss + self.config.mu / 2 * sq_distance(params, work.memo.params), buffers


def sq_distance(a: Tensors, b: Tensors) -> Tensor:
    """Return ‖a − b‖² over the names of `b`."""
    terms = [(a[name] - value).square().sum() for name, value in b.items()]
    return sum(terms[1:], terms[0])
