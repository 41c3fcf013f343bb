"""pFedBreD and pFedMe, server half (Shi et al. 2023, NeurIPS; Dinh et al. 2020, NeurIPS): FedAvg's
average of the models around which clients have their personal ones.

    paper        here                      shape
    w            state.params              by name
    theta_i      (none)                    personal models are never sent
    lambda       config.bred_weight        ()
    eta          config.bred_eta           ()

pFedMe is pFedBreD with the prior's mean at the client's own copy of w (`bred_prior=none`).

Departs: the server takes the whole average (the authors' beta = 1). The prior is a spherical
Gaussian; the paper's other exponential families are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, check_choices
from ..settings import setting
from . import fedavg

Prior = Literal["mh", "meg", "lg", "none"]


@dataclass(frozen=True)
class Config:
    """What the user sets for pFedBreD."""

    bred_prior: Prior = setting(
        "mh",
        "where the prior's mean is: lg = a gradient step from w; meg = w moved by what the last "
        "round said; mh = meg after a step of MAML; none = at w (pFedMe)",
    )
    bred_weight: float = setting(
        15.0, "strength of the tie between personal model and the prior's mean (lambda)"
    )
    bred_eta: float = setting(0.05, "length of the prior's move (eta)")
    bred_meta_lr: float = setting(0.01, "rate of both steps of mh")
    bred_prox_steps: int = setting(5, "steps of the personal model in one step of the round")
    bred_personal_lr: float = setting(0.01, "rate of those steps")

    def __post_init__(self) -> None:
        for name in ("bred_weight", "bred_eta", "bred_meta_lr"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        if self.bred_prox_steps < 1:
            raise ConfigError(f"bred_prox_steps must be at least 1, got {self.bred_prox_steps}")
        if not 0 < self.bred_personal_lr < float("inf"):
            raise ConfigError(
                f"bred_personal_lr must be positive and finite, got {self.bred_personal_lr}"
            )
        if not self.bred_personal_lr * self.bred_weight < 2:
            raise ConfigError(
                "bred_personal_lr × bred_weight must be below 2, or the personal steps diverge; "
                f"got {self.bred_personal_lr * self.bred_weight:g}"
            )
        check_choices(self)


class Server(fedavg.Server):
    """Averages the clients' copies of the global model, weighted by sample count."""
