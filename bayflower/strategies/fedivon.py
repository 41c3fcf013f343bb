"""FedIvon, server half (Pal et al. 2024, arXiv 2411.18385): a Gaussian over all weights, by
precision-weighted averages of the clients'.

    paper        here               shape
    mu           state.params       by name
    h            state.hess         by name: curvature of the mean loss
    delta        config.ivon_decay  ()
    w_k          n_k / Σ n          ()

    h = Σ_k w_k h_k,    mu = Σ_k w_k (h_k + delta) mu_k / Σ_k w_k (h_k + delta)              [eq. 4]

The posterior is N(mu, T/(λ (h + delta))), λ the samples of the last round's clients.

Departs: means are weighted by h + delta, which is a precision; h alone may be negative. Running
statistics are averaged by sample count. The default temperature was chosen on validation rows of
the digits (15 rounds, one seed, lr = 0.1): 94.8 % at 0.001, 82.3 % at 0.01, 89.2 % at 0.1. The
row's learning rate is 0.01: a step is lr / (h + delta), so 0.1 is a whole gradient at the start and
diverged on images (loss 2e5), 0.03 with one seed of three; the public optimiser multiplies its 0.1
by the first h + delta.
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
from . import fedavg


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedIvon."""

    ivon_start: float = setting(0.1, "curvature h at the start")
    ivon_decay: float = setting(1e-3, "weight decay: precision of the prior for each sample")
    ivon_momentum: float = setting(0.9, "share of the old gradient in a step (beta 1)")
    ivon_memory: float = setting(0.999, "share of the old curvature in a step (beta 2)")
    ivon_temperature: float = setting(
        0.001, "temperature of the posterior; 1 = the posterior, less = a cold one"
    )
    predict_samples: int = setting(
        10, "weight samples in the view `sampled`; 0 = no such view, the means alone"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ivon_start", "ivon_decay", "ivon_temperature")
        for name in ("ivon_momentum", "ivon_memory"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.predict_samples < 0:
            raise ConfigError(f"predict_samples must not be negative, got {self.predict_samples}")


class State(NamedTuple):
    """The Gaussian, running statistics, and the samples behind it. Clients are sent all of it."""

    params: Tensors
    buffers: Tensors
    hess: Tensors
    number: Tensor  # int64


class Update(NamedTuple):
    """What a client sends: its Gaussian, and its number of samples."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    hess: Tensors


class Server(fedavg.Server):
    """Averages curvatures, and means by precision."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = State  # type: ignore[assignment]
    averages_models = False
    headings = {
        "posterior_spread": Heading(
            "Spread of the posterior", "mean standard deviation", "Of all weights, over rounds."
        )
    }

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial network with the same curvature everywhere."""
        hess = {n: torch.full_like(v, self.config.ivon_start) for n, v in params.items()}
        some = next(iter(params.values()))
        return State(params, buffers, hess, torch.zeros((), dtype=torch.int64, device=some.device))

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        number = torch.zeros((), dtype=torch.int64)
        return Update(number, state.params, state.buffers, state.hess)

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the Gaussian cannot be averaged, or None."""
        least = min(float(value.min()) for value in update.hess.values())
        if not least + self.config.ivon_decay > 0:
            return f"a curvature must be above −ivon_decay, got {least:.3g}"
        return super().check(state, client, update)

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return n, n h, n (h + delta) mu and n times running statistics [eq. 4]."""
        number, decay = update.num_examples, self.config.ivon_decay
        return {
            "num_examples": number,
            **fedavg.weighted("buffers", update.buffers, number),
            **fedavg.weighted("hess", update.hess, number),
            **{
                f"shift/{n}": number.double() * (update.hess[n].double() + decay) * value.double()
                for n, value in update.params.items()
            },
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        weight, decay = updates.num_examples.double(), self.config.ivon_decay
        shift = {
            n: (updates.hess[n].double() + decay) * value.double()
            for n, value in updates.params.items()
        }
        return {
            "num_examples": updates.num_examples.sum(),
            **fedavg.summed("buffers", updates.buffers, weight),
            **fedavg.summed("hess", updates.hess, weight),
            **fedavg.summed("shift", shift, weight),
        }

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the next Gaussian [eq. 4]; no reply leaves the state as it was."""
        if "num_examples" not in total:
            return state
        number, decay = total["num_examples"], self.config.ivon_decay
        params = {
            n: (total[f"shift/{n}"] / (total[f"hess/{n}"] + number * decay)).to(value.dtype)
            for n, value in state.params.items()
        }
        return State(
            params,
            fedavg.averaged("buffers", state.buffers, total, number),
            fedavg.averaged("hess", state.hess, total, number),
            number.to(state.number),
        )

    def report(self, state: Any) -> dict[str, float]:
        """Return the mean standard deviation of a weight."""
        std = torch.cat([v.flatten() for v in spread(state, self.config).values()])
        return {"posterior_spread": float(std.double().mean())}


def spread(state: Any, config: Config) -> Tensors:
    """Return √(T/(λ (h + delta))) by weight; λ is at least 1."""
    number = state.number.clamp(min=1) / config.ivon_temperature
    found = {n: number * (v + config.ivon_decay) for n, v in state.hess.items()}
    return {n: v.clamp(min=1e-12).rsqrt() for n, v in found.items()}
