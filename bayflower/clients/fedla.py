"""FedLA, client half (Liu et al. 2021, arXiv 2102.01936): training under the server's posterior as
prior, then a Laplace approximation.

    paper       here                shape
    mu_S        memo.params         by name: mean of the prior
    Lambda_S    memo.precision      by name: its diagonal precision
    F_k         survey / n_k        by name: Fisher information of the mean loss at the trained
                                    model
    Lambda_k    update.precision    by name

    loss = mean NLL + (la_weight/2) Σ Lambda_S (theta − mu_S)²                          [eq. 3]
    Lambda_k = memory Lambda_S + F_k                                                    [eq. 4]

Departs: the Fisher information is exact, over the model's own labels (curvature.py), one pass back
for each class; `curvature=sketch` has one pass for all. A precision is at least 1e-6: weights
behind dead units have no information and would divide 0 by 0.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Survey, Work
from ..maths.curvature import at_once, diagonal
from ..maths.laplace import Seen, independent, last_weights
from ..networks.model import Batch, Model
from ..strategies.fedla import State as Broadcast
from ..strategies.fedla import Update
from ..tree import Tensors
from . import fedavg

LEAST = 1e-6


class State(NamedTuple):
    """Nothing stays on the client but how often it took part."""

    turns: Tensor
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Client(fedavg.Global):
    """Trains under the global posterior; says how certain it is of each weight."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        self.survey_size = at_once(model, training.batch_size, config.curvature)

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client that has not taken part."""
        some = next(iter(params.values()))
        return State(torch.zeros((), dtype=torch.int64, device=some.device), {})

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the prior's mean."""
        return Work(broadcast.params, broadcast.buffers, memo=broadcast)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean NLL and the prior's term on one batch [eq. 3]."""
        loss, buffers = super().loss(params, work, batch, noise, phase)
        memo: Broadcast = work.memo
        terms = [
            (value * (params[name] - memo.params[name]).square()).sum()
            for name, value in memo.precision.items()
        ]
        return loss + self.config.la_weight / 2 * sum(terms[1:], terms[0]), buffers

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the Fisher information that `batch` adds."""
        return Survey(
            diagonal(self.model, work.params, work.buffers, batch, self.config.curvature), {}
        )

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return (theta_k, Lambda_k, n_k) [eq. 4]."""
        number, memo = fedavg.count(data), work.memo
        found = {name: value / number.to(value.dtype) for name, value in work.survey.total.items()}
        precision = {
            name: (self.config.memory * memo.precision[name] + value).clamp(min=LEAST)
            for name, value in found.items()
        }
        return State(state.turns + 1, {}), Update(number, work.params, work.buffers, precision)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the method's own diagonal posterior of the last layer, for as many samples as
        the client has.
        """
        found = super().posterior(params, broadcast, seen, layer)
        if seen is not None and layer is not None:
            precision = last_weights(broadcast.precision, layer)
            std = (seen.number.clamp(min=1) * precision).rsqrt()
            found["own"] = independent(std, "FedLA's diagonal posterior of the last round")
        return found
