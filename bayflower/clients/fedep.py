"""FedEP and FedSEP, client half (Guo et al. 2023, ICLR): local training under the cavity, and a
Gaussian of the tilted distribution.

    paper          here                       shape
    q_global       broadcast                  by name: mean and precision (Λ, H = Λ × mean)
    q_k            state.precision, shift     by name, float64: the own factor (λ_k, η_k)
    q_-k           work.memo                  by name: the cavity (λ_c, η_c)
    mu, Sigma^-1   (in finish)                by name: mean and precision of the tilted distribution
    omega, iota    config.ep_decay, ep_start  ()
    c              config.ep_scale            ()

    (λ_c, η_c) = (Λ − λ_k, H − η_k); FedSEP: (1 − n_k/N) (Λ, H)                             [eq. 1]
    J(θ) = mean_i −log p(y_i|x_i, θ) + (1/n_k) [½ Σ (λ_c + ω n_k) θ² − Σ η_c θ]             [eq. 2]
    μ = mean of the iterates at the ends of the epochs; the precision Λ̃ is                  [eq. 3]
        identity   c n_k (ι + ω) + λ_c
        laplace    c (F + ω n_k) + λ_c      F the Fisher information at μ, summed over samples
        mcmc       1/(ρ + (1 − ρ) v), v the variance of the epochs' ends, as long as identity's
    The change of the factor is δ (Λ̃ − Λ, Λ̃ μ − H), cut to the length `ep_max_norm` before δ.

Departs: where a factor would get a negative precision it is not changed. With fewer steps than an
epoch has, μ is the last iterate. v of one epoch is 0. The paper's rule by natural-gradient
variational inference is left out. The mean is what predicts; before a test it may be fine-tuned.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Posterior, Survey, Work
from ..maths.curvature import at_once, diagonal
from ..maths.laplace import Seen
from ..networks.model import Batch, Model
from ..strategies.fedep import Broadcast, Update
from ..tree import Tensors, choose, map_tree
from . import fedavg
from .pvi import Natural, State, bare, totals


class Memo(NamedTuple):
    """The round's constants, and what was seen at the ends of epochs."""

    cavity: Natural
    total: Natural
    own: Natural
    turns: Tensor
    epoch: Tensor
    damping: Tensor
    fresh: Tensor
    number: Tensor  # n_k, in the dtype of the network
    anchor: Tensors  # the first iterate
    each: Tensor  # int64: steps of an epoch
    steps: Tensor  # int64
    ends: Tensor  # int64
    sums: Tensors  # Σ of iterates at ends, less the anchor
    squares: Tensors  # Σ of their squares, for mcmc


