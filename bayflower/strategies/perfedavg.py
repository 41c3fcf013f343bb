"""PerFedAvg, server half (Fallah, Mokhtari and Ozdaglar 2020, NeurIPS): the average; the method is
in the client.

    paper      here                  shape
    w          state.params          by name
    alpha      config.inner_lr       ()
    delta      config.hf_delta       ()

Departs: the server is Reptile's (rate, momentum); clients are weighted by sample count, the paper's
count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..settings import Presets, setting
from . import reptile
from .reptile import check_meta


@dataclass(frozen=True)
class Config:
    """What the user sets for PerFedAvg; `lr` is the rate of the outer step."""

    # MetaVD's paper, which compares with it
    presets: ClassVar[Presets] = {"paper": {"adapt_steps": 1, "inner_lr": 0.02}}

    inner_lr: float = setting(0.1, "learning rate of inner steps and of adaptation before a test")
    inner_steps: int = setting(1, "inner steps on the support set")
    hf_delta: float = setting(
        0.01,
        "step length of the finite difference that approximates the Hessian; smaller values lose "
        "precision in float32",
    )
    server_lr: float = setting(
        1.0, "step size of the global model towards the clients' average; 1 = the average"
    )
    server_momentum: float = setting(0.0, "momentum of the global model's step; 0 = none")
    adapt_steps: int = setting(
        10, "steps on the client's training data before a test; 0 = test the global model"
    )

    def __post_init__(self) -> None:
        check_meta(self)


class Server(reptile.Server):
    """Moves the global model towards the clients' average."""
