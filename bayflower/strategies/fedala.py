"""FedALA, server half (Zhang et al. 2023, AAAI): FedAvg's average; what a client takes of it, each
client learns itself.

    paper        here                     shape
    Theta        state.params             by name
    Theta_i      update.params            by name
    W_i          (none)                   weights of a client's mixture are never sent
    eta          config.ala_rate          ()
    p            config.ala_tensors       ()

Departs: the paper counts layers (p), the authors' code tensors; here tensors, a weight and its bias
being two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check_least, check_positive
from ..settings import setting
from . import fedavg


@dataclass(frozen=True)
class Config:
    """What the user sets for FedALA."""

    ala_rate: float = setting(1.0, "learning rate of the weights of the mixture (SGD)")
    ala_epochs: int = setting(1, "passes over the client's data in which these weights move")
    ala_tensors: int = setting(
        2, "last parameters of the network that are mixed, the rest is the global one; 0 = all"
    )

    def __post_init__(self) -> None:
        check_positive(self, "ala_rate")
        check_least(self, ala_epochs=1, ala_tensors=0)


class Server(fedavg.Server):
    """Averages the clients' models, weighted by sample count."""
