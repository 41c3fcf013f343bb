"""FedDC, server half (Gao et al. 2022, CVPR): the mean of models to which each client has added its
drift.

    paper      here             shape
    w          state.params     by name
    theta_i    (client)         by name
    h_i        (client)         by name: the drift
    g          state.pace       by name: mean of the clients' pace
    g_i        update.pace      by name: theta_i+ − w over K eta, the step of the last round

    w = Σ n_i (theta_i+ + h_i) / Σ n_i                                                  [eq. 6]
    g = mean of g_i over the clients of the round                                       [eq. 7]

Defaults of the paper: alpha in {0.005, 0.01, 0.1, 0.2}.

Departs: g_i is sent divided by K eta, so that clients with other numbers of steps K can be
compared; the mean of g_i is weighted like that of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices
from ..settings import setting
from ..tree import Tensors
from . import fedavg

Pace = Literal["sgd", "always"]


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedDC."""

    dc_alpha: float = setting(
        0.01, "strength of the penalty that ties a client's model to the global one less its drift"
    )

    dc_pace: Pace = setting(
        "sgd",
        "when the loss has the term <theta, g_i − g>: sgd = only with optimizer=sgd, for which a "
        "round's change over its steps and rate is a gradient; always = with every optimiser",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        if not 0 <= self.dc_alpha < float("inf"):
            raise ConfigError(f"dc_alpha must be finite and not negative, got {self.dc_alpha}")


class State(NamedTuple):
    """The global model and the mean pace; the same is broadcast."""

    params: Tensors
    buffers: Tensors
    pace: Tensors


class Update(NamedTuple):
    """What a client sends: its model with its drift added, its number of samples, and its pace."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    pace: Tensors


class Server(fedavg.Server):
    """Averages corrected models, and paces."""

    update_fields = {"params": "model", "buffers": "buffers", "pace": "slope"}

    averages_models = False
    adds_up = True  # the drift

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model; g = 0."""
        return State(
            params, buffers, {name: torch.zeros_like(value) for name, value in params.items()}
        )

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        return Update(torch.zeros((), dtype=torch.int64), state.params, state.buffers, state.pace)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n_i, n_i (theta_i + h_i), n_i g_i)."""
        return {
            **super().statistic(state, client, update),
            **fedavg.weighted("pace", update.pace, update.num_examples),
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        return {
            **super().total(state, clients, updates),
            **fedavg.summed("pace", updates.pace, updates.num_examples.double()),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return w [eq. 6] and g [eq. 7]; no reply leaves the state as it was."""
        if "num_examples" not in total:
            return state
        return State(
            *(
                fedavg.averaged(group, getattr(state, group), total, total["num_examples"])
                for group in State._fields
            )
        )
