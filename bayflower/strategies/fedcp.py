"""FedCP, server half (Zhang et al. 2023, KDD): FedAvg of base, head and a policy that splits each
feature between the global and the own head.

    paper          here                         shape
    W_fe           state.params                 by name: the base
    W_hd           state.params                 by name: the global head
    Theta          state.params["fedcp:…"]      the policy: weight (2D, D), bias and norm (2D,)

Departs: the policy is no part of the user's network: it is made here, seeded by the initial one. A
client sends the mean of its own and the global head, so the server, which knows the latter, can
tell the former: own heads are not private.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..contract import Sum
from ..errors import ConfigError
from ..settings import setting
from ..tree import Tensors
from . import fedavg
from .gpfl import even, head_size, seeded

EXTRA = "fedcp:"  # what the names of the policy begin with


@dataclass(frozen=True)
class Config:
    """What the user sets for FedCP."""

    cp_weight: float = setting(
        5.0, "weight of the distance (MMD²) between features of the local and the received base"
    )
    cp_temperature: float = setting(1.0, "temperature of the policy; small = hard decisions")
    cp_test_noise: bool = setting(
        False, "whether the policy is random in predictions too, as in the authors' code"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.cp_weight < float("inf"):
            raise ConfigError(f"cp_weight must be finite and not negative, got {self.cp_weight}")
        if not 0 < self.cp_temperature < float("inf"):
            raise ConfigError(
                f"cp_temperature must be positive and finite, got {self.cp_temperature}"
            )


class Server(fedavg.Server):
    """Averages base, head and policy, weighted by sample count."""

    averages_models = False

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> fedavg.State:
        """Return the initial network and a policy for its features."""
        _, dim = head_size(params, self.anatomy)
        like, draw = next(iter(params.values())), seeded(params)
        extra = {
            EXTRA + "weight": even((2 * dim, dim), dim, draw),
            EXTRA + "bias": even((2 * dim,), dim, draw),
            EXTRA + "norm": torch.ones(2 * dim),
            EXTRA + "normbias": torch.zeros(2 * dim),
        }
        made = {name: value.to(like) for name, value in extra.items()}
        return fedavg.State({**params, **made}, buffers)

    def finalise(self, state: fedavg.State, total: Sum) -> fedavg.State:
        """Return the averages of network and policy."""
        return super().finalise(state, total)
