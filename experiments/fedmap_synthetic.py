"""FedMAP's synthetic tables (1, 3 and 4) and the map behind our defaults: rounds × epochs × sigma²
in three scenarios.

    python experiments/fedmap_synthetic.py map   --out runs/fedmap-map --jobs 2      # every cell that is not there yet
    python experiments/fedmap_synthetic.py report --out runs/fedmap-map              # tables from the cells that are there

Each cell is one run, kept in its own file, so an interrupted map goes on where it stopped. All
methods of a schedule have the same total number of local epochs, the same optimiser (Adam 1e-3),
batch size (64) and network (30-32-16-1; FedBN: with BatchNorm). The metric is balanced accuracy,
mean over clients (E-M7), after the last round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

SCENARIOS = {
    "label": "Table 1, label skew",
    "feature": "Table 3, feature skew",
    "quantity": "Table 4, quantity skew",
}
SCHEDULES = [(20, 2), (20, 5), (50, 5), (100, 5)]
SIGMA2 = [1.0, 5.0, 15.0, 50.0, 100.0, 300.0, 1000.0]
BASELINES = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": {"finetune_epochs": 5},
    "fedprox": {"mu": 0.01},
    "fedbn": {"model": "mlp-bn"},
}
# average over clients, recomputed from the printed rows where the printed average disagrees (E-M9);
# skewed clients 6-10
PAPER = {
    "label": {"local": 73.89, "fedmap": 80.40, "fedbn": 63.06, "fedprox": 53.72, "fedavg": 52.92},
    "feature": {"local": 83.80, "fedmap": 86.27, "fedbn": 65.38, "fedprox": 63.00, "fedavg": 63.18},
    "quantity": {
        "local": 74.27,
        "fedmap": 78.24,
        "fedbn": 63.62,
        "fedprox": 61.35,
        "fedavg": 61.54,
    },
}
PAPER_SKEWED = {
    "label": {"local": 61.01, "fedmap": 72.78},
    "quantity": {"local": 64.18, "fedmap": 70.44},
}


def cells(seeds: int, schedules: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the settings of every run of the map."""
    found = []
    for (rounds, epochs), scenario, seed in itertools.product(schedules, SCENARIOS, range(seeds)):
        common = {
            "dataset": "synthetic",
            "scenario": scenario,
            "rounds": rounds,
            "local_epochs": epochs,
            "seed": seed,
            "batch_size": 64,
            "optimizer": "adam",
            "lr": 0.001,
            "evaluate_every": 0,
            "device": "cpu",
        }
        found += [{"method": "fedmap", **common, "sigma2": sigma2} for sigma2 in SIGMA2]
        found += [{"method": method, **common, **extra} for method, extra in BASELINES.items()]
        if (rounds, epochs) == (50, 5):
            found += [
                {"method": "fedmap", **common, "sigma2": 100.0, "weights": mode}
                for mode in ("sum", "count", "uniform")
            ]
    return found


def name(cell: dict[str, Any]) -> str:
    """Return a file name that tells one cell from all others."""
    extra = "".join(f"_{key}={cell[key]}" for key in ("sigma2", "weights") if key in cell)
    return f"{cell['method']}_{cell['scenario']}_{cell['rounds']}x{cell['local_epochs']}_s{cell['seed']}{extra}.json"


def run_cell(cell: dict[str, Any], folder: str) -> str:
    """Run one cell and keep what the tables need."""
    import torch

    torch.set_num_threads(1)
    from bayflower.config import parse
    from bayflower.engines import prepare, run_to_result
    from bayflower.files.atomic import write_json

    started = time.perf_counter()
    run = parse(cell["method"], {key: value for key, value in cell.items() if key != "method"})
    result = run_to_result(prepare(run, "fused"))
    block = result["final"]["personal"]
    kept = {
        "cell": cell,
        "seconds": time.perf_counter() - started,
        "device": result["device"],
        "versions": result["versions"],
        "balanced": [client["balanced_accuracy"] for client in block["per_client"]],
        "accuracy": block["accuracy_mean"],
        "ece": block["ece"],
        "nll": block["nll"],
        "effective_clients": result["rounds"][-1].get("effective_clients"),
    }
    write_json(Path(folder) / name(cell), kept)
    return name(cell)


def run_map(args: argparse.Namespace) -> None:
    """Run every cell that is not there yet, `--jobs` at a time."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    schedules = [tuple(map(int, text.split("x"))) for text in args.schedules.split(",")]
    todo = [cell for cell in cells(args.seeds, schedules) if not (folder / name(cell)).exists()]  # type: ignore[arg-type]
    todo.sort(key=lambda cell: -cell["rounds"] * cell["local_epochs"])
    print(f"{len(todo)} runs to do")
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_cell, cell, str(folder)) for cell in todo]
        for number, future in enumerate(as_completed(futures), 1):
            print(f"{number}/{len(todo)} {future.result()}", flush=True)


def load(folder: Path) -> list[dict[str, Any]]:
    """Return all cells that were run."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def select(runs: list[dict[str, Any]], **want: Any) -> list[dict[str, Any]]:
    """Return the runs whose cell has these values; `weights` is absent unless asked for."""
    return [
        run
        for run in runs
        if all(run["cell"].get(key) == value for key, value in {"weights": None, **want}.items())
    ]


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation in %."""
    if not values:
        return "–"
    return f"{100 * statistics.mean(values):.1f}" + (
        f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def mean_over(runs: list[dict[str, Any]], clients: slice = slice(None)) -> list[float]:
    """Return each run's mean balanced accuracy over some clients."""
    return [statistics.mean(run["balanced"][clients]) for run in runs]


