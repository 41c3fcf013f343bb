"""FedAvg, client half (McMahan et al. 2017, AISTATS): local training from the global model.

    paper      here            shape
    w          broadcast.params  by name
    w_k        work.params       by name
    n_k        num_examples      ()

    w_k = E epochs of the optimiser on the mean loss, from w                            [eq. 2]

The half is written for any split of the model into a shared part, which is sent and averaged, and an *own* part, which stays on
the client and is continued in the next round. FedAvg owns nothing; FedBN owns its normalisation layers; `local` owns everything.

Departs: with `finetune_epochs` the global model is fine-tuned on the client's training data before a test (FedAvg-FT).
A client that never trained is tested with the global model, or fine-tuned alike; methods with an own part first fit that part
alone, the shared part frozen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..strategies.fedavg import State as Broadcast
from ..strategies.fedavg import Update
from ..types import Batch, ClientHalf, Phase, Purpose, Tensors, Work


class State(NamedTuple):
    """What stays on the client: its own part of the model; after fine-tuning, the whole model."""

    params: Tensors
    buffers: Tensors


class Client(ClientHalf):
    """Trains from the shared part and the client's own part; sends the shared part."""

    state_type = State
    update_type = Update
    private = ("params", "buffers")

    def is_own(self, name: str) -> bool:
        """Return whether the parameter or buffer `name` stays on the client."""
        return False

    @property
    def owns(self) -> bool:
        """Return whether any part of the model stays on the client."""
        return any(self.is_own(name) for name in (*self.model.anatomy.trainable, *self.model.anatomy.buffers))

    def finetune_epochs(self) -> int:
        """Return the epochs of fine-tuning before a test."""
        return getattr(self.config, "finetune_epochs", 0)

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training; fine-tuning before a test where asked; the own part alone for a new client."""
        if purpose == "train":
            return (self.training.phase("local"),)
        if purpose == "new" and self.owns:
            own = tuple(name for name in self.model.anatomy.trainable if self.is_own(name))
            return (self.training.phase("fit", epochs=self.training.new_client_epochs, trainable=own),)
        epochs = self.finetune_epochs()
        return (self.training.phase("finetune", epochs=epochs),) if epochs else ()

    def views(self) -> dict[str, str]:
        """Return the personal model and, where the shared part is a whole model, the global one."""
        if self.owns:
            return {"personal": "the shared part of the last round with the client's own part"}
        tuned = f"the global model after {self.finetune_epochs()} epoch(s) of local fine-tuning"
        personal = tuned if self.finetune_epochs() else "the global model (the method has no personal one)"
        return {"personal": personal, "global": "the global model of the last round"}

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return the own part of the initial model."""
        return State(*(
            {name: value for name, value in tensors.items() if self.is_own(name)} for tensors in (params, buffers)
        ))  # fmt: skip

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at the shared part and the own part."""
        params, buffers = {**broadcast.params, **state.params}, {**broadcast.buffers, **state.buffers}
        return Work(params, buffers, memo=broadcast)

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return the own part and the update (n_k, shared part) [eq. 2]."""
        own = State(*({name: tensors[name] for name in old} for tensors, old in zip((work.params, work.buffers), state, strict=True)))
        shared = Update(
            num_examples=count(data),
            params={name: value for name, value in work.params.items() if not self.is_own(name)},
            buffers={name: value for name, value in work.buffers.items() if not self.is_own(name)},
        )
        return own, shared

    def adapted(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the fine-tuned model, or the own part that was fitted."""
        if self.owns and purpose == "new":
            return self.finish(state, work, data)[0]
        return State(work.params, work.buffers)

    def predict(self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the shared part with, for `personal`, what the client owns."""
        own = State({}, {}) if view == "global" else state
        logits, _ = self.model.forward({**broadcast.params, **own.params}, {**broadcast.buffers, **own.buffers}, x, train=False)
        return self.model.probabilities(logits)


def count(data: Batch) -> Tensor:
    """Return the number of samples that are not padding (int64)."""
    return data.mask.sum(dtype=torch.float64).to(torch.int64)
