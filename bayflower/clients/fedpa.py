"""FedPA, client half (Al-Shedivat et al. 2021, ICLR): samples of the local posterior by averaged
SGD, and the delta they give.

    paper        here                 shape
    theta        broadcast.params     by name
    x_1..x_ell   memo.samples         by name, (ell, …): each the mean of `sample_steps` iterates
                                      (IASG)
    S            (never formed)       (P, P): sample covariance
    rho_ell      1/(1 + (ell−1) rho)  ()
    Δ            delta                by name

    Σ = rho_ell I + (1 − rho_ell) S                                                     [eq. 2]
    Δ = Σ⁻¹ (theta − mean of x)                                                         [eq. 3]

With C the centred samples, S = C Cᵀ/(ell − 1) has rank ell − 1, so [eq. 3] needs one system of ell
equations (Woodbury); the paper's dynamic programme gives the same numbers. The update carries theta
− Δ.

Departs: the burn-in of a round is the local epochs; sampling comes after it, with the same
optimiser, started afresh.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..networks.model import Batch
from ..strategies.fedavg import State as Broadcast
from ..tree import Tensors
from . import fedavg

SAMPLE = "sample"


class State(NamedTuple):
    """Nothing stays on the client but how often it took part."""

    turns: Tensor
    tuned: Tensors  # before a test the fine-tuned model, else {}


class Memo(NamedTuple):
    """The broadcast, and what sampling has found: steps taken, and sums of iterates over the length
    of a sample.
    """

    anchor: Tensors
    steps: Tensor  # int64
    samples: Tensors


class Client(fedavg.Global):
    """Trains, samples, and sends where the posterior wants the global model."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why iterates would be no samples: their spread is set by the rate."""
        if not training.over_steps.changes:
            return None
        return (
            "samples a posterior by SGD at one rate, so the learning rate must not change within a "
            "round; use local_schedule=constant warmup_steps=0"
        )

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return burn-in and sampling; before a test fine-tuning where asked."""
        if purpose != "train":
            return super().phases(purpose)
        burn_in = self.training.phase("local")
        return burn_in, burn_in._replace(
            name=SAMPLE, epochs=0, steps=self.config.num_samples * self.config.sample_steps
        )

    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return a client that has not taken part."""
        some = next(iter(params.values()))
        return State(torch.zeros((), dtype=torch.int64, device=some.device), {})

    def begin(self, state: Any, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at the global model."""
        samples = {
            name: torch.zeros_like(value).expand(self.config.num_samples, *value.shape)
            for name, value in broadcast.params.items()
        }
        steps = data.mask.new_zeros((), dtype=torch.int64)
        return Work(broadcast.params, broadcast.buffers, Memo(broadcast.params, steps, samples))

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work after one step; while sampling, the iterate is added to the sample it
        belongs to.
        """
        work, info = super().step(phase, work, batches, noise)
        if phase.name != SAMPLE:
            return work, info
        memo: Memo = work.memo
        places = torch.arange(self.config.num_samples, device=memo.steps.device)
        share = (places == memo.steps // self.config.sample_steps) / self.config.sample_steps
        samples = {
            name: memo.samples[name] + share.to(value.dtype).reshape(-1, *(1,) * value.ndim) * value
            for name, value in work.params.items()
        }
        return work._replace(memo=memo._replace(steps=memo.steps + 1, samples=samples)), info

    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return (theta − Δ, n_k) [eq. 3]."""
        moved = delta(work.memo.anchor, work.memo.samples, self.config.shrinkage)
        params = {name: value - moved[name] for name, value in work.memo.anchor.items()}
        return State(state.turns + 1, {}), self.update_type(
            fedavg.count(data), params, work.buffers
        )

    @property
    def plain_loop(self) -> bool:
        """Return False: a round also samples its posterior."""
        return False


def delta(anchor: Tensors, samples: Tensors, shrinkage: float) -> Tensors:
    """Return Σ⁻¹ (theta − mean) [eq. 3], Σ = rho I + a C Cᵀ [eq. 2]: (v − a C (rho I + a CᵀC)⁻¹ Cᵀ
    v) / rho, in float64.
    """
    number = next(iter(samples.values())).shape[0]
    rho = 1 / (1 + (number - 1) * shrinkage)
    a = (1 - rho) / max(number - 1, 1)
    mean = {name: value.double().mean(0) for name, value in samples.items()}
    apart = {name: anchor[name].double() - value for name, value in mean.items()}
    centred = {
        name: (value.double() - mean[name]).reshape(number, -1) for name, value in samples.items()
    }
    gram = sum(
        (value @ value.mT for value in centred.values()), torch.zeros((), dtype=torch.float64)
    )
    right = sum(
        (value @ apart[name].reshape(-1) for name, value in centred.items()),
        torch.zeros((), dtype=torch.float64),
    )
    eye = torch.eye(number, dtype=torch.float64, device=gram.device)
    weights = torch.linalg.solve(rho * eye + a * gram, a * right[:, None])[:, 0]
    return {
        name: ((value - (weights @ centred[name]).reshape(value.shape)) / rho).to(
            anchor[name].dtype
        )
        for name, value in apart.items()
    }
