"""GPFL, client half (Zhang et al. 2023, ICCV): one feature, two routes: a global one near shared
class embeddings, a personal one for the own head.

    paper          here                    shape
    f              features                (B, D): what the head gets
    E, E^(t)       params["gpfl:E"],       (K, D): embeddings, and those that were received
                   memo.embeddings
    g, p_i         memo.generic, memo.own  (D,): the valve's two conditions, constant in a round
    head_i         state.params            by name, private

    valve(z; c) = ReLU(z (γ(c) + 1) + β(c)),   γ, β: c ↦ LayerNorm(ReLU(A c + r))            [eq. 1]
    g = mean_c E_c,   p_i = Σ_c (n_{i,c}/n_i) E_c, of the received E                         [eq. 2]
    L = mean −log softmax(head(valve(z; p_i)))_y + mean −log softmax_c(cos(valve(z; g), E_c))_y
        + lambda ‖valve(z; g) − E^(t)_y‖ + (mu/2) ‖E, valve‖²                                [eq. 3]

Departs: conditions are of the received embeddings from the first round on; the authors' code takes
those of the client's own last round, and 0 at first. The norm is over the batch, as in their code.
`personal` is the model after one more local training, as FedPer's. A client that never trained fits
its head, the rest frozen. At home the valve is two vectors before the head: its condition is
constant.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from ..contract import Phase, Purpose, Work
from ..maths.classwise import members
from ..maths.tops import Top, linear, rest_of
from ..networks.model import Batch, masked_mean
from ..stacked.shaped import is_mixed
from ..strategies.gpfl import EMBEDDINGS, EXTRA
from ..tree import Tensors
from . import fedper

TINY = 1e-12


class State(NamedTuple):
    """The own head, the shares of the client's classes; before a test also all that was tuned."""

    params: Tensors
    buffers: Tensors
    tuned: Tensors
    shares: Tensor  # (K,)


class Memo(NamedTuple):
    """Received embeddings, and the two conditions."""

    embeddings: Tensor
    generic: Tensor
    own: Tensor
    shares: Tensor


