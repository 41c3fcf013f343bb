"""SNIP, client half (Lee, Ajanthan and Torr 2019, ICLR), federated as in MetaVD's comparison: the
base's training on a pruned layer.

    paper      here                  shape
    w          work.params           by name
    c          ~memo.mask            shape of the layer
    g_j        work.survey.total     shape of the layer: slope of the summed loss in c_j, at c = 1,
                                     over w_j
    s_j        update.sensitivity    shape of the layer

    s_j = |g_j w_j|,    g = ∂L/∂w over all of the client's data                         [eq. 5]

Departs: sensitivities are not divided by their sum, which no ranking sees; they are taken after the
round, in evaluation mode, as long as nothing is pruned. Pruned weights are 0, do not move, and are
not sent.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Survey, Work
from ..maths import dropout
from ..maths.gradients import grad
from ..networks.model import Batch
from ..strategies.snip import MASK, SENSITIVITY, Broadcast, Update
from ..tree import Shapes, Tensors, flatten, map_tree, shapes, unflatten
from .addon import AddOn
from .fedavg import State, count


class Memo(NamedTuple):
    """What is constant during a round."""

    mask: Tensor
    pruned: Tensor


class Client(AddOn):
    """Trains what is left of the network; says what its loss depends on."""

    update_type: ClassVar[type] = Update
    sized_by = ("mask", "pruned")
    survey_size = 64

    def views(self) -> dict[str, str]:
        """Return the personal model and the global one."""
        adapted = (
            f"the pruned global model after {self.config.adapt_steps} step(s) of adaptation "
            "on the client's training data"
        )
        return {
            "personal": adapted if self.phases("finetune") else "the pruned global model",
            "global": "the pruned global model",
        }

    def unpack(self, kind: type, flat: Tensors) -> Any:
        """Return the broadcast, pruned weights 0."""
        return unflatten(
            kind,
            dropout.fill(flat, MASK, (f"params/{self.weight}",), self.model.shapes[self.weight]),
        )

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:  # type: ignore[override]
        """Return the work that starts at the pruned global model."""
        return Work(
            broadcast.params, broadcast.buffers, memo=Memo(broadcast.mask, broadcast.pruned)
        )

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean loss of a batch, pruned weights 0 whatever the optimiser does to them."""
        kept = {**params, self.weight: params[self.weight].masked_fill(work.memo.mask, 0)}
        return super().loss(kept, work, batch, noise, phase)

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the slope of the batch's summed loss in the weights of the layer."""

        def summed(weight: Tensor) -> Tensor:
            logits, _ = self.model.forward(
                {**work.params, self.weight: weight}, work.buffers, batch.x, train=False
            )
            return (self.model.nll(logits, batch.y, batch.mask) * batch.mask).sum()

        return Survey({SENSITIVITY: grad(summed)(work.params[self.weight])}, {})

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return (n, the model, s) [eq. 5]; s is 0 once the mask is decided."""
        number = count(data)
        weight = work.params[self.weight].masked_fill(work.memo.mask, 0)
        found = (work.survey.total[SENSITIVITY] * weight).abs() / number.to(weight.dtype)
        found = torch.where(work.memo.pruned, torch.zeros_like(found), found)
        return state, Update(
            number,
            {**work.params, self.weight: weight},
            work.buffers,
            work.memo.mask,
            work.memo.pruned,
            found,
        )

    def pack(self, update: Update) -> Tensors:
        """Return what travels of an update: of the layer what is kept; sensitivities until the mask
        is decided.
        """
        flat = dropout.thin(flatten(update), MASK, (f"params/{self.weight}",))
        return {
            name: value
            for name, value in flat.items()
            if name != SENSITIVITY or not bool(update.pruned)
        }

    def packed_shapes(self, updates: Update) -> list[Shapes]:
        """Return the shapes of the messages of stacked updates: all have the same mask."""
        first = map_tree(lambda leaf: leaf[0], updates)
        values = first._replace(
            params={
                name: torch.zeros_like(first.mask, dtype=leaf.dtype)
                if name == self.weight
                else leaf
                for name, leaf in first.params.items()
            }
        )
        return [shapes(self.pack(values))] * len(updates.num_examples)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Any) -> State:
        """Return the adapted model, its pruned weights 0."""
        weight = work.params[self.weight].masked_fill(work.memo.mask, 0)
        return state._replace(tuned={**work.params, self.weight: weight, **work.buffers})

    def predict(  # type: ignore[override]
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of the adapted model (personal), or
        of the pruned global one.
        """
        known = (
            {**broadcast.params, **broadcast.buffers}
            if view == "global" or not state.tuned
            else state.tuned
        )
        return self.model.probabilities(self.model.forward(known, {}, x, train=False)[0])
