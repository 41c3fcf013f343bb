"""MAML, client half (Finn, Abbeel and Levine 2017, ICML): descends the loss that is left after an
inner step.

    paper          here                 shape
    theta          work.params          by name
    theta'_i       (inside meta.py)     by name: after the inner steps
    alpha          config.inner_lr      ()
    beta           lr                   (): rate of the outer step
    D_i, D'_i      batches[0], [1]      support and query

    theta'_i = theta − alpha ∇L(theta; D_i)                                             [eq. 1]
    theta ← theta − beta ∇_theta L(theta'_i; D'_i)                                      [eq. 2]

The gradient of [eq. 2] goes through [eq. 1], second derivatives and all.

Departs: a local step takes two mini-batches, support and query, where MetaVD's authors halve one.
Before a test: `adapt_steps` plain gradient steps at inner_lr, of clients old and new.
"""

from __future__ import annotations

from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..maths import meta
from ..maths.optim import Optimizer
from ..networks.model import Batch
from ..tree import Tensors
from ..work import unchanged_where
from . import reptile


class Client(reptile.Client):
    """Trains for what comes after a step of adaptation."""

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return local training with two batches a step; a few plain steps before a test."""
        if purpose == "train":
            return (self.training.phase("local")._replace(batches=2),)
        return super().phases(purpose)

    def adaptation(self) -> Phase:
        """Return the steps before a test: those the training was for [eq. 1]."""
        return Phase(
            reptile.ADAPT,
            Optimizer("sgd", self.config.inner_lr),
            self.training.batch_size,
            steps=self.config.adapt_steps,
        )

    @unchanged_where(lambda phase: phase.batches == 1)
    def gradient(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return the meta-gradient [eq. 2] of a step with two batches; of one with a single batch,
        that of the loss.
        """
        if phase.batches == 1:
            return super().gradient(phase, work, batches, noise)

        def loss(params: Tensors, buffers: Tensors, group: int) -> tuple[Tensor, Tensors]:
            drawn = {name: value[group] for name, value in noise.items()}
            return self.loss(params, work._replace(buffers=buffers), batches[group], drawn, phase)

        return self.meta_gradient(
            loss, work, meta.Way(self.inner(work), self.config.inner_lr, self.config.inner_steps)
        )

    def inner(self, work: Work) -> tuple[str, ...]:
        """Return the names of the parameters that the inner step moves."""
        return tuple(work.params)

    def meta_gradient(
        self, loss: meta.Loss, work: Work, way: meta.Way
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return (∇F, the buffers, F) through the inner steps [eq. 1]."""
        return meta.second_order(loss, work.params, work.buffers, way)

    @property
    def plain_loop(self) -> bool:
        """Return False: a step goes down a gradient of a gradient step."""
        return False
