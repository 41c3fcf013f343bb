"""pFedBayes, client half (Zhang et al. 2022, ICML): an own Gaussian over all weights by variational
inference, with the shared Gaussian as prior, which moves towards it.

    paper          here                        shape
    mu_w, rho_w    work.params, ["rho:…"]      by name: the client's copy of the shared Gaussian
    mu_i, rho_i    work.params["own:…"]        by name, private: the client's own Gaussian
    sigma          softplus(rho)               by name
    zeta           config.bayes_zeta           ()
    K              config.bayes_samples        ()

    L = (1/K) Σ_k mean_i −log p(y_i|x_i, mu_i + sigma_i ε_k) + (zeta/n_i) KL            [eq. 1]
    KL = Σ log(s/sigma) + (sigma² + (mu − m)²)/(2 s²) − ½,    m, s of the shared one    [eq. 2]

The likelihood does not contain the shared Gaussian, so its gradient is that of the KL alone.

Departs: both Gaussians step together on one loss; the paper alternates. `personal` predicts with
the means, `sampled` with the mean over draws; the spread goes home with the personal model as its
posterior. The own Gaussian starts at the first shared one that the client is sent. A client that
never trained fits its own, the shared one fixed. With `bayes_layers=head` the base is FedAvg's.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..contract import ClientHalf, Phase, Posterior, Purpose, Work
from ..maths.laplace import SPREAD, Seen
from ..networks.model import Batch
from ..strategies.pfedbayes import WIDEST, Update, gaussian
from ..tree import Tensors, choose
from .ditto import OWN, owned, unstarted, with_own
from .fedavg import count

RHO = "rho:"  # what the names of spreads begin with; no layer has such a name


class State(NamedTuple):
    """The client's own Gaussian, its running statistics, and whether there is one."""

    params: Tensors
    rho: Tensors
    buffers: Tensors
    started: Tensor  # bool


class Memo(NamedTuple):
    """The weight of the KL: zeta / n_i."""

    weight: Tensor


