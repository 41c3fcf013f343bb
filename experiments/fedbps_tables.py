"""FedBPS's Tables 1 to 3 and Figure 3: FedAvg, FedPer, LG-FedAvg and FedBPS (p = 30 to 90 %) on MNIST, Fashion-MNIST and CIFAR-10.

    python experiments/fedbps_tables.py run --data-dir data --out runs/fedbps.jsonl --minutes 9    # every cell that is not there yet
    python experiments/fedbps_tables.py run … --datasets mnist,fmnist --tables 1,2 --seeds 3       # some of them
    python experiments/fedbps_tables.py report --out runs/fedbps.jsonl                             # tables from the cells that are there
    python experiments/fedbps_tables.py picture --out runs/fedbps.jsonl --figure runs/fedbps.svg   # mask by layer, accuracy over p

Each finished run is one line of JSON, so an interrupted series goes on where it stopped, in pieces as long as `--minutes` says.
Protocol (the paper states neither clients nor sizes nor δ; here 20 clients of 600 training and 300 test samples, as FedPAC's, and δ =
weight_decay·n): two major classes a client, s = 0.2 in reading R1 (E-B7), SGD 0.01 with momentum 0.9 and weight decay 5e-4, batches of 128,
5 epochs, 60 rounds (CIFAR-10: 100). The figure of merit is the mean over clients of the personal model's accuracy after the last round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARES = (0.3, 0.5, 0.7, 0.9)
DATASETS = {"mnist": ("lenet5", 60), "fmnist": ("lenet5", 60), "cifar10": ("lenet-wide", 100)}  # network, rounds
TITLES = {"mnist": "MNIST", "fmnist": "FMNIST", "cifar10": "CIFAR-10"}
RESNETS = ("resnet20", "resnet32", "resnet44", "resnet56")
BASELINES = ("fedavg", "fedper", "lgfedavg")
COMMON = {"partition": "major-minor", "major_classes": 2, "minor_share": 0.2, "major_minor_reading": "r1", "num_clients": 20,
          "samples_per_client": 900, "test_fraction": 1 / 3, "optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4,
          "batch_size": 128, "local_epochs": 5, "evaluate_every": 10, "checkpoint_every": 0}  # fmt: skip
PAPER_1 = {
    "fedavg": (98.49, 87.28, 71.53),
    "fedper": (96.48, 92.09, 75.27),
    "lgfedavg": (96.44, 91.92, 76.52),
    "fedbps": (96.87, 92.51, 76.80),
}
PAPER_2 = {0.3: (95.44, 91.13, 75.27), 0.5: (97.74, 93.14, 75.72), 0.7: (96.87, 92.52, 76.80), 0.9: (96.23, 92.19, 76.23)}
PAPER_3 = {
    0.3: (72.13, 72.47, 72.17, 71.75),
    0.5: (73.21, 72.96, 73.19, 73.34),
    0.7: (74.92, 74.25, 73.94, 73.73),
    0.9: (75.08, 74.96, 74.49, 74.60),
}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what distinguishes each run: method, data set, network, seed, p."""
    tables = set(args.tables.split(","))
    for seed in range(args.seeds):
        for dataset in args.datasets.split(","):
            base = {"dataset": dataset, "model": DATASETS[dataset][0], "seed": seed}
            if "1" in tables:
                yield from ({"method": method, **base} for method in BASELINES)
            if tables & {"1", "2"}:
                yield from ({"method": "fedbps", **base, "personal_share": p} for p in (SHARES if "2" in tables else (0.7,)))
            if "3" in tables and dataset == "cifar10":
                for network in args.networks.split(","):
                    yield from ({"method": "fedbps", **base, "model": network, "personal_share": p} for p in SHARES)


def settings(cell: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return all settings of a run."""
    chosen = {**COMMON, **{key: value for key, value in cell.items() if key != "method"}, "data_dir": args.data_dir, "device": args.device}
    chosen["rounds"] = DATASETS[cell["dataset"]][1]
    for text in args.set or []:
        key, _, value = text.partition("=")
        chosen[key] = value
    return chosen


def load(path: Path) -> list[dict[str, Any]]:
    """Return the runs that are there; a last line that was cut off is left out."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"a broken line in {path} is left out", file=sys.stderr)
    return runs


def run(args: argparse.Namespace) -> None:
    """Run every cell that is not there yet; none is begun after `--minutes`."""
    from bayflower.config import parse
    from bayflower.engines import prepare, run_to_result

    path, began = Path(args.out), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [one["cell"] for one in load(path)]
    place, processes = (int(number) for number in args.part.split("/"))
    todo = [cell for cell in cells(args) if cell not in done][place - 1 :: processes]
    print(f"{len(todo)} runs to do", flush=True)
    for number, cell in enumerate(todo, 1):
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over; {len(todo) - number + 1} runs are left")
            return
        started = time.perf_counter()
        result = run_to_result(prepare(parse(cell["method"], settings(cell, args)), args.engine))
        kept = {
            "cell": cell, "seconds": time.perf_counter() - started, "engine": args.engine, "device": result["device"],
            "versions": result["versions"], "note": result["note"], "partition": result["partition"]["kind"],
            "parameters": result["model"]["parameters"], "changed": args.set or [], "processes": processes, "commit": args.commit,
            "final": {view: {key: block[key] for key in ("accuracy_mean", "accuracy", "nll", "ece")}
                      for view, block in result["final"].items() if block},
            "rounds": [{key: value for key, value in record.items() if key != "num_clients"} for record in result["rounds"]],
        }  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(kept) + "\n")
        print(f"{number}/{len(todo)} {cell} {100 * kept['final']['personal']['accuracy_mean']:.2f} % {kept['seconds']:.0f} s", flush=True)


