"""pFedBayes, server half (Zhang et al. 2022, ICML): a Gaussian over all weights, averaged, which is
the prior of the clients' own Gaussians.

    paper        here                    shape
    mu_w         state.params            by name: means of the shared Gaussian
    rho_w        state.rho               by name: its standard deviation is log(1 + e^rho)
    v_i          (none)                  the clients' Gaussians are never sent
    zeta         config.bayes_zeta       ()
    beta         config.bayes_rate       ()

    (mu_w, rho_w) ← (1 − beta) old + beta Σ_i n_i (mu_w,i, rho_w,i) / Σ_i n_i            [eq. 3]

Departs: clients are weighted by sample count. zeta is 0.1, a tempered evidence bound: with the
paper's 10 clients of some hundred samples stay at the prior. rho starts at −3; the paper's −2.5 is
a noise as large as the weights of a small network. Both are what validation rows of the digits
chose (15 rounds, one seed): 86.1 %; 64.6 and 25.0 % with zeta 1 and 10, 82.6 % with rho −2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_choices
from ..settings import Presets, setting
from ..tree import Tensors
from . import fedavg

Layers = Literal["all", "head"]
WIDEST = 15.0  # |rho| is at most this: a standard deviation of 3e-7 at least


@dataclass(frozen=True)
class Config:
    """What the user sets for pFedBayes."""

    presets: ClassVar[Presets] = {"paper": {"bayes_zeta": 10.0, "bayes_start_rho": -2.5}}

    bayes_zeta: float = setting(
        0.1, "weight of the KL to the shared Gaussian; 1 = the evidence bound, 10 in the paper"
    )
    bayes_start_rho: float = setting(
        -3.0, "where rho starts; the standard deviation is log(1 + e^rho)"
    )
    bayes_samples: int = setting(1, "draws of the weights in one step")
    bayes_layers: Layers = setting(
        "all", "which weights are Gaussian: all, or those of the head; then the base is FedAvg's"
    )
    bayes_rate: float = setting(
        1.0, "step of the shared Gaussian towards the clients' average; 1 = the average"
    )
    predict_samples: int = setting(
        10, "weight samples in the view `sampled`; 0 = no such view, the means alone"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.bayes_zeta < float("inf"):
            raise ConfigError(f"bayes_zeta must be finite and not negative, got {self.bayes_zeta}")
        if not abs(self.bayes_start_rho) <= WIDEST:
            raise ConfigError(f"bayes_start_rho must be in [-15, 15], got {self.bayes_start_rho}")
        if self.bayes_samples < 1:
            raise ConfigError(f"bayes_samples must be at least 1, got {self.bayes_samples}")
        if not 0 < self.bayes_rate <= 1:
            raise ConfigError(f"bayes_rate must be in (0, 1], got {self.bayes_rate}")
        if self.predict_samples < 0:
            raise ConfigError(f"predict_samples must not be negative, got {self.predict_samples}")
        check_choices(self)


class State(NamedTuple):
    """The shared Gaussian, and running statistics. Clients are sent all of it."""

    params: Tensors
    buffers: Tensors
    rho: Tensors


class Update(NamedTuple):
    """What a client sends: its copy of the shared Gaussian, and its number of samples."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    rho: Tensors


class Server(fedavg.Server):
    """Averages means and spreads, weighted by sample count."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]
    averages_models = False
    update_fields = {"params": "model", "buffers": "buffers", "rho": "model"}

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial network as means, all with the same spread."""
        names = gaussian(self.config, params, self.anatomy.head_names)
        start = self.config.bayes_start_rho
        rho = {name: torch.full_like(params[name], start) for name in names}
        return State(params, buffers, rho)

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        number = torch.zeros((), dtype=torch.int64)
        return Update(number, state.params, state.buffers, state.rho)

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the update cannot be averaged, or None."""
        widest = max(float(value.abs().max()) for value in update.rho.values())
        if widest > WIDEST:
            return f"rho must be in [-15, 15], got one of size {widest:.3g}"
        return super().check(state, client, update)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n_i, n_i mu_w,i, n_i rho_w,i)."""
        return {
            **super().statistic(state, client, update),
            **fedavg.weighted("rho", update.rho, update.num_examples),
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        weight = updates.num_examples.double()
        return {
            **super().total(state, clients, updates),
            **fedavg.summed("rho", updates.rho, weight),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the next shared Gaussian [eq. 3]; no reply leaves the state as it was."""
        if "num_examples" not in total:
            return state
        weight, rate = total["num_examples"], self.config.bayes_rate

        def moved(group: str, old: Tensors) -> Tensors:
            new = fedavg.averaged(group, old, total, weight)
            return new if rate == 1 else {n: torch.lerp(old[n], new[n], rate) for n in old}

        buffers = fedavg.averaged("buffers", state.buffers, total, weight)
        return State(moved("params", state.params), buffers, moved("rho", state.rho))

    def report(self, state: Any) -> dict[str, float]:
        """Return the mean standard deviation of the shared Gaussian."""
        spread = torch.cat([torch.nn.functional.softplus(v).flatten() for v in state.rho.values()])
        return {"prior_spread": float(spread.double().mean())}


def gaussian(config: Config, params: Tensors, head: frozenset[str]) -> tuple[str, ...]:
    """Return the names of the weights that are Gaussian."""
    found = tuple(n for n in params if config.bayes_layers == "all" or n in head)
    if not found:
        raise ConfigError("bayes_layers=head needs a network with a head; name its last layer")
    return found
