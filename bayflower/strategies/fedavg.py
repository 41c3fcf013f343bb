"""FedAvg, server half (McMahan et al. 2017, AISTATS): the average of the clients' models, weighted
by sample count.

    paper      here                shape
    w          state.params        by name
    n_k        num_examples        ()
    n          total num_examples  ()

    w = Σ_k n_k w_k / Σ_k n_k                                                          [eq. 1]

FedProx, FedBN and the other averaging methods reuse this half: they differ in what a client sends.

Departs: the paper's formula is applied to the clients of the round (partial participation), and to
floating-point buffers (BatchNorm's running statistics) as to parameters; integer buffers (counters)
take the rounded mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError
from ..maths.exact import Scaled
from ..settings import setting
from ..stacked.weighted import weighted_sums
from ..tree import Tensors, recast


@dataclass(frozen=True)
class Tuning:
    """What the user sets for every method of one global model."""

    finetune_epochs: int = setting(
        0, "epochs of local fine-tuning before a test; 0 = test the global model (rows -ft: 5)"
    )

    def __post_init__(self) -> None:
        if self.finetune_epochs < 0:
            raise ConfigError(
                f"finetune_epochs must not be negative, got {self.finetune_epochs}; 0 means no "
                "fine-tuning"
            )


@dataclass(frozen=True)
class Config(Tuning):
    """What the user sets for FedAvg."""

    settle_epochs: int = setting(
        0,
        "passes over a client's data in training mode, without steps, before its model is sent: "
        "BatchNorm's running statistics become those of the last weights",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settle_epochs < 0:
            raise ConfigError(
                f"settle_epochs must not be negative, got {self.settle_epochs}; 0 means no pass "
                "over the data"
            )


class State(NamedTuple):
    """The global model, or its shared part."""

    params: Tensors
    buffers: Tensors


class Update(NamedTuple):
    """What a client sends: its shared part and its number of training samples."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors


class Server(ServerHalf):
    """Averages what is shared, weighted by sample count."""

    state_type = State
    broadcast_type = State
    averages_models = True

    def is_shared(self, name: str) -> bool:
        """Return whether the parameter or buffer `name` travels."""
        return True

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return the shared part of the initial model."""
        return State(
            {name: value for name, value in params.items() if self.is_shared(name)},
            {name: value for name, value in buffers.items() if self.is_shared(name)},
        )

    def broadcast(self, state: State, client: int) -> State:
        """Return the shared part, the same for every client."""
        return state

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        return Update(torch.zeros((), dtype=torch.int64), state.params, state.buffers)

    def check(self, state: State, client: int, update: Update) -> str | None:
        """Return why the update cannot be averaged, or None."""
        count = int(update.num_examples)
        return (
            None
            if 0 < count < 2**40
            else f"num_examples must be positive and below 2^40, got {count}"
        )

    def statistic(self, state: State, client: int, update: Update) -> Statistic:
        """Return (n_k, n_k w_k); the product is exact in float64 for float32 weights and n_k <
        2^29.
        """
        return {
            "num_examples": update.num_examples,
            **weighted("params", update.params, update.num_examples),
            **weighted("buffers", update.buffers, update.num_examples),
        }

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return (Σ n_k, Σ n_k w_k) of stacked updates."""
        weight = updates.num_examples.double()
        return {
            "num_examples": updates.num_examples.sum(),
            **summed("params", updates.params, weight),
            **summed("buffers", updates.buffers, weight),
        }

    def finalise(self, state: State, total: Sum) -> State:
        """Return w = Σ n_k w_k / Σ n_k [eq. 1]; no reply leaves the state as it was."""
        if "num_examples" not in total:
            return state
        weight = total["num_examples"]
        return State(
            averaged("params", state.params, total, weight),
            averaged("buffers", state.buffers, total, weight),
        )


def weighted(group: str, tensors: Tensors, weight: Tensor) -> dict[str, Scaled]:
    """Return weight·tensor by "group/name"."""
    return {f"{group}/{name}": Scaled(value, float(weight)) for name, value in tensors.items()}


def summed(group: str, tensors: Tensors, weight: Tensor) -> Tensors:
    """Return Σ_k weight_k·tensor_k by "group/name" of stacked tensors, in float64."""
    return {f"{group}/{name}": one for name, one in weighted_sums(weight, tensors).items()}


def averaged(group: str, old: Tensors, total: Sum, weight: Tensor) -> Tensors:
    """Return Σ weight·tensor / Σ weight by name, in the dtype of `old`."""
    if not old:
        return {}
    sums = [total[f"{group}/{name}"] for name in old]
    number = weight.to(sums[0].device, torch.float64)
    means = dict(zip(old, torch._foreach_div(sums, number), strict=True))
    for name, value in old.items():
        if not value.is_floating_point():
            means[name].round_()
    return recast(means, old)
