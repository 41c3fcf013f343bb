"""MetaVD, server half (Jeon et al. 2023, "Federated Learning via Meta-Variational Dropout",
NeurIPS): dropout posteriors by a hypernetwork.

    paper        here                          shape
    theta        state.params                  by name; one linear layer of K weights is the *MetaVD
                                               layer*
    alpha^m      exp(broadcast.log_alpha)      shape of the layer: dropout of client m, w ~ N(theta,
                                               alpha theta²)
    psi, e^m     state.belief                  the hypernetwork, and an embedding (1 + M/4,) for
                                               each of M clients (beliefs.py)
    g^m          num_examples / Σ              ()
    Delta^m      update.log_alpha_step         shape of the layer: how far log alpha moved on the
                                               client
    eta          config.server_lr              ()

    theta_agg = Σ g^m theta^m / v^m  /  Σ g^m / v^m,   v^m = alpha^m (theta^m)² + floor   [eq. 5]
                (the layer; elsewhere Σ g^m theta^m)
    theta ← theta + eta (theta_agg − theta)
    psi ← psi + eta Σ g^m (∂h/∂psi)ᵀ Delta^m,   e^m ← e^m + eta (∂h/∂e^m)ᵀ Delta^m
                                                (Algorithm 1)

`posterior=hyper` is MetaVD; `global` is VD, `own` EnsembleVD (beliefs.py). They extend `base`.

Departs:
  E-V1, E-V2  no further 1/M in [eq. 5], where weights already sum to 1, nor in the step of psi; g^m
              over the clients of the round.
  E-V3  the paper's update of e^m does not type; the chain rule gives (∂h/∂e)ᵀ Delta.
  E-V5  everything is in log alpha, within ±8.5; a client sends its change. Steps of psi ignore the
        limits, or outputs stay beyond.
  E-V8  `variance_floor` in v^m: a weight of 0 would have infinite precision. `weighting=alpha`
        weighs by g/alpha alone.
  E-V14 (ours) a step of psi and e moves log alpha by J Jᵀ Delta, hundreds of times Delta where K is
  large; `hyper_reach` bounds it. E-V15 (ours) log alpha's start is added to h and no bias in it, or
  weight decay would pull every dropout rate to one half. E-V10 with `drop_above` weights of a
  larger dropout rate neither travel, in either direction, nor count, from round `drop_after` on.
  E-V11 a client that never trained has alpha from the mean of the trained embeddings, or nearly
  none (`ood=deterministic`). psi and e move with momentum, weight decay and clipping as in the
  authors' code; the weight of the KL ramps up along a sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices, check_positive
from ..maths import beliefs, dropout
from ..maths.beliefs import Belief
from ..maths.window import on_grid
from ..settings import Presets, paper, setting
from ..shown import Heading, Picture
from ..tree import Tensors, digest, flatten, map_tree, matching
from . import reptile
from .fedavg import averaged, summed, weighted

Base = Literal["fedavg", "reptile", "maml", "perfedavg"]
Posterior = Literal["hyper", "global", "own"]
Weighting = Literal["variance", "alpha"]
Ood = Literal["mean", "deterministic"]
MASK, STEP = "mask/layer", "log_alpha_step"
REPORTED = 16  # clients in a round's mean dropout rate, at most
AUTHORS = {"kl_weight": 10.0, "server_lr": 0.9, "server_momentum": 0.9, "adapt_steps": 1}


@dataclass(frozen=True)
class Config:
    """What the user sets for MetaVD and its ablations."""

    presets: ClassVar[Presets] = paper("sgd", 0.02, 64, 5, clip_norm=5.0, inner_lr=0.02, **AUTHORS)

    base: Base = setting("reptile", "method that MetaVD extends; fedavg: no adaptation")
    posterior: Posterior = setting(
        "hyper",
        "hyper: alpha from a hypernetwork; global: one alpha for all clients (VD); own: one for "
        "each client (EnsembleVD)",
    )
    dropout_layer: str = setting(
        "", "name of the linear layer with dropout; empty = the last one before the head"
    )
    kl_weight: float = setting(
        1.0,
        "weight of the mean KL over the layer's K weights; 10 in the authors' code, where K is "
        "32,768",
    )
    ramp_rounds: int = setting(20, "rounds of warm-up in which the weight of the KL rises from 0")
    log_alpha_start: float = setting(-3.0, "approximate log alpha before the first round")
    alpha_rate: float = setting(1.0, "learning rate of log alpha on a client, as a multiple of lr")
    variance_floor: float = setting(1e-3, "added to the variances that weight the layer's average")
    weighting: Weighting = setting("variance", "variance: 1/(alpha theta²); alpha: 1/alpha")
    hyper_width: int = setting(200, "hidden units of the hypernetwork")
    hyper_momentum: float = setting(0.6, "momentum of the hypernetwork's steps")
    embedding_momentum: float = setting(0.3, "momentum of the embeddings' steps")
    hyper_decay: float = setting(5e-4, "weight decay of hypernetwork and embeddings")
    hyper_clip: float = setting(100.0, "cap on the norm of the hypernetwork's gradient")
    hyper_reach: float = setting(
        0.1,
        "cap on a round's change of log alpha (root mean square over clients and weights); 0 = no "
        "cap",
    )
    ood: Ood = setting(
        "mean",
        "alpha of new clients: mean = from the mean embedding; deterministic = almost no dropout",
    )
    predict_samples: int = setting(0, "weight samples for the extra test view `sampled`; 0 = none")
    drop_above: float = setting(0.0, "weights with a larger dropout rate are removed; 0 = none")
    drop_after: int = setting(150, "rounds before weights are removed")
    inner_lr: float = setting(
        0.1, "base=maml, perfedavg: learning rate of inner steps and of adaptation before a test"
    )
    inner_steps: int = setting(1, "base=maml, perfedavg: inner steps on the support set")
    hf_delta: float = setting(0.01, "base=perfedavg: step length of the finite difference")
    server_lr: float = setting(
        1.0, "step size of the global model towards the clients' average; 1 = the average"
    )
    server_momentum: float = setting(0.0, "momentum of the global model's step; 0 = none")
    adapt_steps: int = setting(
        10, "steps on the client's training data before a test; 0 = test the global model"
    )

    def __post_init__(self) -> None:
        reptile.check_meta(self)
        check_choices(self)
        check_positive(self, "variance_floor", "hyper_clip", "hyper_width")
        for name in (
            "kl_weight",
            "ramp_rounds",
            "alpha_rate",
            "hyper_decay",
            "hyper_reach",
            "predict_samples",
            "drop_after",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("hyper_momentum", "embedding_momentum", "drop_above"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be in [0, 1), got {getattr(self, name)}; 0 means none"
                )
        if abs(self.log_alpha_start) > dropout.LIMIT:
            raise ConfigError(
                f"log_alpha_start must be in ±{dropout.LIMIT}, got {self.log_alpha_start}"
            )


class State(NamedTuple):
    """The global model, the rounds done, and what is believed of each client's dropout."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors
    round: Tensor
    belief: Belief


