"""pFedBreD and pFedMe, client half (Shi et al. 2023, NeurIPS; Dinh et al. 2020, NeurIPS): a
personal model near the mean of a prior that the client moves itself.

    paper        here                     shape
    w            work.params              by name: the copy that is sent
    theta_i      work.memo.theta          by name, private
    w_last       work.memo.last           by name: the client's w at the end of its last round
    s            (in step)                by name: the prior's mean
    B1, B2       batches[0], [1]          two mini-batches for mh, else one

    lg     s = w − eta ∇F(w; B1)                                    x = s                    [eq. 1]
    meg    s = w − eta (w_last − theta)                             x = w                    [eq. 2]
    mh     w ← w − a ∇F(w − a ∇F(w; B1); B2), then as meg, with B2  x = w                    [eq. 3]
    none   s = w                                                    x = w                    [eq. 4]
    some times x ← x − p (∇F(x; B) + lambda (x − s)); theta = x                              [eq. 5]
    w ← w − lr lambda (s − theta)                                                            [eq. 6]

Departs: a round is `local_epochs` of such steps, where the authors count mini-batches; [eq. 6] is a
step of the run's optimiser. Running statistics are those after the last pass; they are sent. theta
and w_last start at the first w that the client is sent. A client that never trained fits theta
around w by [eq. 5].
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Work
from ..maths.gradients import grad_and_value
from ..networks.model import Batch
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors, choose
from . import fedavg
from .ditto import FIT, unstarted


class State(NamedTuple):
    """The personal model, the client's last copy of the global one, and whether there are any."""

    params: Tensors
    buffers: Tensors
    last: Tensors
    started: Tensor  # bool


class Memo(NamedTuple):
    """theta, and w at the end of the last round."""

    theta: Tensors
    last: Tensors


class Client(fedavg.Client):
    """Trains a personal model around a prior's mean, and its copy of w towards it."""

    state_type: ClassVar[type] = State
    private = ("params",)

    @property
    def plain_loop(self) -> bool:
        """Return False: a step has steps of the personal model in it."""
        return False

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch on both models; nothing before a test; the personal model alone for a
        new client.
        """
        if purpose == "new":
            return (self.training.phase(FIT, epochs=self.training.new_client_epochs),)
        number = 2 if self.config.bred_prior == "mh" else 1
        local = self.training.phase("local")._replace(batches=number)
        return (local,) if purpose == "train" else ()

    def views(self) -> dict[str, str]:
        """Return the personal and the global model."""
        return {
            "personal": "the client's own model, near the mean of its prior",
            "global": "the global model of the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a personal model."""
        return State(params, buffers, params, unstarted(params))

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work on both models; theta and w_last start at the first w."""
        theta, last = choose(
            state.started, (state.params, state.last), (broadcast.params, broadcast.params)
        )
        return Work(broadcast.params, broadcast.buffers, Memo(theta, last))

    def slope(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return (∇F, the buffers, F) on one batch."""

        def objective(params: Tensors) -> tuple[Tensor, Tensors]:
            return ClientHalf.loss(self, params, work, batch, noise, phase)

        grads, (loss, buffers) = grad_and_value(objective, has_aux=True)(params)
        return grads, buffers, loss

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after the personal model's steps [eq. 5] and one of w [eq. 6]; of a new
        client w stays.
        """
        memo: Memo = work.memo
        if phase.name == FIT:
            after, loss = self.near(memo.theta, work.params, work, batches[0], noise, phase)
            return after, {"loss": loss}
        w, s, start, work = self.prior(work, batches, noise, phase)
        work, loss = self.near(start, s, work._replace(params=w), batches[-1], noise, phase)
        theta = work.memo.theta
        grads = {n: self.config.bred_weight * (s[n] - theta[n]) for n in w}
        moved, opt = phase.optimizer.update(w, grads, work.opt)
        return work._replace(params=moved, opt=opt), {"loss": loss}

    def prior(
        self, work: Work, batches: tuple[Batch, ...], noise: Tensors, phase: Phase
    ) -> tuple[Tensors, Tensors, Tensors, Work]:
        """Return (w, s, x, the work with the buffers of the passes) [eq. 1] to [eq. 4]."""
        w, memo, kind = work.params, work.memo, self.config.bred_prior
        if kind == "none":
            return w, w, w, work
        if kind == "lg":
            grads, buffers, _ = self.slope(w, work, batches[0], noise, phase)
            s = {n: w[n] - self.config.bred_eta * grads[n] for n in w}
            return w, s, s, work._replace(buffers=buffers)
        if kind == "mh":
            inner = w
            for batch in batches:
                grads, buffers, _ = self.slope(inner, work, batch, noise, phase)
                work = work._replace(buffers=buffers)
                inner = {n: w[n] - self.config.bred_meta_lr * grads[n] for n in w}
            w = inner
        s = {n: w[n] - self.config.bred_eta * (memo.last[n] - memo.theta[n]) for n in w}
        return w, s, w, work

    def near(
        self, x: Tensors, s: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Work, Tensor]:
        """Return (the work with the personal model after its steps from x around s, the last
        loss) [eq. 5].
        """
        rate, tie = self.config.bred_personal_lr, self.config.bred_weight
        loss = batch.mask.new_zeros(())
        for _ in range(self.config.bred_prox_steps):
            grads, buffers, loss = self.slope(x, work, batch, noise, phase)
            work = work._replace(buffers=buffers)
            x = {n: value - rate * (grads[n] + tie * (value - s[n])) for n, value in x.items()}
        return work._replace(memo=work.memo._replace(theta=x)), loss

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return theta and w, and (n_k, w)."""
        sent = self.update_type(fedavg.count(data), work.params, work.buffers)
        return self.kept(state, work), sent

    def kept(self, state: Any, work: Work) -> Any:
        """Return the state with theta after training."""
        there = torch.ones_like(state.started)
        return State(work.memo.theta, work.buffers, work.params, there)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state of a new client, theta fitted."""
        return self.kept(state, work)

    def predict(
        self, view: str, state: Any, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of the personal or the global model."""
        params, buffers = broadcast.params, broadcast.buffers
        if view == "personal":
            params, buffers = choose(
                state.started, (state.params, state.buffers), (params, buffers)
            )
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])
