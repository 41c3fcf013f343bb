"""pFedVMP, server half ("Personalized Federated Learning via Variational Message Passing"): class
centroids from Gaussian messages.

    paper            here                    shape
    theta^b          state.params            by name: the base; heads theta_n^h never leave the
                                             clients
    mu_k             state.centroids         (K, D): mean of the belief about the features of class
                                             k
    Lambda_{k,n}     basis, weight, alpha    V diag(weight) Vᵀ + alpha I; V is basis transposed, one
                                             row a direction that client n has seen
    mu_{k,n}         means                   (K, D): mean feature of class k at client n
    Z_{k,n}, S_n     counts, num_examples    (K,), ()
    alpha, xi_1      config.alpha, config.xi ()

    theta^b = Σ_n S_n theta_n^b / Σ_n S_n                                               [eq. 12]
    Lambda_k = Σ_n Lambda_{k,n},    mu_k = Lambda_k^{-1} Σ_n Lambda_{k,n} mu_{k,n}      [eq. 13]

A client's update has equal shapes on all clients; what travels (`pack`) are the classes it has,
each as its vectors and weights or, if more than D/2 directions were seen, as the packed triangle of
a triangular R with RᵀR = V diag(weight) Vᵀ, which is then smaller. (R, not the matrix: rounded to
float32 a matrix need not stay positive semi-definite.) The server expands a message when it comes
and adds it by class, so its memory is that of K matrices, however many clients there are.

Departs:
  E-P2  V and weight are sent, not the D×D matrix; alpha is known to both sides.
  E-P4  a class that a client does not have is not sent, and adds nothing; one sample gives alpha I.
  E-P5  the printed precision is that of features, not of their mean: a client with 2 samples counts
        as one with 200. `centroid=diag` (Z/(variance + diag_floor) by coordinate) and `count_mean`
        (Z) are alternatives, `mean` (1) is the ablation pFedVMP-avg.
  E-P6  centroids start unknown. The prior N(0, I) of [eq. 5] is left out, as in [eq. 13];
        `prior_precision` puts it in.
  E-P7  heads stay local, though Algorithm 1 sends them.
  E-P8  [eq. 10] fixes relative weights only: [eq. 12] is FedAvg by S_n.
  E-P9  one Gaussian a class, not a product of mixtures; labels are known.
  E-P11 the sum is at least N_k alpha I, so Cholesky exists; float64, and weights beyond its range
fall back on eigenvalues. E-P1, E-P3, E-P10, E-P12 and E-P13 are the client's. A class that nobody
sent keeps its centroid. Private sums (dp) add what `maths/noisyclasses.py` says of a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import BayflowerError, ConfigError, check_choices
from ..maths import classmessages
from ..maths.classmessages import ClassMessage, all_shrunk, filled, received, roots, shrunk, sizes
from ..maths.classwise import class_sums, from_triangle, to_triangle
from ..maths.gaussian import solve_clamped, solve_guessing, solve_precision
from ..maths.noisyclasses import class_portion, restored_classes
from ..networks.model import Anatomy
from ..settings import Presets, paper, setting
from ..shown import Heading
from ..tree import Tensors, upload
from . import fedper

Rule = Literal["separated", "fixed"]
Centroid = Literal["precision", "diag", "count_mean", "mean"]
DIVERGED = (
    "the clients' features or the precisions of their classes are not finite: training has "
    "diverged; lower lr or xi"
)
AT_ONCE = 16  # matrices that are solved together


@dataclass(frozen=True)
class Config:
    """What the user sets for pFedVMP."""

    presets: ClassVar[Presets] = paper("sgd", 0.01, 10, 1, xi=50.0, xi_rule="fixed", alpha=1.0)

    xi: float = setting(20.0, "weight of the loss that pulls features to class centroids; 0 = none")
    xi_rule: Rule = setting(
        "separated",
        "what xi is multiplied by: separated = D/512 for D features, times the share of the "
        "centroids' mean square that differs between classes; fixed = 1, as in the paper (D = 512)",
    )
    alpha: float = setting(1.0, "precision in directions in which a client's features do not vary")
    centroid: Centroid = setting(
        "precision",
        "weights of clients in a centroid: precision (the paper), diag (its diagonal), count_mean "
        "(sample counts), mean (equal)",
    )
    prior_precision: float = setting(
        0.0, "precision of the prior N(0, I/prior_precision) over centroids; 0 = no prior"
    )
    min_count: int = setting(
        5,
        "a client sends nothing about a class with fewer samples; with 1 sample it would send that "
        "sample's feature itself",
    )
    diag_floor: float = setting(0.001, "centroid=diag: added to the variances")
    cut: float = setting(
        0.0,
        "eigenvalues of a class's covariance below this share of the largest count as zero; 0 = "
        "the default, 1e-5 in float32 and 1e-10 in float64",
    )

    def __post_init__(self) -> None:
        for name, least in (("xi", 0.0), ("prior_precision", 0.0), ("cut", 0.0)):
            value = getattr(self, name)
            if not (value >= least and math.isfinite(value)):
                raise ConfigError(
                    f"{name} must not be negative and must be finite, got {value}; 0 switches it "
                    "off"
                )
        for name in ("alpha", "diag_floor"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(
                    f"{name} must be positive and finite, got {value}; without it a precision or "
                    "its inverse may not exist"
                )
        if not self.cut < 1:
            raise ConfigError(
                f"cut must be in [0, 1), got {self.cut}; it is a share of the largest eigenvalue"
            )
        check_choices(self)
        if self.min_count < 1:
            raise ConfigError(
                f"min_count must be at least 1, got {self.min_count}; 1 sends every class a "
                "client has"
            )


class State(NamedTuple):
    """The base, the centroids, and which classes have one. Clients are sent all of it."""

    params: Tensors
    buffers: Tensors
    centroids: Tensor  # (K, D), 0 where not known
    known: Tensor  # (K,) bool


class Update(NamedTuple):
    """What a client makes. `counts` is 0 for classes that are not sent; `spread` depends on
    `centroid`.

    precision: "basis" (N, D), "weight" (N,), "label" (N,), a row a training sample (see
    classwise.py); diag: "precision" (K, D); else {}.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    counts: Tensor  # (K,)
    means: Tensor  # (K, D)
    spread: Tensors