class Broadcast(NamedTuple):
    """What one client is sent: the model, its own log alpha, its weight of the KL, and which
    weights are dropped (if any can be).
    """

    params: Tensors
    buffers: Tensors
    log_alpha: Tensor
    kl_weight: Tensor
    mask: Tensors


class Update(NamedTuple):
    """What a client sends: its model, how far its log alpha moved, and what was dropped."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    log_alpha_step: Tensor
    mask: Tensors


class Server(beliefs.Admitting, reptile.Server):
    """Keeps the hypernetwork; sends each client its dropout; averages the layer by precision."""

    headings = {
        "dropout_rate": Heading(
            "Dropout over rounds",
            "mean dropout rate",
            f"Mean over weights of the layer and clients, {REPORTED} of them at most.",
        ),
        "sparsity": dropout.SPARSITY,
    }

    state_type: ClassVar[type] = State
    broadcast_type: ClassVar[type] = Broadcast  # type: ignore[assignment]
    per_client = True

    def layer(self, params: Tensors) -> str:
        """Return the name of the MetaVD layer's weights."""
        shapes = {key: tuple(one.shape) for key, one in params.items()}
        return dropout.find_layer(self.anatomy, params, shapes, self.config.dropout_layer)

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial model and the first belief, seeded by the model's initialisation."""
        belief = beliefs.begin(self.config, digest(params), params[self.layer(params)], clients)
        return State(params, buffers, self.rest(params), torch.zeros((), dtype=torch.int64), belief)

    def log_alpha(self, state: State | Broadcast, client: int) -> Tensor:
        """Return log alpha of a client, in the shape of the layer; the client was sent it."""
        if isinstance(state, Broadcast):
            return state.log_alpha
        weight = state.params[self.layer(state.params)]
        found = beliefs.log_alpha(self.config, state.belief, client, weight.numel())
        return found.reshape(weight.shape)

    def log_alphas(self, state: State, clients: Sequence[int]) -> Tensor:
        """Return log alpha of clients, stacked."""
        weight = state.params[self.layer(state.params)]
        found = beliefs.log_alphas(self.config, state.belief, clients, weight.numel())
        return found.reshape(-1, *weight.shape)

    def kl_weight(self, state: State) -> Tensor:
        """Return the weight of the KL in the coming round: along a sigmoid to its full value."""
        return self.config.kl_weight * dropout.ramp(state.round, self.config.ramp_rounds)

    def dropped(self, state: State, log_alpha: Tensor) -> Tensor:
        """Return which weights are dropped in the coming round (E-V10)."""
        limit = dropout.log_alpha_of(self.config.drop_above)
        return (log_alpha > limit) & (state.round >= self.config.drop_after)

    def broadcast(self, state: Any, client: int) -> Any:
        """Return the model and the client's own dropout; dropped entries are 0."""
        return self.message(self.layer(state.params), state, self.log_alpha(state, client))

    def broadcasts(self, state: Any, clients: tuple[int, ...]) -> Any:
        """Return the same of clients, stacked; what they share is there once."""
        number = len(clients)
        one = State(*map_tree(lambda leaf: leaf.expand(number, *leaf.shape), state[:2]), *state[2:])
        sent = self.message(self.layer(state.params), one, self.log_alphas(state, clients))
        return sent._replace(kl_weight=sent.kl_weight.expand(number))

    def message(self, name: str, state: State, log_alpha: Tensor) -> Broadcast:
        """Return the broadcast of a client's dropout, or of that of several."""
        params, buffers = state.params, state.buffers
        beta = self.kl_weight(state).to(log_alpha)
        if not self.config.drop_above:
            return Broadcast(params, buffers, log_alpha, beta, {})
        mask = self.dropped(state, log_alpha)
        params = {**params, name: params[name].masked_fill(mask, 0)}
        return Broadcast(params, buffers, log_alpha.masked_fill(mask, 0), beta, {"layer": mask})

    def pack(self, broadcast: Broadcast) -> Tensors:
        """Return what travels to a client: of the layer only what is not dropped."""
        flat = flatten(broadcast)
        return (
            dropout.thin(flat, MASK, (f"params/{self.layer(broadcast.params)}", "log_alpha"))
            if broadcast.mask
            else flat
        )

    def packs_alike(self, broadcast: Any) -> bool:
        """Return whether nothing is dropped."""
        return not broadcast.mask

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        weight = state.params[self.layer(state.params)]
        mask = (
            {"layer": torch.zeros_like(weight, dtype=torch.bool)} if self.config.drop_above else {}
        )
        return Update(torch.zeros((), dtype=torch.int64), state.params, state.buffers, weight, mask)

    def unpack(self, state: Any, flat: Tensors) -> Any:
        """Return the update in `flat`, dropped entries 0; raise if it cannot be one."""
        if self.config.drop_above:
            name = self.layer(state.params)
            flat = dropout.fill(
                flat, MASK, (f"params/{name}", STEP), tuple(state.params[name].shape)
            )
        return matching(flat, self.expects(state))

    def present(self, state: Any, updates: Any) -> Tensors:
        """Return the entries of the layer that were not dropped (E-V10)."""
        name = f"params/{self.layer(state.params)}"
        return {name: ~updates.mask["layer"]} if updates.mask else {}

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the update cannot be used, or None."""
        largest = float(update.log_alpha_step.abs().max())
        if largest > 2 * dropout.LIMIT + 1e-3:
            return f"log_alpha_step must be in ±{2 * dropout.LIMIT}, got {largest:.3g}"
        sent = isinstance(state, Broadcast)  # the client itself, for a secure sum
        if update.mask and not torch.equal(
            update.mask["layer"],
            state.mask["layer"] if sent else self.dropped(state, self.log_alpha(state, client)),
        ):
            return "the entries left out are not those that were dropped"
        return super().check(state, client, update)

    def precision(self, theta: Tensor, start: Tensor, step: Tensor, mask: Tensors) -> Tensor:
        """Return 1/v of each weight in float64, 0 where it was dropped [eq. 5]."""
        floor = None if self.config.weighting == "alpha" else self.config.variance_floor
        weight = dropout.precision(theta, dropout.limited(start + step), floor)
        return weight.masked_fill(mask["layer"], 0) if mask else weight

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n/v, n theta/v) of the layer, (n, n theta) of the rest, and, by client, n and
        Delta.
        """
        own = beliefs.line(client, update.num_examples, update.log_alpha_step)
        return {**self.sums(state, client, update), **own}

    def summand(self, state: Any, client: int, update: Any) -> Statistic:
        """Return the same with n Delta in place of what is kept by client, for VD's one alpha."""
        found = self.sums(state, client, update)
        found |= {name: on_grid(found[name]) for name in ("precision", "shift")}
        moved = {beliefs.ALL: update.log_alpha_step}
        return {**found, **weighted("step", moved, update.num_examples)}

    def sums(self, state: Any, client: int, update: Any) -> dict[str, Any]:
        """Return (n/v, n theta/v) of the layer and (n, n theta) of the rest [eq. 5]."""
        name, number = self.layer(state.params), update.num_examples
        theta = update.params[name]
        rest = {key: value for key, value in update.params.items() if key != name}
        weight = number * self.precision(
            theta, self.log_alpha(state, client), update.log_alpha_step, update.mask
        )
        return {
            "num_examples": number,
            **weighted("params", rest, number),
            **weighted("buffers", update.buffers, number),
            "precision": weight,
            "shift": weight * theta.double(),
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates, in float64 on their device."""
        name, number = self.layer(state.params), updates.num_examples
        theta = updates.params[name]
        rest = {key: value for key, value in updates.params.items() if key != name}
        start = self.log_alphas(state, clients).to(theta.device)
        weight = number.reshape(-1, 1, 1) * self.precision(
            theta, start, updates.log_alpha_step, updates.mask
        )
        own: dict[str, Tensor] = {}
        steps = updates.log_alpha_step.double().unbind()
        for client, count, step in zip(clients, number.unbind(), steps, strict=True):
            own |= beliefs.line(client, count, step)
        return {
            "num_examples": number.sum(),
            **summed("params", rest, number.double()),
            **summed("buffers", updates.buffers, number.double()),
            "precision": weight.sum(0),
            "shift": (weight * theta.double()).sum(0),
            **own,
        }

    def aggregate(self, state: Any, total: Sum) -> Tensors:
        """Return theta_agg [eq. 5]; a weight that every client dropped stays as it was."""
        name = self.layer(state.params)
        old, weight = state.params[name], total["precision"]
        others = {key: value for key, value in state.params.items() if key != name}
        rest = averaged("params", others, total, total["num_examples"])
        ratio = total["shift"] / torch.where(weight > 0, weight, torch.ones_like(weight))
        mean = torch.where(weight > 0, ratio, old.to(weight.device).double()).to(old.dtype)
        return {key: mean if key == name else rest[key] for key in state.params}

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the model after [eq. 5] and the belief after Algorithm 1's step; no reply leaves
        the state as it was.
        """
        if "num_examples" not in total:
            return state
        belief = beliefs.after(self.config, state.belief, total)
        return super().finalise(state, total)._replace(round=state.round + 1, belief=belief)

    def report(self, state: Any) -> dict[str, float]:
        """Return the mean dropout rate over the clients (over some of many), the weight of the KL,
        and the share of dropped weights.
        """
        clients = sorted(map(int, state.belief.seen))
        some = clients[:: -(-len(clients) // REPORTED)]
        rate = dropout.rate(self.log_alphas(state, some)).mean().double()
        numbers = {"dropout_rate": rate, "kl_weight_now": self.kl_weight(state).to(rate)}
        if self.config.drop_above:
            mask = self.dropped(state, self.log_alphas(state, clients))
            numbers["sparsity"] = mask.double().mean()
        # a GPU is waited for once
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))

    def pictures(self, state: Any) -> tuple[Picture, ...]:
        """Return the dropout rates of each client's layer, a box a client."""
        if self.config.posterior != "hyper":
            return ()
        clients = sorted(int(client) for client in state.belief.seen)
        rates = {client: dropout.rate(self.log_alpha(state, client)) for client in clients}
        return dropout.picture(rates)
