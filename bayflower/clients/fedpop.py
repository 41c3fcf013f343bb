"""FedPop, client half (Kotelevskii et al. 2022, NeurIPS): Langevin samples of the client's head
under the population as prior; common layers are trained with them.

    paper        here                       shape
    z_i          work.params, state.params  by name: the head, the newest sample
    phi          work.params                by name: what lies before the head
    beta         memo.mean, memo.variance   by name: the population
    gamma        config.pop_rate            (): times the number of samples

    U(z) = mean −log p(y | x, phi, z) + ‖z − mean‖²/(2 n variance)                           [eq. 4]
    z ← z − gamma ∇U(z) + √(2 gamma T / n) ξ,   ξ standard normal                            [eq. 5]
    phi ← one step of the optimiser on the mean loss at z                                    [eq. 6]

[eq. 5] samples exp(−n U / T), the posterior if T = 1. Moments are means over the iterates of a
round.

Departs: the chain's gradients are of batches (stochastic gradient Langevin dynamics). It goes on
from round to round, so there is no burn-in. Before a test it runs on for as long as a round, phi
fixed; a new client begins at the population's mean. `personal` has the mean of the samples as head;
`sampled` averages over draws N(E z, Var z), which go home as the model's posterior. The chain has a
constant step size: learning rate schedules and `clip_norm` are for phi alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Purpose, Work
from ..maths.gradients import grad_and_value
from ..maths.laplace import SPREAD, Seen
from ..networks.model import Batch
from ..strategies.fedpop import Update
from ..tree import Tensors, choose
from . import fedavg
from .ditto import unstarted

DRAW = "draw"  # the phase before a test: the head alone


class State(NamedTuple):
    """The newest sample of the head, and mean and spread of the last samples."""

    params: Tensors
    mean: Tensors
    std: Tensors
    started: Tensor  # bool


class Memo(NamedTuple):
    """The population, the client's samples, and sums over iterates."""

    mean: Tensors
    variance: Tensors
    number: Tensor  # n
    steps: Tensor
    total: Tensors  # Σ (z − mean)
    squares: Tensors  # Σ (z − mean)²