class Server(ServerHalf):
    """Averages the base as FedPer does, and multiplies the clients' Gaussian messages about each
    class.
    """

    headings = {
        "known_classes": Heading(
            "Classes with a centroid",
            "classes",
            "Classes about which at least one client has sent a message.",
        )
    }

    has_claims = True

    update_fields = {
        "params": "model",
        "buffers": "buffers",
        "means": "rows",
        "spread": "claimed",
        "spread/triangle": "root",
    }

    state_type = State
    broadcast_type = State

    def __init__(self, config: Config, anatomy: Anatomy) -> None:
        super().__init__(config, anatomy)
        self.base: ServerHalf = fedper.Server(config, anatomy)

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return the initial base without centroids; their number and size
        are those of the head.
        """
        heads = [
            params[name]
            for name in self.anatomy.trainable
            if name in self.anatomy.head_names and params[name].ndim == 2
        ]
        if not heads:
            found = [f"{name} {tuple(params[name].shape)}" for name in self.anatomy.head_names]
            raise ConfigError(
                "class centroids need a head with a linear layer, whose inputs are the features; "
                f"the head has {', '.join(sorted(found)) or 'no weights'}. Name the layers from "
                "the first linear one as head, or end the network with a linear layer"
            )
        # one logit tells two classes apart
        num_classes, dim = max(heads[-1].shape[0], 2), heads[0].shape[1]
        base = self.base.init(params, buffers, clients)
        unknown = torch.zeros(num_classes, dtype=torch.bool, device=heads[0].device)
        return State(base.params, base.buffers, heads[0].new_zeros(num_classes, dim), unknown)

    def broadcast(self, state: State, client: int) -> State:
        """Return base and centroids, the same for every client."""
        return state

    def shared(self, state: State) -> Tensors:
        """Return the base."""
        return self.base.shared(state)

    def check(self, state: State, client: int, update: ClassMessage) -> str | None:
        """Return why the base cannot be averaged, or None; the rest was checked by `unpack`."""
        return self.base.check(state, client, update)

    def claims(self, state: State, update: ClassMessage) -> dict[str, float]:
        """Return by how much the message counts for each class it has; nothing where all clients
        count alike.
        """
        if self.config.centroid == "mean":
            return {}
        present = update.counts.nonzero()[:, 0].tolist()
        return {
            f"class {k}": size
            for k, size in zip(present, sizes(self.config.centroid, update), strict=True)
        }

    def reduced(
        self, state: State, update: ClassMessage, factors: Mapping[str, float]
    ) -> ClassMessage:
        """Return the message with the precision of some classes multiplied by a factor; alpha I,
        which all have, stays.
        """
        present = update.counts.nonzero()[:, 0].tolist()
        return shrunk(
            self.config.centroid, update, [factors.get(f"class {k}", 1.0) for k in present]
        )

    def stacked_claims(self, state: State, updates: Update) -> Tensors:
        """Return the claims of stacked updates."""
        sent = updates.counts > 0
        if self.config.centroid == "mean":
            return {}
        if self.config.centroid == "precision":
            size = classmessages.all_sizes(updates.spread, sent.shape[1])
        elif self.config.centroid == "diag":
            size = updates.spread["precision"].double().sum(2)
        else:
            size = updates.counts.double()
        return {f"class {k}": one for k, one in enumerate((size * sent).unbind(1))}

    def stacked_reduced(self, state: State, updates: Update, factors: Tensors) -> Update:
        """Return stacked updates with their claims multiplied by factors."""
        names = [f"class {k}" for k in range(updates.counts.shape[1])]
        by = torch.stack([factors[name] for name in names], 1)
        return updates._replace(**all_shrunk(self.config.centroid, updates, by))

    def expects(self, state: State) -> ClassMessage:
        """Return the shape of a message without any class."""
        return classmessages.blank(
            self.config.centroid, self._like(state), state.centroids.shape[1]
        )

    def unpack(self, state: State, flat: Tensors) -> ClassMessage:
        """Return the message; raise if names, shapes, dtypes, counts, ranks or values cannot be
        right.
        """
        return received(self.config.centroid, self._like(state), flat)

    def _like(self, state: State) -> Update:
        counts = torch.zeros(len(state.known), dtype=torch.int64)
        return Update(counts[0], state.params, state.buffers, counts, state.centroids, {})

    def statistic(self, state: State, client: int, update: ClassMessage) -> Statistic:
        """Return (S_n, S_n theta_n^b) and, of each class that was sent, (Lambda, Lambda mu, Z) by
        name.
        """
        found: dict[str, Tensor] = {}
        present = (update.counts > 0).nonzero()[:, 0].tolist()
        each_root = (
            roots(update.spread, present) if self.config.centroid == "precision" else iter(())
        )
        for position, k in enumerate(present):
            mean = update.means[position].double()
            if self.config.centroid == "precision":
                root = next(each_root)
                precision = root.mT @ root
                precision.diagonal().add_(self.config.alpha)
                shift, precision = precision @ mean, to_triangle(precision)
            else:
                precision = self._simple(
                    update.counts[k], update.spread.get("precision", update.means)[position]
                )
                shift = precision * mean
            found |= {
                f"precision/{k}": precision,
                f"shift/{k}": shift,
                f"count/{k}": update.counts[k],
            }
        return {**self.base.statistic(state, client, update), **found}

    def summand(self, state: State, client: int, update: ClassMessage) -> Statistic:
        """Return the same of all classes, zeros of those that were not sent."""
        found, centroid = self.statistic(state, client, update), self.config.centroid
        scale = self.config.alpha if centroid == "precision" else None
        return filled(centroid, found, update.counts, state.centroids.shape[1], scale)

    portions = {"classes": 0.25}  # of the noise budget
    replaced = ("counts", "means", "spread")

    def portion(self, state: State, update: ClassMessage) -> Tensors:
        """Return natural parameters of all classes, relative to the centroids that were sent."""
        config, sent = self.config, state.centroids
        return {"classes": class_portion(config.centroid, config.alpha, update, sent)}

    def restored(self, state: State, sums: Tensors, noise: Mapping[str, float]) -> Tensors:
        """Return natural parameters of the classes that are heard through the noise."""
        noisy, spread = sums["classes"], noise["classes"]
        return restored_classes(self.config.centroid, noisy, spread, state.centroids)

    def _simple(self, count: Tensor, precision: Tensor) -> Tensor:
        """Return the precision where it is no matrix: given by coordinate, the number of samples,
        or 1 (E-P5).
        """
        if self.config.centroid == "diag":
            return precision.double()
        return count.double() if self.config.centroid == "count_mean" else (count > 0).double()

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the sum of the statistics of stacked updates; for matrices one product a class
        over the rows of all clients.
        """
        counts, means = updates.counts, updates.means.double()
        number = counts.sum(0)
        if self.config.centroid == "precision":
            sums = class_sums(
                **updates.spread, means=means, sent=counts > 0, alpha=self.config.alpha
            )
        else:
            present = number.nonzero()[:, 0].tolist()
            weight = (
                self._simple(counts[..., None], updates.spread.get("precision", means))
                * (counts > 0)[..., None]
            )
            pooled = weight.sum(0) if self.config.centroid == "diag" else weight.sum(0)[:, 0]
            sums = zip(present, pooled[present], (weight * means).sum(0)[present], strict=True)
        found = dict(self.base.total(state, clients, updates) or {})
        for k, precision, shift in sums:
            found |= {f"precision/{k}": precision, f"shift/{k}": shift, f"count/{k}": number[k]}
        return found

    def finalise(self, state: State, total: Sum) -> State:
        """Return the averaged base [eq. 12] and the centroids [eq. 13]; a class that nobody sent
        keeps its own.
        """
        if "num_examples" not in total:
            return state
        base = self.base.finalise(state, total)
        centroids, known = state.centroids.clone(), state.known.clone()
        present = [k for k in range(len(known)) if f"count/{k}" in total]
        if "counts" in total:  # a secure sum
            present = total["counts"].nonzero()[:, 0].tolist()
        for start in range(0, len(present), AT_ONCE):
            some = present[start : start + AT_ONCE]
            precision, shift = (
                torch.stack([total[f"{name}/{k}"] for k in some]) for name in ("precision", "shift")
            )
            where = upload(some, centroids.device)
            centroids.index_copy_(0, where, self._solved(precision, shift).to(centroids))
            known.index_fill_(0, where, True)
        return State(base.params, base.buffers, centroids, known)

    def _solved(self, precision: Tensor, shift: Tensor) -> Tensor:
        """Return (precision + prior)^{-1} shift of some classes, (G, D)."""
        if self.config.centroid != "precision":
            return shift / (precision.reshape(len(shift), -1) + self.config.prior_precision)
        matrix = from_triangle(precision, shift.shape[1])
        matrix.diagonal(dim1=1, dim2=2).add_(self.config.prior_precision)
        if matrix.is_cuda:
            return solve_guessing(matrix, shift)
        try:
            return solve_precision(matrix, shift)
        except ValueError:
            if not bool(matrix.isfinite().all()):
                raise BayflowerError(DIVERGED) from None
            # weights so large that alpha is lost in their rounding: what is left of such directions
            # is at least alpha
            return solve_clamped(matrix, shift, self.config.alpha)

    def report(self, state: State) -> dict[str, float]:
        """Return how many classes have a centroid."""
        if not bool(state.centroids.isfinite().all()):
            raise BayflowerError(DIVERGED)
        return {"known_classes": float(state.known.sum())}
