"""FedCP, client half (Zhang et al. 2023, KDD): a policy gives each coordinate of a feature a share
for the own head; the rest goes to the frozen global one.

    paper          here                    shape
    h              features                (B, D): what the head gets
    v_i            memo.context            (D,): rows of the own head added up, of length 1
    r              (in shares)             (B, D): the own head's shares
    W_i            work.params["own:…"]    by name: the own head
    W_g, psi_0     memo                    by name: head and base as received

    a = ReLU(LayerNorm(A (h v) + t)) as (2, D),   r = σ((a_0 − a_1 + logistic noise)/τ)      [eq. 1]
    logits = W_i (r h) + b_i + W_g ((1 − r) h) + b_g                                         [eq. 2]
    L = mean −log softmax(logits)_y + lambda MMD²({psi(x_i)}, {psi_0(x_i)}), the kernel
        k(p, q) = Σ_s exp(−‖p − q‖²/(2 s)), s in {10, 15, 20, 50}                            [eq. 3]
    sent: base, policy and ½ (own + global) head                                             [eq. 4]

A Gumbel softmax over two entries is a sigmoid of their difference with one logistic variable.

Departs: predictions have no noise unless `cp_test_noise`. The context is that of the own head as a
round begins, in the first one that of the global head. psi_0 is in evaluation mode. `personal` is
the model after one more local training, as FedPer's. A client that never trained fits its own head
from the global one, the rest frozen. At home policy and both heads stand in the head's place, the
heads as one layer on [r h, (1 − r) h]; there is no noise, whatever `cp_test_noise` says.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from ..contract import Phase, Purpose, Work
from ..maths.tops import Top, linear, rest_of
from ..networks.model import Batch
from ..strategies.fedcp import EXTRA
from ..tree import Tensors, choose
from . import fedavg
from .ditto import OWN, others, owned, unstarted, with_own

WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernels
NOISE = "logistic"


class State(NamedTuple):
    """The own head, and whether there is one; before a test also all that was tuned."""

    params: Tensors
    tuned: Tensors
    started: Tensor  # bool


class Memo(NamedTuple):
    """Head, base and running statistics as received, and the context."""

    params: Tensors
    buffers: Tensors
    context: Tensor


class Client(fedavg.Client):
    """Trains base, policy and own head; sends the own head half."""

    state_type: ClassVar[type] = State
    private = ("tuned",)
    needs_base = True
    needs_classes = True

    @property
    def plain_loop(self) -> bool:
        """Return False: more than the user's network is trained."""
        return False

    @property
    def head(self) -> tuple[str, ...]:
        """Return the names of the head's parameters."""
        return tuple(sorted(self.model.head_names))

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training, in a round and before a test alike; the own head
        alone for a new client.
        """
        if purpose == "new":
            own = tuple(OWN + name for name in self.head)
            epochs = self.training.new_client_epochs
            return (self.training.phase("fit", epochs=epochs, trainable=own),)
        return (self.training.phase("local"),)

    def views(self) -> dict[str, str]:
        """Return the personal model after and before local training."""
        model = "base, policy and global head of the last round with the client's own head"
        return {
            "personal": f"{model}, after local training as in a round; of a client that never "
            "trained, of its own head alone",
            "before": f"{model}, before local training",
        }

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return one number for each coordinate of each sample's feature."""
        if stage == "predict" and not self.config.cp_test_noise:
            return {}
        # a last sample joins the batch before it where samples are coupled
        return {NOISE: (batch_size + 1, self.model.shapes[f"{self.model.head}.weight"][-1])}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a head of its own."""
        return State({name: params[name] for name in self.head}, {}, unstarted(params))

    def own_head(self, state: Any, broadcast: Any) -> Tensors:
        """Return the own head; the global one while there is none."""
        shared = {name: broadcast.params[name] for name in state.params}
        found: Tensors = choose(state.started, state.params, shared)
        return found

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work on base, policy and own head; what was received stays in the memo."""
        own = self.own_head(state, broadcast)
        moving = {n: v for n, v in broadcast.params.items() if n not in self.model.head_names}
        memo = Memo(self.network(broadcast.params), broadcast.buffers, self.context(own))
        return Work({**moving, **with_own(own)}, broadcast.buffers, memo)

    def network(self, params: Tensors) -> Tensors:
        """Return the user's network alone."""
        return {name: params[name] for name in self.model.shapes}

    def context(self, head: Tensors) -> Tensor:
        """Return the rows of a head added up, of length 1."""
        v = head[f"{self.model.head}.weight"].sum(0)
        return v / (v.square().sum().sqrt()).clamp(min=1e-12)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return L on one batch [eq. 3]."""
        memo: Memo = work.memo
        shared = {**memo.params, **{n: v for n, v in others(params).items() if n in memo.params}}
        _, z, buffers = self.model.forward_features(
            shared, work.buffers, batch.x, train=True, mask=batch.mask
        )
        z = z.flatten(1)
        share = shares(params, z, memo.context, noise[NOISE][: len(z)], self.config.cp_temperature)
        logits = self.split(owned(params), memo.params, z, share)
        loss = self.model.mean_nll(logits, batch.y, batch.mask)
        if self.config.cp_weight:
            before = self.model.forward_features(memo.params, memo.buffers, batch.x, train=False)[1]
            apart = mmd(z, before.flatten(1).detach(), batch.mask)
            loss = loss + self.config.cp_weight * apart
        return loss, buffers

    def split(self, own: Tensors, shared: Tensors, z: Tensor, share: Tensor) -> Tensor:
        """Return the logits of both heads on their shares [eq. 2]."""
        weight, bias = f"{self.model.head}.weight", f"{self.model.head}.bias"
        out = (share * z) @ own[weight].mT + ((1 - share) * z) @ shared[weight].mT
        return out + own[bias] + shared[bias] if bias in own else out

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the own head, and base, policy and half the own head [eq. 4]."""
        own, memo = owned(work.params), work.memo
        halves = {name: (value + memo.params[name]) / 2 for name, value in own.items()}
        update = self.update_type(
            fedavg.count(data), {**others(work.params), **halves}, work.buffers
        )
        return State(own, {}, torch.ones_like(state.started)), update

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state beside all that was tuned; of a new client, its own head fitted."""
        if purpose == "new":
            return State(owned(work.params), {}, torch.ones_like(state.started))
        return state._replace(tuned={**work.params, **work.buffers})

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of both heads [eq. 2], after or before local training."""
        known, context = self.known(view, state, broadcast)
        buffers = {n: known[n] for n in broadcast.buffers}
        z = self.model.forward_features(self.network(known), buffers, x, train=False)[1].flatten(1)
        drawn = noise[NOISE][: len(z)].to(z) if noise else None
        share = shares(known, z, context, drawn, self.config.cp_temperature)
        return self.model.probabilities(self.split(owned(known), broadcast.params, z, share))

    def known(self, view: str, state: Any, broadcast: Any) -> tuple[Tensors, Tensor]:
        """Return all numbers after or before local training, and the context."""
        own = self.own_head(state, broadcast)
        known = {**broadcast.params, **broadcast.buffers, **with_own(own)}
        if view == "personal" and state.tuned:
            known = {**known, **state.tuned}
        return known, self.context(own)

    def top(self) -> Top:
        """Return policy and both heads in the place of the head."""
        return Top("split", {"temperature": self.config.cp_temperature})

    def topped(self, state: Any, broadcast: Any) -> tuple[Tensors, Tensors]:
        """Return the network with policy and both heads [eq. 2]."""
        (known, context), head = self.known("personal", state, broadcast), self.model.head
        own, weight, bias = owned(known), f"{head}.weight", f"{head}.bias"
        both = torch.cat([own[weight], broadcast.params[weight]], 1)
        last = linear(head, both, own[bias] + broadcast.params[bias] if bias in own else None)
        parts = ("weight", "bias", "norm", "normbias")
        policy = {f"{head}.0.{name}": known[EXTRA + name] for name in parts}
        buffers = {n: known[n] for n in broadcast.buffers}
        rest = rest_of(self.model, known)
        return {**rest, **last}, {**buffers, **policy, f"{head}.0.context": context}


