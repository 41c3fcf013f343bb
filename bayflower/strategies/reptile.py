"""Reptile, server half (Nichol, Achiam and Schulman 2018, arXiv 1803.02999): a step towards the
average of the adapted models.

    paper      here                  shape
    phi        state.params          by name
    W_i        update.params         by name: a client's model after local training
    epsilon    config.server_lr      ()
    (none)     state.velocity        by name: momentum of the server; {} without it

    phi ← phi + epsilon (W̄ − phi),    W̄ = Σ n_i W_i / Σ n_i                             [eq. 1]

With momentum m: v ← m v + (W̄ − phi), phi ← phi + epsilon v. MAML and PerFedAvg (and MetaVD) reuse
this half: they differ in what a client does. At server_lr = 1 without momentum it is FedAvg's
average to the bit.

Departs: clients are weighted by sample count, as in FedAvg (the paper's tasks count alike). Buffers
are averaged as they are: a running variance moved beyond the average could become negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..contract import Sum
from ..errors import ConfigError
from ..settings import Presets, setting
from ..tree import Tensors
from . import fedavg


@dataclass(frozen=True)
class Config:
    """What the user sets for Reptile."""

    # MetaVD's paper, which compares with it
    presets: ClassVar[Presets] = {"paper": {"adapt_steps": 1}}

    server_lr: float = setting(
        1.0, "step size of the global model towards the clients' average; 1 = the average"
    )
    server_momentum: float = setting(0.0, "momentum of the global model's step; 0 = none")
    adapt_steps: int = setting(
        10, "steps on the client's training data before a test; 0 = test the global model"
    )

    def __post_init__(self) -> None:
        check_meta(self)


def check_meta(config: Any) -> None:
    """Raise if a setting that the methods of this family share is out of its range."""
    for name in ("server_lr", "inner_lr", "hf_delta"):
        if hasattr(config, name) and not 0 < getattr(config, name) < float("inf"):
            raise ConfigError(f"{name} must be positive and finite, got {getattr(config, name)}")
    if not 0 <= config.server_momentum < 1:
        raise ConfigError(
            f"server_momentum must be in [0, 1), got {config.server_momentum}; 0 means none"
        )
    for name, least in (("adapt_steps", 0), ("inner_steps", 1)):
        if hasattr(config, name) and getattr(config, name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(config, name)}")


class State(NamedTuple):
    """The global model and, with momentum, its velocity."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors


class Server(fedavg.Server):
    """Moves the global model towards the clients' average."""

    averages_models = False
    velocities = ("velocity",)

    state_type: ClassVar[type] = State  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model at rest."""
        return State(params, buffers, self.rest(params))

    def rest(self, params: Tensors) -> Tensors:
        """Return the velocity before the first round."""
        return (
            {name: torch.zeros_like(value) for name, value in params.items()}
            if self.config.server_momentum
            else {}
        )

    def broadcast(self, state: Any, client: int) -> Any:
        """Return the global model; the velocity stays on the server."""
        return fedavg.State(state.params, state.buffers)

    def aggregate(self, state: Any, total: Sum) -> Tensors:
        """Return the average W̄ of the clients' parameters."""
        return fedavg.averaged("params", state.params, total, total["num_examples"])

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return phi + epsilon (W̄ − phi), with momentum where it is set [eq. 1]; no reply leaves
        the state as it was.
        """
        if "num_examples" not in total:
            return state
        params, velocity = self.moved(state, self.aggregate(state, total))
        buffers = fedavg.averaged("buffers", state.buffers, total, total["num_examples"])
        return state._replace(params=params, buffers=buffers, velocity=velocity)

    def moved(self, state: Any, mean: Tensors) -> tuple[Tensors, Tensors]:
        """Return (parameters, velocity) after a step towards `mean`; at rate 1, from rest, it is
        `mean` to the bit.
        """
        rate, momentum = self.config.server_lr, self.config.server_momentum
        params = (
            mean
            if rate == 1
            else {name: value + rate * (mean[name] - value) for name, value in state.params.items()}
        )
        if not momentum:
            return params, {}
        params = {
            name: value + rate * momentum * state.velocity[name] for name, value in params.items()
        }
        velocity = {
            name: momentum * state.velocity[name] + (mean[name] - value)
            for name, value in state.params.items()
        }
        return params, velocity
