"""FedPop, server half (Kotelevskii et al. 2022, NeurIPS): a mixed-effects model. The layers before
the head are common to all; heads are random effects of a population, which is learned.

    paper        here                  shape
    phi          state.params          by name: the common part
    beta         state.mean,           by name: mean of the population of heads,
                 state.variance        by name, (): its variance, one for each tensor
    z_i          (none)                a client's head
    M            steps of a round      ()

    z_i ~ N(mean, variance),   y ~ p(y | x, phi, z_i)                                        [eq. 1]
    m = Σ_i E z_i / b,   q = Σ_i E (z_i − mean)² / b, over the b clients of the round        [eq. 2]
    mean' = mean + rho (m − mean),
    variance' = (1 − rho) variance + rho q − (mean' − mean)²                                 [eq. 3]

E is a mean over a client's Langevin samples; squares are means over a tensor's weights. [eq. 3] is
the M-step of expectation maximisation, rho = 1, or its stochastic approximation.

Departs: the paper takes gradient steps on beta; for a Gaussian population the maximum is known in
closed form. phi is averaged by sample count after several local steps, as FedAvg's; the paper sends
its gradient. Messages are not compressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_positive
from ..settings import setting
from ..shown import Heading
from ..tree import Tensors
from . import fedavg, fedper


@dataclass(frozen=True)
class Config:
    """What the user sets for FedPop."""

    pop_rate: float = setting(
        0.05, "step size of the Langevin chain over heads, on the mean loss of a client"
    )
    pop_temperature: float = setting(
        1.0, "factor of a head's posterior variance: 1 = the posterior, 0 = descent without noise"
    )
    pop_variance: float = setting(1.0, "variance of the population of heads before the first round")
    pop_floor: float = setting(1e-4, "the variance of the population stays above this")
    pop_step: float = setting(
        1.0, "share of the population's moments that a round replaces; 1 = all of them"
    )
    predict_samples: int = setting(
        10, "draws of a head's posterior in the view `sampled`; 0 = no such view"
    )

    def __post_init__(self) -> None:
        check_positive(self, "pop_rate", "pop_variance", "pop_floor")
        if not 0 <= self.pop_temperature < float("inf"):
            raise ConfigError(
                f"pop_temperature must be finite and not negative, got {self.pop_temperature}"
            )
        if not 0 < self.pop_step <= 1:
            raise ConfigError(
                f"pop_step must be in (0, 1], got {self.pop_step}; 1 replaces the moments"
            )
        if self.predict_samples < 0:
            raise ConfigError(f"predict_samples must not be negative, got {self.predict_samples}")


class State(NamedTuple):
    """The common part, and the population of heads. Clients are sent all of it."""

    params: Tensors
    buffers: Tensors
    mean: Tensors
    variance: Tensors  # by name, ()


class Update(NamedTuple):
    """What a client sends: the common part, and two moments of its head."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    mean: Tensors
    square: Tensors  # by name, (): E (z − mean)², a mean over the weights


class Server(fedper.Server):
    """Averages the common part; fits the population to the clients' heads."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]
    update_fields = {
        "params": "model",
        "buffers": "buffers",
        "mean": "model",
        "square": "certainty",
    }
    headings = {
        "population_spread": Heading(
            "Spread of the population", "standard deviation", "Of heads between clients."
        )
    }

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial network, its head as the population's mean."""
        base = super().init(params, buffers, clients)
        mean = {n: v for n, v in params.items() if not self.is_shared(n)}
        start = {n: torch.full_like(v.sum(), self.config.pop_variance) for n, v in mean.items()}
        return State(base.params, base.buffers, mean, start)

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        number = torch.zeros((), dtype=torch.int64)
        return Update(number, state.params, state.buffers, state.mean, state.variance)

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the moments cannot be used, or None: E (z − c)² ≥ (E z − c)²."""
        for name, square in update.square.items():
            apart = update.mean[name].double() - state.mean[name].double()
            least = float(apart.square().mean())
            if not float(square) >= least * (1 - 1e-3) - 1e-6:
                return f"square of {name!r} must be at least {least:.3g}, got {float(square):.3g}"
        return super().check(state, client, update)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return (n, n·common part), 1 and both moments [eq. 2]."""
        return {
            **super().statistic(state, client, update),
            "clients": torch.ones_like(update.num_examples),
            **{f"mean/{n}": v.double() for n, v in update.mean.items()},
            **{f"square/{n}": v.double() for n, v in update.square.items()},
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        one = torch.ones_like(updates.num_examples)
        return {
            **super().total(state, clients, updates),
            "clients": one.sum(),
            **fedavg.summed("mean", updates.mean, one.double()),
            **fedavg.summed("square", updates.square, one.double()),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the averaged common part, and the population [eq. 3]; no reply leaves the state as
        it was.
        """
        if "num_examples" not in total:
            return state
        base = super().finalise(state, total)
        rho, number, mean, variance = self.config.pop_step, total["clients"], {}, {}
        for name, old in state.mean.items():
            found = total[f"mean/{name}"] / number
            new = found if rho == 1 else old.double() + rho * (found - old.double())
            second = (1 - rho) * state.variance[name].double()
            second = second + rho * total[f"square/{name}"] / number
            spread = second - (new - old.double()).square().mean()
            mean[name] = new.to(old.dtype)
            variance[name] = spread.clamp(min=self.config.pop_floor).to(old.dtype)
        return State(base.params, base.buffers, mean, variance)

    def report(self, state: Any) -> dict[str, float]:
        """Return the standard deviation of heads between clients, a mean over their weights."""
        sizes = {n: state.mean[n].numel() for n in state.variance}
        every = sum(sizes[n] * float(v.double()) for n, v in state.variance.items())
        return {"population_spread": (every / sum(sizes.values())) ** 0.5}
