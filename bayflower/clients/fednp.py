"""FedNP, client half (FedNP: Federated Neural Propagation, AAAI 2023): the latent's Gaussian
regularises the classifier.

    paper               here                 shape
    z_{m,-k}, z_{s,-k}  memo.mean, memo.var  (D,): the cavity, what all others say about z
    f_k                 f                    (D,): the f-layer's mean over a batch; at the end over
                                             all local data
    z_m, z_s            tilted               (D,): moments of cavity × σ(f z)
    mu_theta, s_theta   npn.forward          (P,): Gaussian over the classifier's weights
    lambda_k, eta_k     state.factor         (D,) float64: own factor
    lambda              config.np_weight     ()
    rho                 config.damping       ()

    (cavity) = (Lambda − lambda_k, H − eta_k)                                           [eq. 8]
    loss = J + lambda (KL_theta + KL_z)                                                 [eq. 18]
    (lambda_k, eta_k) ← (1 − rho) old + rho (tilted / cavity)                           [eq. 10]

J is the mean cross-entropy. KL_theta pulls the classifier's weights and the NPN's Gaussian towards
each other; KL_z acts through f alone and keeps the tilt small. After the local epochs f is computed
once more, in evaluation mode, over the whole local training set.

Departs:
  E-N1  to E-N4: the moments are those of `maths/tilted.py`, corrected; the default is exact to
        rounding. f clipped: f² z_{s,-k} ≤ 25.
  E-N5  the factor is computed without cancellation and lies in 0 ≤ lambda_k ≤ f²/4; one that is not
        finite leaves the old one as it is.
  E-N9  nothing divides by f.
  E-N13 KL_theta is a sum over the weights, with `epsilon` = 0.1 (the paper gives none). The f-layer
  is trained. E-N14 the NPN's sigmoid has a floor in its variance; accepted. E-N15 concerns the
  paper's tables. Weights of the NPN have variances of their own, and it is averaged with the model
  (the authors' is private and without them).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Survey, Work
from ..maths import npn
from ..maths.fromfeatures import regularised
from ..maths.gaussian import Diagonal, quotient
from ..maths.laplace import Seen, independent
from ..maths.propagation import new_factor, regulariser
from ..maths.tilted import make_slopes
from ..networks.model import Batch, Model
from ..stacked.meanlayer import layer_mean, layer_sum
from ..strategies.fednp import EXTRA, Update, classifier
from ..tree import Tensors, choose, map_tree
from . import fedavg
from .fedavg import count


class State(NamedTuple):
    """What stays on the client: its factor of p(z), how often it has sent a change of it, and in
    which epoch.
    """

    factor: Diagonal
    turns: Tensor  # int64
    epoch: Tensor  # int64
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """The round's constants: the cavity, and the own factor that is not in it."""

    cavity: Diagonal
    own: Diagonal
    turns: Tensor
    epoch: Tensor


