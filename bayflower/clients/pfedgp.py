"""pFedGP, client half (Achituve et al. 2021, NeurIPS): the shared network makes features, and a
Gaussian process at each node of a tree over the classes classifies them from the client's data.

    paper      here                     shape
    theta      work.params              by name: what lies before the head
    z          u                        (N, D): features, of length 1
    omega      tuned.omega              (K − 1, N): Pólya–Gamma means at the training samples
    (tree)     tuned.signs              (K − 1, K): +1 left, −1 right, 0 not below the node

    k(u, u') = gp_scale · exp(−‖u − u'‖² / 2 gp_length²), + gp_jitter for a sample itself   [eq. 5]
    L = Σ_nodes mean over query samples of −log p_node(side | the step's other samples)     [eq. 6]

The inference is that of `maths/processes.py`. In a training step `gp_predict_share` of the samples
of each class are predicted from the rest [eq. 6]; ω is a constant in the gradient. At a test the
client's training samples are the model; nothing is trained, for a new client neither.

Departs: mean-field inference instead of Gibbs chains; E σ(f) instead of exp E log σ(f) for "left"
and 1 minus it for "right", which favours the right; fixed kernel, as in the authors' code. A round
is `local_epochs` in batches of `gp_batch` samples. A class that the client has no sample of gets
the probability 1e-6 / K. The personal model holds the features of the client's training samples in
the place of the head; predictions are in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..maths import processes
from ..maths.classwise import class_means, members
from ..maths.processes import Kernel, Known
from ..maths.tops import Top, rest_of
from ..networks.model import Batch
from ..tree import Tensors
from . import fedper

LOOK = "look"  # the phase before a test, in which no weight moves
TINY = 1e-12


class Client(fedper.Client):
    """Trains the features; its own samples classify."""

    needs_classes = True

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why a sample must have one class."""
        usual = {"mixup": 0.0, "label_smoothing": 0.0, "class_weights": "none"}
        wrong = [name for name, off in usual.items() if getattr(training, name) != off]
        if not wrong:
            return None
        return f"puts a sample on one side of each node; use {wrong[0]}={usual[wrong[0]]}"

    @property
    def plain_loop(self) -> bool:
        """Return False: the network's own loss is not used."""
        return False

    @property
    def kernel(self) -> Kernel:
        """Return k [eq. 5]."""
        return Kernel(self.config.gp_scale, self.config.gp_length, self.config.gp_jitter)

    @property
    def num_classes(self) -> int:
        """Return K; a network with one output has two classes."""
        return max(self.model.num_classes, 2)

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training; before a test, also of a new client, a look at the
        data without a step.
        """
        if purpose == "train":
            return (self.training.phase("local")._replace(batch_size=self.config.gp_batch),)
        look = self.training.phase(LOOK, epochs=1, trainable=())
        return (look._replace(batch_size=2, epochs=0, steps=1),)

    def views(self) -> dict[str, str]:
        """Return the one way to predict."""
        return {"personal": "Gaussian processes on the client's data, features of the last round"}

    def features(self, params: Tensors, buffers: Tensors, data: Batch, train: bool) -> Any:
        """Return (u (N, D), the buffers after the pass)."""
        mask = data.mask if train else None
        _, z, after = self.model.forward_features(params, buffers, data.x, train=train, mask=mask)
        return processes.unit(z.flatten(1)), after

    def tree(self, u: Tensor, data: Batch) -> Tensor:
        """Return the signs of the tree for these samples."""
        if self.config.gp_tree == "fixed":
            return torch.as_tensor(processes.halves(self.num_classes)).to(u)
        counts, centres = class_means(u, data.y, data.mask, self.num_classes)
        return processes.grown(centres.to(u.dtype), counts)

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the shared features, and the tree of the round."""
        work = super().begin(state, broadcast, data)
        with torch.no_grad():
            u, _ = self.features(work.params, work.buffers, data, train=False)
            return work._replace(memo=self.tree(u.detach(), data))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L on one batch [eq. 6]."""
        signs: Tensor = work.memo
        u, buffers = self.features(params, work.buffers, batch, train=True)
        member = members(batch.y, batch.mask, self.num_classes).to(u)
        asked = query(member, self.config.gp_predict_share)  # (B,)
        side = signs @ member.mT  # (R, B)
        given = side * (1 - asked)
        cross = self.kernel.between(u, u)
        gram = self.kernel.jittered(cross)
        fitted = processes.fit(gram, given / 2, given.abs(), self.config.gp_iterations)
        mean, spread = processes.predicted(gram, cross, self.kernel.own, fitted)
        right = processes.left(side * mean, spread).clamp(min=TINY)
        live = ((given > 0).any(1) & (given < 0).any(1)).to(u)
        counted = side.abs() * asked * live[:, None]
        per_node = -(counted * right.log()).sum(1) / counted.sum(1).clamp(min=1)
        return per_node.sum(), buffers

    def gradient(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return the gradient of L; a look has none."""
        if phase.name == LOOK:
            return {}, work.buffers, batches[0].mask.new_zeros(())
        return super().gradient(phase, work, batches, noise)

    def own(self, state: Any, work: Work) -> Any:
        """Return the state as it is: nothing of the client's own is trained."""
        return state

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state with the training samples as the model."""
        with torch.no_grad():
            u, _ = self.features(work.params, work.buffers, data, train=False)
            u, signs = u.detach(), work.memo
            side = signs[:, data.y] * data.mask
            gram = self.kernel.within(u)
            iterations = self.config.gp_test_iterations
            pieces = [
                processes.fit(gram, part / 2, part.abs(), iterations).omega
                for part in side.split(processes.at_a_time(len(u)))
            ]
            counts = members(data.y, data.mask, self.num_classes).sum(0)
            known = Known(u, side, torch.cat(pieces), signs, counts)
        return state._replace(tuned=known._asdict())

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities from the client's samples."""
        known = {**broadcast.params, **state.params}, {**broadcast.buffers, **state.buffers}
        _, z, _ = self.model.forward_features(*known, x, train=False)
        if not state.tuned:
            return z.new_full((len(x), self.num_classes), 1 / self.num_classes)
        found = processes.probabilities(self.kernel, Known(**state.tuned), z.flatten(1))
        return found.to(z.dtype)

    def top(self) -> Top:
        """Return the processes in the place of the head."""
        return Top("processes", self.kernel._asdict())

    def topped(self, state: Any, broadcast: Any) -> tuple[Tensors, Tensors]:
        """Return the network before the head, and the client's samples as its processes."""
        head, params = self.model.head, {**broadcast.params, **state.params}
        known = {f"{head}.{name}": value for name, value in state.tuned.items()}
        return rest_of(self.model, params), {**broadcast.buffers, **state.buffers, **known}


def query(member: Tensor, share: float) -> Tensor:
    """Return which rows are to be predicted (N,): of each class's rows (N, K) the first
    int(n_c · share), in the order of the batch, which is a shuffled one.
    """
    rank = (member.cumsum(0) * member).sum(1)
    number = (member * (member.sum(0) * share).floor()).sum(1)
    return ((rank > 0) & (rank <= number)).to(member)