class Client(fedavg.Client):
    """Samples its head; trains what is common."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update
    private = ("std",)
    needs_base = True

    @property
    def plain_loop(self) -> bool:
        """Return False: the head moves by a chain of the method's own."""
        return False

    @property
    def head(self) -> tuple[str, ...]:
        """Return the names of the head's parameters."""
        return tuple(sorted(self.model.head_names))

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch in which all moves; before a test, also of a new client, one of the
        head alone.
        """
        if purpose == "train":
            common = tuple(n for n in self.model.shapes if n not in self.model.head_names)
            return (self.training.phase("local", trainable=common),)
        epochs = self.training.new_client_epochs if purpose == "new" else None
        return (self.training.phase(DRAW, epochs=epochs, trainable=()),)

    def views(self) -> dict[str, str]:
        """Return the personal model, the population's, and an average over draws."""
        found = {
            "personal": "the common part of the last round with the mean of the head's samples",
            "global": "the common part of the last round with the population's mean as head",
        }
        if number := self.config.predict_samples:
            found["sampled"] = f"the head's posterior, averaged over {number} draws of it"
        return found

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return one number for each weight of the head; for each draw in predictions."""
        shapes = {name: self.model.shapes[name] for name in self.head}
        if stage != "predict":
            return shapes
        draws = self.config.predict_samples
        return {n: (draws, *shape) for n, shape in shapes.items()} if draws else {}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a head of its own."""
        head = {name: params[name] for name in self.head}
        flat = {name: torch.zeros_like(value) for name, value in head.items()}
        return State(head, head, flat, unstarted(params))

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that goes on from the newest sample; the first one is the mean."""
        head = choose(state.started, state.params, broadcast.mean)
        flat = {name: torch.zeros_like(value) for name, value in head.items()}
        number = data.mask.sum().clamp(min=1)
        known = (broadcast.mean, broadcast.variance, number, torch.zeros_like(number), flat, flat)
        return Work({**broadcast.params, **head}, broadcast.buffers, Memo(*known))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean loss; where the head alone moves, of the network as it predicts."""
        if phase.name != DRAW:
            return super().loss(params, work, batch, noise, phase)
        logits, _ = self.model.forward(params, work.buffers, batch.x, train=False)
        return self.model.mean_nll(logits, batch.y, batch.mask), work.buffers

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one step of the chain [eq. 5], and of what is common [eq. 6]."""
        memo: Memo = work.memo
        common = phase.moving(work.params)
        moving = {name: work.params[name] for name in (*common, *memo.mean)}

        def objective(moving: Tensors) -> tuple[Tensor, Tensors]:
            return self.loss({**work.params, **moving}, work, batches[0], noise, phase)

        grads, (loss, buffers) = grad_and_value(objective, has_aux=True)(moving)
        old = {name: work.params[name] for name in common}
        moved, opt = phase.optimizer.update(old, {n: grads[n] for n in common}, work.opt)
        heat = (2 * self.config.pop_rate * self.config.pop_temperature / memo.number).sqrt()
        head, total, squares = {}, {}, {}
        for name, mean in memo.mean.items():
            z = work.params[name]
            slope = grads[name] + (z - mean) / (memo.number * memo.variance[name])
            head[name] = z - self.config.pop_rate * slope + heat * noise[name]
            apart = head[name] - mean
            total[name] = memo.total[name] + apart
            squares[name] = memo.squares[name] + apart.square()
        memo = memo._replace(steps=memo.steps + 1, total=total, squares=squares)
        params = {**work.params, **moved, **head}
        return work._replace(params=params, buffers=buffers, memo=memo, opt=opt), {"loss": loss}

    def found(self, work: Work) -> tuple[Any, Tensors]:
        """Return the state after the chain, and E (z − mean)² by weight."""
        memo, mean, std, second = work.memo, {}, {}, {}
        steps = memo.steps.clamp(min=1)
        for name, old in memo.mean.items():
            apart, second[name] = memo.total[name] / steps, memo.squares[name] / steps
            mean[name] = old + apart
            std[name] = (second[name] - apart.square()).clamp(min=0).sqrt()
        head = {name: work.params[name] for name in memo.mean}
        there = torch.ones((), dtype=torch.bool, device=memo.steps.device)
        return State(head, mean, std, there), second

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the chain's end, and (n_k, common part, moments of the head)."""
        after, second = self.found(work)
        common = {n: v for n, v in work.params.items() if n not in work.memo.mean}
        square = {name: value.mean() for name, value in second.items()}
        update = Update(fedavg.count(data), common, work.buffers, after.mean, square)
        return after, update

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return mean and spread of the samples before a test."""
        return self.found(work)[0]

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities with the mean of the samples, of the population, or over
        draws.
        """
        head = broadcast.mean
        if view != "global":
            head = choose(state.started, state.mean, head)
        known = {**broadcast.params, **head}
        if view == "sampled":
            parts = [
                {n: head[n] + v * noise[n][draw].to(v) for n, v in state.std.items()}
                for draw in range(self.config.predict_samples)
            ]
            each = [self.said({**known, **one}, broadcast.buffers, x) for one in parts]
            return self.model.task.mixed(torch.stack(each))
        return self.said(known, broadcast.buffers, x)

    def said(self, params: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        """Return class probabilities of one network."""
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def spread(self, state: Any, broadcast: Any) -> Tensors:
        """Return the spread of the head's samples; that of the population without samples."""
        wide = {n: v.sqrt().expand_as(state.std[n]) for n, v in broadcast.variance.items()}
        found: Tensors = choose(state.started, state.std, wide)
        return found

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the Gaussian of the head's samples."""
        std = {n.removeprefix(SPREAD): v for n, v in params.items() if n.startswith(SPREAD)}
        std = std or {n: v.sqrt().expand_as(params[n]) for n, v in broadcast.variance.items()}
        own = Posterior("sampled", std, "FedPop's samples of the head")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}
