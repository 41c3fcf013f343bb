"""FedBE, server half (Chen and Chao 2021, ICLR): FedAvg whose server also fits a Gaussian to the
clients' models, and distils an ensemble drawn from it where it has samples without labels.

    paper        here               shape
    w_i          update.params      by name
    mu           state.params       by name: the weighted mean of the clients' models
    Sigma        state.variance     by name: their weighted variance, weight by weight
    c            the last mean      by name

    S0 = Σ n_i,   S1 = Σ n_i (w_i − c),   S2 = Σ n_i (w_i − c)²                              [eq. 1]
    mu = c + S1/S0,   Sigma = S2/S0 − (S1/S0)²                                               [eq. 2]

Sums around the last mean lose no digits where the models hardly differ.

With `server_data` the next model is the student of the client half's `Refiner`, which starts at the
mean. Without, it is the mean (the ensemble form), and models are drawn only where predictions are
made.

Departs: the authors' Gaussian is one of directions of updates, tensor by tensor, with a tenth of
the spread (`be_spread`). The Dirichlet family is left out. Running statistics are averaged and
never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..contract import Statistic, Sum
from ..errors import ConfigError, check_least, check_positive
from ..settings import setting
from ..shown import Heading
from ..tree import Tensors
from . import fedavg
from .fedavg import Update


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedBE."""

    be_samples: int = setting(10, "models drawn for the view `ensemble`, and as teachers")
    be_spread: float = setting(1.0, "factor of the standard deviation that models are drawn with")
    be_temperature: float = setting(
        0.5, "the ensemble's probabilities are taught to the power of 1/be_temperature"
    )
    be_server_epochs: int = setting(20, "passes over server_data after a round")
    be_server_batch: int = setting(128, "samples in one step at the server")
    be_server_lr: float = setting(0.001, "learning rate at the server (SGD)")
    be_swa_start: int = setting(
        500, "step from which every 25th model is averaged; before it, the last one counts"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, be_samples=1, be_server_epochs=1, be_server_batch=1, be_swa_start=0)
        check_positive(self, "be_temperature", "be_server_lr")
        if not 0 <= self.be_spread < float("inf"):
            raise ConfigError(f"be_spread must be finite and not negative, got {self.be_spread}")


class State(NamedTuple):
    """The clients' mean model and the variance of each weight. Clients are sent all of it."""

    params: Tensors
    buffers: Tensors
    variance: Tensors


class Server(fedavg.Server):
    """Averages models, and their squares."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]
    averages_models = False
    headings = {
        "model_spread": Heading(
            "Spread of the clients' models",
            "mean standard deviation",
            "Of all weights over the clients of the last round.",
        )
    }

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial network without spread."""
        return State(params, buffers, {n: torch.zeros_like(v) for n, v in params.items()})

    def statistic(self, state: Any, client: int, update: Update) -> Statistic:
        """Return n, n w and the second moment of w around the last mean [eq. 1]."""
        weight = update.num_examples.double()
        squares = {
            f"square/{n}": weight * (v.double() - state.params[n].double()).square()
            for n, v in update.params.items()
        }
        return {**super().statistic(state, client, update), **squares}

    def total(self, state: Any, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the same sums over stacked updates."""
        weight = updates.num_examples.double()
        apart = {
            n: (v.double() - state.params[n].double()).square() for n, v in updates.params.items()
        }
        return {
            **super().total(state, clients, updates),
            **fedavg.summed("square", apart, weight),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return mean and variance of the clients' models [eq. 2]; no reply leaves the state as it
        was.
        """
        if "num_examples" not in total:
            return state
        number, variance = total["num_examples"], {}
        for name, old in state.params.items():
            first = total[f"params/{name}"] / number - old.double()
            second = total[f"square/{name}"] / number
            variance[name] = (second - first.square()).clamp(min=0).to(old.dtype)
        return State(
            fedavg.averaged("params", state.params, total, number),
            fedavg.averaged("buffers", state.buffers, total, number),
            variance,
        )

    def refined(self, state: Any, update: Any) -> Any:
        """Return the state with the student in the place of the mean."""
        return state._replace(params=update.params, buffers=update.buffers)

    def report(self, state: Any) -> dict[str, float]:
        """Return the mean standard deviation of a weight over clients."""
        every = torch.cat([value.flatten() for value in state.variance.values()])
        return {"model_spread": float(every.double().sqrt().mean())}
