"""FedNP's toy problem (its Table 4): a polynomial with four coefficients, three clients on three
segments of x.

y = −x² + 2x + 5 + noise of standard deviation 5; 30, 20 and 50 points on [−7, −5], [−2, 2] and [4,
8]; 4 local epochs in batches of 10 by RMSprop. The package's contract is classification: here its
halves are used as they are, on a `Model` whose mean NLL is the squared error. Rounds are a loop
over clients (`solo.train`) and the server half's own statistics; no engine is involved.
"""

from __future__ import annotations

import platform
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import methods
from ..config import Training
from ..maths.exact import Total
from ..networks.model import Batch, Model, masked_mean
from ..rounds import solo
from ..rounds.result import versions
from .tables import Spec

SEGMENTS = ((30, -7.0, -5.0), (20, -2.0, 2.0), (50, 4.0, 8.0))
ROUNDS, EPOCHS = 10, 4


class Polynomial(nn.Module):
    """Four coefficients on (1, x, x², x³)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x**power for power in range(4)], dim=1))


class Regression(Model):
    """A model whose loss is the squared error."""

    def __init__(self) -> None:
        super().__init__(Polynomial, 2, "polynomial", head="head")

    def mean_nll(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return the mean squared error over the samples that the mask marks."""
        return masked_mean((logits[:, 0] - y).square(), mask)


class ToyRun(NamedTuple):
    """What one run gives: error on all data, the server's state, the data, each client's last own
    coefficients.
    """

    mse: float
    state: Any
    data: list[Batch]
    local: list[Tensor]


def make_data(seed: int) -> list[Batch]:
    """Return the three clients' samples."""
    rng = np.random.default_rng(seed)
    found = []
    for count, low, high in SEGMENTS:
        x = rng.uniform(low, high, count)
        y = -x * x + 2 * x + 5 + rng.normal(0, 5, count)
        found.append(
            Batch(torch.tensor(x)[:, None], torch.tensor(y), torch.ones(count, dtype=torch.float64))
        )
    return found


def run(
    method: str,
    seed: int,
    epochs: int = EPOCHS,
    rounds: int = ROUNDS,
    lr: float = 0.01,
    **options: Any,
) -> ToyRun:
    """Return a run of `method` through its two halves, from coefficients that are 0."""
    row, model = methods.get(method), Regression()
    training = Training(optimizer="rmsprop", lr=lr, batch_size=10, local_epochs=epochs)
    config = row.config(**options)
    server: Any = row.server(config, model.anatomy)
    client: Any = row.client(config, training, model)
    initial, data = model.initial(seed, torch.float64), make_data(seed)
    initial = ({name: torch.zeros_like(value) for name, value in initial[0].items()}, initial[1])
    state = server.init(*initial, (0, 1, 2))
    states = [client.init(*initial) for _ in data]
    local: list[Tensor] = []
    for number in range(1, rounds + 1):
        total, local = Total(), []
        for k, batch in enumerate(data):
            trained = solo.train(
                client,
                states[k],
                server.broadcast(state, k),
                batch,
                seed=seed,
                client=k,
                round=number,
            )
            states[k] = trained.state
            update: Any = trained.update
            local.append(update.params["head.weight"][0])
            total.add(server.statistic(state, k, update))
        state = server.finalise(state, total.value())
    return ToyRun(error(state.params["head.weight"][0], data), state, data, local)


def error(coefficients: Tensor, data: list[Batch]) -> float:
    """Return the mean squared error of a polynomial on all clients' data."""
    x, y = torch.cat([batch.x for batch in data]), torch.cat([batch.y for batch in data])
    return float((powers(x) @ coefficients - y).square().mean())


def powers(x: Tensor) -> Tensor:
    """Return (1, x, x², x³) in columns."""
    return torch.cat([x**power for power in range(4)], dim=1)


def run_toy(spec: Spec, seed: int) -> dict[str, Any]:
    """Return a run of the toy problem in the form of the cache."""
    from .cache import commit

    values, started = spec.values(), time.monotonic()
    with solo.one_thread():
        found = run(spec.method, seed, **values)
    seconds, rounds = time.monotonic() - started, int(values.get("rounds", ROUNDS))
    return {
        "method": spec.method,
        "dataset": "toy",
        "note": "",
        "partition": {"kind": "segments"},
        "model": {"name": "polynomial", "parameters": 4},
        "engine": "none",
        "device": f"cpu ({platform.machine()})",
        "versions": versions(),
        "commit": commit(),
        "origin": "reproduce",
        "seconds": round(seconds, 3),
        "seconds_per_round": seconds / rounds,
        "rounds": rounds,
        "last": {},
        "curve": [],
        "final": {"toy": {"mse": found.mse}},
        "remark": None,
        "faults": 0,
    }
