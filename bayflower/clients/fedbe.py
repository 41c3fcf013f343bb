"""FedBE, client half (Chen and Chao 2021, ICLR): FedAvg's training, predictions of an ensemble
around the average, and what the server does with samples without labels.

    paper        here                  shape
    mu, Sigma    broadcast             by name: mean and variance of the clients' models
    w^(m)        (in predict, taught)  by name: sampled models
    M            config.be_samples     ()
    p-hat        memo.taught           (N, K): what the ensemble says of the server's samples
    w            work.params           by name: the student

    w^(m) = mu + spread √Sigma ε_m,   p = mean over m of softmax f(x; w^(m))                 [eq. 3]
    p-hat ∝ max(p-bar^{1/T}, 1e-8),   p-bar: the mean over mu and all w^(m)                  [eq. 4]
    student: SGD from mu on mean KL(p-hat ‖ softmax f(x; w)); the mean of every 25th iterate from
    step be_swa_start on, or the last one                                                    [eq. 5]

Departs: `personal` and `global` are the mean (the student) alone, fine-tuned if asked; `ensemble`
is [eq. 3] around it. The spread goes home with the personal model as its posterior. The clients'
own models are no teachers: they would have to be kept one by one. The KL is a mean over samples;
the authors' code divides by the number of classes too. Running statistics are those after the last
step.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Posterior, Purpose, Work
from ..maths.laplace import Seen
from ..maths.optim import Optimizer
from ..networks.model import Batch, masked_mean
from ..tree import Tensors
from . import fedavg

TEACH, DISTIL = "teach", "distil"  # the phases at the server
MOMENTUM, DECAY = 0.9, 1e-5  # of its optimiser
EVERY = 25  # steps between two iterates that are averaged
LEAST = 1e-8  # of a probability to the power of 1/T
CHUNK = 1024  # samples of one pass


class Memo(NamedTuple):
    """What the server was left with by the clients, what the ensemble says of its samples, and the
    sum of iterates that count.
    """

    variance: Tensors
    x: Tensor  # (N, …)
    taught: Tensor  # (N, K)
    step: Tensor  # int64
    number: Tensor  # of iterates that count
    total: Tensors


class Refiner(ClientHalf):
    """Distils the ensemble into one network at the server. The label of a sample is its number."""

    state_type: ClassVar[type] = fedavg.State
    update_type: ClassVar[type] = fedavg.Update
    needs_classes = True

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return nothing: the server keeps no state for it."""
        return fedavg.State({}, {}, {})

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return the ensemble's look at all samples, and the student's training."""
        config = self.config
        how = Optimizer("sgd", config.be_server_lr, momentum=MOMENTUM, weight_decay=DECAY)
        return (
            Phase(TEACH, how, batch_size=2, steps=1, trainable=()),
            Phase(DISTIL, how, config.be_server_batch, epochs=config.be_server_epochs),
        )

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return as many numbers as there are weights, for each drawn teacher."""
        if stage != TEACH:
            return {}
        return {n: (self.config.be_samples, *shape) for n, shape in self.model.shapes.items()}

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the mean."""
        zero = torch.zeros((), dtype=torch.int64, device=data.mask.device)
        total = {n: torch.zeros_like(v) for n, v in broadcast.params.items()}
        memo = Memo(broadcast.variance, data.x, data.mask[:, None], zero, zero, total)
        return Work(broadcast.params, broadcast.buffers, memo)

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after the ensemble's look, or after one step of the student [eq. 5]."""
        memo: Memo = work.memo
        if phase.name == TEACH:
            with torch.no_grad():
                memo = memo._replace(taught=self.taught(work, noise))
            return work._replace(memo=memo), {"loss": batches[0].mask.new_zeros(())}
        work, info = super().step(phase, work, batches, noise)
        past = memo.step + 1 - self.config.be_swa_start
        counts = ((past >= 0) & (past % EVERY == 0)).long()
        total = {n: v + counts * work.params[n].detach() for n, v in memo.total.items()}
        memo = memo._replace(step=memo.step + 1, number=memo.number + counts, total=total)
        return work._replace(memo=memo), info

    def taught(self, work: Work, noise: Tensors) -> Tensor:
        """Return p-hat (N, K): the mean over the teachers' probabilities, sharpened [eq. 4]."""
        mean, memo = work.params, work.memo
        parts = []
        for x in memo.x.split(CHUNK):
            found = [self.said(mean, work.buffers, x)]
            for draw in range(self.config.be_samples):
                std = {n: self.config.be_spread * v.sqrt() for n, v in memo.variance.items()}
                drawn = {n: v + std[n] * noise[n][draw].to(v) for n, v in mean.items()}
                found.append(self.said(drawn, work.buffers, x))
            parts.append(sharpened(torch.stack(found).mean(0), self.config.be_temperature))
        return torch.cat(parts)

    def said(self, params: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        """Return the class probabilities of one teacher."""
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return mean KL(p-hat ‖ the student's probabilities) [eq. 5]."""
        logits, buffers = self.model.forward(
            params, work.buffers, batch.x, train=True, mask=batch.mask
        )
        return masked_mean(divergence(work.memo.taught[batch.y], logits), batch.mask), buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the student: the mean of the iterates that count, or the last one."""
        memo: Memo = work.memo
        some = memo.number > 0
        params = {
            n: torch.where(some, memo.total[n] / memo.number.clamp(min=1), v)
            for n, v in work.params.items()
        }
        return state, fedavg.Update(fedavg.count(data), params, work.buffers)

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the model that was sent."""
        return self.said(broadcast.params, broadcast.buffers, x)


class Client(fedavg.Client):
    """Trains as FedAvg's; predicts with models drawn around the average."""

    refiner = Refiner

    def views(self) -> dict[str, str]:
        """Return the mean model, fine-tuned or not, and the ensemble."""
        number = self.config.be_samples
        return {
            **super().views(),
            "ensemble": f"{number} models drawn around it with the spread of the clients' models",
        }

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return as many numbers as there are weights, for each drawn model."""
        if stage != "predict":
            return {}
        return {n: (self.config.be_samples, *shape) for n, shape in self.model.shapes.items()}

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the mean model."""
        return Work(broadcast.params, broadcast.buffers, memo={})

    def std(self, broadcast: Any) -> Tensors:
        """Return the standard deviations that models are drawn with."""
        return {n: self.config.be_spread * v.sqrt() for n, v in broadcast.variance.items()}

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the mean model, or of models drawn around it [eq. 3]."""
        if view != "ensemble":
            return super().predict(view, state, broadcast, x, noise)
        return self.over_draws(state, broadcast, self.std(broadcast), x, noise)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the Gaussian of the clients' models."""
        own = Posterior("sampled", self.std(broadcast), "FedBE's Gaussian of the clients' models")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p-hat ∝ max(p^{1/T}, 1e-8) [eq. 4]."""
    power = (probabilities ** (1 / temperature)).clamp(min=LEAST)
    return power / power.sum(-1, keepdim=True)


def divergence(taught: Tensor, logits: Tensor) -> Tensor:
    """Return KL(taught ‖ softmax(logits)) of each sample; one logit is that of the second class."""
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    return (taught * (taught.log() - logits.log_softmax(-1))).sum(-1)
