"""FedBPS, server half (Luo and Kuruoglu, arXiv 2402.16091): one mask says which weights are
personal.

    paper      here                 shape
    w_i, mu_i  update.params        by name: a client's weights after local training
    sigma_i    update.variance      by name: their *variance* under a Laplace approximation
    pi_i       num_examples / Σ     ()
    w_g        state.params         by name: the mean of the mixture
    sigma_g    variance             by name: the variance of the mixture
    M          state.mask           by name, bool: true = personal
    p          config.personal_share  ()
    c          state.params before  by name: the shift in which moments are summed

    w_g = Σ pi_i mu_i,    sigma_g = Σ pi_i (sigma_i + (mu_i − w_g)²)                     [eq. 5]
    M = 1 on the ⌊p P + ½⌋ entries with the largest sigma_g                             [eq. 3]

sigma_g does not depend on the shift c: Σ pi (mu − w_g)² = Σ pi (mu − c)² − (w_g − c)². Down travel
the mask as bits, and w_g on the shared entries alone; before the first round every entry is shared.
In a secure sum clients shift by what they were sent, which is 0 on personal entries. In a private
sum (dp) they send no personal entries and no squares: M ranks what is left of sigma_g by E-B5.

Departs:
  E-B2  the algorithm's line 6 lacks the square of [eq. 5], without which the term is always 0.
  E-B5  the variance of the weights between clients is 10^4 to 10^8 times smaller than their
        variance within, so the ranking of [eq. 3] is that of the curvature alone (`report` says how
        small). `ranking=balanced` divides each term by its median before adding.
  E-B6  exactly ⌊p P + ½⌋ entries, of equals the lower index first (in the order of names); one
        threshold for all tensors, or `threshold=tensor`: the share p of each.
  E-B8  running statistics of BatchNorm have no curvature: they stay on the client, or are averaged
        (`statistics=average`).
  E-B9  moments are summed shifted by the last w_g and in float64. The mean itself is summed as it
        is, exactly, so that p = 0 is FedAvg to the bit.
  E-B10 "KL aggregation" is moment matching, which is [eq. 5]; pi_i is not defined in the paper and
  is n_i / Σ n here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError, check_choices
from ..maths.bits import pack_bits
from ..maths.curvature import Kind
from ..maths.ranking import divided, drawn, flat, standardised, steadied, top
from ..maths.window import on_grid
from ..settings import Presets, paper, setting
from ..shown import Heading
from ..tree import Tensors
from .fedavg import averaged, weighted

Ranking = Literal["paper", "balanced", "printed", "random"]
Threshold = Literal["global", "tensor"]
Statistics = Literal["local", "average"]


@dataclass(frozen=True)
class Config:
    """What the user sets for FedBPS."""

    presets: ClassVar[Presets] = paper(
        "sgd", 0.01, 128, 5, momentum=0.9, weight_decay=5e-4, personal_share=0.7
    )

    personal_share: float = setting(
        0.7, "share p of the entries that are personal; 0 is FedAvg, 1 is local training"
    )
    delta: float | None = setting(
        None,
        "prior precision added to the curvature; none = weight_decay · n_i, or 1 without weight "
        "decay",
    )
    curvature: Kind = setting(
        "fisher",
        "fisher: expected over the model's predicted labels (for ReLU the Hessian's diagonal); "
        "sketch: a fast estimate of it; empirical: the true labels",
    )
    ranking: Ranking = setting(
        "paper",
        "paper: variance within clients plus variance between them; balanced: each divided by its "
        "median first; printed: curvature in place of the variance within, as the algorithm is "
        "printed (E-B1); random: drawn once",
    )
    threshold: Threshold = setting(
        "global", "global: one threshold for all tensors; tensor: the share p of each tensor"
    )
    statistics: Statistics = setting(
        "local", "BatchNorm's running statistics: local = kept by each client, or averaged"
    )
    finetune_epochs: int = setting(
        0, "epochs of local training of the whole model before a test; 0 = test it as it is"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.personal_share <= 1:
            raise ConfigError(
                f"personal_share must be in [0, 1], got {self.personal_share}; 0 is FedAvg, 1 is "
                "local training"
            )
        if self.delta is not None and not (self.delta > 0 and math.isfinite(self.delta)):
            raise ConfigError(
                f"delta must be positive and finite, got {self.delta}; without it a weight "
                "without curvature has no variance"
            )
        if self.finetune_epochs < 0:
            raise ConfigError(
                f"finetune_epochs must not be negative, got {self.finetune_epochs}; 0 means no "
                "fine-tuning"
            )
        check_choices(self)


class State(NamedTuple):
    """The mean of the mixture (the averaged running statistics), the mask, and median variance
    between over within clients (E-B5).
    """

    params: Tensors
    buffers: Tensors
    mask: Tensors
    disagreement: Tensor  # float64


class Broadcast(NamedTuple):
    """What every client is sent: w_g where it is shared (0 elsewhere), and which entries are
    personal.
    """

    params: Tensors
    buffers: Tensors
    mask: Tensors


class Update(NamedTuple):
    """What a client sends: its weights, their variances (`ranking=printed`: their precisions), and
    its number of training samples.
    """

    num_examples: Tensor
    params: Tensors
    variance: Tensors
    buffers: Tensors


class Server(ServerHalf):
    """Matches the moments of the clients' mixture and lets the most uncertain entries go."""

    headings = {
        "disagreement": Heading(
            "Disagreement of the clients",
            "between / within",
            "Median variance of a weight between clients over that within.",
        ),
        "personal_share/": Heading(
            "What is personal",
            "personal entries, % of a layer",
            "Share of each layer's weights that every client keeps for itself.",
            percent=True,
        ),
    }

    update_fields = {"params": "model", "buffers": "buffers", "variance": "certainty"}

    state_type = State
    broadcast_type = Broadcast

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return the initial model, all of it shared: no curvature is known yet."""
        kept = buffers if self.config.statistics == "average" else {}
        mask = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in params.items()}
        return State(params, kept, mask, torch.zeros((), dtype=torch.float64))

    def broadcast(self, state: State, client: int) -> Broadcast:
        """Return the shared entries and the mask, the same for every client."""
        shared = {
            name: value.masked_fill(state.mask[name], 0) for name, value in state.params.items()
        }
        return Broadcast(shared, state.buffers, state.mask)

    def pack(self, broadcast: Broadcast) -> Tensors:
        """Return the mask as bits and the shared entries as one vector,
        both in the order of names.
        """
        names = sorted(broadcast.mask)
        mask = torch.cat([broadcast.mask[name].reshape(-1) for name in names])
        values = torch.cat([broadcast.params[name].reshape(-1) for name in names])[~mask]
        return {
            "mask": pack_bits(mask),
            "values": values,
            **{f"buffers/{name}": value for name, value in broadcast.buffers.items()},
        }

    def sent_entries(self, state: State) -> Tensors:
        """Return the entries that are shared."""
        return {name: ~mask for name, mask in state.mask.items()}

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        return Update(torch.zeros((), dtype=torch.int64), state.params, state.params, state.buffers)

    def check(self, state: State, client: int, update: Update) -> str | None:
        """Return why the update cannot be used, or None: a client that claims any variance it likes
        could choose the mask alone.
        """
        count = int(update.num_examples)
        if not 0 < count < 2**40:
            return f"num_examples must be positive and below 2^40, got {count}"
        least = min(float(value.min()) for value in update.variance.values())
        most = max(float(value.max()) for value in update.variance.values())
        known = self.config.delta is not None and self.config.ranking != "printed"
        bound = (1 + 1e-5) / self.config.delta if known else math.inf
        return (
            None
            if least > 0 and most <= bound
            else f"variance must be in (0, {bound:.6g}], got [{least:.3g}, {most:.3g}]"
        )

    def bounds(
        self, state: State, client: int, update: Update, limits: Any, training: Any
    ) -> str | None:
        """Return why variances cannot be those of the default prior, 1/(weight_decay n) or 1, or
        None.
        """
        if self.config.delta is not None or self.config.ranking == "printed":
            return None  # `check` has looked, or a precision has no bound
        delta = training.weight_decay * int(update.num_examples) if training.weight_decay else 1.0
        most = max(float(value.max()) for value in update.variance.values())
        return (
            None
            if most <= (1 + 1e-5) / delta
            else f"variance must be at most {1 / delta:.6g}, got {most:.3g}"
        )

    def statistic(self, state: State, client: int, update: Update) -> Statistic:
        """Return (n, n mu, n sigma, n (mu − c)²) with c the last w_g; the last two in two sums,
        because E-B5 needs them apart.
        """
        number = update.num_examples
        apart = {
            name: (value.double() - state.params[name].double()).square()
            for name, value in update.params.items()
        }
        return {
            "num_examples": number,
            **weighted("params", update.params, number),
            **weighted("within", update.variance, number),
            **weighted("between", apart, number),
            **weighted("buffers", update.buffers, number),
        }

    def summand(self, state: State | Broadcast, client: int, update: Update) -> Statistic:
        """Return the same with the shift c that clients know: w_g where it is shared, else 0."""
        sent = state if isinstance(state, Broadcast) else self.broadcast(state, client)
        number, weight = update.num_examples, update.num_examples.double()
        apart = {
            f"moment/{name}": on_grid(
                weight * (value.double() - sent.params[name].double()).square()
            )
            for name, value in update.params.items()
        }
        return {
            "num_examples": number,
            **weighted("params", update.params, number),
            **weighted("within", update.variance, number),
            **weighted("buffers", update.buffers, number),
            **apart,
        }

    # a quarter of the noise budget: E-B5 leaves the variance within clients to be ranked
    portions = {"scores": 0.25}
    replaced = ("variance",)

    def portion(self, state: State | Broadcast, update: Update) -> Tensors:
        """Return the client's variances in units of their own spread."""
        return {"scores": standardised(update.variance)}

    def restored(self, state: State, sums: Tensors, noise: Mapping[str, float]) -> Tensors:
        """Return sums whose variance between clients is 0, and within them the noisy scores."""
        found = steadied(sums["scores"], noise["scores"], state.mask)
        within = {f"within/{name}": value for name, value in found.items()}
        return within | {f"between/{name}": torch.zeros_like(v) for name, v in found.items()}

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the same sums over stacked updates, in float64 on their device."""
        number = updates.num_examples
        weight = number.double()

        def add(group: str, tensors: Tensors) -> Tensors:
            return {
                f"{group}/{name}": torch.tensordot(weight, value.double(), 1)
                for name, value in tensors.items()
            }

        apart = {
            name: (value.double() - state.params[name].to(value.device).double()).square()
            for name, value in updates.params.items()
        }
        return {
            "num_examples": number.sum(),
            **add("params", updates.params),
            **add("within", updates.variance),
            **add("between", apart),
            **add("buffers", updates.buffers),
        }

    def finalise(self, state: State, total: Sum) -> State:
        """Return w_g, sigma_g's mask and the averaged statistics [eq. 5] [eq. 3]; no reply leaves
        the state as it was.
        """
        if "num_examples" not in total:
            return state
        number = total["num_examples"]
        secure = any(name.startswith("moment/") for name in total)
        shift = self.broadcast(state, 0).params if secure else state.params
        within, between = moments(shift, total)
        ratio = flat(between).median() / flat(within).median()
        return State(
            params=averaged("params", state.params, total, number),
            buffers=averaged("buffers", state.buffers, total, number),
            mask=self.select(within, between),
            disagreement=ratio,
        )

    def select(self, within: Tensors, between: Tensors) -> Tensors:
        """Return the mask [eq. 3] of the variances within and between clients, by name."""
        if self.config.ranking == "balanced":
            within, between = (divided(term, flat(term).median()) for term in (within, between))
        names = sorted(within)
        scores = {name: within[name] + between[name] for name in names}
        if self.config.ranking == "random":
            scores = drawn(scores)
        if self.config.threshold == "tensor":
            return {
                name: top(scores[name].reshape(-1), self.config.personal_share).reshape(
                    scores[name].shape
                )
                for name in names
            }
        parts = top(flat(scores), self.config.personal_share).split(
            [scores[name].numel() for name in names]
        )
        return {
            name: part.reshape(scores[name].shape) for name, part in zip(names, parts, strict=True)
        }

    def report(self, state: State) -> dict[str, float]:
        """Return the share of personal entries, in all and in each layer, and median variance
        between over within clients (E-B5).
        """
        layers: dict[str, list[Tensor]] = {}
        for name, mask in state.mask.items():
            layers.setdefault(name.rpartition(".")[0] or name, []).append(mask.reshape(-1))
        shares = {
            f"personal_share/{layer}": float(torch.cat(parts).double().mean())
            for layer, parts in layers.items()
        }
        return {
            "personal_share": float(flat(state.mask).double().mean()),
            "disagreement": float(state.disagreement),
            **shares,
        }


def moments(last: Tensors, total: Sum) -> tuple[Tensors, Tensors]:
    """Return (Σ pi sigma, Σ pi (mu − w_g)²) by name, whose sum is sigma_g [eq. 5]; `last` is the
    shift c.
    """
    number = total["num_examples"]
    within = {name: total[f"within/{name}"] / number for name in last}
    between = {}
    for name, value in last.items():
        step = total[f"params/{name}"] / number - value.to(number.device).double()
        squares = total[f"between/{name}" if f"between/{name}" in total else f"moment/{name}"]
        # rounding may leave −1e-30
        between[name] = (squares / number - step.square()).clamp(min=0)
    return within, between
