"""FedALA, client half (Zhang et al. 2023, AAAI): a client starts each round at a mixture of its own
last model and the global one, weight by weight; it learns the mixture on its data.

    paper        here                       shape
    Theta_i      memo.own, state.params     by name: the client's model after its last round
    Theta        memo.shared                by name: the global one
    W_i          work.params["ala:…"]       by name: how much of the global one, 0 to 1; private
    Theta_hat_i  work.params                by name

    Theta_hat = Theta_i + (Theta − Theta_i) W,   W = 1 outside the last `ala_tensors`        [eq. 1]
    W ← clip(W − eta (Theta − Theta_i) ∇F(Theta_hat), 0, 1)                                  [eq. 2]
    then local training from Theta_hat

W starts at 1 and is kept from round to round. In a client's first round both models are one, and W
does not move.

Departs: W moves for `ala_epochs` over all samples of the client; the authors draw 80 % of them, and
in the second round repeat until the loss no longer moves, which would give clients rounds of
unequal length. `before` is the mixture with the weights that the client has; `personal` has learned
them again and trained, as a round begins. A client that never trained starts at the global model.
Running statistics are the global model's while W moves.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..maths.optim import Optimizer
from ..networks.model import Batch
from ..tree import Tensors, choose
from . import fedavg
from .ditto import unstarted

ALA = "ala:"  # what the names of the weights W begin with; no layer has such a name
WEIGH = "weigh"  # the phase in which they move


class State(NamedTuple):
    """The client's last model and its weights; before a test also the tuned model, else {}."""

    params: Tensors
    weights: Tensors
    tuned: Tensors
    started: Tensor  # bool


class Memo(NamedTuple):
    """The mixed tensors of both models."""

    own: Tensors
    shared: Tensors


class Client(fedavg.Client):
    """Learns how much of the global model it takes; trains and sends a whole model."""

    state_type: ClassVar[type] = State
    private = ("weights", "tuned")

    @property
    def plain_loop(self) -> bool:
        """Return False: more than the user's network moves."""
        return False

    @property
    def mixed(self) -> tuple[str, ...]:
        """Return the names of the parameters that are mixed, the last ones in the network; in the
        order of names, as states have them.
        """
        names = self.model.anatomy.trainable
        return tuple(sorted(names[-self.config.ala_tensors :]))

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return the weights' phase and local training, in a round and before a test alike; of a
        new client training alone.
        """
        names = tuple(self.model.shapes)
        if purpose == "new":
            epochs = self.training.new_client_epochs
            return (self.training.phase("fit", epochs=epochs, trainable=names),)
        weights = tuple(ALA + name for name in self.mixed)
        weigh = self.training.phase(WEIGH, epochs=self.config.ala_epochs, trainable=weights)
        weigh = weigh._replace(optimizer=Optimizer("sgd", self.config.ala_rate))
        return weigh, self.training.phase("local", trainable=names)

    def views(self) -> dict[str, str]:
        """Return the model after and before local training."""
        model = "a mixture of the client's last model and the global one"
        return {
            "personal": f"{model}, learned and trained as in a round; of a client that never "
            "trained, the global one after local training",
            "before": f"{model}, as the client's weights have it",
            "global": "the global model of the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a model of its own, all weights 1."""
        weights = {name: torch.ones_like(params[name]) for name in self.mixed}
        return State(params, weights, {}, unstarted(params))

    def memo(self, state: Any, broadcast: Any) -> Memo:
        """Return the mixed tensors of both models; the global ones while there is no other."""
        shared = {name: broadcast.params[name] for name in self.mixed}
        own = choose(state.started, {name: state.params[name] for name in self.mixed}, shared)
        return Memo(own, shared)

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the mixture [eq. 1]."""
        memo = self.memo(state, broadcast)
        weights = {ALA + name: value for name, value in state.weights.items()}
        start = {**broadcast.params, **mixture(memo, state.weights)}
        return Work({**start, **weights}, broadcast.buffers, memo)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return F of the mixture as a function of its weights, or F of the model that trains."""
        known = network(params)
        if phase.name == WEIGH:
            known = {**known, **mixture(work.memo, weights_of(params))}
        loss, buffers = super().loss(known, work, batch, noise, phase)
        return loss, work.buffers if phase.name == WEIGH else buffers

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one step; of the weights with the mixture they make [eq. 2]."""
        work, info = super().step(phase, work, batches, noise)
        if phase.name != WEIGH:
            return work, info
        weights = {n: v.clamp(0, 1) for n, v in weights_of(work.params).items()}
        named = {ALA + name: value for name, value in weights.items()}
        params = {**work.params, **mixture(work.memo, weights), **named}
        return work._replace(params=params), info

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the client's model and weights, and (n_k, the model)."""
        params = network(work.params)
        after = State(params, weights_of(work.params), {}, torch.ones_like(state.started))
        return after, self.update_type(fedavg.count(data), params, work.buffers)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state beside the model that was tuned."""
        return state._replace(tuned={**network(work.params), **work.buffers})

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the tuned model, the mixture, or the global model."""
        params, buffers = broadcast.params, broadcast.buffers
        if view == "personal" and state.tuned:
            params, buffers = state.tuned, {}
        elif view != "global":
            params = {**params, **mixture(self.memo(state, broadcast), state.weights)}
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])


def mixture(memo: Memo, weights: Tensors) -> Tensors:
    """Return Theta_i + (Theta − Theta_i) W of the mixed tensors [eq. 1], written such that it is
    Theta to the bit where W is 1.
    """
    return {
        name: shared + (memo.own[name] - shared) * (1 - weights[name])
        for name, shared in memo.shared.items()
    }


def weights_of(params: Tensors) -> Tensors:
    """Return W by the network's names."""
    return {n.removeprefix(ALA): value for n, value in params.items() if n.startswith(ALA)}


def network(params: Tensors) -> Tensors:
    """Return the network's parameters alone."""
    return {name: value for name, value in params.items() if not name.startswith(ALA)}
