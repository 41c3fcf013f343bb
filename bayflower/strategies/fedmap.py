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

`prior=learned` and `prior=full` go beyond the paper: the prior's variances, or its covariance, are
learned too. A client's update is then its posterior in units of the prior (`maths/hierarchy.py`),
the statistics are plain sums, and the server climbs the marginal likelihood (`maths/scoring.py`):
by Fisher scoring up to SMALL parameters (FULL for a covariance), by EM for larger networks. If only
K of N clients reply to round t, the prior moves by max(K/N, 1/t) of the step: absent clients count
as the mean of all. No client's part is kept, so one that leaves cannot be taken out.

Departs:
  E-M1  exp(−ΣNLL) under- and overflows: only log omega is ever computed; the Gaussian's constant
        cancels in [eq. 9].
  E-M2  the summed posterior of the paper's [eq. 8] (`weights=sum`) gives all weight to one client;
        `mean` is the default.
  E-M4  the constant of [eq. 5] needs the power (2πσ²)^{−d/2}; it is dropped with E-M1.
  E-M5  [eq. 3] gives weights without the prior's factor; both carry it here (far ones count less).
  E-M8  sums run over the q clients of the round; gamma starts at a seeded, untrained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError, check_choices, check_positive
from ..maths import scoring
from ..maths.hierarchy import size, varied, vector
from ..settings import Presets, paper, setting
from ..shown import Heading
from ..tree import Tensors, map_tree
from .fedavg import summed, weighted

Weights = Literal["mean", "count", "sum", "uniform"]
Prior = Literal["fixed", "learned", "full"]
Hyperprior = Literal["weak", "flat"]
BIN = 256  # powers of two in one exponent bin
SMALL = 256  # parameters up to which a posterior has a full covariance
FULL = 32  # parameters up to which a prior may have one


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
    prior: Prior = setting(
        "fixed",
        "fixed: variance sigma2; learned: one variance a parameter, by maximum marginal "
        "likelihood; full: a whole covariance, up to 32 parameters",
    )
    start_variance: float = setting(1.0, "prior=learned or full: its variance before round 1")
    hyperprior: Hyperprior = setting(
        "weak",
        "prior=learned or full: weak: a few clients' prior stays in bounds, in units of "
        "standardised inputs; flat: maximum marginal likelihood",
        before="flat",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "sigma2", "tau", "start_variance")

    @property
    def learns(self) -> bool:
        """Return whether the prior's variances are learned."""
        return self.prior != "fixed"

    def solves(self, params: Tensors) -> bool:
        """Return whether a client's posterior has a full covariance, found by Newton's method."""
        return self.learns and size(params) <= SMALL


class State(NamedTuple):
    """The prior's mean, and how many clients effectively made it: 1/Σ w² of the normalised weights.
    Of a learned prior also its root (as it is sent), and what the server notes for itself.
    """

    params: Tensors
    effective_clients: Tensor
    prior: Tensors = {}
    course: Tensors = {}


class Broadcast(NamedTuple):
    """What every client is sent: the mean, and of a learned prior "std/NAME" or "root"."""

    params: Tensors
    prior: Tensors = {}


class Update(NamedTuple):
    """What a client sends: its personal model, its log weight and its number of training samples.
    Under a learned prior its posterior instead of the model, in units of the prior: "z", "data"
    (or both by name), and what it says of parameters that all share; log_weight is its evidence.
    """

    num_examples: Tensor
    log_weight: Tensor  # float64
    params: Tensors
    belief: Tensors = {}