class Client(fedper.Client):
    """Owns its head; trains it with base, embeddings and valve."""

    state_type: ClassVar[type] = State
    private = ("params", "buffers", "tuned", "shares")
    needs_classes = True

    @property
    def plain_loop(self) -> bool:
        """Return False: more than the user's network is trained."""
        return False

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return the own part of the initial model, all classes alike."""
        known = super().init(params, buffers)
        classes = max(self.model.num_classes, 2)
        like = next(iter(params.values()))
        return State(*known, like.new_full((classes,), 1 / classes))

    def shares(self, data: Batch) -> Tensor:
        """Return n_{i,c}/n_i."""
        counts = members(data.y, data.mask, max(self.model.num_classes, 2)).sum(0)
        return (counts / counts.sum().clamp(min=1)).to(data.mask.dtype)

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at what is shared and the own head [eq. 2]."""
        work, e = super().begin(state, broadcast, data), broadcast.params[EMBEDDINGS]
        shares = self.shares(data)
        return work._replace(memo=Memo(e, e.mean(0), shares @ e, shares))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L on one batch [eq. 3]."""
        memo: Memo = work.memo
        _, z, buffers = self.model.forward_features(
            self.network(params), work.buffers, batch.x, train=True, mask=batch.mask
        )
        z = z.flatten(1)
        own, shared = valves(params, z, torch.stack((memo.own, memo.generic)))
        loss = self.model.mean_nll(self.top_logits(params, own), batch.y, batch.mask)
        loss = loss + angle(shared, params[EMBEDDINGS], batch)
        target = batch.y @ memo.embeddings if is_mixed(batch.y) else memo.embeddings[batch.y]
        loss = loss + self.config.gpfl_weight * self.far(shared - target, batch.mask)
        if self.config.gpfl_decay:
            squares = [params[n].square().sum() for n in sorted(params) if n.startswith(EXTRA)]
            loss = loss + self.config.gpfl_decay / 2 * torch.stack(squares).sum()
        return loss, buffers

    def far(self, apart: Tensor, mask: Tensor) -> Tensor:
        """Return the length of rows that are not padding: of all together, or of one on average."""
        squares = apart.square().sum(1)
        if self.config.gpfl_norm == "mean":
            return masked_mean((squares + TINY).sqrt(), mask)
        return ((squares * mask).sum() + TINY).sqrt()

    def network(self, params: Tensors) -> Tensors:
        """Return the user's network alone."""
        return {name: params[name] for name in self.model.shapes}

    def top_logits(self, params: Tensors, features: Tensor) -> Tensor:
        """Return the head's logits."""
        out = features @ params[f"{self.model.head}.weight"].mT
        bias = params.get(f"{self.model.head}.bias")
        return out if bias is None else out + bias

    def own(self, state: Any, work: Work) -> Any:
        """Return the head after training, and the shares of classes."""
        found: Any = super().own(state, work)
        return found._replace(shares=work.memo.shares)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state beside all that was tuned; of a new client, its head fitted."""
        found: Any = super().finish_adapting(state, work, data, purpose)
        return found._replace(shares=work.memo.shares)

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the personal route, after or before local training."""
        known, own = self.known(view, state, broadcast)
        z = self.model.forward_features(
            self.network(known), {n: known[n] for n in broadcast.buffers}, x, train=False
        )[1]
        (gated,) = valves(known, z.flatten(1), own[None])
        return self.model.probabilities(self.top_logits(known, gated))

    def known(self, view: str, state: Any, broadcast: Any) -> tuple[Tensors, Tensor]:
        """Return all numbers of the personal route, after or before local training, and p_i."""
        known = {**broadcast.params, **broadcast.buffers, **state.params, **state.buffers}
        if view == "personal" and state.tuned:
            known = state.tuned
        return known, state.shares @ broadcast.params[EMBEDDINGS]

    def top(self) -> Top:
        """Return the valve before the head."""
        return Top("gate")

    def topped(self, state: Any, broadcast: Any) -> tuple[Tensors, Tensors]:
        """Return the network with the valve as two vectors."""
        (known, own), head = self.known("personal", state, broadcast), self.model.head
        scale, shift = (rows[0] for rows in conditioned(known, own[None]))
        last = linear(head, known[f"{head}.weight"], known.get(f"{head}.bias"))
        buffers = {n: known[n] for n in broadcast.buffers}
        gate = {f"{head}.0.scale": scale, f"{head}.0.shift": shift}
        return {**rest_of(self.model, known), **last}, {**buffers, **gate}


def valves(params: Tensors, z: Tensor, conditions: Tensor) -> Tensor:
    """Return ReLU(z (γ(c) + 1) + β(c)), (N, B, D), of each of N conditions [eq. 1]."""
    scale, shift = conditioned(params, conditions)
    return torch.relu(z * scale[:, None] + shift[:, None])


def conditioned(params: Tensors, conditions: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ(c) + 1 and β(c), both (N, D), of each of N conditions [eq. 1]."""
    scale, shift = (
        layer_norm(
            torch.relu(
                conditions @ params[f"{EXTRA}{layer}.weight"].mT + params[f"{EXTRA}{layer}.bias"]
            ),
            conditions.shape[1:],
            params[f"{EXTRA}{layer}.norm"],
            params[f"{EXTRA}{layer}.normbias"],
        )
        for layer in ("scale", "shift")
    )
    return scale + 1, shift


def angle(features: Tensor, embeddings: Tensor, batch: Batch) -> Tensor:
    """Return mean −log softmax_c(cos(f, E_c))_y."""
    log = cosine(features, embeddings).log_softmax(1)
    picked = (log * batch.y).sum(1) if is_mixed(batch.y) else log.gather(1, batch.y[:, None])[:, 0]
    return masked_mean(-picked, batch.mask)


def cosine(features: Tensor, embeddings: Tensor) -> Tensor:
    """Return cosines (B, K); of a row of zeros 0."""
    length = (features.square().sum(1, keepdim=True) + TINY**2).sqrt()
    other = (embeddings.square().sum(1) + TINY**2).sqrt()
    return features @ embeddings.mT / (length * other)
