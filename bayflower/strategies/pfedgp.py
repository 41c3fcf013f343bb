"""pFedGP, server half (Achituve et al. 2021, NeurIPS): FedAvg of a feature network; Gaussian
processes on the clients classify.

    paper      here                 shape
    theta      state.params         by name: what lies before the head
    (none)     (none)               the network's head is not used

Departs: clients count by their samples, as FedAvg's do; the authors' code counts them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, check_choices, check_least, check_positive
from ..settings import setting
from . import fedper

Tree = Literal["client", "fixed"]


@dataclass(frozen=True)
class Config:
    """What the user sets for pFedGP."""

    gp_tree: Tree = setting(
        "client",
        "tree over the classes: client = each client's own, near classes together; fixed = halves "
        "of the list of classes",
    )
    gp_batch: int = setting(512, "samples of one training step; the batch size of other methods")
    gp_predict_share: float = setting(
        0.5, "share of a step's samples of each class that the rest must predict"
    )
    gp_iterations: int = setting(5, "iterations of the inference in a training step")
    gp_test_iterations: int = setting(20, "iterations of the inference before a test")
    gp_scale: float = setting(8.0, "variance of the kernel")
    gp_length: float = setting(1.0, "length scale of the kernel; features have length 1")
    gp_jitter: float = setting(1e-3, "variance of a sample beside the kernel's")

    def __post_init__(self) -> None:
        check_choices(self)
        check_least(self, gp_batch=2, gp_iterations=0, gp_test_iterations=0)
        if not 0 < self.gp_predict_share < 1:
            raise ConfigError(
                f"gp_predict_share must lie between 0 and 1, got {self.gp_predict_share}"
            )
        check_positive(self, "gp_scale", "gp_length", "gp_jitter")


class Server(fedper.Server):
    """Averages what lies before the head."""
