"""SNIP, server half (Lee, Ajanthan and Torr 2019, ICLR), federated as in MetaVD's comparison: one
layer is pruned once, after round 1.

    paper      here                    shape
    s_j        total["sensitivity"]    shape of the layer: connection sensitivity |g_j w_j|,
                                       averaged over the clients
    c_j        ~state.mask             shape of the layer: 1 = the weight is kept
    kappa      (1 − prune_share) K     weights that are kept

    c_j = 1 for the kappa largest s_j                                                   [eq. 6]

Departs: the paper prunes a network at its initialisation, all layers, on one batch. Here it is the
layer that MetaVD drops weights of, after the first round, by the clients' whole data; `base` is how
clients train. Of equals the lower index is pruned first. From round 2 on pruned weights are 0 and
do not travel, in either direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices
from ..maths import dropout
from ..settings import Presets, setting
from ..tree import Tensors, flatten, matching
from . import reptile
from .fedavg import summed, weighted

Base = Literal["fedavg", "reptile", "maml", "perfedavg"]
MASK, SENSITIVITY = "mask", "sensitivity"


@dataclass(frozen=True)
class Config:
    """What the user sets for SNIP."""

    # MetaVD's paper, which compares with it
    presets: ClassVar[Presets] = {"paper": {"adapt_steps": 1, "inner_lr": 0.02}}

    base: Base = setting("reptile", "method that clients train with; fedavg: no adaptation")
    prune_share: float = setting(
        0.7, "share of the layer's weights that are pruned after the first round"
    )
    dropout_layer: str = setting(
        "", "name of the linear layer that is pruned; empty = the last one before the head"
    )
    inner_lr: float = setting(
        0.1, "base=maml, perfedavg: learning rate of inner steps and of adaptation before a test"
    )
    inner_steps: int = setting(1, "base=maml, perfedavg: inner steps on the support set")
    hf_delta: float = setting(0.01, "base=perfedavg: step length of the finite difference")
    server_lr: float = setting(
        1.0, "step size of the global model towards the clients' average; 1 = the average"
    )
    server_momentum: float = setting(0.0, "momentum of the global model's step; 0 = none")
    adapt_steps: int = setting(
        10, "steps on the client's training data before a test; 0 = test the global model"
    )

    def __post_init__(self) -> None:
        reptile.check_meta(self)
        check_choices(self)
        if not 0 <= self.prune_share < 1:
            raise ConfigError(
                f"prune_share must be in [0, 1), got {self.prune_share}; 0 prunes nothing"
            )


class State(NamedTuple):
    """The global model, and which weights of the layer are pruned once that is decided."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors
    mask: Tensor  # bool, shape of the layer
    pruned: Tensor  # bool: whether the mask is decided


class Broadcast(NamedTuple):
    """What every client is sent: the model, pruned weights 0, and which they are."""

    params: Tensors
    buffers: Tensors
    mask: Tensor
    pruned: Tensor


class Update(NamedTuple):
    """What a client sends: its model and, until the mask is decided, how sensitive its loss is to
    each weight of the layer.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    mask: Tensor
    pruned: Tensor
    sensitivity: Tensor


class Server(reptile.Server):
    """Averages the clients' models; prunes the layer after the first round."""

    headings = {"sparsity": dropout.SPARSITY}

    state_type: ClassVar[type] = State
    broadcast_type: ClassVar[type] = Broadcast  # type: ignore[assignment]

    def layer(self, params: Tensors) -> str:
        """Return the name of the weights that are pruned."""
        shapes = {name: tuple(value.shape) for name, value in params.items()}
        return dropout.find_layer(self.anatomy, params, shapes, self.config.dropout_layer)

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model, nothing pruned."""
        mask = torch.zeros_like(params[self.layer(params)], dtype=torch.bool)
        return State(params, buffers, self.rest(params), mask, torch.zeros((), dtype=torch.bool))

    def broadcast(self, state: Any, client: int) -> Any:
        """Return the model with pruned weights 0, the same for every client."""
        name = self.layer(state.params)
        return Broadcast(
            {**state.params, name: state.params[name].masked_fill(state.mask, 0)},
            state.buffers,
            state.mask,
            state.pruned,
        )

    def pack(self, broadcast: Any) -> Tensors:
        """Return what travels to a client: of the layer only what is kept, and which that is."""
        return dropout.thin(flatten(broadcast), MASK, (f"params/{self.layer(broadcast.params)}",))

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        return Update(
            torch.zeros((), dtype=torch.int64),
            state.params,
            state.buffers,
            state.mask,
            state.pruned,
            state.params[self.layer(state.params)],
        )

    def unpack(self, state: Any, flat: Tensors) -> Any:
        """Return the update in `flat`, pruned weights 0; raise if it cannot be one."""
        name = self.layer(state.params)
        if bool(state.pruned):
            flat = {**flat, SENSITIVITY: torch.zeros_like(state.params[name])}
        flat = dropout.fill(flat, MASK, (f"params/{name}",), tuple(state.mask.shape))
        return matching(flat, self.expects(state))

    def present(self, state: Any, updates: Any) -> Tensors:
        """Return the entries of the layer that are not pruned."""
        return {f"params/{self.layer(state.params)}": ~updates.mask}

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the update cannot be used, or None."""
        if not torch.equal(update.mask, state.mask) or bool(update.pruned) != bool(state.pruned):
            return "the weights left out are not those that were pruned"
        if bool((update.sensitivity < 0).any()):
            return "sensitivity must not be negative"
        return super().check(state, client, update)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n, n theta) and, until the mask is decided, n s."""
        found = dict(super().statistic(state, client, update))
        return (
            found
            if bool(state.pruned)
            else {
                **found,
                **weighted("layer", {SENSITIVITY: update.sensitivity}, update.num_examples),
            }
        )

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        found = dict(super().total(state, clients, updates))
        return (
            found
            if bool(state.pruned)
            else {
                **found,
                **summed(
                    "layer", {SENSITIVITY: updates.sensitivity}, updates.num_examples.double()
                ),
            }
        )

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the average and, after the first replies, the mask of the least sensitive weights
        [eq. 6]; no reply changes nothing.
        """
        if "num_examples" not in total:
            return state
        after = super().finalise(state, total)
        if bool(state.pruned):
            return after
        scores = total[f"layer/{SENSITIVITY}"].reshape(-1)
        least = torch.sort(scores, stable=True).indices[
            : round(self.config.prune_share * scores.numel())
        ]
        mask = (
            torch.zeros_like(scores, dtype=torch.bool)
            .index_fill(0, least, True)
            .reshape(state.mask.shape)
        )
        return after._replace(mask=mask.to(state.mask.device), pruned=torch.ones_like(state.pruned))

    def report(self, state: Any) -> dict[str, float]:
        """Return the share of the layer's weights that are pruned."""
        return {"sparsity": float(state.mask.double().mean())}
