"""SCAFFOLD, server half (Karimireddy et al. 2020, ICML): the average of the clients' models, and of
their control variates.

    paper      here                    shape
    x          state.params            by name
    c          state.control           by name: the server's control variate
    y_i        update.params           by name
    Δc_i       update.control_change   by name: c_i+ − c_i
    |S|, N     num_clients             (): clients of the round, clients in all

    x ← mean of y_i over S (server rate 1)                                              [eq. 1]
    c ← c + (|S|/N) mean of Δc_i over S = c + Σ_S Δc_i / N                               [eq. 2]

Defaults of the paper: server rate 1, no setting of its own.

Departs: x is the mean weighted by sample count, as in FedAvg and the other baselines; c counts
clients alike, as in the paper. N is the number of clients that ever trained: one that comes later
enters with c_i = 0, one that leaves counts on like one that is not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..settings import setting
from ..tree import Tensors
from . import fedavg
from .fedavg import Config as FedAvgConfig


@dataclass(frozen=True)
class Config(FedAvgConfig):
    """What the user sets for SCAFFOLD."""

    finetune_epochs: int = setting(0, "epochs of local fine-tuning before a test")


class State(NamedTuple):
    """The global model, the server's control variate, and N."""

    params: Tensors
    buffers: Tensors
    control: Tensors
    num_clients: Tensor  # int64


class Broadcast(NamedTuple):
    """What every client is sent."""

    params: Tensors
    buffers: Tensors
    control: Tensors


class Update(NamedTuple):
    """What a client sends: its model, its number of samples, and
    the change of its control variate.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    control_change: Tensors


class Server(fedavg.Server):
    """Averages models, and sums changes of control variates."""

    update_fields = {"params": "model", "buffers": "buffers", "control_change": "slope"}

    averages_models = False

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = Broadcast  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model; c = 0."""
        control = {name: torch.zeros_like(value) for name, value in params.items()}
        return State(params, buffers, control, torch.tensor(max(len(clients), 1)))

    def admit(self, state: Any, client: int) -> Any:
        """Return the state with one client more, whose control variate is 0: c is the mean over N +
        1.
        """
        more = state.num_clients + 1
        control = {
            name: (value.double() * state.num_clients / more).to(value.dtype)
            for name, value in state.control.items()
        }
        return state._replace(control=control, num_clients=more)

    def broadcast(self, state: Any, client: int) -> Any:
        """Return the model and c."""
        return Broadcast(state.params, state.buffers, state.control)

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        return Update(torch.zeros((), dtype=torch.int64), state.params, state.buffers, state.params)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n_k, n_k y_k, Δc_k)."""
        changes = {f"control/{name}": value for name, value in update.control_change.items()}
        return {**super().statistic(state, client, update), **changes}

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        changes = {
            f"control/{name}": value.double().sum(0)
            for name, value in updates.control_change.items()
        }
        return {**super().total(state, clients, updates), **changes}

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the mean model [eq. 1] and c + Σ Δc / N [eq. 2]; no reply leaves the state as it
        was.
        """
        if "num_examples" not in total:
            return state
        mean = super().finalise(state, total)
        control = {
            n: (v + total[f"control/{n}"] / state.num_clients).to(v.dtype)
            for n, v in state.control.items()
        }
        return state._replace(params=mean.params, buffers=mean.buffers, control=control)
