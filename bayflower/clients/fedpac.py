"""FedPAC, client half (Xu, Tong and Huang 2023, ICLR): the head, then the base with features pulled
to class prototypes.

    paper          here                  shape
    f(x; theta)    features              (B, D): what the head gets
    phi_i          work.params           by name: the head; starts at the client's mixture
    c_c            work.memo.centroids   (K, D): the server's, constant during the round
    h_i, V_i       work.memo             (K, D), (): of the received base, before training

    h_{i,c} = (1/n) Σ_{y=c} z,   V_i = (1/n) ((1/n) Σ ‖z‖² − Σ_c ‖h_{i,c}‖²)                 [eq. 6]
    L = mean_i −log p(y_i|x_i) + lambda mean_i mean_d (z_id − c_{y_i,d})²                    [eq. 7]
    first the head on the cross-entropy, the base frozen; then the base on L, the head frozen

V_i is the variance of the mean of onehot(y) ⊗ z, summed over its coordinates.

Departs: a class without a prototype has no pull; the authors pull it to the client's own mean. A
class with fewer than `min_count` samples is sent neither in the prototypes nor in h. `personal` is
the model after one more local training, as FedRep's; `before` is the one of the mixed head. A
client that never trained fits a head, the base frozen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Work
from ..maths.classwise import class_means, members
from ..networks.model import Batch
from ..strategies.fedpac import Update
from ..tree import Shapes, Tensors, choose
from . import fedavg, fedper, pfedvmp
from .fedavg import State

PIECE = 256  # samples in one pass


class Memo(NamedTuple):
    """Prototypes, and what the received base shows of the classes."""

    centroids: Tensor
    known: Tensor
    weight: Tensor
    strength: Tensor
    h: Tensor
    variance: Tensor


class Client(pfedvmp.Client):
    """Trains head and base in turn; sends both, and what it saw of each class."""

    update_type: ClassVar[type] = Update  # type: ignore[assignment]
    private = ("tuned",)
    sized_by: ClassVar[tuple[str, ...]] = ()  # type: ignore[assignment]
    origin = "FedPAC's prototypes as class Gaussians over features"

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return the head's epochs, then the base's, in a round and before a test alike; the head
        alone for a new client.
        """
        if purpose == "new":
            return fedper.Client.phases(self, purpose)
        parts = [
            tuple(n for n in self.model.anatomy.trainable if self.is_own(n) == own)
            for own in (True, False)
        ]
        head = self.training.phase("head", epochs=self.config.pac_head_epochs, trainable=parts[0])
        if self.config.pac_head_lr:
            rate = replace(head.optimizer, lr=self.config.pac_head_lr)
            head = head._replace(optimizer=rate)
        return head, self.training.phase("base", trainable=parts[1])

    def views(self) -> dict[str, str]:
        """Return the model after and before local training."""
        model = "the base of the last round with the client's mixture of heads"
        return {
            "personal": f"{model}, after local training as in a round; of a client that never "
            "trained, of its own head alone",
            "before": f"{model}, before local training",
        }

    def head(self, state: State, broadcast: Any) -> Tensors:
        """Return the mixed head; the own one while there is none."""
        found: Tensors = choose(broadcast.mixed, broadcast.head, state.params)
        return found

    def begin(self, state: State, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the base and the mixed head, with h and V [eq. 6]."""
        params = {**broadcast.params, **self.head(state, broadcast)}
        h, variance = self.seen(params, broadcast.buffers, data, len(broadcast.known))
        work = Work(params, broadcast.buffers, memo=broadcast)
        return work._replace(memo=Memo(*self.strengths(work), h, variance))

    def seen(
        self, params: Tensors, buffers: Tensors, data: Batch, classes: int
    ) -> tuple[Tensor, Tensor]:
        """Return (h, V) of all training data in evaluation mode [eq. 6]."""
        sums, squares = [], []
        for start in range(0, len(data.y), PIECE):
            part = Batch(*(tensor[start : start + PIECE] for tensor in data))
            z = self.model.forward_features(params, buffers, part.x, train=False)[1].flatten(1)
            sums.append(members(part.y, part.mask, classes).mT @ z.double())
            squares.append((z.double().square().sum(1) * part.mask).sum())
        number = data.mask.double().sum().clamp(min=1)
        h = torch.stack(sums).sum(0) / number
        spread = torch.stack(squares).sum() / number - h.square().sum()
        variance = spread.clamp(min=0) / number
        return h.to(data.mask.dtype), variance.to(data.mask.dtype)

    def weight(self, work: Work) -> Tensor | float:
        """Return lambda [eq. 7]."""
        return float(self.config.pac_weight)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L on one batch [eq. 7]; the cross-entropy alone where the head moves."""
        if phase.name == "base":
            return super().loss(params, work, batch, noise, phase)
        return fedavg.Client.loss(self, params, work, batch, noise, phase)

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Any]:
        """Return the head, and base, head and what was seen of the classes."""
        own, base = fedavg.Client.finish(self, state, work, data)
        memo: Memo = work.memo
        z = work.survey.each["features"]
        counts, means = class_means(z, data.y, data.mask, len(memo.known))
        sent = counts >= self.config.min_count
        head, seen = {}, {}
        if self.config.pac_mix:
            head = own.params
            seen = {"h": memo.h * sent[:, None], "variance": memo.variance}
        return own, Update(
            base.num_examples,
            base.params,
            base.buffers,
            counts * sent,
            (means * sent[:, None]).to(z.dtype),
            head,
            seen,
        )

    def predict(self, view: str, state: State, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities after or before local training."""
        if view == "personal" and state.tuned:
            params, buffers = state.tuned, {}
        else:
            params = {**broadcast.params, **self.head(state, broadcast)}
            buffers = broadcast.buffers
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def pack(self, update: Any) -> Tensors:
        """Return the update as it is."""
        return ClientHalf.pack(self, update)

    def packed_shapes(self, updates: Any) -> list[Shapes]:
        """Return the shapes of the update, the same for all clients."""
        return ClientHalf.packed_shapes(self, updates)
