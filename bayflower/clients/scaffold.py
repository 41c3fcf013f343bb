"""SCAFFOLD, client half (Karimireddy et al. 2020, ICML): local steps corrected by control variates.

    paper      here               shape
    x          broadcast.params   by name
    y_i        work.params        by name
    c          memo.shift + c_i   by name
    c_i        state.control      by name: this client's control variate
    g_i        gradient           by name
    K          memo.steps         (): local steps
    eta_l      lr                 (): rate of the local steps

    y_i ← y_i − eta_l (g_i(y_i) − c_i + c)                                              [eq. 3]
    c_i+ = c_i − c + (x − y_i) / (K eta_l)                              (option II)     [eq. 4]

Departs: [eq. 4] is the mean of g_i along the path when steps are plain SGD; here that mean itself
is kept, so that it is right for momentum and adaptive optimisers, too: the corrected gradient goes
to whatever optimiser is set, and weight decay is not part of g_i.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..networks.model import Batch
from ..strategies.scaffold import Update
from ..tree import Tensors
from . import fedavg

CORRECTED = "local"  # the phase in which steps are corrected; fine-tuning before a test is plain


class State(NamedTuple):
    """What stays on the client: its control variate; before a test also the fine-tuned model, else
    {}.
    """

    control: Tensors
    tuned: Tensors


class Memo(NamedTuple):
    """c − c_i, constant; and what the steps add up: their number and the gradients."""

    shift: Tensors
    steps: Tensor
    summed: Tensors


class Client(fedavg.Client):
    """Trains from the global model, each step corrected by c − c_i."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update
    # the control variate stays here too, but the changes that travel add up to it
    private = ("tuned",)  # type: ignore[assignment]

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return c_i = 0."""
        return State({name: torch.zeros_like(value) for name, value in params.items()}, {})

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the global model."""
        shift = {name: broadcast.control[name] - value for name, value in state.control.items()}
        summed = {name: torch.zeros_like(value) for name, value in broadcast.params.items()}
        return Work(
            broadcast.params, broadcast.buffers, Memo(shift, torch.zeros_like(data.mask[0]), summed)
        )

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one corrected step [eq. 3]."""
        if phase.name != CORRECTED:
            return super().step(phase, work, batches, noise)
        grads, buffers, loss = self.gradient(phase, work, batches, noise)
        memo: Memo = work.memo
        corrected = {name: grad + memo.shift[name] for name, grad in grads.items()}
        params, opt = phase.optimizer.update(work.params, corrected, work.opt)
        memo = memo._replace(
            steps=memo.steps + 1,
            summed={name: value + grads[name] for name, value in memo.summed.items()},
        )
        return work._replace(params=params, buffers=buffers, opt=opt, memo=memo), {"loss": loss}

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return c_i+ [eq. 4] and (y_i, n_i, c_i+ − c_i)."""
        memo: Memo = work.memo
        control = {name: value / memo.steps for name, value in memo.summed.items()}
        change = {name: value - state.control[name] for name, value in control.items()}
        return State(control, {}), Update(fedavg.count(data), work.params, work.buffers, change)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state beside the fine-tuned model."""
        return state._replace(tuned={**work.params, **work.buffers})

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the global model, or of the fine-tuned one."""
        tuned = view == "personal" and state.tuned
        params, buffers = (state.tuned, {}) if tuned else (broadcast.params, broadcast.buffers)
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    @property
    def plain_loop(self) -> bool:
        """Return False: every step is corrected by control variates."""
        return False