class Client(ClientHalf):
    """Learns its own Gaussian over the weights; sends where the prior should go."""

    state_type: ClassVar[type] = State
    update_type: ClassVar[type] = Update
    private = ("params", "rho")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the weights that are Gaussian."""
        blank = dict.fromkeys(self.model.shapes, torch.zeros(()))
        return gaussian(self.config, blank, self.model.anatomy.head_names)

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch on both Gaussians; nothing before a test; the own one alone for a new
        client.
        """
        if purpose == "new":
            own = tuple(OWN + prefix + name for prefix in ("", RHO) for name in self.names)
            epochs = self.training.new_client_epochs
            return (self.training.phase("fit", epochs=epochs, trainable=own),)
        return (self.training.phase("local"),) if purpose == "train" else ()

    def views(self) -> dict[str, str]:
        """Return the own Gaussian's means, an average over its draws, and the shared means."""
        found = {
            "personal": "the client's own weights at their mean",
            "global": "the shared Gaussian's mean",
        }
        if self.config.predict_samples:
            number = self.config.predict_samples
            found["sampled"] = f"the client's own weights, averaged over {number} samples of them"
        return found

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return as many numbers as there are Gaussian weights, for each draw."""
        predicts = stage == "predict"
        draws = self.config.predict_samples if predicts else self.config.bayes_samples
        return {name: (draws, *self.model.shapes[name]) for name in self.names} if draws else {}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a Gaussian of its own."""
        own = {name: params[name] for name in self.names}
        rho = {name: torch.zeros_like(value) for name, value in own.items()}
        return State(own, rho, buffers, unstarted(params))

    def own(self, state: Any, broadcast: Any) -> tuple[Tensors, Tensors, Tensors]:
        """Return (mu_i, rho_i, running statistics); the shared ones while there are none."""
        shared = {name: broadcast.params[name] for name in state.params}
        found: tuple[Tensors, Tensors, Tensors] = choose(
            state.started,
            (state.params, state.rho, state.buffers),
            (shared, broadcast.rho, broadcast.buffers),
        )
        return found

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work on both Gaussians."""
        mu, rho, buffers = self.own(state, broadcast)
        params = {**broadcast.params, **spreads(broadcast.rho), **with_own({**mu, **spreads(rho)})}
        weight = self.config.bayes_zeta / data.mask.sum().clamp(min=1)
        return Work(params, buffers, Memo(weight))

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean NLL over draws and the KL on one batch [eq. 1]."""
        mine, buffers, fit = owned(params), work.buffers, []
        base = {name: value for name, value in params.items() if name in self.model.shapes}
        sigma = {name: spread(mine[RHO + name]) for name in self.names}
        for draw in range(self.config.bayes_samples):
            drawn = {n: mine[n] + sigma[n] * noise[n][draw] for n in self.names}
            logits, buffers = self.model.forward(
                {**base, **drawn}, buffers, batch.x, train=True, mask=batch.mask
            )
            fit.append(self.model.mean_nll(logits, batch.y, batch.mask))
        parts = [kl(mine[n], sigma[n], params[n], spread(params[RHO + n])) for n in self.names]
        mean = sum(fit[1:], fit[0]) / len(fit)
        return mean + work.memo.weight * sum(parts[1:], parts[0]), buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the own Gaussian, and (n_i, the copy of the shared one)."""
        shared = {name: work.params[name] for name in self.model.shapes}
        rho = {name: work.params[RHO + name].clamp(-WIDEST, WIDEST) for name in self.names}
        return self.kept(state, work), Update(count(data), shared, work.buffers, rho)

    def kept(self, state: Any, work: Work) -> Any:
        """Return the state with the own Gaussian after training."""
        mine = owned(work.params)
        mu, rho = {n: mine[n] for n in self.names}, {n: mine[RHO + n] for n in self.names}
        return State(mu, rho, work.buffers, torch.ones_like(state.started))

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state of a new client, its Gaussian fitted."""
        return self.kept(state, work)

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities at the own means, over draws, or at the shared means."""
        if view == "global":
            return self.at(broadcast.params, broadcast.buffers, x)
        mu, rho, buffers = self.own(state, broadcast)
        whole = {**broadcast.params, **mu}
        if view == "personal":
            return self.at(whole, buffers, x)
        found = []
        for draw in range(self.config.predict_samples):
            drawn = {n: mu[n] + spread(rho[n]) * noise[n][draw].to(mu[n]) for n in mu}
            found.append(self.at({**whole, **drawn}, buffers, x))
        return self.model.task.mixed(torch.stack(found))

    def at(self, params: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        """Return the probabilities of one network."""
        return self.model.probabilities(self.model.forward(params, buffers, x, train=False)[0])

    def spread(self, state: Any, broadcast: Any) -> Tensors:
        """Return sigma_i, by weight."""
        return {name: spread(value) for name, value in self.own(state, broadcast)[1].items()}

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the own Gaussian over the weights; the shared one's spread without it."""
        shared = {SPREAD + n: spread(value) for n, value in broadcast.rho.items()}
        std = {n: {**shared, **params}[SPREAD + n] for n in self.names}
        own = Posterior("sampled", std, "pFedBayes's Gaussian over the weights")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def spread(rho: Tensor) -> Tensor:
    """Return the standard deviation log(1 + e^rho)."""
    return softplus(rho.clamp(-WIDEST, WIDEST))


def spreads(rho: Tensors) -> Tensors:
    """Return rho under the names that it has beside the means."""
    return {RHO + name: value for name, value in rho.items()}


def kl(mu: Tensor, sigma: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """Return KL(N(mu, sigma²) ‖ N(m, s²)), summed over the weights [eq. 2]."""
    apart = (sigma.square() + (mu - m).square()) / (2 * s.square())
    return (s.log() - sigma.log() + apart - 0.5).sum()
