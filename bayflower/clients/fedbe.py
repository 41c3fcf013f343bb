"""FedBE, client half (Chen and Chao 2021, ICLR), in its ensemble form: FedAvg's training, and
predictions of an ensemble around the average.

    paper        here                  shape
    mu, Sigma    broadcast             by name: mean and variance of the clients' models
    w^(m)        (in predict)          by name: sampled models
    M            config.be_samples     ()

    w^(m) = mu + spread √Sigma ε_m,   p = mean over m of softmax f(x; w^(m))                 [eq. 3]

Departs: `personal` and `global` are the mean alone, fine-tuned if asked; `ensemble` is [eq. 3],
around the fine-tuned model too. The spread goes home with the personal model as its posterior.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contract import Posterior, Work
from ..maths.laplace import Seen
from ..networks.model import Batch
from ..tree import Tensors
from . import fedavg


class Client(fedavg.Client):
    """Trains as FedAvg's; predicts with models drawn around the average."""

    def views(self) -> dict[str, str]:
        """Return the mean model, fine-tuned or not, and the ensemble."""
        number = self.config.be_samples
        return {
            **super().views(),
            "ensemble": f"{number} models drawn around it with the spread of the clients' models",
        }

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return as many numbers as there are weights, for each drawn model."""
        if stage != "predict":
            return {}
        return {n: (self.config.be_samples, *shape) for n, shape in self.model.shapes.items()}

    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work that starts at the mean model."""
        return Work(broadcast.params, broadcast.buffers, memo={})

    def std(self, broadcast: Any) -> Tensors:
        """Return the standard deviations that models are drawn with."""
        return {n: self.config.be_spread * v.sqrt() for n, v in broadcast.variance.items()}

    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities of the mean model, or of models drawn around it [eq. 3]."""
        if view != "ensemble":
            return super().predict(view, state, broadcast, x, noise)
        return self.over_draws(state, broadcast, self.std(broadcast), x, noise)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the Gaussian of the clients' models."""
        own = Posterior("sampled", self.std(broadcast), "FedBE's Gaussian of the clients' models")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}
