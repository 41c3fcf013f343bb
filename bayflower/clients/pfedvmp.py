"""pFedVMP, client half ("Personalized Federated Learning via Variational Message Passing"): base
and own head, features near centroids.

    paper            here                       shape
    psi(x; theta^b)  features                   (B, D): what the head gets
    theta_n^h        state.params               by name, private: the head
    mu_k             work.memo.centroids        (K, D): the server's, constant during the round
    xi_1             work.memo.weight           (): what the pull is multiplied by (E-P13)
    mu_{k,n}         update.means               (K, D)
    Sigma_{k,n}      (not formed)               covariance of the features of class k
    Lambda_{k,n}     update.spread, alpha       V diag(weight) Vᵀ + alpha I, see classwise.py
    Z_{k,n}          update.counts              (K,)
    xi_1, alpha      config.xi, config.alpha    ()

    L = mean_i −log p(y_i|x_i) + xi · mean_i mean_j (z_ij − mu_{y_i,j})²                [eq. 9]
    Lambda_{k,n} = Sigma_{k,n}† + alpha I, after training, in evaluation mode          [eq. 11]

Departs:
  E-P1  means over the batch and over the D coordinates in [eq. 9]; the printed sums diverge at the
        stated learning rate.
  E-P3  a pseudo-inverse is not continuous: only eigenvalues above `cut` times the largest one, and
        above rounding, count as spread.
  E-P6  a class without a centroid (all of them in round 1) has no penalty.
  E-P10 the features are what the head gets (the CNN: 512 after LeakyReLU); `features` sets their
  number. E-P13 [eq. 9] is weighted by `weight`, not by xi alone (`xi_rule=fixed`). The mean over D
  coordinates makes the pull on a feature 2 xi/D; xi = 50 was chosen for D = 512, and is 16 times as
  strong for D = 32. And where centroids hardly differ between classes, as in the first rounds, the
  pull draws all features to one point, from which small clients do not come back. E-P12 a class
  with fewer than `min_count` samples is not sent: one sample's mean is that sample's feature. A
  client that never trained fits its head, the base frozen.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Survey, Work
from ..errors import ConfigError
from ..maths.classmessages import ClassMessage, blank_shapes, dense_ranks, pack_factors, ranks
from ..maths.classwise import class_factors, class_labels, class_means, class_variances
from ..maths.laplace import Seen, class_gaussians, generative
from ..networks.model import Batch, masked_mean
from ..stacked.losses import pull
from ..stacked.shaped import is_mixed
from ..strategies.pfedvmp import Update
from ..tree import Shapes, Tensors, flatten, map_tree
from . import fedper
from .fedavg import State

DIMENSION = 512  # features of the network for which the paper chose xi


class Memo(NamedTuple):
    """What a step needs to pull features, constant during the round."""

    centroids: Tensor  # (K, D)
    known: Tensor  # (K,) bool
    weight: Tensor  # (): what the pull is multiplied by
    strength: Tensor  # (K,): the weight of each class, 0 where no centroid is known


class Client(fedper.Client):
    """Owns its head; trains with features pulled to their centroids, and sends what it saw of each
    class.
    """

    shapes_features = True
    needs_classes = True

    update_type = Update
    sized_by = ("counts", "spread/counted", "spread/label")
    survey_size = 64
    origin: ClassVar[str] = "pFedVMP's class Gaussians over features"  # of its posterior

    def begin(self, state: State, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the base and the own head, with the weight of the pull."""
        work = super().begin(state, broadcast, data)
        return work._replace(memo=Memo(*self.strengths(work)))

    def strengths(self, work: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of `Memo` for the centroids in work.memo."""
        centroids, known = work.memo.centroids, work.memo.known
        weight = self.weight(work)
        if not isinstance(weight, Tensor):
            weight = torch.full_like(centroids[0, 0], weight)
        return centroids, known, weight, known * weight

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean NLL and the pull to the centroids on one batch [eq. 9]."""
        logits, features, buffers = self.model.forward_features(
            params, work.buffers, batch.x, train=True, mask=batch.mask
        )
        nll = self.model.mean_nll(logits, batch.y, batch.mask)
        flat, memo = self.features(features, work), work.memo
        if self.model.stacked and not is_mixed(batch.y):
            return pull(flat, memo.centroids, memo.strength, batch.y, batch.mask, nll), buffers
        return nll + memo.weight * self.pull(flat, work, batch), buffers

    def weight(self, work: Work) -> Tensor | float:
        """Return what the pull is multiplied by: xi, or xi · D/512 · B/M (E-P13). M is the mean
        square of the known centroids' coordinates, B its part that differs between classes.
        """
        if self.config.xi_rule == "fixed":
            return self.config.xi
        centroids, known = work.memo.centroids, work.memo.known
        share = known.to(centroids.dtype)[:, None] / known.sum().clamp(min=1)
        middle = (share * centroids).sum(0)
        between = (share * (centroids - middle).square()).mean(1).sum()
        whole = between + middle.square().mean()
        size = self.config.xi * centroids.shape[1] / DIMENSION
        return size * between / whole.clamp(min=torch.finfo(whole.dtype).tiny)

    def pull(self, features: Tensor, work: Work, batch: Batch) -> Tensor:
        """Return the mean squared distance to the centroids, of samples whose class has one."""
        centroids, known = work.memo.centroids, work.memo.known
        if is_mixed(batch.y):  # each class by its share
            apart = (features[:, None] - centroids).square().mean(-1)
            return masked_mean((apart * known * batch.y).sum(-1), batch.mask)
        distance = (features - centroids[batch.y]).square().mean(-1)
        return masked_mean(distance * known[batch.y], batch.mask)

    def features(self, features: Tensor, work: Work) -> Tensor:
        """Return the features as (B, D), which must fit the centroids."""
        flat, dim = features.flatten(1), work.memo.centroids.shape[1]
        if flat.shape[1] != dim:
            raise ConfigError(
                f"class centroids need a head whose input is the features: its weights have {dim} "
                f"columns, but there are {flat.shape[1]} features; name another layer as head"
            )
        return flat

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the features of the batch in evaluation mode."""
        _, features, _ = self.model.forward_features(
            work.params, work.buffers, batch.x, train=False
        )
        return Survey({}, {"features": self.features(features, work)})

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return the head, and the base with mean and precision of every class that is sent
        [eq. 11].
        """
        own, base = super().finish(state, work, data)
        z, classes = work.survey.each["features"], work.memo.known.shape[0]
        counts, means = class_means(z, data.y, data.mask, classes)
        sent = counts >= self.config.min_count
        spread: Tensors = {}
        if self.config.centroid == "precision":
            basis, weight, counted = class_factors(
                z, data.y, data.mask, classes, self.config.cut, self.config.min_count
            )
            label = class_labels(data.y, data.mask, classes, self.config.min_count)
            spread = {"basis": basis, "weight": weight, "label": label, "counted": counted}
        elif self.config.centroid == "diag":
            variance = class_variances(z, data.y, data.mask, means)
            spread = {
                "precision": (counts[:, None] / (variance + self.config.diag_floor)).to(z.dtype)
                * sent[:, None]
            }
        return own, Update(
            base.num_examples,
            base.params,
            base.buffers,
            counts * sent,
            means * sent[:, None],
            spread,
        )

    def pack(self, update: Update) -> Tensors:
        """Return the message of the classes that are sent, each in its smaller form."""
        present, spread = update.counts > 0, update.spread
        if self.config.centroid == "precision":
            spread = pack_factors(spread["basis"], spread["weight"], spread["label"], len(present))
        elif self.config.centroid == "diag":
            spread = {"precision": spread["precision"][present]}
        return flatten(
            ClassMessage(
                update.num_examples,
                update.params,
                update.buffers,
                update.counts,
                update.means[present],
                spread,
            )
        )

    def packed_shapes(self, updates: Update) -> list[Shapes]:
        """Return the shapes of the messages of stacked updates, from their counts and ranks."""
        counts, spread, dim = updates.counts, updates.spread, updates.means.shape[2]
        rank = (
            ranks(spread["counted"], spread["label"], counts.shape[1])
            if "counted" in spread
            else torch.zeros_like(counts)
        )
        dense = dense_ranks(rank, dim)
        first = map_tree(lambda leaf: leaf[0], updates)
        sizes = (
            (counts > 0).sum(1).tolist(),
            (rank * ~dense).sum(1).tolist(),
            dense.sum(1).tolist(),
        )
        return blank_shapes(self.config.centroid, first, dim, zip(*sizes, strict=True))

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the class Gaussians around the server's centroids, as a generative head."""
        found = super().posterior(params, broadcast, seen, layer)
        if seen is None or broadcast.centroids.shape[1] != seen.sums.shape[1]:
            return found
        own, known = class_gaussians(seen), broadcast.known.double()
        means = torch.where(known[:, None] > 0, broadcast.centroids.double(), own.means)
        shared = own._replace(means=means, known=torch.maximum(known, own.known))
        return {**found, "own": generative(shared, self.origin)}