def report(args: argparse.Namespace) -> None:
    """Write the tables as Markdown, and all cells as one JSON file."""
    runs = load(Path(args.out))
    rounds, epochs = map(int, args.schedule.split("x"))
    seeds = sorted({run["cell"]["seed"] for run in runs})
    lines = [
        f"Balanced accuracy in %, mean ± standard deviation over {len(seeds)} seeds of the mean "
        "over 10 clients, last round.",
        "",
    ]
    lines += [f"### The tables, {rounds} rounds × {epochs} epochs, sigma² = {args.sigma2:g}", ""]
    order = ["local", "fedmap", "fedbn", "fedprox", "fedavg", "fedavg-ft"]
    lines += [
        "| scenario | clients | " + " | ".join(order) + " |",
        "|---|---|" + "---|" * len(order),
    ]
    for scenario, title in SCENARIOS.items():
        for clients, label in ((slice(None), "all"), (slice(5, 10), "6–10")):
            row = []
            for method in order:
                want = {
                    "method": method,
                    "scenario": scenario,
                    "rounds": rounds,
                    "local_epochs": epochs,
                }
                row.append(
                    spread(
                        mean_over(
                            select(
                                runs,
                                **want,
                                **({"sigma2": args.sigma2} if method == "fedmap" else {}),
                            ),
                            clients,
                        )
                    )
                )
            lines.append(f"| {title} | {label} | " + " | ".join(row) + " |")
        paper = [
            f"{PAPER[scenario][method]:.2f}" if method in PAPER[scenario] else "–"
            for method in order
        ]
        lines.append("| *paper* | all | " + " | ".join(paper) + " |")
        if scenario in PAPER_SKEWED:
            skewed = [
                f"{PAPER_SKEWED[scenario][m]:.2f}" if m in PAPER_SKEWED[scenario] else "–"
                for m in order
            ]
            lines.append("| *paper* | 6–10 | " + " | ".join(skewed) + " |")
    lines += [
        "",
        "### The map: FedMAP over sigma², next to local training and FedAvg on the same schedule",
        "",
    ]
    for scenario, title in SCENARIOS.items():
        for clients, label in ((slice(None), "all clients"), (slice(5, 10), "clients 6–10")):
            if scenario == "feature" and clients != slice(None):
                continue
            lines += [
                f"{title}, {label}",
                "",
                "| rounds × epochs | local | FedAvg | "
                + " | ".join(f"{s:g}" for s in SIGMA2)
                + " |",
            ]
            lines.append("|---|---|---|" + "---|" * len(SIGMA2))
            for r, e in sorted(
                {(run["cell"]["rounds"], run["cell"]["local_epochs"]) for run in runs}
            ):
                want = {"scenario": scenario, "rounds": r, "local_epochs": e}
                row = [
                    spread(mean_over(select(runs, method=m, **want), clients))
                    for m in ("local", "fedavg")
                ]
                row += [
                    spread(mean_over(select(runs, method="fedmap", sigma2=s, **want), clients))
                    for s in SIGMA2
                ]
                lines.append(f"| {r} × {e} | " + " | ".join(row) + " |")
            lines.append("")
    lines += [
        "### The weights (E-M2), sigma² = 100: effective clients in the last round and balanced "
        "accuracy",
        "",
    ]
    lines += ["| scenario | mean | count | uniform | sum |", "|---|---|---|---|---|"]
    for scenario, title in SCENARIOS.items():
        row = []
        for mode in (None, "count", "uniform", "sum"):
            chosen = select(
                runs,
                method="fedmap",
                scenario=scenario,
                rounds=rounds,
                local_epochs=epochs,
                sigma2=100.0,
                weights=mode,
            )
            effective = [run["effective_clients"] for run in chosen]
            row.append(
                f"{spread(mean_over(chosen))} ({statistics.mean(effective):.2f})"
                if effective
                else "–"
            )
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    seconds = sum(run["seconds"] for run in runs)
    lines += [
        "",
        f"{len(runs)} runs, {seconds:.0f} CPU-seconds in all, one thread each, fused engine on "
        f"{runs[0]['device']}, "
        f"torch {runs[0]['versions']['torch']}, commit {commit}.",
    ]
    print("\n".join(lines))
    if args.json:
        from bayflower.files.atomic import write_json

        write_json(Path(args.json), {"commit": commit, "runs": runs})


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["map", "report"])
    parser.add_argument("--out", default="runs/fedmap-map", help="folder of the cells")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--schedules",
        default=",".join(f"{r}x{e}" for r, e in SCHEDULES),
        help="rounds x epochs, e.g. 20x2,50x5",
    )
    parser.add_argument("--schedule", default="50x5", help="the schedule of the report's tables")
    parser.add_argument("--sigma2", type=float, default=100.0, help="sigma² of the report's tables")
    parser.add_argument("--json", help="report: also write every cell to this file")
    args = parser.parse_args()
    {"map": run_map, "report": report}[args.action](args)


if __name__ == "__main__":
    sys.exit(main())
