"""Time of one update of FedNP's tilted Gaussian: closed forms against quadrature (FedNP's Table 6).

    python benchmarks/moments.py --json benchmarks/results/moments.json

One update is cavity, f → tilted mean and variance and the site's factor, for D = 10 coordinates;
with `--clients` that many clients at once. With `gradient`, the derivative in f is taken as well,
as a training step does. The median over many calls is given, one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bayflower.maths import tilted

CASES: dict[str, tilted.Slopes] = {
    "logz": tilted.logz,
    "probit": tilted.probit,
    "thm2": tilted.thm2,
    "trapezoid (65 nodes)": tilted.trapezoid,
    **{f"quadrature, {nodes:,} nodes": tilted.quadrature(nodes) for nodes in (100, 1_000, 10_000)},
}


def seconds(call: Callable[[], object], budget: float) -> float:
    """Return the median time of a call, measured for about `budget` seconds."""
    call()
    found: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(found) < 5:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(clients: int, latent: int, budget: float) -> dict[str, dict[str, float]]:
    """Return microseconds of an update, and of one with its gradient, by back-end; and the largest
    error of the variance.
    """
    generator = torch.Generator().manual_seed(0)
    mean, f = (
        torch.randn(clients, latent, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    var = 0.1 + 0.9 * torch.rand(clients, latent, generator=generator, dtype=torch.float64)
    exact = tilted.tilt(mean, var, f, tilted.quadrature(2_001)).variance
    rows = {}
    for name, slopes in CASES.items():

        def update(slopes: tilted.Slopes = slopes) -> tilted.Tilted:
            return tilted.tilt(mean, var, f, slopes)

        def value(f: Tensor, slopes: tilted.Slopes = slopes) -> Tensor:
            found = tilted.tilt(mean, var, f, slopes)
            return (found.mean + found.variance).sum()

        derivative = torch.func.grad(value)
        rows[name] = {
            "update_us": 1e6 * seconds(update, budget),
            "with_gradient_us": 1e6 * seconds(lambda derivative=derivative: derivative(f), budget),
            "variance_error": float((update().variance - exact).abs().max()),
        }
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--latent", type=int, default=10)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each number")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "latent": args.latent,
        "clients": {},
    }
    for clients in args.clients:
        rows = measure(clients, args.latent, args.budget)
        result["clients"][str(clients)] = rows
        print(
            f"\n{clients} client(s)\n\n| moments | µs an update | µs with gradient | largest "
            "error of z_s |\n|---|---|---|---|"
        )
        for name, row in rows.items():
            print(
                f"| {name} | {row['update_us']:,.0f} | {row['with_gradient_us']:,.0f} | "
                f"{row['variance_error']:.1e} |"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