def scores(params: Tensors, z: Tensor, context: Tensor) -> Tensor:
    """Return a (B, 2, D) [eq. 1]."""
    out = (z * context) @ params[EXTRA + "weight"].mT + params[EXTRA + "bias"]
    normed = layer_norm(out, out.shape[-1:], params[EXTRA + "norm"], params[EXTRA + "normbias"])
    return torch.relu(normed).unflatten(-1, (2, z.shape[-1]))


def shares(
    params: Tensors, z: Tensor, context: Tensor, noise: Tensor | None, temperature: float
) -> Tensor:
    """Return r (B, D) from standard normal noise, or without any [eq. 1]."""
    a = scores(params, z, context)
    apart = a[:, 0] - a[:, 1]
    if noise is not None:
        apart = apart + logistic(noise)
    return torch.sigmoid(apart / temperature)


def logistic(noise: Tensor) -> Tensor:
    """Return logistic numbers, log Φ(ξ) − log Φ(−ξ) of standard normal ones."""
    return torch.erfc(-noise / 2**0.5).log() - torch.erfc(noise / 2**0.5).log()


def mmd(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return MMD² between the real rows of two sets, all pairs counted [eq. 3]."""
    pairs = mask[:, None] * mask
    parts = kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)
    return (parts * pairs).sum() / pairs.sum().clamp(min=1)


def kernel(p: Tensor, q: Tensor) -> Tensor:
    """Return Σ_s exp(−‖p − q‖²/(2 s)) of all pairs."""
    far = (p[:, None] - q[None]).square().sum(-1)
    return torch.stack([torch.exp(-far / (2 * width)) for width in WIDTHS]).sum(0)