class Client(fedavg.Global):
    """Refines its factor of the posterior; sends the change."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    update_type: ClassVar[type] = Update

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        if config.ep_moments == "laplace":
            self.survey_size = at_once(model, training.batch_size, "fisher")

    @property
    def plain_loop(self) -> bool:
        """Return False: a round also averages its iterates."""
        return False

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client without a factor."""
        zeros = (
            {}
            if self.config.ep_sites == "shared"
            else {name: torch.zeros_like(value).double() for name, value in params.items()}
        )
        number = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
        return State(zeros, map_tree(torch.clone, zeros), number, number.clone(), {})

    def lost(self, state: Any) -> Any:
        """Return a client that had a factor and has none, or whose samples were counted."""
        return bare(state)

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:  # type: ignore[override]
        """Return the work that starts at the mean, with the cavity [eq. 1]; a factor of an older
        epoch is dropped.
        """
        number, total = data.mask.sum(), totals(broadcast)
        if self.config.ep_sites == "shared":
            share = (number / broadcast.number.clamp(min=1)).clamp(max=1).double()
            own: Natural = map_tree(lambda leaf: share * leaf, total)
            turns = state.turns
        else:
            same = state.epoch == broadcast.epoch
            kept = Natural(state.precision, state.shift)
            own = choose(same, kept, map_tree(torch.zeros_like, kept))
            turns = torch.where(same, state.turns, torch.zeros_like(state.turns))
        precision = {n: (v - own.precision[n]).clamp(min=0) for n, v in total.precision.items()}
        shift = {n: v - own.shift[n] for n, v in total.shift.items()}
        count = fedavg.count(data)
        zeros = {n: torch.zeros_like(v) for n, v in broadcast.params.items()}
        memo = Memo(
            Natural(precision, shift),
            total,
            own,
            turns,
            broadcast.epoch,
            broadcast.damping,
            broadcast.fresh,
            number.clamp(min=1),
            broadcast.params,
            self.epoch_steps(count),
            torch.zeros_like(count),
            torch.zeros_like(count),
            zeros,
            map_tree(torch.clone, zeros) if self.config.ep_moments == "mcmc" else {},
        )
        return Work(broadcast.params, broadcast.buffers, memo)

    def epoch_steps(self, count: Tensor) -> Tensor:
        """Return the steps of an epoch over so many samples; a last batch of one sample joins the
        one before it where samples are coupled.
        """
        size = self.training.batch_size
        steps = -torch.div(-count, size, rounding_mode="floor")
        alone = (count % size == 1) & (count > 1) & self.model.coupled & (size > 1)
        return steps - alone.to(steps.dtype)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean NLL and the cavity's term on one batch [eq. 2]."""
        loss, buffers = super().loss(params, work, batch, noise, phase)
        memo: Memo = work.memo
        return loss + cavity_term(params, memo.cavity, memo.number, self.config.ep_decay), buffers

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one step; at the end of an epoch the iterate is added [eq. 3]."""
        work, info = super().step(phase, work, batches, noise)
        if phase.name == fedavg.FINETUNE:
            return work, info
        memo: Memo = work.memo
        steps = memo.steps + 1
        end = (steps % memo.each.clamp(min=1) == 0).to(steps.dtype)
        far = {n: end * (work.params[n] - value) for n, value in memo.anchor.items()}
        memo = memo._replace(
            steps=steps,
            ends=memo.ends + end,
            sums={n: value + far[n] for n, value in memo.sums.items()},
            squares={n: value + far[n].square() for n, value in memo.squares.items()},
        )
        return work._replace(memo=memo), info

    def mean(self, work: Work) -> Tensors:
        """Return the mean of the epochs' ends; the last iterate where there is no end [eq. 3]."""
        memo: Memo = work.memo
        number = memo.ends.clamp(min=1)
        ends = {n: memo.anchor[n] + value / number for n, value in memo.sums.items()}
        found: Tensors = choose(memo.ends > 0, ends, {n: work.params[n] for n in ends})
        return found

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the Fisher information that `batch` adds, at the mean."""
        return Survey(diagonal(self.model, self.mean(work), work.buffers, batch, "fisher"), {})

    def tilted(self, work: Work) -> Tensors:
        """Return the precision of the tilted distribution, in float64 [eq. 3]; in FedAvg's rounds
        by the sample count.
        """
        memo, config = work.memo, self.config
        plain = identity(memo.cavity.precision, memo.number, config)
        if config.ep_moments == "laplace":
            found = laplace(work.survey.total, memo.cavity.precision, memo.number, config)
        elif config.ep_moments == "mcmc":
            number = memo.ends.clamp(min=1)
            variance = {
                n: ((value - memo.sums[n].square() / number) / (number - 1).clamp(min=1))
                .clamp(min=0)
                .double()
                for n, value in memo.squares.items()
            }
            found = spread_of_ends(variance, plain, config)
        else:
            return plain
        chosen: Tensors = choose(memo.fresh, plain, found)
        return chosen

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return the factor with its change, and the change [eq. 3]."""
        memo: Memo = work.memo
        mean, tilted = self.mean(work), self.tilted(work)
        change = Natural(
            {n: v - memo.total.precision[n] for n, v in tilted.items()},
            {n: v * mean[n].double() - memo.total.shift[n] for n, v in tilted.items()},
        )
        if self.config.ep_max_norm:
            factor = torch.where(memo.fresh, 1.0, within(change, self.config.ep_max_norm))
            change = map_tree(lambda leaf: factor * leaf, change)
        change = map_tree(lambda leaf: memo.damping * leaf, change)
        sent = Natural(
            {n: v.to(mean[n].dtype) for n, v in change.precision.items()},
            {n: v.to(mean[n].dtype) for n, v in change.shift.items()},
        )
        shared = self.config.ep_sites == "shared"
        if not shared:
            good = {n: memo.own.precision[n] + v.double() >= 0 for n, v in sent.precision.items()}
            sent = Natural(*({n: good[n] * v for n, v in group.items()} for group in sent))
        update = Update(fedavg.count(data), work.buffers, *sent, memo.turns)
        if shared:
            return State({}, {}, memo.turns.clamp(min=0) + 1, memo.epoch, {}), update
        own = [
            {n: v + group[n].double() for n, v in old.items()}
            for old, group in zip(memo.own, sent, strict=True)
        ]
        return State(own[0], own[1], memo.turns.clamp(min=0) + 1, memo.epoch, {}), update

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the posterior over all weights that the clients agreed on."""
        std = {
            n: torch.where(v > 0, v.double().rsqrt(), torch.zeros_like(v).double())
            for n, v in broadcast.precision.items()
        }
        own = Posterior("sampled", std, "FedEP's posterior over the weights")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}


def cavity_term(params: Tensors, cavity: Natural, number: Tensor, decay: float) -> Tensor:
    """Return (1/n) [½ Σ (λ_c + ω n) θ² − Σ η_c θ] [eq. 2]."""
    parts = [
        (
            (cavity.precision[n].to(value) + decay * number) * value.square() / 2
            - cavity.shift[n].to(value) * value
        ).sum()
        for n, value in params.items()
    ]
    return sum(parts[1:], parts[0]) / number


def identity(cavity: Tensors, number: Tensor, config: Any) -> Tensors:
    """Return c n (ι + ω) + λ_c [eq. 3]."""
    own = config.ep_scale * number.double() * (config.ep_start + config.ep_decay)
    return {n: own + value for n, value in cavity.items()}


def laplace(fisher: Tensors, cavity: Tensors, number: Tensor, config: Any) -> Tensors:
    """Return c (F + ω n) + λ_c, F within its band [eq. 3]."""
    kept = banded({n: value.double() for n, value in fisher.items()}, config.ep_band)
    decay = config.ep_decay * number.double()
    return {n: config.ep_scale * (kept[n] + decay) + value for n, value in cavity.items()}


def spread_of_ends(variance: Tensors, plain: Tensors, config: Any) -> Tensors:
    """Return 1/(ρ + (1 − ρ) v) within its band, scaled to the length of `plain` [eq. 3]."""
    shrink = config.ep_shrink
    found = {n: 1 / (shrink + (1 - shrink) * value) for n, value in variance.items()}
    found = banded(found, config.ep_band)
    factor = length(plain) / length(found).clamp(min=1e-300)
    return {n: factor * value for n, value in found.items()}


def banded(values: Tensors, band: float) -> Tensors:
    """Return values within so many standard deviations of the mean, both over all weights."""
    every = torch.cat([value.flatten() for value in values.values()])
    middle, far = every.mean(), band * every.std(correction=0)
    return {n: value.clamp(middle - far, middle + far) for n, value in values.items()}


def length(values: Tensors) -> Tensor:
    """Return the norm over all weights."""
    return torch.stack([value.square().sum() for value in values.values()]).sum().sqrt()


def within(change: Natural, longest: float) -> Tensor:
    """Return the factor that makes a change at most so long, both parts together."""
    size = (length(change.precision).square() + length(change.shift).square()).sqrt()
    return (longest / size.clamp(min=1e-300)).clamp(max=1)
