"""FedMAP, client half (Zhang et al., "FedMAP: Bi-Level MAP Optimization", arXiv 2405.19000v1): MAP
training of a personal model.

    paper      here                   shape
    theta_k    state.params           by name: the personal model, continued from round to round
    gamma      work.memo.params       by name: mean of the prior, constant during the round
    sigma^2    config.sigma2          ()
    N_k        num_examples           ()
    J_k        objective              ()

    J_k(theta) = (1/N_k) Σ_i −log p(y_i|x_i, theta) + ‖theta − gamma‖² / (2 sigma²)     [eq. 7]
    log omega_k = −J_k(theta_k)/tau                                     (`mean`)        [eq. 8]

What distinguishes it from FedProx with mu = 1/sigma²: a round continues from the client's own
theta_k, and clients are weighted by how well their models explain their data.

Departs:
  E-M1  log omega instead of omega; the Gaussian's constant is dropped because it cancels.
  E-M2  `weights=mean` by default; `sum` is the printed [eq. 8], `count` multiplies by N_k,
        `uniform` is equal weights.
  E-M3  the prior is added to the *mean* NLL [eq. 7], not to the sum [eq. 6]; so clients of
        different size are tied equally.
  E-M8  an "arg min" in the algorithm is some epochs of the optimiser. BatchNorm's scale and shift
        are part of theta; its running statistics stay on the client.
  A client that never trained starts at gamma and fits [eq. 7] for `new_client_epochs`. E-M6 (the
generator) is in data/synthetic.py; E-M7 (balanced accuracy) in metrics.py; E-M9 (averages) in the
experiment's table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Survey, Work
from ..networks.model import Batch
from ..strategies.fedmap import Broadcast, Update
from ..tree import Tensors, choose
from .fedavg import count
from .fedprox import sq_distance


class State(NamedTuple):
    """The personal model (it travels, by the method's definition), its running statistics, and
    whether it has trained.
    """

    params: Tensors
    buffers: Tensors
    started: Tensor  # bool


class Client(ClientHalf):
    """Fits its personal model under the prior N(gamma, sigma² I)."""

    state_type = State
    update_type = Update
    private = ("buffers",)
    survey_size = 1024

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training; a new client fits its model from gamma; nothing
        before a test.
        """
        if purpose == "finetune":
            return ()
        epochs = self.training.new_client_epochs if purpose == "new" else None
        return (self.training.phase("local" if purpose == "train" else "fit", epochs=epochs),)

    def views(self) -> dict[str, str]:
        """Return the personal model and the prior's mean."""
        return {
            "personal": "the client's own MAP model",
            "global": "the mean of the prior after the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return a state that will start at the first gamma it is sent."""
        return State(params, buffers, torch.zeros((), dtype=torch.bool))

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that continues theta_k, or starts at gamma the first time."""
        params = choose(state.started, state.params, broadcast.params)
        return Work(params, state.buffers, memo=broadcast)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return J_k on one batch [eq. 7]."""
        nll, buffers = super().loss(params, work, batch, noise, phase)
        return nll + self.prior(params, work.memo.params), buffers

    def prior(self, params: Tensors, gamma: Tensors) -> Tensor:
        """Return ‖theta − gamma‖² / (2 sigma²)."""
        return sq_distance(params, gamma) / (2 * self.config.sigma2)

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return theta_k as state, and (theta_k, log omega_k, N_k)."""
        number = count(data)
        weight = self.log_weight(
            work.survey.total,
            self.prior(work.params, work.memo.params).double(),
            number.double(),
        )
        return State(work.params, work.buffers, torch.ones_like(state.started)), Update(
            number, weight, work.params
        )

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return Σ_i −log p(y_i|x_i, theta_k) of a batch, in evaluation mode (float64)."""
        logits, _ = self.model.forward(work.params, work.buffers, batch.x, train=False)
        nll = self.model.nll(logits, batch.y, batch.mask)
        return Survey((nll * batch.mask).sum(dtype=torch.float64), {})

    def log_weight(self, sum_nll: Tensor, prior: Tensor, number: Tensor) -> Tensor:
        """Return log omega_k [eq. 8] in the chosen reading (E-M2, E-M3)."""
        mode, tau = self.config.weights, self.config.tau
        if mode == "uniform":
            return torch.zeros_like(sum_nll)
        if mode == "sum":
            return -sum_nll - prior
        objective = sum_nll / number + prior
        return -objective / tau + (number.log() if mode == "count" else 0)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the fitted model."""
        return State(work.params, work.buffers, torch.ones_like(state.started))

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of theta_k (gamma if the client has not trained), or of gamma
        for `global`.
        """
        params = (
            broadcast.params
            if view == "global"
            else choose(state.started, state.params, broadcast.params)
        )
        logits, _ = self.model.forward(params, state.buffers, x, train=False)
        return self.model.probabilities(logits)
