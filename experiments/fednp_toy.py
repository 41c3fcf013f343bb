"""FedNP's toy problem (its Table 4 and Figure 2): a polynomial with four coefficients, three clients on three segments of x.

    python experiments/fednp_toy.py --seeds 3 --page experiments/fednp_toy.md --picture experiments/pictures/fednp_toy.png

y = −x² + 2x + 5 + noise of standard deviation 5; 30, 20 and 50 points on [−7, −5], [−2, 2] and [4, 8]. Every method has 10 rounds of 4
local epochs in batches of 10 by RMSprop 0.01, as the authors, or 50 rounds at 0.001, from coefficients that are 0. The metric is the
global model's mean squared error on all clients' training data.

The package's contract is classification. Here its halves are used as they are, on a `Model` whose mean NLL is the squared error; rounds
are a loop over clients (`solo.train`) and the server half's own statistics. No engine is involved, and nothing in the package is changed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bayflower import methods, npn, solo
from bayflower.config import Training
from bayflower.exact import Total
from bayflower.models import Model
from bayflower.strategies.fednp import EXTRA
from bayflower.types import Batch, masked_mean

SEGMENTS = ((30, -7.0, -5.0), (20, -2.0, 2.0), (50, 4.0, 8.0))
PAPER = {
    "fedavg": "116.48 ± 2.54",
    "fedprox": "117.11 ± 2.96",
    "scaffold": "100.48 ± 3.24",
    "fedpa": "97.85 ± 3.44",
    "fednp": "72.42 ± 2.39",
}
ROUNDS, EPOCHS = 10, 4
NP = {"latent": 1, "npn_hidden": 10}


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


class Found(NamedTuple):
    """What one run gives: error on all data, the server's state, the data, each client's last own coefficients."""

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
        found.append(Batch(torch.tensor(x)[:, None], torch.tensor(y), torch.ones(count, dtype=torch.float64)))
    return found


def run(method: str, seed: int, epochs: int = EPOCHS, rounds: int = ROUNDS, lr: float = 0.01, **options: Any) -> Found:
    """Return a run of `method` through its two halves, from coefficients that are 0."""
    row, model = methods.get(method), Regression()
    training = Training(optimizer="rmsprop", lr=lr, batch_size=10, local_epochs=epochs)
    config = row.config(**options)
    server, client = row.server(config, model.anatomy), row.client(config, training, model)
    initial, data = model.initial(seed, torch.float64), make_data(seed)
    initial = ({name: torch.zeros_like(value) for name, value in initial[0].items()}, initial[1])
    state = server.init(*initial, (0, 1, 2))
    states = [client.init(*initial) for _ in data]
    local: list[Tensor] = []
    for number in range(1, rounds + 1):
        total, local = Total(), []
        for k, batch in enumerate(data):
            trained = solo.train(client, states[k], server.broadcast(state, k), batch, seed=seed, client=k, round=number)
            states[k] = trained.state
            local.append(trained.update.params["head.weight"][0])
            total.add(server.statistic(state, k, trained.update))
        state = server.finalise(state, total.value())
    return Found(error(state.params["head.weight"][0], data), state, data, local)


def error(coefficients: Tensor, data: list[Batch]) -> float:
    """Return the mean squared error of a polynomial on all clients' data."""
    x, y = torch.cat([batch.x for batch in data]), torch.cat([batch.y for batch in data])
    return float((powers(x) @ coefficients - y).square().mean())


def powers(x: Tensor) -> Tensor:
    """Return (1, x, x², x³) in columns."""
    return torch.cat([x**power for power in range(4)], dim=1)


def least(data: list[Batch]) -> float:
    """Return the smallest possible error: least squares on all data at once."""
    x, y = torch.cat([batch.x for batch in data]), torch.cat([batch.y for batch in data])
    return error(torch.linalg.lstsq(powers(x), y[:, None]).solution[:, 0], data)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx (mu 0.01)": ("fedprox", {"mu": 0.01}),
    "SCAFFOLD": ("scaffold", {}),
    "FedPA (2 epochs, then 3 samples of 2 steps)": ("fedpa", {"epochs": 2, "num_samples": 3, "sample_steps": 2}),
    "FedNP (np_weight 10, the authors')": ("fednp", {"np_weight": 10.0, **NP}),
    "FedNP (np_weight 1)": ("fednp", {"np_weight": 1.0, **NP}),
}


def table(seeds: int, schedules: tuple[tuple[float, int], ...]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds for each (rate, rounds), and the paper's."""
    heads = [f"MSE, rate {lr:g}, {rounds} rounds" for lr, rounds in schedules]
    lines = [f"| method | {' | '.join(heads)} | paper |", "|---" * (len(heads) + 2) + "|"]
    for label, (method, options) in RUNS.items():
        cells = [summary([run(method, seed, rounds=rounds, lr=lr, **options).mse for seed in range(seeds)]) for lr, rounds in schedules]
        lines.append(f"| {label} | {' | '.join(cells)} | {PAPER[method]} |")
    floor = summary([least(make_data(seed)) for seed in range(seeds)])
    return [*lines, f"| least squares on all data at once | {' | '.join([floor] * len(heads))} | – |"]


def summary(found: list[float]) -> str:
    """Return mean ± standard deviation over seeds."""
    return f"{statistics.mean(found):.2f} ± {statistics.pstdev(found):.2f}"


def picture(path: Path, found: Found) -> None:
    """Draw data, local models, global model, and the distribution of models that z gives, within three standard deviations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    state, x = found.state, torch.linspace(-8, 9, 300, dtype=torch.float64)[:, None]
    layers = {name.removeprefix(EXTRA + "npn."): value for name, value in state.extra.items()}
    theta = npn.forward(layers, npn.Gauss(state.total.mean(), state.total.variance()))
    mean, spread = powers(x) @ theta.mean, (powers(x).square() @ theta.var).sqrt()
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.fill_between(x[:, 0], mean - 3 * spread, mean + 3 * spread, color="0.9", label="model distribution, ±3 s.d.")
    for k, (batch, own) in enumerate(zip(found.data, found.local, strict=True)):
        axes.plot(batch.x[:, 0], batch.y, ".", ms=4, color=f"C{k}")
        axes.plot(x[:, 0], powers(x) @ own, "--", lw=1, color=f"C{k}", label=f"local model {k + 1}")
    axes.plot(x[:, 0], powers(x) @ state.params["head.weight"][0], "k", label="global model")
    axes.set(xlabel="x", ylabel="y", ylim=(-90, 30))
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and write page and picture where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, nargs=2, default=[ROUNDS, 50], help="of the rates 0.01 (the authors') and 0.001")
    parser.add_argument("--page", type=Path, help="markdown file whose table is replaced")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = table(args.seeds, ((0.01, args.rounds[0]), (0.001, args.rounds[1])))
    print("\n".join(lines))
    if args.page:
        before, _, rest = args.page.read_text().partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end -->\n")
        args.page.write_text(before + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->\n" + after)
    if args.picture:
        picture(args.picture, run("fednp", 0, rounds=args.rounds[1], lr=0.001, **RUNS["FedNP (np_weight 10, the authors')"][1]))


if __name__ == "__main__":
    main()
