"""FedDyn, client half (Acar et al. 2021, ICLR): a linear and a proximal term that make local optima
those of the whole.

    paper             here               shape
    theta^{t-1}       memo.anchor        by name: the broadcast
    ∇L_k(theta_k)     state.slope        by name: the gradient at this client's last optimum, as its
                                         updates say
    alpha             config.dyn_alpha   ()

    theta_k = argmin L_k(theta) − ⟨slope, theta⟩ + (alpha/2) ‖theta − theta^{t-1}‖²      [eq. 1]
    slope ← slope − alpha (theta_k − theta^{t-1})                                       [eq. 2]

Departs: the argmin is the local epochs of the optimiser.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Work
from ..networks.model import Batch
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors
from . import fedavg
from .fedprox import sq_distance


class State(NamedTuple):
    """What stays on the client: the gradient of its loss at its last optimum."""

    slope: Tensors
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """What does not move in a round."""

    anchor: Tensors
    slope: Tensors


class Client(fedavg.Global):
    """Trains with FedDyn's two terms."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    private: ClassVar[tuple[str, ...]] = ("slope", "tuned")

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return slope = 0."""
        return State({name: torch.zeros_like(value) for name, value in params.items()}, {})

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at the global model."""
        return Work(broadcast.params, broadcast.buffers, Memo(broadcast.params, state.slope))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L_k − ⟨slope, theta⟩ + (alpha/2)‖theta − theta^{t-1}‖² on one batch [eq. 1]."""
        loss, buffers = super().loss(params, work, batch, noise, phase)
        memo: Memo = work.memo
        return loss - inner(memo.slope, params) + self.config.dyn_alpha / 2 * sq_distance(
            params, memo.anchor
        ), buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the new slope [eq. 2] and (theta_k, n_k)."""
        alpha, memo = self.config.dyn_alpha, work.memo
        slope = {
            name: value - alpha * (work.params[name] - memo.anchor[name])
            for name, value in memo.slope.items()
        }
        return State(slope, {}), self.update_type(fedavg.count(data), work.params, work.buffers)


def inner(a: Tensors, b: Tensors) -> Tensor:
    """Return ⟨a, b⟩ over the names of `a`."""
    terms = [(value * b[name]).sum() for name, value in a.items()]
    return sum(terms[1:], terms[0])
