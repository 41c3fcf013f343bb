"""PVI, client half (Ashman et al. 2022, arXiv 2202.12275): local variational inference under what
the prior and all other clients say.

    paper          here                       shape
    q^(i-1)        broadcast                  by name: mean and precision (Λ, H = Λ × mean)
    t_m            state.precision, shift     by name, float64: the own factor (λ_m, η_m)
    cavity         work.memo                  by name: (λ_c, m_c), m_c its mean
    q              work.params, ["rho:…"]     by name: N(μ, σ²), σ = log(1 + e^rho)
    rho            broadcast.damping          ()

    (λ_c, λ_c m_c) = (Λ − λ_m, H − η_m)                                                 [eq. 1]
    L = mean_i −log p(y_i|x_i, μ + σ ε) + (T/n) ½ Σ [λ_c/λ − 1 − log(λ_c/λ) + λ_c (μ − m_c)²],
    λ = 1/σ²; the change of the factor is rho ((λ, λ μ) − (Λ, H))                       [eq. 2]

Departs: T = `pvi_temperature` (1 is the paper's bound). Where a factor would get a negative
precision, which sampling noise can do, it is not changed: so Λ ≥ λ0. A cavity has at least 1e-3 of
the prior's precision. The client adds the change as it was sent, rounded, to its factor.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Work
from ..maths.laplace import Seen
from ..networks.model import Batch
from ..strategies.pvi import Broadcast, Update
from ..tree import Tensors, choose, map_tree
from . import fedavg
from .pfedbayes import RHO, spread, spreads

LEAST = 1e-3  # share of the prior's precision that a cavity has at least


class State(NamedTuple):
    """The own factor, how often it was changed, and in which epoch."""

    precision: Tensors  # float64
    shift: Tensors  # float64
    turns: Tensor  # int64
    epoch: Tensor  # int64
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Natural(NamedTuple):
    """Natural parameters by weight, float64."""

    precision: Tensors
    shift: Tensors


class Memo(NamedTuple):
    """The round's constants: cavity, total, own factor, and the weight of the KL."""

    precision: Tensors  # of the cavity
    mean: Tensors
    total: Natural
    own: Natural
    turns: Tensor
    epoch: Tensor
    damping: Tensor
    weight: Tensor


