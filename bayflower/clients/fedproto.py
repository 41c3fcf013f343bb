"""FedProto, client half (Tan et al. 2022, AAAI): an own network whose features are pulled to the
global prototypes.

    paper        here                        shape
    omega_i      state.params                by name, private: the whole network
    f_i(x)       features                    (B, D): what the head gets
    C̄^(j)        work.memo.centroids         (K, D): constant during the round
    C_i^(j)      update.means                (K, D)
    lambda       config.proto_weight         ()

    C_i^(j) = mean feature of class j over all local data, after training                 [eq. 3]
    L = mean_i −log p(y_i|x_i) + lambda · mean_i mean_d (z_id − C̄_{y_i,d})²               [eq. 7]
    prediction: argmin_j ‖f_i(x) − C̄^(j)‖                                                 [eq. 8]

[eq. 8] is the arg max of softmax_j(C̄^(j)·z − ½‖C̄^(j)‖²): the network with the prototypes as its
head, under Gaussian classes of variance 1. That is the personal model.

Departs: samples of a class without a prototype add nothing to the pull and count in its mean; a
class without a prototype is never predicted. Before the first prototypes the client's own head
predicts (it is the view `head`). Features are collected after training, in evaluation mode; the
authors collect them during the last epoch. A client that never trained trains its network alone,
with the prototypes fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..contract import Phase, Purpose, Work
from ..errors import ConfigError
from ..networks.model import Model
from ..tree import Tensors, choose
from . import fedavg, pfedvmp

NEVER = -1e4  # the logit of a class without a prototype: its probability is 0


class Client(pfedvmp.Client):
    """Owns its network; sends the mean feature of each class."""

    origin = "FedProto's prototypes as class Gaussians over features"

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        found = [model.module_for(False).get_submodule(name) for name in model.head_layers]
        if len(found) != 1 or not isinstance(found[0], nn.Linear) or found[0].bias is None:
            raise ConfigError(
                "prototypes stand in for the head, which must be one Linear layer with a bias; "
                f"got {', '.join(model.head_layers) or 'none'}; name such a layer as head"
            )

    def is_own(self, name: str) -> bool:
        """Return True: no weight leaves the client."""
        return True

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training, also for a new client; nothing before a test."""
        return () if purpose == "finetune" else fedavg.Client.phases(self, purpose)

    def views(self) -> dict[str, str]:
        """Return both ways to predict."""
        return {
            "personal": "the client's own network, the nearest prototype predicts",
            "head": "the client's own network with its own head",
        }

    def weight(self, work: Work) -> Tensor | float:
        """Return lambda [eq. 7]."""
        return float(self.config.proto_weight)

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities by distance to the prototypes [eq. 8], or of the own head."""
        params = state.params
        if view == "personal":
            head = prototype_head(broadcast.centroids, broadcast.known, params, self.model.head)
            own = {name: params[name] for name in head}
            params = {**params, **choose(broadcast.known.any(), head, own)}
        return self.model.probabilities(
            self.model.forward(params, state.buffers, x, train=False)[0]
        )


def prototype_head(centroids: Tensor, known: Tensor, params: Tensors, layer: str) -> Tensors:
    """Return the head whose logits are C·z − ½‖C‖² by class; one logit is their difference."""
    weight, bias = f"{layer}.weight", f"{layer}.bias"
    c = centroids.to(params[weight].dtype)
    b = torch.where(known, -c.square().sum(1) / 2, torch.full_like(c[:, 0], NEVER))
    if params[weight].shape[-2] == 1:
        c, b = c[1:] - c[:1], b[1:] - b[:1]
    return {weight: c, bias: b}
