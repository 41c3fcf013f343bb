"""FedPA, server half (Al-Shedivat et al. 2021, ICLR): FedAvg's average of models that were moved by
posterior deltas.

    paper          here                  shape
    theta          state.params          by name
    Δ_k            theta − params        by name
    ell            config.num_samples    ()
    rho            config.shrinkage      ()

    theta ← theta − Σ n_k Δ_k / Σ n_k (server rate 1)                                   [eq. 1]

Defaults of the paper: 5 to 10 samples, rho in {0.01, 0.1, 1}, each sample the mean of one epoch's
steps.

Departs: the server's optimiser is plain averaging (rate 1); the paper tunes it, and begins with
some hundred rounds of FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting
from . import fedavg


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedPA."""

    num_samples: int = setting(5, "posterior samples that a client draws in one round")
    sample_steps: int = setting(
        10,
        "steps whose mean is one sample; sampling follows the local epochs, which are the burn-in",
    )
    shrinkage: float = setting(
        0.01,
        "rho: 0 = ignore the covariance (FedAvg with averaged iterates); large = use the samples' "
        "covariance",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_samples", "sample_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.shrinkage < float("inf"):
            raise ConfigError(f"shrinkage must be finite and not negative, got {self.shrinkage}")


class Server(fedavg.Server):
    """Averages what the clients send, weighted by sample count [eq. 1]."""
