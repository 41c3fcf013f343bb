"""FedDC, client half (Gao et al. 2022, CVPR): each client learns how far it drifts and takes that
off before averaging.

    paper      here               shape
    w          memo.params        by name: the broadcast
    theta_i    work.params        by name
    h_i        state.drift        by name: summed drift of this client
    g_i, g     pace               by name: theta_i+ − w over K eta, of this client and of all, in
                                  the last round
    K, eta     steps, lr          ()
    alpha      config.dc_alpha    ()

    loss = L_i + (alpha/2) ‖theta + h_i − w‖² + ⟨theta, g_i − g⟩                         [eq. 3]
    h_i ← h_i + (theta_i+ − w)                                                          [eq. 5]

The update carries theta_i+ + h_i.

Departs: g_i holds the factor 1/(K eta) of the paper's last term, K of its own round. With an
adaptive optimiser that is a step per unit of rate, no gradient, and far larger; so the term
is left out then (`dc_pace=always` keeps it).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Work
from ..networks.model import Batch
from ..strategies.feddc import State as Broadcast
from ..strategies.feddc import Update
from ..tree import Tensors
from . import feddyn
from .fedavg import count
from .feddyn import inner


class State(NamedTuple):
    """The drift, and the pace of the last round."""

    drift: Tensors
    pace: Tensors
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """What does not move in a round: w, h_i, g_i − g."""

    params: Tensors
    drift: Tensors
    apart: Tensors


class Client(feddyn.Client):
    """Trains with FedDC's two terms and sends its model with its drift added."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update
    private = ("tuned",)
    # the drift stays here, but what is sent (theta + drift, pace) tells it

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why the pace [eq. 3] has no meaning: it is divided by K eta."""
        if not training.scheduled:
            return None
        return "divides by steps × lr, so the learning rate must not change; use schedule=constant"

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return no drift and no pace."""
        one, two = ({n: torch.zeros_like(value) for n, value in params.items()} for _ in range(2))
        return State(one, two, tuned={})

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the global model."""
        sent: Broadcast = broadcast
        apart = {name: value - sent.pace[name] for name, value in state.pace.items()}
        return Work(sent.params, sent.buffers, Memo(sent.params, state.drift, apart))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L_i + (alpha/2)‖theta + h_i − w‖² + ⟨theta, g_i − g⟩ on one batch [eq. 3]."""
        logits, buffers = self.model.forward(
            params, work.buffers, batch.x, train=True, mask=batch.mask
        )
        memo: Memo = work.memo
        terms = [
            (params[name] + value - memo.params[name]).square().sum()
            for name, value in memo.drift.items()
        ]
        extra = self.config.dc_alpha / 2 * sum(terms[1:], terms[0])
        if self.config.dc_pace == "always" or self.training.optimizer == "sgd":
            extra = extra + inner(memo.apart, params)
        return self.model.mean_nll(logits, batch.y, batch.mask) + extra, buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the new drift [eq. 5] and pace, and (theta_i + h_i, n_i, g_i)."""
        memo, number = work.memo, count(data)
        moved = {name: value - memo.params[name] for name, value in work.params.items()}
        rate = self.steps(number).to(data.mask.dtype) * self.training.lr
        drift = {name: value + moved[name] for name, value in memo.drift.items()}
        pace = {name: value / rate for name, value in moved.items()}
        corrected = {name: value + drift[name] for name, value in work.params.items()}
        return State(drift, pace, {}), Update(number, corrected, work.buffers, pace)

    def steps(self, number: Tensor) -> Tensor:
        """Return K, the local steps of a round with this many samples; the numbers of
        `data/batches.py`, on a tensor.
        """
        phase = self.phases("train")[0]
        if phase.steps:
            return torch.full_like(number, phase.steps)
        rest = number % phase.batch_size
        joined = (
            (rest == 1) & (number > 1)
            if self.model.coupled
            else torch.zeros_like(rest, dtype=torch.bool)
        )
        return phase.epochs * (
            number // phase.batch_size + (rest > 0).to(number.dtype) - joined.to(number.dtype)
        )
