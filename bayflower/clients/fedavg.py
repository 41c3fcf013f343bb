"""FedAvg, client half (McMahan et al. 2017, AISTATS): local training from the global model.

    paper      here            shape
    w          broadcast.params  by name
    w_k        work.params       by name
    n_k        num_examples      ()

    w_k = E epochs of the optimiser on the mean loss, from w                            [eq. 2]

The half is written for any split of the model into a shared part, which is sent and averaged, and
an *own* part, which stays on the client and is continued in the next round. FedAvg owns nothing;
FedBN owns its normalisation layers; `local` owns everything.

Departs: with `finetune_epochs` the global model is fine-tuned on the client's training data before
a test (FedAvg-FT). A client that never trained is tested with the global model, or fine-tuned
alike; methods with an own part first fit that part alone, the shared part frozen. With
`settle_epochs` a client passes over its data in training mode once more before it sends its model,
so that BatchNorm's running statistics follow the last weights; no weight moves.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Work
from ..networks.model import Batch
from ..strategies.fedavg import State as Broadcast
from ..strategies.fedavg import Update
from ..tree import Tensors
from ..work import unchanged

SETTLE = "settle"  # the phase in which no weight moves
FINETUNE = "finetune"  # the phase before a test


class State(NamedTuple):
    """What stays on the client: its own part of the model; before a test also the whole model after
    fine-tuning, else {}.
    """

    params: Tensors
    buffers: Tensors
    tuned: Tensors


class Client(ClientHalf):
    """Trains from the shared part and the client's own part; sends the shared part."""

    state_type: ClassVar[type] = State
    update_type: ClassVar[type] = Update
    private: ClassVar[tuple[str, ...]] = ("params", "buffers", "tuned")

    def is_own(self, name: str) -> bool:
        """Return whether the parameter or buffer `name` stays on the client."""
        return False

    @property
    def owns(self) -> bool:
        """Return whether any part of the model stays on the client."""
        return any(
            self.is_own(name)
            for name in (*self.model.anatomy.trainable, *self.model.anatomy.buffers)
        )

    def finetune_epochs(self) -> int:
        """Return the epochs of fine-tuning before a test."""
        return getattr(self.config, "finetune_epochs", 0)

    def settle_epochs(self) -> int:
        """Return the passes in training mode, without steps, before a model is sent."""
        return getattr(self.config, "settle_epochs", 0)

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training, and passes without steps where asked; fine-tuning
        before a test where asked; the own part alone for a new client.
        """
        if purpose == "train":
            local, epochs = self.training.phase("local"), self.settle_epochs()
            last = self.training.phase(SETTLE, epochs=epochs, trainable=()) if epochs else None
            return (local, last) if last else (local,)
        if purpose == "new" and self.owns:
            own = tuple(name for name in self.model.anatomy.trainable if self.is_own(name))
            return (
                self.training.phase("fit", epochs=self.training.new_client_epochs, trainable=own),
            )
        epochs = self.finetune_epochs()
        return (self.training.phase(FINETUNE, epochs=epochs),) if epochs else ()

    def views(self) -> dict[str, str]:
        """Return the personal model and, where the shared part is a whole model, the global one."""
        if self.owns:
            return {"personal": "the shared part of the last round with the client's own part"}
        tuned = f"the global model after {self.finetune_epochs()} epoch(s) of local fine-tuning"
        personal = (
            tuned if self.finetune_epochs() else "the global model (the method has no personal one)"
        )
        return {"personal": personal, "global": "the global model of the last round"}

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return the own part of the initial model."""
        own = [
            {name: value for name, value in tensors.items() if self.is_own(name)}
            for tensors in (params, buffers)
        ]
        return State(own[0], own[1], tuned={})

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at the shared part and the own part."""
        params, buffers = (
            {**broadcast.params, **state.params},
            {**broadcast.buffers, **state.buffers},
        )
        return Work(params, buffers, memo=broadcast)

    @property
    def plain_loop(self) -> bool:
        """Return whether a round is nothing but steps down the loss."""
        return not self.settle_epochs()

    @unchanged
    def gradient(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return the gradient of the loss; of a pass without steps no gradient, but its buffers."""
        if phase.name != SETTLE:
            return super().gradient(phase, work, batches, noise)
        loss, buffers = self.loss(work.params, work, batches[0], noise, phase)
        return {}, buffers, loss

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Any]:
        """Return the own part and the update (n_k, shared part) [eq. 2]."""
        shared = Update(
            num_examples=count(data),
            params={name: value for name, value in work.params.items() if not self.is_own(name)},
            buffers={name: value for name, value in work.buffers.items() if not self.is_own(name)},
        )
        return self.own(state, work), shared

    def own(self, state: State, work: Work) -> State:
        """Return the own part of the model after training."""
        return state._replace(
            params={name: work.params[name] for name in state.params},
            buffers={name: work.buffers[name] for name in state.buffers},
        )

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the state beside the fine-tuned model; of a new client of a method with an own
        part, that part fitted.
        """
        if self.owns and purpose == "new":
            return self.own(state, work)
        return state._replace(tuned={**work.params, **work.buffers})

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities: `personal` of the fine-tuned model, or of shared and own part
        where nothing is tuned.
        """
        if view == "personal" and state.tuned:
            params, buffers = state.tuned, {}
        else:
            params, buffers = (
                {**broadcast.params, **state.params},
                {**broadcast.buffers, **state.buffers},
            )
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def over_draws(
        self, state: Any, broadcast: Any, std: Tensors, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities averaged over networks drawn around the mean, one for each
        draw in `noise`.
        """
        known, found = {**broadcast.params, **broadcast.buffers, **state.tuned}, []
        for draw in range(len(noise[next(iter(std))])):
            drawn = {n: known[n] + (v * noise[n][draw].to(v)).to(known[n]) for n, v in std.items()}
            out = self.model.forward({**known, **drawn}, {}, x, train=False)[0]
            found.append(self.model.probabilities(out))
        return self.model.task.mixed(torch.stack(found))


class Global(Client):
    """A method of one global model whose clients have a state and a loss of their own. Before a
    test the global model may be fine-tuned, as FedAvg's is: by plain steps. The state has a field
    `tuned`.
    """

    private: ClassVar[tuple[str, ...]] = ("tuned",)

    def adapt(self, state: Any, broadcast: Any, data: Batch, purpose: Purpose) -> Work:
        """Return the work that starts at the global model."""
        return Work(broadcast.params, broadcast.buffers, memo={})

    @unchanged
    def gradient(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return the method's gradient; of the loss alone in fine-tuning."""
        if phase.name == FINETUNE:
            plain = Client(self.config, self.training, self.model)
            return plain.gradient(phase, work, batches, noise)
        return super().gradient(phase, work, batches, noise)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state beside the fine-tuned model."""
        return state._replace(tuned={**work.params, **work.buffers})

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the global model, or of the fine-tuned one."""
        tuned = view == "personal" and state.tuned
        params, buffers = (state.tuned, {}) if tuned else (broadcast.params, broadcast.buffers)
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])


def count(data: Batch) -> Tensor:
    """Return the number of samples that are not padding (int64)."""
    return data.mask.sum(dtype=torch.float64).to(torch.int64)
