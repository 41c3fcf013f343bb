"""FedEP and FedSEP, server half (Guo et al. 2023, ICLR): a Gaussian posterior over all weights as a
product of one factor a client, by expectation propagation.

    paper          here                      shape
    q_global       state.precision, shift    by name, float64: (Λ, H), H = Λ × mean
    q_k            (on the clients)          (λ_k, η_k): factors; their changes travel
    delta          damping                   ()
    N              number                    (): samples of all clients seen so far (FedSEP)

    Λ ← Λ + Σ_k Δλ_k,    H ← H + Σ_k Δη_k    of the changes Δ that clients send             [eq. 4]

The sums are PVI's, under a flat prior. FedSEP (`ep_sites=shared`) has no factors: every client
stands for its share n_k/N of the posterior, and nothing stays on it but how often it took part: in
a secure sum a client adds n_k to N the first time.

In the first `ep_warm_rounds` rounds there is no posterior: a client's first factor is a Gaussian of
precision c n_k (ι + ω) around its own model, so the mean is FedAvg's average, and only the factors
of the last such round are kept.

Departs: the authors begin with FedAvg's model of a late round (400 of 1500), around which all first
factors lie. Server and clients take plain steps; the authors' momentum on both sides drifts them
apart. Damping is 1 / (replies of the last round).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices, check_positive
from ..networks.model import Anatomy
from ..settings import setting
from ..tree import Tensors
from . import fedavg, pvi
from .pvi import Update

Sites = Literal["own", "shared"]
Moments = Literal["identity", "laplace", "mcmc"]


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedEP."""

    ep_sites: Sites = setting(
        "own", "own = one factor a client (FedEP); shared = all clients share one (FedSEP)"
    )
    ep_moments: Moments = setting(
        "identity",
        "how a client finds its precision: identity = by its sample count; laplace = Fisher "
        "information; mcmc = the spread of its epochs' ends",
    )
    ep_scale: float = setting(500.0, "factor c of a client's own precision")
    ep_start: float = setting(0.0, "precision a sample has beside ep_decay (iota)")
    ep_decay: float = setting(1e-4, "weight decay as a part of the likelihood (omega)")
    ep_shrink: float = setting(1e-4, "variance of a weight that never moved, for mcmc")
    ep_band: float = setting(2.0, "precisions are kept within so many standard deviations")
    ep_max_norm: float = setting(0.0, "longest change of a factor; 0 = any")
    ep_damping: float = setting(
        0.0, "step of a factor towards its new value, in (0, 1]; 0 = 1 / (replies of a round)"
    )
    ep_warm_rounds: int = setting(1, "rounds of FedAvg before the posterior")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ep_scale", "ep_shrink", "ep_band")
        for name in ("ep_start", "ep_decay", "ep_max_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        if not self.ep_start + self.ep_decay > 0:
            raise ConfigError(
                "ep_start and ep_decay must not both be 0: a weight that no sample tells of "
                "would have no precision"
            )
        if not 0 <= self.ep_damping <= 1:
            raise ConfigError(f"ep_damping must be in [0, 1], got {self.ep_damping}")
        if self.ep_warm_rounds < 1:
            raise ConfigError(f"ep_warm_rounds must be at least 1, got {self.ep_warm_rounds}")
        check_choices(self)


class State(NamedTuple):
    """The posterior: its mean as a network, and its natural parameters."""

    params: Tensors
    buffers: Tensors
    precision: Tensors  # float64
    shift: Tensors  # float64
    turns: Tensors  # "k": how often client k has changed its factor (FedEP)
    epoch: Tensor  # int64
    fresh: Tensor  # bool: there is no posterior yet, params are FedAvg's
    replies: Tensor  # int64: of the last round
    warm: Tensor  # int64: rounds of FedAvg that are left
    sizes: Tensors  # "k": samples of client k (FedSEP); "all": of all, after secure sums


class Broadcast(NamedTuple):
    """What every client is sent; it forms its cavity itself."""

    params: Tensors
    buffers: Tensors
    precision: Tensors  # in the dtype of params
    damping: Tensor
    epoch: Tensor
    fresh: Tensor
    number: Tensor  # int64: samples of all clients (FedSEP)


class Server(pvi.Server):
    """Adds changes of factors to the natural parameters of the posterior."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = Broadcast  # type: ignore[assignment]

    def __init__(self, config: Config, anatomy: Anatomy) -> None:
        super().__init__(config, anatomy)
        self.shares = config.ep_sites == "shared"

    @property
    def damping(self) -> float:
        """Return the step of a factor; 0 = 1 / replies."""
        return float(self.config.ep_damping)

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return no posterior, and the initial network to start from."""
        known: Any = super().init(params, buffers, clients)
        left = torch.full_like(known.epoch, self.config.ep_warm_rounds)
        return State(**known._asdict(), warm=left, sizes={})

    def prior(self, params: Tensors) -> tuple[Tensors, Tensors]:
        """Return a flat prior."""
        precision, shift = (
            {name: torch.zeros_like(value).double() for name, value in params.items()}
            for _ in range(2)
        )
        return precision, shift

    def broadcast(self, state: Any, client: int) -> Any:
        """Return mean and precision, the same for all; the first factors are not damped."""
        known = super().broadcast(state, client)
        number = sum(state.sizes.values(), torch.zeros_like(state.epoch))
        damping = torch.where(state.fresh, torch.ones_like(known.damping), known.damping)
        return Broadcast(*known._replace(damping=damping), number)

    def check(self, state: Any, client: int, update: Update) -> str | None:
        """Return why the change cannot be added, or None."""
        if self.shares:  # turns say only whether its samples were counted
            update = update._replace(turns=update.turns.clamp(max=0))
        return super().check(state, client, update)

    def line(self, state: Any, client: int, turns: int) -> Tensors:
        """Return the client's turns by name; with a shared factor nothing is counted."""
        return {"reset": torch.tensor(0)} if self.shares else super().line(state, client, turns)

    def statistic(self, state: Any, client: int, update: Update) -> Statistic:
        """Return the change, (n, n·buffers), turns or size of the client by name [eq. 4]."""
        size = {f"size/{client}": update.num_examples} if self.shares else {}
        return {**super().statistic(state, client, update), **size}

    def summand(self, state: Any, client: int, update: Update) -> Statistic:
        """Return the change and (n, n·buffers); with a shared factor also n in `joined`, if the
        client's samples are not yet in N.
        """
        if not self.shares:
            return super().summand(state, client, update)
        new = torch.where(update.turns == 0, update.num_examples, 0)
        return {**pvi.changes(update), "reset": torch.zeros_like(new), "joined": new}

    def total(self, state: Any, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the same sums over stacked updates."""
        found = super().total(state, clients, updates)
        if not self.shares:
            return found
        numbers = zip(clients, updates.num_examples, strict=True)
        return {**found, **{f"size/{client}": number for client, number in numbers}}

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the posterior with the changes [eq. 4]; after a round of FedAvg that is not the
        last one, its mean alone. No reply leaves the state as it was.
        """
        if "num_examples" not in total:
            return state
        device = state.epoch.device
        new = {n[5:]: value.to(device) for n, value in total.items() if n.startswith("size/")}
        if "joined" in total:
            old = sum(state.sizes.values(), torch.zeros_like(state.epoch))
            new = {"all": old + total["joined"].to(old)}
        sizes = dict(sorted({**state.sizes, **new}.items()))
        found: Any = super().finalise(state, total)
        after = found._replace(sizes=sizes)
        if int(total["reset"]):
            return after._replace(warm=torch.ones_like(state.warm))
        if not bool(state.fresh):
            return after
        left = (state.warm - 1).clamp(min=0)
        if not int(left):
            return after._replace(warm=left)
        precision, shift = self.prior(state.params)
        return after._replace(
            precision=precision,
            shift=shift,
            turns={},
            epoch=state.epoch + 1,
            fresh=torch.ones_like(state.fresh),
            warm=left,
        )

    def report(self, state: Any) -> dict[str, float]:
        """Return the spread of the posterior, the clients with a factor, and how often all factors
        started anew.
        """
        found = super().report(state)
        return {**found, "posterior_spread": 0.0} if bool(state.fresh) else found