def figure_of(runs: list[dict[str, Any]], **want: Any) -> str:
    """Return mean ± standard deviation over seeds, in %, of the runs with these values."""
    chosen = [one for one in runs if all(one["cell"].get(key) == value for key, value in want.items())]
    values = [100 * one["final"]["personal"]["accuracy_mean"] for one in chosen]
    if not values:
        return "–"
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f} ({len(values)})" if len(values) > 1 else "")


def report(args: argparse.Namespace) -> None:
    """Print the tables as Markdown, each number followed by the paper's in parentheses."""
    runs = load(Path(args.out))
    names = {"fedavg": "FedAvg", "fedper": "FedPer", "lgfedavg": "LG-FedAvg", "fedbps": "FedBPS, p = 70 %"}
    head = [f"| | {' | '.join(TITLES.values())} |", "|---|" + "---|" * len(TITLES)]
    lines = ["Accuracy in %, mean over clients after the last round, ± standard deviation over seeds (their number); *paper's*.", ""]
    lines += ["### Table 1", "", *head]
    for method, paper in PAPER_1.items():
        more = {"personal_share": 0.7} if method == "fedbps" else {}
        found = [figure_of(runs, method=method, dataset=d, model=DATASETS[d][0], **more) for d in DATASETS]
        lines.append(f"| {names[method]} | " + " | ".join(f"{mine}; *{theirs}*" for mine, theirs in zip(found, paper, strict=True)) + " |")
    lines += ["", "### Table 2", "", *head]
    for p, paper in PAPER_2.items():
        found = [figure_of(runs, method="fedbps", dataset=d, model=DATASETS[d][0], personal_share=p) for d in DATASETS]
        lines.append(f"| p = {p:.0%} | " + " | ".join(f"{mine}; *{theirs}*" for mine, theirs in zip(found, paper, strict=True)) + " |")
    lines += ["", "### Table 3, CIFAR-10", "", f"| | {' | '.join(RESNETS)} |", "|---|" + "---|" * len(RESNETS)]
    for p, row in PAPER_3.items():
        found = [figure_of(runs, method="fedbps", dataset="cifar10", model=network, personal_share=p) for network in RESNETS]
        lines.append(f"| p = {p:.0%} | " + " | ".join(f"{mine}; *{theirs}*" for mine, theirs in zip(found, row, strict=True)) + " |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    notes = sorted({one["note"] for one in runs if one["note"]})
    devices = sorted({one["device"] for one in runs})
    lines += ["", f"{len(runs)} runs, {sum(one['seconds'] for one in runs):.0f} s in all on {', '.join(devices)}, commit {commit}. "
              + "; ".join(notes)]  # fmt: skip
    print("\n".join(lines))


def picture(args: argparse.Namespace) -> None:
    """Draw, for each data set, the share of personal entries of each layer over the rounds (p = 70 %), and accuracy over p."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    runs = [one for one in load(Path(args.out)) if one["cell"]["method"] == "fedbps"]
    drawn = [d for d in DATASETS if any(one["cell"]["dataset"] == d and one["cell"]["model"] == DATASETS[d][0] for one in runs)]
    if not drawn:
        raise SystemExit(f"{args.out} has no runs of FedBPS to draw")
    figure, axes = pyplot.subplots(2, len(drawn), figsize=(4.2 * len(drawn), 6.4), squeeze=False, layout="constrained")
    for column, dataset in enumerate(drawn):
        own = [one for one in runs if one["cell"]["dataset"] == dataset and one["cell"]["model"] == DATASETS[dataset][0]]
        upper, lower = axes[0][column], axes[1][column]
        shown = [one for one in own if one["cell"]["personal_share"] == 0.7][:1]
        for record in shown[0]["rounds"][:1] if shown else []:
            for key in (key for key in record if key.startswith("personal_share/")):
                upper.plot([100 * one[key] for one in shown[0]["rounds"]], label=key.partition("/")[2])
        upper.set(title=TITLES[dataset], xlabel="round", ylabel="personal entries, % of layer", ylim=(0, 100))
        upper.legend(fontsize="small")
        shares = sorted({one["cell"]["personal_share"] for one in own})
        values = {p: [100 * one["final"]["personal"]["accuracy_mean"] for one in own if one["cell"]["personal_share"] == p] for p in shares}
        bars = [statistics.stdev(values[p]) if len(values[p]) > 1 else 0 for p in shares]
        means = [statistics.mean(values[p]) for p in shares]
        lower.errorbar([100 * p for p in shares], means, bars, marker="o", capsize=3, label="here")
        place = list(DATASETS).index(dataset)
        lower.plot([100 * p for p in PAPER_2], [row[place] for row in PAPER_2.values()], "x--", color="gray", label="paper, Table 2")
        lower.set(xlabel="p, %", ylabel="accuracy, %")
        lower.legend(fontsize="small")
    figure.savefig(args.figure)
    print(f"written: {args.figure}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report", "picture"])
    parser.add_argument("--out", default="runs/fedbps.jsonl", help="file of the runs, one a line")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--tables", default="1,2,3")
    parser.add_argument("--networks", default=",".join(RESNETS), help="of Table 3")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after this time; 0 = no limit")
    parser.add_argument("--part", default="1/1", help="the K-th of N parts of the runs, as K/N, for N processes that share a device")
    parser.add_argument("--commit", default="", help="noted with each run, for machines without git")
    parser.add_argument("--engine", default="fused")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="change a setting of every run, e.g. rounds=2")
    parser.add_argument("--figure", default="runs/fedbps.svg")
    args = parser.parse_args()
    {"run": run, "report": report, "picture": picture}[args.action](args)


if __name__ == "__main__":
    sys.exit(main())