class Client(fedavg.Global):
    """Trains the global model under what the others say about z; sends the change of what it says
    itself.
    """

    shapes_features = True

    state_type = State
    update_type: ClassVar[type] = Update
    # the factor stays here, but the changes that travel add up to it
    survey_size = 1024

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        self.slopes = make_slopes(config.moments, config.nodes)

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a factor."""
        some = next(iter(params.values()))
        zero = torch.zeros(self.config.latent, dtype=torch.float64, device=some.device)
        number = torch.zeros((), dtype=torch.int64, device=some.device)
        return State(Diagonal(zero, zero.clone()), number, number.clone(), {})

    def rejoined(self, state: State) -> State:
        """Return a client without a factor: the server has taken it out of the total."""
        return bare(state)

    def lost(self, state: State) -> State:
        """Return a client without a factor: the server must take the old one out of the total."""
        return bare(state)

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the global model, with the cavity [eq. 8]; a factor of an
        older epoch is dropped.
        """
        same = state.epoch == broadcast.epoch
        own = choose(same, state.factor, map_tree(torch.zeros_like, state.factor))
        turns = torch.where(same, state.turns, torch.zeros_like(state.turns))
        cavity = quotient(broadcast.total, own)
        # the prior's: no factor has a negative precision
        cavity = cavity._replace(precision=cavity.precision.clamp(min=1))
        return Work(
            {**broadcast.params, **broadcast.extra},
            broadcast.buffers,
            Memo(cavity, own, turns, broadcast.epoch),
        )

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return J + lambda (KL_theta + KL_z) on one batch [eq. 18]."""
        logits, features, buffers = self.model.forward_features(
            self.network(params), work.buffers, batch.x, train=True, mask=batch.mask
        )
        nll = self.model.mean_nll(logits, batch.y, batch.mask)
        layers = {
            name.removeprefix(EXTRA + "npn."): value
            for name, value in params.items()
            if name.startswith(EXTRA + "npn.")
        }
        target = params[classifier(params, self.model.head_names)].reshape(-1)
        known = (
            work.memo.cavity,
            layers,
            target,
            self.slopes,
            self.config.epsilon,
            self.config.np_weight,
        )
        x, layer = features.flatten(1), self.f_layer(params)
        if self.config.site == "vector":
            return nll + regularised(x, layer, batch.mask, *known), buffers
        return nll + regulariser(self.site(layer_mean(x, *layer, batch.mask)), *known), buffers

    def network(self, params: Tensors) -> Tensors:
        """Return the parameters of the user's network."""
        return {name: value for name, value in params.items() if not name.startswith(EXTRA)}

    def f_layer(self, params: Tensors) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the f-layer."""
        return params[EXTRA + "f.weight"], params[EXTRA + "f.bias"]

    def site(self, f: Tensor) -> Tensor:
        """Return f as the site has it: `site=scalar` takes its mean (E-N10), `site=none` a placebo
        of 0.
        """
        if self.config.site == "scalar":
            return f.mean().expand(f.shape)
        return torch.zeros_like(f) if self.config.site == "none" else f

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return what `batch` adds to f over all local data, in evaluation mode."""
        _, features, _ = self.model.forward_features(
            self.network(work.params), work.buffers, batch.x, train=False
        )
        found = layer_sum(features.flatten(1), *self.f_layer(work.params), batch.mask)
        return Survey({"f": found}, {})

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the new factor, damped [eq. 10], and (theta_k, n_k, its change)."""
        number, memo = count(data), work.memo
        f = self.site(work.survey.total["f"].double() / number)
        change, after = new_factor(f, memo.cavity, memo.own, self.slopes, self.config.damping)
        extra = {name: value for name, value in work.params.items() if name.startswith(EXTRA)}
        sent = Update(number, self.network(work.params), work.buffers, extra, change, memo.turns)
        return State(after, memo.turns.clamp(min=0) + 1, memo.epoch, {}), sent

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the Gaussian that the natural-parameter network gives the classifier's
        weights, from the Gaussian over z that all clients agreed on.
        """
        result = super().posterior(params, broadcast, seen, layer)
        name = classifier(params, self.model.head_names)
        if seen is None or layer is None or name != f"{layer}.weight":
            return result
        layers = {
            name.removeprefix(EXTRA + "npn."): value
            for name, value in broadcast.extra.items()
            if name.startswith(EXTRA + "npn.")
        }
        dtype = next(iter(layers.values())).dtype
        total = broadcast.total
        mean, variance = total.shift / total.precision, 1 / total.precision
        found = npn.forward(layers, npn.Gauss(mean.to(dtype), variance.to(dtype)))
        std = found.var.clamp(min=0).sqrt().reshape(params[name].shape)
        if f"{layer}.bias" in params:
            std = torch.cat([std, torch.zeros_like(std[:, :1])], 1)
        origin = "the natural-parameter network's Gaussian over the classifier"
        return {**result, "own": independent(std, origin)}


def bare(state: State) -> State:
    """Return a client that had a factor and has none (`turns` = −1)."""
    none = map_tree(torch.zeros_like, state.factor)
    return state._replace(factor=none, turns=torch.full_like(state.turns, -1))
