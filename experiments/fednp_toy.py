"""FedNP's toy problem (its Table 4 and Figure 2): a polynomial with four coefficients, three
clients on three segments of x.

    python experiments/fednp_toy.py --seeds 3 --page experiments/fednp_toy.md \\
        --picture experiments/pictures/fednp_toy.svg

y = −x² + 2x + 5 + noise of standard deviation 5; 30, 20 and 50 points on [−7, −5], [−2, 2] and [4,
8]. Every method has 10 rounds of 4 local epochs in batches of 10 by RMSprop 0.01, as the authors,
or 50 rounds at 0.001, from coefficients that are 0. The metric is the global model's mean squared
error on all clients' training data.

The runs themselves are in `bayflower/reproduce/toy.py`; `bayflower reproduce fednp-4` shows the
same table beside the paper's.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from drawing import drawing, save

from bayflower.maths import npn
from bayflower.networks.model import Batch
from bayflower.reproduce.toy import ROUNDS, ToyRun, error, make_data, powers, run
from bayflower.strategies.fednp import EXTRA

PAPER = {
    "fedavg": "116.48 ± 2.54",
    "fedprox": "117.11 ± 2.96",
    "scaffold": "100.48 ± 3.24",
    "fedpa": "97.85 ± 3.44",
    "fednp": "72.42 ± 2.39",
}
NP = {"latent": 1, "npn_hidden": 10}


def least(data: list[Batch]) -> float:
    """Return the smallest possible error: least squares on all data at once."""
    x, y = torch.cat([batch.x for batch in data]), torch.cat([batch.y for batch in data])
    return error(torch.linalg.lstsq(powers(x), y[:, None]).solution[:, 0], data)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx (mu 0.01)": ("fedprox", {"mu": 0.01}),
    "SCAFFOLD": ("scaffold", {}),
    "FedPA (2 epochs, then 3 samples of 2 steps)": (
        "fedpa",
        {"epochs": 2, "num_samples": 3, "sample_steps": 2},
    ),
    "FedNP (np_weight 10, the authors')": ("fednp", {"np_weight": 10.0, **NP}),
    "FedNP (np_weight 1)": ("fednp", {"np_weight": 1.0, **NP}),
}


def table(seeds: int, schedules: tuple[tuple[float, int], ...]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds for each (rate, rounds), and
    the paper's.
    """
    heads = [f"MSE, rate {lr:g}, {rounds} rounds" for lr, rounds in schedules]
    lines = [f"| method | {' | '.join(heads)} | paper |", "|---" * (len(heads) + 2) + "|"]
    for label, (method, options) in RUNS.items():
        cells = [
            summary(
                [run(method, seed, rounds=rounds, lr=lr, **options).mse for seed in range(seeds)]
            )
            for lr, rounds in schedules
        ]
        lines.append(f"| {label} | {' | '.join(cells)} | {PAPER[method]} |")
    floor = summary([least(make_data(seed)) for seed in range(seeds)])
    return [
        *lines,
        f"| least squares on all data at once | {' | '.join([floor] * len(heads))} | – |",
    ]


def summary(found: list[float]) -> str:
    """Return mean ± standard deviation over seeds."""
    return f"{statistics.mean(found):.2f} ± {statistics.pstdev(found):.2f}"


def picture(path: Path, found: ToyRun) -> None:
    """Draw data, local models, global model, and the distribution of models that z gives, within
    three standard deviations.
    """
    state, x = found.state, torch.linspace(-8, 9, 300, dtype=torch.float64)[:, None]
    layers = {name.removeprefix(EXTRA + "npn."): value for name, value in state.extra.items()}
    theta = npn.forward(layers, npn.Gauss(state.total.mean(), state.total.variance()))
    mean, spread = powers(x) @ theta.mean, (powers(x).square() @ theta.var).sqrt()
    with drawing("fednp") as pyplot:
        figure, axes = pyplot.subplots(figsize=(6, 4))
        axes.fill_between(
            x[:, 0],
            mean - 3 * spread,
            mean + 3 * spread,
            color="0.9",
            label="model distribution, ±3 s.d.",
        )
        for k, (batch, own) in enumerate(zip(found.data, found.local, strict=True)):
            axes.plot(batch.x[:, 0], batch.y, ".", ms=4, color=f"C{k}")
            axes.plot(
                x[:, 0], powers(x) @ own, "--", lw=1, color=f"C{k}", label=f"local model {k + 1}"
            )
        axes.plot(x[:, 0], powers(x) @ state.params["head.weight"][0], "k", label="global model")
        axes.set(xlabel="x", ylabel="y", ylim=(-90, 30))
        axes.legend(fontsize=8)
        save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and write page and picture where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rounds",
        type=int,
        nargs=2,
        default=[ROUNDS, 50],
        help="of the rates 0.01 (the authors') and 0.001",
    )
    parser.add_argument("--page", type=Path, help="markdown file whose table is replaced")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = table(args.seeds, ((0.01, args.rounds[0]), (0.001, args.rounds[1])))
    print("\n".join(lines))
    if args.page:
        before, _, rest = args.page.read_text().partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end -->\n")
        args.page.write_text(
            before + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->\n" + after
        )
    if args.picture:
        picture(
            args.picture,
            run(
                "fednp",
                0,
                rounds=args.rounds[1],
                lr=0.001,
                **RUNS["FedNP (np_weight 10, the authors')"][1],
            ),
        )


if __name__ == "__main__":
    main()
