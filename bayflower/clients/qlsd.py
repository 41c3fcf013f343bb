"""QLSD, client half (Vono et al. 2022, AISTATS): one gradient a round, quantised.

    paper        here                    shape
    theta        broadcast.params        by name
    eta_k        state.memory            by name, float64: what the client remembers
    tau          config.qlsd_prior       (): the prior's precision, shared out to b clients
    s            config.qlsd_levels      ()

    g_k = n_k ∇ mean loss(theta; batch) + (tau/b) theta                                      [eq. 1]
    sent = Q(g_k − eta_k),   eta_k ← eta_k + alpha sent
    Q(v) = ‖v‖ sign(v) (⌊r⌋ + [u < r − ⌊r⌋])/s,   r = s |v|/‖v‖,   u = Φ(normal)             [eq. 2]

Q is unbiased: E Q(v) = v, tensor by tensor.

Departs: the client adds what it sent, rounded, to its memory. `personal` is the mean of the samples
that count, fine-tuned if asked; `global` is the newest sample. Their spread goes home with the
personal model as its posterior.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Purpose, Work
from ..maths.gradients import grad_and_value
from ..maths.laplace import Seen
from ..networks.model import Batch
from ..strategies.qlsd import Broadcast, Update, decoded, memory_rate
from ..tree import Tensors, choose
from . import fedavg


class State(NamedTuple):
    """The memory, how often it was changed, and in which epoch."""

    memory: Tensors  # float64; {} without
    turns: Tensor  # int64
    epoch: Tensor  # int64
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """The round's constants, and what the one step found."""

    memory: Tensors
    turns: Tensor
    epoch: Tensor
    share: Tensor  # tau/b
    number: Tensor  # n_k
    codes: Tensors
    norms: Tensors


class Client(fedavg.Global):
    """Sends the quantised gradient of one batch."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update

    @property
    def plain_loop(self) -> bool:
        """Return False: no step is taken here."""
        return False

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one step on one batch; before a test fine-tuning where asked."""
        if purpose != "train":
            return super().phases(purpose)
        return (self.training.phase("local")._replace(epochs=0, steps=1),)

    def views(self) -> dict[str, str]:
        """Return the mean of the samples, fine-tuned or not, and the newest one."""
        mean = "the mean of the posterior's samples"
        tuned = f"{mean} after {self.finetune_epochs()} epoch(s) of local fine-tuning"
        return {
            "personal": tuned if self.finetune_epochs() else mean,
            "mean": mean,
            "global": "the newest sample of the posterior",
        }

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return one number for each weight, for the quantiser."""
        return dict(self.model.shapes) if stage == "local" else {}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client that remembers nothing."""
        memory = (
            {n: torch.zeros_like(v).double() for n, v in params.items()}
            if self.config.qlsd_memory
            else {}
        )
        number = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
        return State(memory, number, number.clone(), {})

    def lost(self, state: Any) -> Any:
        """Return a client that had a memory and has none: all memories must start anew."""
        none = {n: torch.zeros_like(v) for n, v in state.memory.items()}
        return state._replace(memory=none, turns=torch.full_like(state.turns, -1))

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:  # type: ignore[override]
        """Return the work at the newest sample; a memory of an older epoch is dropped."""
        same = state.epoch == broadcast.epoch
        none = {n: torch.zeros_like(v) for n, v in state.memory.items()}
        memo = Memo(
            choose(same, state.memory, none),
            torch.where(same, state.turns, torch.zeros_like(state.turns)),
            broadcast.epoch,
            self.config.qlsd_prior / broadcast.number.clamp(min=1).to(data.mask.dtype),
            data.mask.sum(),
            {n: torch.zeros_like(v) for n, v in broadcast.params.items()},
            {n: v.new_zeros(()) for n, v in broadcast.params.items()},
        )
        return Work(broadcast.params, broadcast.buffers, memo)

    def adapt(self, state: Any, broadcast: Any, data: Batch, purpose: Purpose) -> Work:
        """Return the work that starts at the mean of the samples."""
        return Work(broadcast.mean, broadcast.buffers, memo={})

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work with the quantised gradient [eq. 1] [eq. 2]; in fine-tuning a step."""
        if phase.name == fedavg.FINETUNE:
            return super().step(phase, work, batches, noise)
        memo: Memo = work.memo

        def objective(params: Tensors) -> tuple[Tensor, Tensors]:
            return self.loss(params, work, batches[0], noise, phase)

        grads, (loss, buffers) = grad_and_value(objective, has_aux=True)(work.params)
        codes, norms = {}, {}
        for n, value in work.params.items():
            slope = memo.number * grads[n] + memo.share * value
            if n in memo.memory:
                slope = slope - memo.memory[n].to(slope)
            uniform = torch.erfc(-noise[n] / 2**0.5) / 2
            codes[n], norms[n] = quantised(slope, uniform, self.config.qlsd_levels)
        memo = memo._replace(codes=codes, norms=norms)
        return work._replace(buffers=buffers, memo=memo), {"loss": loss}

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the memory with what was sent, and the codes."""
        memo, levels = work.memo, self.config.qlsd_levels
        codes = {n: v.to(torch.int16) for n, v in memo.codes.items()}
        memory = {
            n: v + memory_rate(v.numel(), levels) * decoded(codes[n], memo.norms[n], levels)
            for n, v in memo.memory.items()
        }
        update = Update(fedavg.count(data), work.buffers, codes, memo.norms, memo.turns)
        return State(memory, memo.turns.clamp(min=0) + 1, memo.epoch, {}), update

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities at the mean, fine-tuned if it was, or the newest sample."""
        params, buffers = broadcast.params, broadcast.buffers
        if view != "global":
            params = broadcast.mean
        if view == "personal" and state.tuned:
            params, buffers = state.tuned, {}
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the spread of the posterior's samples."""
        own = Posterior("sampled", broadcast.spread, "the spread of QLSD's samples")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def quantised(v: Tensor, uniform: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return (codes, norm) of a tensor, from uniform numbers [eq. 2]; of zeros both are zero."""
    norm = v.square().sum().sqrt()
    size = levels * v.abs() / torch.where(norm > 0, norm, torch.ones_like(norm))
    whole = size.floor()
    code = torch.sign(v) * (whole + (uniform < size - whole).to(v.dtype))
    return code.clamp(-levels, levels), norm