class Server(ServerHalf):
    """Keeps the mean of the prior."""

    headings = {
        "effective_clients": Heading(
            "Clients that made the prior",
            "effective clients",
            "(Σω)²/Σω²: 1 means that one client made the prior alone.",
        ),
        "data_share": Heading(
            "What clients' own data decide",
            "share",
            "Of a learned prior: 1 means that every client stands alone, 0 that all are the same.",
            percent=True,
        ),
    }

    update_fields = {"params": "model", "log_weight": "log_weight"}

    state_type = State
    broadcast_type = Broadcast

    @property
    def comparable(self) -> bool:
        """Return False for a learned prior: more samples make a client honestly more certain."""
        return not self.config.learns

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return gamma at the initial model (E-M8); running statistics of normalisation layers
        belong to the clients.
        """
        zero = torch.zeros((), dtype=torch.float64)
        if not self.config.learns:
            return State(params, zero)
        std = math.sqrt(self.config.start_variance)
        prior = {f"std/{name}": torch.full_like(params[name], std) for name in self.own(params)}
        if self.config.prior == "full":
            if size(params) > FULL:
                raise ConfigError(too_large(size(params)))
            one = next(iter(params.values()))
            prior = {"root": std * torch.eye(size(params), dtype=one.dtype)}
        course = {"rounds": zero, "data_share": zero, "evidence": zero}
        return State(params, zero, prior, {**course, "members": zero + len(clients)})

    def own(self, params: Tensors) -> tuple[str, ...]:
        """Return the names of the parameters that differ between clients; those of the task itself
        are shared where clients solve for theirs.
        """
        return varied(params) if self.config.solves(params) else tuple(params)

    def broadcast(self, state: State, client: int) -> Broadcast:
        """Return gamma and what is learned of the prior's width, the same for every client."""
        return Broadcast(state.params, state.prior)

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        zero = torch.zeros((), dtype=torch.float64)
        params, belief = state.params, {}
        if self.config.learns:
            belief = scoring.expected(params, self.config.solves(params))
        return Update(
            torch.zeros((), dtype=torch.int64), zero, {} if self.config.learns else params, belief
        )

    def check(self, state: State, client: int, update: Update) -> str | None:
        """Return why the update cannot be used, or None."""
        count = int(update.num_examples)
        if not 0 < count < 2**40:
            return f"num_examples must be positive and below 2^40, got {count}"
        log_weight = float(update.log_weight)
        if not abs(log_weight) < 2**40:
            return f"log_weight must lie within ±2^40, got {log_weight:.3g}"
        return scoring.impossible(update.belief)

    def bounds(
        self, state: State, client: int, update: Update, limits: Any, training: Any
    ) -> str | None:
        """Return why the weight is more than that of a client that knows all its classes, or why a
        posterior lies too far from the prior, or None.
        """
        if self.config.learns:
            far = scoring.distance(state.prior, update.belief)
            most = limits.max_change * (1 + float(vector(state.params).norm()))
            return (
                None
                if far <= most
                else f"the model changed by {far:.3g}, more than {most:.3g} (max_change = "
                f"{limits.max_change:g})"
            )
        if training.task != "classification":
            return None  # a density may be above 1
        log_weight, most = float(update.log_weight), self.largest_weight(state, update)
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
        """Return (omega, omega², omega·theta) of one client, in the exponent bin of omega; of a
        learned prior what its posterior adds to the sums.
        """
        if self.config.learns:
            return self.terms(update)
        number, mantissa = split(float(update.log_weight))
        weight = torch.tensor(mantissa, dtype=torch.float64)
        key = f"bin/{number}"
        return {
            f"{key}/weight": weight,
            f"{key}/sq_weight": weight.square(),
            **weighted(f"{key}/params", update.params, weight),
        }

    def terms(self, update: Update) -> Tensors:
        """Return what a client's posterior adds to the sums of a learned prior."""
        return {
            "clients": torch.ones_like(update.num_examples),
            "num_examples": update.num_examples,
            "evidence": update.log_weight,
            **scoring.terms(update.belief, self.config.prior == "full"),
        }

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the sums of updates in the two highest bins; what is lower cannot matter."""
        if self.config.learns:
            alone = [map_tree(lambda leaf, k=k: leaf[k], updates) for k in range(len(clients))]
            return added(self.terms(update) for update in alone)
        exponent = (updates.log_weight / math.log(2)).floor()
        number = ((exponent + BIN // 2) / BIN).floor().nan_to_num(0.0).clamp(-(2**40), 2**40)
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
        if self.config.learns:
            return set()
        bins = {name: int(name.split("/")[1]) for name in names}
        top = max(bins.values(), default=0)
        return {name for name, number in bins.items() if number < top - 1}

    def finalise(self, state: State, total: Sum) -> State:
        """Return gamma = Σ omega theta / Σ omega [eq. 9]; no reply leaves the state as it was."""
        if not total:
            return state
        if self.config.learns:
            return self.climbed(state, total)
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

    def climbed(self, state: State, total: Sum) -> State:
        """Return the state with a prior that makes the data of the round's clients more likely."""
        count, course = total["clients"].double(), state.course
        rate = torch.maximum(count / course["members"].clamp(min=1), 2 / (course["rounds"] + 2))
        hyper = self.hyper(state.params, float(count / course["members"].clamp(min=1)))
        known = (count, rate.clamp(max=1), course["rounds"], hyper)
        params, prior = scoring.climbed(state.params, state.prior, dict(total), *known)
        noted = {
            "rounds": course["rounds"] + 1,
            "members": course["members"],
            "data_share": total["data_share"] / count,
            "evidence": total["evidence"] / total["num_examples"],
        }
        return State(params, count, prior, noted)

    def hyper(self, params: Tensors, share: float) -> scoring.Hyper | None:
        """Return the hyperprior of a round with a share of the clients; intercepts are wider."""
        if self.config.hyperprior == "flat":
            return None
        wide = {name: 1.0 if value.ndim > 1 else 25.0 for name, value in params.items()}
        variance = {name: torch.full_like(params[name], wide[name] / share) for name in wide}
        return scoring.Hyper(variance, share, 0.5)

    def admit(self, state: State, client: int) -> State:
        """Return the state with one more client to speak for."""
        return self.joined(state, 1)

    def forget(self, state: State, client: int) -> State:
        """Return the state with one client less; its part fades as others reply."""
        return self.joined(state, -1)

    def joined(self, state: State, more: int) -> State:
        """Return the state for more or fewer clients; a fixed prior does not count them."""
        if not self.config.learns:
            return state
        members = state.course["members"] + more
        return state._replace(course={**state.course, "members": members})

    def shared(self, state: State) -> Tensors:
        """Return gamma."""
        return dict(state.params)

    def report(self, state: State) -> dict[str, float]:
        """Return the number of clients that effectively made gamma: near 1, one client has taken
        over (E-M2). Of a learned prior also what the data decide, and the evidence of a sample.
        """
        found = {"effective_clients": state.effective_clients}
        found |= {key: state.course[key] for key in ("data_share", "evidence") if state.course}
        return {key: float(value) for key, value in found.items()}


def too_large(number: int) -> str:
    """Return what to tell a person whose network is too large for a covariance."""
    return (
        f"prior=full is for at most {FULL} parameters, this network has {number}; use "
        "prior=learned, or a smaller network"
    )


def added(terms: Iterable[Tensors]) -> Tensors:
    """Return the sums by name of clients that have the same names."""
    found: Tensors = {}
    for one in terms:
        found = {name: found[name] + value if found else value for name, value in one.items()}
    return found


def split(log_weight: float) -> tuple[int, float]:
    """Return (b, x) with exp(log_weight) = x·2^{BIN·b} and 2^{−BIN/2} ≤ x < 2^{BIN/2}; usual
    weights fall into bin 0.
    """
    exponent = math.floor(log_weight / math.log(2))
    mantissa = math.exp(log_weight - exponent * math.log(2))
    number = (exponent + BIN // 2) // BIN
    return number, math.ldexp(mantissa, exponent - BIN * number)
