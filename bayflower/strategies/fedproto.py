"""FedProto, server half (Tan et al. 2022, AAAI): class prototypes of features, and no weights.

    paper        here                        shape
    C̄^(j)        state.centroids             (K, D): global prototype of class j
    C_i^(j)      means                       (K, D): mean feature of class j at client i
    |D_i,j|      counts                      (K,)
    lambda       config.proto_weight         ()

    C̄^(j) = Σ_i |D_i,j| C_i^(j) / Σ_i |D_i,j|      over the clients that have class j     [eq. 6]

The sums over clients are pFedVMP's with scalar precisions: a class that nobody sends keeps its
prototype, and only classes that a client has are in its message.

Departs: [eq. 6] as printed divides once more by the number of clients with the class, which shrinks
prototypes round by round; it is left out. `proto_average=mean` counts every client once, as the
authors' code does. A class with fewer than `min_count` samples is not sent: the mean of one sample
is that sample's feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..contract import ServerHalf
from ..errors import ConfigError, check_choices
from ..maths.classmessages import ClassMessage
from ..networks.model import Anatomy
from ..settings import setting
from . import local, pfedvmp
from .pfedvmp import State as State  # what clients are sent

Average = Literal["count", "mean"]


@dataclass(frozen=True)
class Config:
    """What the user sets for FedProto."""

    prior_precision: ClassVar[float] = 0.0  # prototypes have no prior

    proto_weight: float = setting(
        1.0, "weight of the pull of features to the prototypes; 0 makes prototypes meaningless"
    )
    proto_average: Average = setting(
        "count", "how clients count in a prototype: count = by their samples of the class; mean"
    )
    min_count: int = setting(
        5,
        "a client sends nothing about a class with fewer samples; with 1 sample it would send that "
        "sample's feature itself",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.proto_weight < float("inf"):
            raise ConfigError(
                f"proto_weight must be finite and not negative, got {self.proto_weight}"
            )
        if self.min_count < 1:
            raise ConfigError(f"min_count must be at least 1, got {self.min_count}")
        check_choices(self)

    @property
    def centroid(self) -> str:
        """Return the rule of pFedVMP's sums."""
        return "count_mean" if self.proto_average == "count" else "mean"


class Server(pfedvmp.Server):
    """Averages the clients' class means [eq. 6]; models stay where they are."""

    def __init__(self, config: Config, anatomy: Anatomy) -> None:
        super().__init__(config, anatomy)  # type: ignore[arg-type]
        self.base: ServerHalf = local.Server(config, anatomy)

    def check(self, state: State, client: int, update: ClassMessage) -> str | None:
        """Return why the class means cannot be used, or None."""
        counted, number = int(update.counts.sum()), int(update.num_examples)
        if counted > number:
            return f"the classes have {counted} samples, more than num_examples = {number}"
        return super().check(state, client, update)
