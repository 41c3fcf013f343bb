"""FedROD, client half (Chen and Chao 2022, ICLR): a balanced loss for the shared network, and a
personal head on top of it.

    paper        here                      shape
    z            features                  (B, D): what the head gets
    g_G          logits                    (B, K): W z + b, of the shared network
    N_m,c        memo.prior                (K,): gamma log of the client's class counts
    phi_m        work.params["own:…"]      by name, private: the personal head (Q, a)

    L_G = mean_i −log softmax(W z_i + b + gamma log N_m)_{y_i}      for base, W and b      [eq. 7]
    L_P = mean_i −log softmax(W z_i + b + Q z_i + a)_{y_i}          for Q and a alone      [eq. 8]

The personal model is the network with the head (W + Q, b + a).

Departs: the personal head starts at 0; `rod_start=copy` starts it at the initial generic head, with
which the first personal logits are twice the generic ones. A class that the client lacks has the
prior −1e4, not −∞: its probability is exactly 0 and its row of W gets no gradient. `personal` is
the model after one more local training, as FedPer's; `before` is the one the paper tests. A client
that never trained fits Q and a, the rest frozen. The variant in which a hypernetwork makes the
personal head is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contract import Phase, Purpose, Work
from ..errors import ConfigError
from ..maths.classwise import members
from ..networks.model import Batch, Model
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors
from . import fedavg
from .ditto import OWN, others, owned, with_own
from .fedavg import State

FAR = 1e4  # a prior of −FAR gives a class the probability 0


class Memo(NamedTuple):
    """gamma times the logarithm of the class counts."""

    prior: Tensor


class Client(fedavg.Client):
    """Trains the shared network to be fair to classes, and its own head to its own classes."""

    needs_base = True
    needs_classes = True

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        found = [model.module_for(False).get_submodule(name) for name in model.head_layers]
        if len(found) != 1 or not isinstance(found[0], nn.Linear):
            raise ConfigError(
                "the personal head is added to the head, which must be one Linear layer; got "
                f"{', '.join(model.head_layers) or 'none'}; name such a layer as head"
            )

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why labels cannot be smoothed: classes that a client lacks have probability 0."""
        if not training.label_smoothing:
            return None
        return (
            "gives classes that a client lacks the probability 0, so labels cannot be smoothed; "
            "use label_smoothing=0"
        )

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training, in a round and before a test alike; the personal
        head alone for a new client.
        """
        if purpose == "new":
            own = tuple(OWN + name for name in sorted(self.model.head_names))
            epochs = self.training.new_client_epochs
            return (self.training.phase("fit", epochs=epochs, trainable=own),)
        return (self.training.phase("local"),)

    def views(self) -> dict[str, str]:
        """Return the personal model after and before local training, and the shared network."""
        model = "the shared network of the last round with the personal head on top"
        return {
            "personal": f"{model}, after local training as in a round; of a client that never "
            "trained, of its head alone",
            "before": f"{model}, before local training",
            "global": "the shared network of the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return the personal head at its start."""
        head = {name: params[name] for name in sorted(self.model.head_names)}
        if self.config.rod_start == "zero":
            head = {name: torch.zeros_like(value) for name, value in head.items()}
        return State(head, {}, {})

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work on shared network and personal head."""
        params = {**broadcast.params, **with_own(state.params)}
        return Work(params, broadcast.buffers, Memo(self.prior(data)))

    def prior(self, data: Batch) -> Tensor:
        """Return gamma log N_m by class, (K,); of a single logit the difference of two, (1,)."""
        counts = members(data.y, data.mask, max(self.model.num_classes, 2)).sum(0)
        known = self.config.rod_gamma * counts.clamp(min=1).log()
        found = torch.where(counts > 0, known, torch.full_like(known, -FAR))
        if self.model.shapes[f"{self.model.head}.weight"][0] == 1:
            found = (found[1:] - found[:1]).clamp(-FAR, FAR)
        return found.to(data.mask.dtype)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L_G + L_P on one batch [eq. 7] [eq. 8]; L_P has no gradient for what is shared."""
        logits, z, buffers = self.model.forward_features(
            others(params), work.buffers, batch.x, train=True, mask=batch.mask
        )
        own = logits.detach() + self.on_top(owned(params), z.detach().flatten(1))
        balanced = self.model.mean_nll(logits + work.memo.prior, batch.y, batch.mask)
        return balanced + self.model.mean_nll(own, batch.y, batch.mask), buffers

    def on_top(self, head: Tensors, z: Tensor) -> Tensor:
        """Return Q z + a."""
        out = z @ head[f"{self.model.head}.weight"].mT
        bias = head.get(f"{self.model.head}.bias")
        return out if bias is None else out + bias

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Any]:
        """Return the personal head, and (n_k, the shared network)."""
        sent = self.update_type(fedavg.count(data), others(work.params), work.buffers)
        return State(owned(work.params), {}, {}), sent

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the state beside the personal model after training; of a new client, its head."""
        if purpose == "new":
            return State(owned(work.params), {}, {})
        own = self.summed(others(work.params), owned(work.params))
        return state._replace(tuned={**own, **work.buffers})

    def summed(self, params: Tensors, head: Tensors) -> Tensors:
        """Return the network with the personal head added to its head."""
        return {**params, **{name: params[name] + value for name, value in head.items()}}

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of the personal or the shared network, without the prior."""
        params, buffers = broadcast.params, broadcast.buffers
        if view == "personal" and state.tuned:
            params, buffers = state.tuned, {}
        elif view != "global":
            params = self.summed(params, state.params)
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])
