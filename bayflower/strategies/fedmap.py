"""FedMAP, server half (Zhang et al., "FedMAP: Bi-Level MAP Optimization", arXiv 2405.19000v1):
evidence-weighted prior mean.

    paper      here                  shape
    gamma      state.params          by name: mean of the Gaussian prior over the clients' models
    theta_k    update.params         by name: a client's personal model
    omega_k    exp(log_weight)       ()
    q          clients of the round
    sigma^2    config.sigma2         ()

    gamma = Σ_k omega_k theta_k / Σ_k omega_k                                           [eq. 9]

The weights span e^{±1000} in `sum` mode, so they are never formed. Each is split as omega = m·2^e,
and sums are kept exactly per *exponent bin* of 256 powers of two: statistic names are "bin/<b>/…"
with omega·2^{−256 b} in them. In the end only the two highest bins can matter (a bin lower is
2^{−256} of the total), so lower ones are dropped as soon as a higher one exists. A running
log-sum-exp would be associative only up to rounding; this is associative to the bit.

Departs:
  E-M1  exp(−ΣNLL) under- and overflows: only log omega is ever computed; the Gaussian's constant
        cancels in [eq. 9].
  E-M2  the summed posterior of the paper's [eq. 8] (`weights=sum`) gives all weight to one client;
        `mean` is the default.
  E-M4  the constant of [eq. 5] needs the power (2πσ²)^{−d/2}; it is dropped with E-M1.
  E-M5  minimising [eq. 3] gives weights without the prior's factor; both carry it here (it
        discounts clients far from gamma).
  E-M8  sums run over the q clients of the round; gamma starts at a seeded, untrained
        initialisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError, check_choices
from ..settings import Presets, paper, setting
from ..shown import Heading
from ..tree import Tensors
from .fedavg import summed, weighted

Weights = Literal["mean", "count", "sum", "uniform"]
BIN = 256  # powers of two in one exponent bin


@dataclass(frozen=True)
class Config:
    """What the user sets for FedMAP."""

    # the paper states none of these; they are those of the authors' code
    presets: ClassVar[Presets] = paper("adam", 0.001, 64, 5, sigma2=15.0)

    sigma2: float = setting(
        100.0, "variance of the prior around gamma; small = similar clients, large = independent"
    )
    weights: Weights = setting(
        "mean", "mean: exp(−J_k/tau); count: n_k times that; sum: the paper's eq. 8; uniform: equal"
    )
    tau: float = setting(1.0, "temperature of the weights `mean` and `count`")

    def __post_init__(self) -> None:
        if not (self.sigma2 > 0 and math.isfinite(self.sigma2)):
            raise ConfigError(
                f"sigma2 must be positive and finite, got {self.sigma2}; it is the variance of "
                "the prior around gamma"
            )
        check_choices(self)
        if not (self.tau > 0 and math.isfinite(self.tau)):
            raise ConfigError(
                f"tau must be positive and finite, got {self.tau}; 1 means no tempering"
            )


class State(NamedTuple):
    """The prior's mean, and how many clients effectively made it:
    1/Σ w² of the normalised weights.
    """

    params: Tensors
    effective_clients: Tensor


class Broadcast(NamedTuple):
    """What every client is sent."""

    params: Tensors


class Update(NamedTuple):
    """What a client sends: its personal model, its log weight
    and its number of training samples.
    """

    num_examples: Tensor
    log_weight: Tensor  # float64
    params: Tensors


class Server(ServerHalf):
    """Keeps the mean of the prior."""

    headings = {
        "effective_clients": Heading(
            "Clients that made the prior",
            "effective clients",
            "(Σω)²/Σω²: 1 means that one client made the prior alone.",
        )
    }

    state_type = State
    broadcast_type = Broadcast

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return gamma at the initial model (E-M8); running statistics of normalisation layers
        belong to the clients.
        """
        return State(params, torch.zeros((), dtype=torch.float64))

    def broadcast(self, state: State, client: int) -> Broadcast:
        """Return gamma, the same for every client."""
        return Broadcast(state.params)

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        return Update(
            torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.float64), state.params
        )

    def check(self, state: State, client: int, update: Update) -> str | None:
        """Return why the update cannot be used, or None."""
        count = int(update.num_examples)
        if not 0 < count < 2**40:
            return f"num_examples must be positive and below 2^40, got {count}"
        log_weight = float(update.log_weight)
        if not abs(log_weight) < 2**40:
            return f"log_weight must lie within ±2^40, got {log_weight:.3g}"
        most = self.largest_weight(state, update)
        return (
            None
            if log_weight <= most
            else f"log_weight must be at most {most:.6g} that far from gamma, got {log_weight:.6g}"
        )

    def largest_weight(self, state: State, update: Update) -> float:
        """Return the log weight of a client at theta_k that predicts all its labels with certainty,
        and a little for rounding.
        """
        mode, tau = self.config.weights, self.config.tau
        if mode == "uniform":
            return 1e-6
        apart = sum(
            float((value.double() - state.params[name].double()).square().sum())
            for name, value in update.params.items()
        )
        prior = apart / (2 * self.config.sigma2)
        best = (
            -prior
            if mode == "sum"
            else -prior / tau + (math.log(int(update.num_examples)) if mode == "count" else 0.0)
        )
        return best + 1e-3 * (1 + abs(best))

    def statistic(self, state: State, client: int, update: Update) -> Statistic:
        """Return (omega, omega², omega·theta) of one client, in the exponent bin of omega."""
        number, mantissa = split(float(update.log_weight))
        weight = torch.tensor(mantissa, dtype=torch.float64)
        key = f"bin/{number}"
        return {
            f"{key}/weight": weight,
            f"{key}/sq_weight": weight.square(),
            **weighted(f"{key}/params", update.params, weight),
        }

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the sums of stacked updates in the two highest
        bins; what is lower cannot matter.
        """
        exponent = (updates.log_weight / math.log(2)).floor()
        number = ((exponent + BIN // 2) / BIN).floor()
        top = int(number.max())
        mantissa = (updates.log_weight - exponent * math.log(2)).exp() * (
            exponent - BIN * number
        ).exp2()
        found: dict[str, Tensor] = {}
        for one in (top, top - 1):
            weight = mantissa * (number == one)
            found |= {
                f"bin/{one}/weight": weight.sum(),
                f"bin/{one}/sq_weight": weight.square().sum(),
                **summed(f"bin/{one}/params", updates.params, weight),
            }
        return found

    def negligible(self, names: Iterable[str]) -> set[str]:
        """Return the names in bins more than one below the highest."""
        bins = {name: int(name.split("/")[1]) for name in names}
        top = max(bins.values(), default=0)
        return {name for name, number in bins.items() if number < top - 1}

    def finalise(self, state: State, total: Sum) -> State:
        """Return gamma = Σ omega theta / Σ omega [eq. 9]; no reply leaves the state as it was."""
        if not total:
            return state
        top = max(int(name.split("/")[1]) for name in total)

        def joined(name: str, power: int = 1) -> Tensor:
            """Return the sum over the two highest bins, in units of 2^{power·BIN·top}."""
            high, low = total[f"bin/{top}/{name}"], total.get(f"bin/{top - 1}/{name}")
            return high if low is None else high + low * 2.0 ** (-power * BIN)

        weight = joined("weight")
        params = {
            name: (joined(f"params/{name}") / weight).to(value.dtype)
            for name, value in state.params.items()
        }
        return State(params, weight.square() / joined("sq_weight", power=2))

    def shared(self, state: State) -> Tensors:
        """Return gamma."""
        return dict(state.params)

    def report(self, state: State) -> dict[str, float]:
        """Return the number of clients that effectively made gamma: near 1, one client has taken
        over (E-M2).
        """
        return {"effective_clients": float(state.effective_clients)}


def split(log_weight: float) -> tuple[int, float]:
    """Return (b, x) with exp(log_weight) = x·2^{BIN·b} and 2^{−BIN/2} ≤ x < 2^{BIN/2}; usual
    weights fall into bin 0.
    """
    exponent = math.floor(log_weight / math.log(2))
    mantissa = math.exp(log_weight - exponent * math.log(2))
    number = (exponent + BIN // 2) // BIN
    return number, math.ldexp(mantissa, exponent - BIN * number)
