"""FedLA, server half (Liu et al. 2021, arXiv 2102.01936): online Laplace approximations, multiplied
on the server.

    paper      here                 shape
    mu_S       state.params         by name: mean of the global posterior
    Lambda_S   state.precision      by name: its diagonal precision
    mu_k       update.params        by name
    Lambda_k   update.precision     by name
    pi_k       num_examples / Σ     ()

    Lambda_S = Σ pi_k Lambda_k                                                          [eq. 1]
    mu_S = Σ pi_k Lambda_k mu_k / Lambda_S                                              [eq. 2]

Departs: the paper's settings are not at hand; the precision is diagonal, of the mean (not summed)
loss, and what is older than a round counts `memory` as much, without which an online precision
grows without bound. Buffers are averaged by sample count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices
from ..maths.curvature import Kind
from ..maths.exact import Scaled
from ..settings import setting
from ..tree import Tensors
from . import fedavg


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedLA."""

    la_weight: float = setting(
        1.0, "weight of the prior that the server sends, in the local loss; 1 is MAP"
    )
    la_start: float = setting(0.01, "precision of the prior before the first round")
    memory: float = setting(
        0.9,
        "share of the global posterior's precision kept from one round to the next, in [0, 1]; 0 "
        "= only the last round counts, 1 = no forgetting",
    )
    curvature: Kind = setting(
        "fisher",
        "fisher: expected over the model's predicted labels; sketch: a fast estimate of it; "
        "empirical: the true labels",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.la_weight < float("inf"):
            raise ConfigError(f"la_weight must be finite and not negative, got {self.la_weight}")
        if not 0 < self.la_start < float("inf"):
            raise ConfigError(f"la_start must be positive and finite, got {self.la_start}")
        if not 0 <= self.memory <= 1:
            raise ConfigError(f"memory must be in [0, 1], got {self.memory}; 1 means no forgetting")
        check_choices(self)


class State(NamedTuple):
    """The global posterior and the averaged buffers; the same is broadcast."""

    params: Tensors
    buffers: Tensors
    precision: Tensors


class Update(NamedTuple):
    """What a client sends: mean and precision of its Laplace approximation, its number of samples,
    its buffers.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    precision: Tensors


class Server(fedavg.Server):
    """Multiplies the clients' Gaussians, each to the power of its share of the samples."""

    update_fields = {"params": "model", "buffers": "buffers", "precision": "precision"}

    averages_models = False

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model with a weak prior around it."""
        return State(
            params,
            buffers,
            {name: torch.full_like(value, self.config.la_start) for name, value in params.items()},
        )

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        return Update(
            torch.zeros((), dtype=torch.int64), state.params, state.buffers, state.precision
        )

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the update cannot be used, or None."""
        least = min(float(value.min()) for value in update.precision.values())
        return (
            super().check(state, client, update)
            if least > 0
            else f"precision must be positive, got {least:.3g}"
        )

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n_k, n_k Lambda_k, n_k Lambda_k mu_k)."""
        number = update.num_examples
        shift = {
            f"shift/{n}": Scaled(v.double() * update.precision[n].double(), float(number))
            for n, v in update.params.items()
        }
        return {
            "num_examples": number,
            **shift,
            **fedavg.weighted("precision", update.precision, number),
            **fedavg.weighted("buffers", update.buffers, number),
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        weight = updates.num_examples.double()
        shift = {
            name: value.double() * updates.precision[name].double()
            for name, value in updates.params.items()
        }
        return {
            "num_examples": updates.num_examples.sum(),
            **fedavg.summed("shift", shift, weight),
            **fedavg.summed("precision", updates.precision, weight),
            **fedavg.summed("buffers", updates.buffers, weight),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the product of the Gaussians [eq. 1] [eq. 2]; no reply
        leaves the state as it was.
        """
        if "num_examples" not in total:
            return state
        buffers, precision = (
            fedavg.averaged(g, getattr(state, g), total, total["num_examples"])
            for g in ("buffers", "precision")
        )
        params = {
            name: (total[f"shift/{name}"] / total[f"precision/{name}"]).to(value.dtype)
            for name, value in state.params.items()
        }
        return State(params, buffers, precision)
