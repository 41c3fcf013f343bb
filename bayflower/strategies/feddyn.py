"""FedDyn, server half (Acar et al. 2021, ICLR): the mean of the clients' models, corrected by the
sum of their drifts.

    paper      here                 shape
    theta      state.params         by name
    h          state.drift          by name: −alpha times the summed drift of all clients, over m
    alpha      config.dyn_alpha     ()
    m, |P|     num_clients          (): clients in all, clients of the round

    h ← h − (alpha/m) Σ_P (theta_k − theta)                                             [eq. 3]
    theta ← mean of theta_k over P − h/alpha                                            [eq. 4]

Defaults of the paper: alpha in {0.1, 0.01, 0.001}.

Departs: buffers (running statistics) take the plain mean: corrected, a variance could become
negative. m is the number of clients that ever trained: one that comes later enters without a drift,
one that leaves counts on like one that is not drawn. Clients count alike, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError
from ..settings import setting
from ..tree import Tensors
from . import fedavg


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedDyn."""

    dyn_alpha: float = setting(
        0.01, "strength of the proximal term; also the rate at which drifts are corrected"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.dyn_alpha < float("inf"):
            raise ConfigError(f"dyn_alpha must be positive and finite, got {self.dyn_alpha}")


class State(NamedTuple):
    """The global model, the drift, and m."""

    params: Tensors
    buffers: Tensors
    drift: Tensors
    num_clients: Tensor  # int64


class Server(fedavg.Server):
    """Takes the mean, and what all clients' drifts add to it."""

    averages_models = False

    state_type: ClassVar[type] = State  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model; h = 0."""
        return State(
            params,
            buffers,
            {n: torch.zeros_like(v) for n, v in params.items()},
            torch.tensor(max(len(clients), 1)),
        )

    def admit(self, state: Any, client: int) -> Any:
        """Return the state with one client more, which has not drifted yet: h
        is a mean over m + 1.
        """
        more = state.num_clients + 1
        drift = {
            name: (value.double() * state.num_clients / more).to(value.dtype)
            for name, value in state.drift.items()
        }
        return state._replace(drift=drift, num_clients=more)

    def broadcast(self, state: Any, client: int) -> fedavg.State:
        """Return the model; h stays on the server."""
        return fedavg.State(state.params, state.buffers)

    def statistic(self, state: Any, client: int, update: fedavg.Update) -> Statistic:
        """Return (1, theta_k): clients count alike."""
        one = torch.ones((), dtype=torch.int64)
        return {
            "num_clients": one,
            **fedavg.weighted("params", update.params, one),
            **fedavg.weighted("buffers", update.buffers, one),
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: fedavg.Update) -> Sum:
        """Return the same sums over stacked updates."""
        ones = torch.ones_like(updates.num_examples)
        return {
            "num_clients": ones.sum(),
            **fedavg.summed("params", updates.params, ones.double()),
            **fedavg.summed("buffers", updates.buffers, ones.double()),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return h [eq. 3] and theta [eq. 4]; no reply leaves the state as it was."""
        if "num_clients" not in total:
            return state
        number, alpha = total["num_clients"], self.config.dyn_alpha
        drift, params = {}, {}
        for name, value in state.params.items():
            device = value.device
            mean = total[f"params/{name}"].to(device) / number.to(device)
            share = number.to(device).double() / state.num_clients.to(device)
            h = state.drift[name].double() - alpha * share * (mean - value.double())
            drift[name], params[name] = h.to(value.dtype), (mean - h / alpha).to(value.dtype)
        return state._replace(
            params=params,
            drift=drift,
            buffers=fedavg.averaged("buffers", state.buffers, total, number),
        )
