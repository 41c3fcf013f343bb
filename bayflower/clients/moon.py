"""MOON, client half (Li, He and Song 2021, CVPR): features stay near the global model's and away
from the last local one's.

    paper      here                     shape
    z          features                 (B, F): of the model in training
    z_glob     memo.globally            the broadcast's features
    z_prev     memo.before              features of this client's model after its last round
    mu, tau    config                   ()

    l_con = −log [e(z_glob) / (e(z_glob) + e(z_prev))],   e(z') = exp(sim(z, z')/tau)        [eq. 3]
    loss = l_sup + mu l_con                                                             [eq. 4]

sim is the cosine. The two fixed models are used in evaluation mode.

Departs: there is no projection head: features are what the classifier gets. In a client's first
round z_prev is z_glob, where l_con has no gradient.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..contract import Phase, Work
from ..networks.model import Batch, masked_mean
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors, choose
from . import fedavg

TINY = 1e-8  # added to a squared norm


class State(NamedTuple):
    """The client's model after its last round (it travels, by FedAvg's definition), and whether
    there was one.
    """

    params: Tensors
    buffers: Tensors
    started: Tensor  # bool
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """The two models that do not move in a round."""

    globally: Broadcast
    before: Broadcast


class Client(fedavg.Global):
    """Trains from the global model, with a contrastive term."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a last round."""
        return State(
            params,
            buffers,
            torch.zeros((), dtype=torch.bool, device=next(iter(params.values())).device),
            {},
        )

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at the global model."""
        before = Broadcast(
            *choose(
                state.started, (state.params, state.buffers), (broadcast.params, broadcast.buffers)
            )
        )
        return Work(broadcast.params, broadcast.buffers, Memo(broadcast, before))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return l_sup + mu l_con on one batch [eq. 4]."""
        logits, z, buffers = self.model.forward_features(
            params, work.buffers, batch.x, train=True, mask=batch.mask
        )
        near, far = (
            cosine(z, self.model.forward_features(one.params, one.buffers, batch.x, train=False)[1])
            for one in work.memo
        )
        contrast = softplus((far - near) / self.config.moon_temperature)  # [eq. 3]
        return self.model.mean_nll(logits, batch.y, batch.mask) + self.config.mu * masked_mean(
            contrast, batch.mask
        ), buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the trained model as state, and the update."""
        sent = self.update_type(fedavg.count(data), work.params, work.buffers)
        return State(work.params, work.buffers, torch.ones_like(state.started), {}), sent


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine between rows, (B,); smooth where a row is 0."""
    a, b = a.flatten(1), b.flatten(1)
    return (a * b).sum(1) * (a.square().sum(1) + TINY).rsqrt() * (b.square().sum(1) + TINY).rsqrt()