class Client(fedavg.Global):
    """Refines its factor of the posterior; sends the change."""

    state_type: ClassVar[type] = State
    update_type: ClassVar[type] = Update

    def views(self) -> dict[str, str]:
        """Return the posterior's mean, fine-tuned or not, and an average over its draws."""
        found = super().views()
        if self.config.predict_samples:
            number = self.config.predict_samples
            found["sampled"] = f"the posterior over weights, averaged over {number} samples of it"
        return found

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return as many numbers as there are weights, for each draw."""
        if stage == fedavg.FINETUNE:
            return {}
        predicts = stage == "predict"
        draws = self.config.predict_samples if predicts else self.config.pvi_samples
        return {name: (draws, *shape) for name, shape in self.model.shapes.items()} if draws else {}

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a factor."""
        zeros = {name: torch.zeros_like(value).double() for name, value in params.items()}
        number = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
        return State(zeros, map_tree(torch.clone, zeros), number, number.clone(), {})

    def lost(self, state: Any) -> Any:
        """Return a client that had a factor and has none: all factors must start anew."""
        return bare(state)

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:  # type: ignore[override]
        """Return the work that starts at the posterior, with the cavity [eq. 1]; a factor of an
        older epoch is dropped.
        """
        same = state.epoch == broadcast.epoch
        kept = Natural(state.precision, state.shift)
        own: Natural = choose(same, kept, map_tree(torch.zeros_like, kept))
        turns = torch.where(same, state.turns, torch.zeros_like(state.turns))
        total = totals(broadcast)
        least = LEAST * self.config.pvi_prior_sigma**-2
        precision = {n: (v - own.precision[n]).clamp(min=least) for n, v in total.precision.items()}
        mean = {n: (total.shift[n] - own.shift[n]) / v for n, v in precision.items()}
        dtype = data.mask.dtype
        rho = {n: unspread(v).to(dtype) for n, v in self.sigma(broadcast).items()}
        memo = Memo(
            map_tree(lambda leaf: leaf.to(dtype), precision),
            map_tree(lambda leaf: leaf.to(dtype), mean),
            total,
            own,
            turns,
            broadcast.epoch,
            broadcast.damping,
            self.config.pvi_temperature / data.mask.sum().clamp(min=1),
        )
        return Work({**broadcast.params, **spreads(rho)}, broadcast.buffers, memo)

    def sigma(self, broadcast: Any) -> Tensors:
        """Return the standard deviations of q, by weight; those of the start while there is no
        factor.
        """
        start = self.config.pvi_start_sigma
        found = {name: value.double().rsqrt() for name, value in broadcast.precision.items()}
        first = {name: torch.full_like(value, start) for name, value in found.items()}
        chosen: Tensors = choose(broadcast.fresh, first, found)
        return chosen

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean NLL over draws and the KL to the cavity on one batch [eq. 2]."""
        buffers, fit = work.buffers, []
        mu = {name: params[name] for name in self.model.shapes}
        sigma = {name: spread(params[RHO + name]) for name in mu}
        for draw in range(self.config.pvi_samples):
            drawn = {n: mu[n] + sigma[n] * noise[n][draw] for n in mu}
            logits, buffers = self.model.forward(
                drawn, buffers, batch.x, train=True, mask=batch.mask
            )
            fit.append(self.model.mean_nll(logits, batch.y, batch.mask))
        memo: Memo = work.memo
        parts = [kl(mu[n], sigma[n], memo.precision[n], memo.mean[n]) for n in mu]
        mean = sum(fit[1:], fit[0]) / len(fit)
        return mean + memo.weight * sum(parts[1:], parts[0]), buffers

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the factor with its change, and the change [eq. 2]."""
        memo: Memo = work.memo
        sent = Natural({}, {})
        for name, precision in memo.total.precision.items():
            value = work.params[name]
            new = spread(work.params[RHO + name].double()).square().reciprocal()
            change = (
                memo.damping * (new - precision),
                memo.damping * (new * value.double() - memo.total.shift[name]),
            )
            rounded = tuple(one.to(value.dtype) for one in change)
            good = memo.own.precision[name] + rounded[0].double() >= 0
            for group, one in zip(sent, rounded, strict=True):
                group[name] = torch.where(good, one, torch.zeros_like(one))
        own = [
            {name: value + change[name].double() for name, value in old.items()}
            for old, change in zip(memo.own, sent, strict=True)
        ]
        update = Update(fedavg.count(data), work.buffers, *sent, memo.turns)
        return State(own[0], own[1], memo.turns.clamp(min=0) + 1, memo.epoch, {}), update

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities at the mean (fine-tuned, if it was), or over draws."""
        if view != "sampled":
            return super().predict(view, state, broadcast, x, noise)
        return self.over_draws(state, broadcast, self.sigma(broadcast), x, noise)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the posterior over all weights that the clients agreed on."""
        own = Posterior("sampled", self.sigma(broadcast), "PVI's posterior over the weights")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def bare(state: Any) -> Any:
    """Return a client that had a factor and has none (`turns` = −1)."""
    none = map_tree(torch.zeros_like, Natural(state.precision, state.shift))
    return state._replace(**none._asdict(), turns=torch.full_like(state.turns, -1))


def totals(broadcast: Any) -> Natural:
    """Return (Λ, H) in float64; before there is a factor the prior's, H = 0."""
    precision = {name: value.double() for name, value in broadcast.precision.items()}
    shift = {
        name: torch.where(broadcast.fresh, torch.zeros_like(value), value * broadcast.params[name])
        for name, value in precision.items()
    }
    return Natural(precision, shift)


def unspread(sigma: Tensor) -> Tensor:
    """Return rho with log(1 + e^rho) = sigma."""
    return sigma + torch.log(-torch.expm1(-sigma))


def kl(mu: Tensor, sigma: Tensor, precision: Tensor, mean: Tensor) -> Tensor:
    """Return KL(N(mu, sigma²) ‖ the cavity), summed over the weights [eq. 2]."""
    ratio = precision * sigma.square()
    return 0.5 * (ratio - 1 - ratio.log() + precision * (mu - mean).square()).sum()
