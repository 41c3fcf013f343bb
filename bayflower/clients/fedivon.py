"""FedIvon, client half (Pal et al. 2024, arXiv 2411.18385): variational online Newton (IVON, Shen
et al. 2024, ICML) from the server's Gaussian.

    paper        here                 shape
    mu           work.params          by name
    h            work.memo.hess       by name: curvature of the mean loss
    g            work.memo.momentum   by name
    sigma²       (in step)            by name: T/(n (h + delta))
    eta          lr                   (): the run's

    θ = mu + sigma ε;  ĝ = ∇ of the mean loss at θ;  ĥ = ĝ ε/sigma                           [eq. 1]
    g ← b1 g + (1 − b1) ĝ;  h ← b2 h + (1 − b2) ĥ + ½ (1 − b2)² (h − ĥ)²/(h + delta)         [eq. 2]
    mu ← mu − eta (g/(1 − b1^t) + delta mu)/(h + delta)                                      [eq. 3]

[eq. 2] keeps h + delta positive.

Departs: T = `ivon_temperature` (1 is the paper's bound): small clients draw too wide otherwise. The
run's `optimizer` is not used, since IVON is one; its lr, schedule, `clip_norm` and `momentum` are,
on [eq. 3]. g starts at 0 in every round. The personalised form, whose clients have the server's
posterior as their prior, is left out: `personal` is the mean, fine-tuned if asked; `sampled`
averages over draws of the posterior, which goes home with the personal model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Purpose, Work
from ..maths.gradients import grad_and_value
from ..maths.laplace import Seen
from ..networks.model import Batch
from ..strategies.fedivon import Update, spread
from ..tree import Tensors
from . import fedavg
from .fedpa import State


class Memo(NamedTuple):
    """Curvature, momentum, steps taken, and the number of samples by the temperature."""

    hess: Tensors
    momentum: Tensors
    steps: Tensor
    number: Tensor


class Client(fedavg.Global):
    """Trains a Gaussian over the weights; sends mean and curvature."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update

    @property
    def plain_loop(self) -> bool:
        """Return False: the optimiser is the method's."""
        return False

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of plain steps along IVON's direction; before a test fine-tuning where
        asked.
        """
        if purpose != "train":
            return super().phases(purpose)
        local = self.training.phase("local")
        plain = replace(local.optimizer, name="sgd")
        return (local._replace(optimizer=plain),)

    def views(self) -> dict[str, str]:
        """Return the posterior's mean, fine-tuned or not, and an average over its draws."""
        found = super().views()
        if self.config.predict_samples:
            number = self.config.predict_samples
            found["sampled"] = f"the posterior over weights, averaged over {number} samples of it"
        return found

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return one number for each weight; for each draw in predictions."""
        if stage == fedavg.FINETUNE:
            return {}
        if stage != "predict":
            return dict(self.model.shapes)
        draws = self.config.predict_samples
        return {n: (draws, *shape) for n, shape in self.model.shapes.items()} if draws else {}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client that has not taken part."""
        some = next(iter(params.values()))
        return State(torch.zeros((), dtype=torch.int64, device=some.device), {})

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the server's Gaussian."""
        zeros = {n: torch.zeros_like(v) for n, v in broadcast.params.items()}
        number = data.mask.sum().clamp(min=1) / self.config.ivon_temperature
        memo = Memo(broadcast.hess, zeros, torch.zeros_like(number), number)
        return Work(broadcast.params, broadcast.buffers, memo)

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one step [eq. 1] [eq. 2] [eq. 3]; a plain one in fine-tuning."""
        if phase.name == fedavg.FINETUNE:
            return super().step(phase, work, batches, noise)
        memo, delta = work.memo, self.config.ivon_decay
        sigma = {n: (memo.number * (v + delta)).rsqrt() for n, v in memo.hess.items()}
        drawn = {n: v + sigma[n] * noise[n] for n, v in work.params.items()}

        def objective(params: Tensors) -> tuple[Tensor, Tensors]:
            return self.loss(params, work, batches[0], noise, phase)

        grads, (loss, buffers) = grad_and_value(objective, has_aux=True)(drawn)
        b1, b2, steps = self.config.ivon_momentum, self.config.ivon_memory, memo.steps + 1
        momentum = {n: b1 * v + (1 - b1) * grads[n] for n, v in memo.momentum.items()}
        hess = {
            n: curved(v, grads[n] * noise[n] / sigma[n], b2, delta) for n, v in memo.hess.items()
        }
        unbiased = 1 - b1**steps
        way = {
            n: (momentum[n] / unbiased + delta * v) / (hess[n] + delta)
            for n, v in work.params.items()
        }
        params, opt = phase.optimizer.update(work.params, way, work.opt)
        memo = memo._replace(hess=hess, momentum=momentum, steps=steps)
        return work._replace(params=params, buffers=buffers, memo=memo, opt=opt), {"loss": loss}

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return (n_k, mu_k, h_k)."""
        update = Update(fedavg.count(data), work.params, work.buffers, work.memo.hess)
        return State(state.turns + 1, {}), update

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities at the mean (fine-tuned, if it was), or over draws."""
        if view != "sampled":
            return super().predict(view, state, broadcast, x, noise)
        return self.over_draws(state, broadcast, spread(broadcast, self.config), x, noise)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the posterior over all weights that the clients agreed on."""
        std = spread(broadcast, self.config)
        own = Posterior("sampled", std, "FedIvon's posterior over the weights")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def curved(h: Tensor, new: Tensor, memory: float, delta: float) -> Tensor:
    """Return the curvature after one step; with delta it stays positive [eq. 2]."""
    rest = 1 - memory
    return memory * h + rest * new + rest**2 / 2 * (h - new).square() / (h + delta)
