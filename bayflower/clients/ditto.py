"""Ditto, client half (Li, Hu, Beirami and Smith 2021, ICML): FedAvg's training, and beside it a
personal model that is tied to the global one.

    paper      here                       shape
    w^t        work.memo.params           by name: the broadcast, constant during the round
    w          work.params                by name: the copy that is trained and sent
    v_k        work.params["own:…"]       by name, private
    lambda     config.ditto_weight        ()

    h_k(v; w^t) = F_k(v) + (lambda/2) ‖v − w^t‖²                                        [eq. 1]
    a step on F_k(w) + h_k(v; w^t), whose gradient for w is FedAvg's                    [eq. 2]

Departs: both models take as many steps, on the same batches, down one loss; `clip_norm` clips the
gradient of both together. v_k starts at the first w that the client is sent. A client that never
trained fits v from w by [eq. 1]. Running statistics of v_k are its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..networks.model import Batch
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors, choose
from . import fedavg
from .fedprox import sq_distance

OWN = "own:"  # what the names of the personal model begin with; no layer has such a name
FIT = "fit"  # the phase of a client that never trained


class State(NamedTuple):
    """The personal model, and whether there is one."""

    params: Tensors
    buffers: Tensors
    started: Tensor  # bool


class Client(fedavg.Client):
    """Trains a copy of the global model, and its own one."""

    state_type: ClassVar[type] = State
    private = ("params", "buffers")

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch on both models; nothing before a test; the personal model alone for a
        new client.
        """
        if purpose == "new":
            own = tuple(OWN + name for name in self.model.anatomy.trainable)
            epochs = self.training.new_client_epochs
            return (self.training.phase(FIT, epochs=epochs, trainable=own),)
        return (self.training.phase("local"),) if purpose == "train" else ()

    def views(self) -> dict[str, str]:
        """Return the personal and the global model."""
        return {
            "personal": "the client's own model, tied to the global one",
            "global": "the global model of the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a personal model."""
        return State(params, buffers, unstarted(params))

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work on both models; v starts at the first w."""
        params, buffers = self.personal(state, broadcast)
        return Work(
            {**broadcast.params, **with_own(params)},
            {**broadcast.buffers, **with_own(buffers)},
            memo=broadcast,
        )

    def personal(self, state: Any, broadcast: Broadcast) -> tuple[Tensors, Tensors]:
        """Return (parameters, buffers) of v_k; the global model's while there is none."""
        found: tuple[Tensors, Tensors] = choose(
            state.started, (state.params, state.buffers), (broadcast.params, broadcast.buffers)
        )
        return found

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return F_k(w) + h_k(v; w^t) on one batch [eq. 2]; of a new client h_k alone [eq. 1]."""
        v = owned(params)
        own, after = super().loss(
            v, work._replace(buffers=owned(work.buffers)), batch, noise, phase
        )
        own = own + self.config.ditto_weight / 2 * sq_distance(v, work.memo.params)
        buffers = {**work.buffers, **with_own(after)}
        if phase.name == FIT:
            return own, buffers
        shared, after = super().loss(
            others(params), work._replace(buffers=others(work.buffers)), batch, noise, phase
        )
        return shared + own, {**buffers, **after}

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return v_k, and (n_k, the copy of w)."""
        sent = self.update_type(fedavg.count(data), others(work.params), others(work.buffers))
        return self.kept(state, work), sent

    def kept(self, state: Any, work: Work) -> Any:
        """Return the state with v_k after training."""
        return State(owned(work.params), owned(work.buffers), torch.ones_like(state.started))

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state of a new client, v fitted."""
        return self.kept(state, work)

    def predict(
        self, view: str, state: Any, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of the personal or the global model."""
        params, buffers = (
            self.personal(state, broadcast)
            if view == "personal"
            else (broadcast.params, broadcast.buffers)
        )
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    @property
    def plain_loop(self) -> bool:
        """Return whether a user's network can hold all that moves: not running statistics twice."""
        return not self.model.anatomy.buffers


def unstarted(params: Tensors) -> Tensor:
    """Return False, on the device of `params`."""
    return torch.zeros((), dtype=torch.bool, device=next(iter(params.values())).device)


def with_own(tensors: Tensors) -> Tensors:
    """Return tensors under the names of the personal model."""
    return {OWN + name: value for name, value in tensors.items()}


def owned(tensors: Tensors) -> Tensors:
    """Return those of the personal model, under the network's names."""
    return {n.removeprefix(OWN): value for n, value in tensors.items() if n.startswith(OWN)}


def others(tensors: Tensors) -> Tensors:
    """Return those that are not the personal model's."""
    return {name: value for name, value in tensors.items() if not name.startswith(OWN)}
