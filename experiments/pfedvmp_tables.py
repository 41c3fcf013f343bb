"""pFedVMP's tables and figures: methods over rounds (Tables 1 and 3, Figure 3), centroids (Table
2), ξ (Table 7), features (Table 6).

    python experiments/pfedvmp_tables.py run --data-dir data --minutes 9                  # every run that is not there yet
    python experiments/pfedvmp_tables.py run --data-dir data --only fmnist --rounds 500   # those of one group
    python experiments/pfedvmp_tables.py report                                           # pfedvmp_tables.md from the runs that are there
    python experiments/pfedvmp_tables.py plots                                            # pictures/pfedvmp_*.svg

A finished run is one line of JSON in `--out`, so a series that was cut off goes on where it
stopped. A run that two groups need (ξ = 50 is one of the centroids' runs) is made once. `--minutes`
begins no run that would not end in time, going by the runs in the file, and gives up one that does
not. The protocol is the paper's; the generated page states it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FMNIST = {"dataset": "fmnist", "images": 17_500, "beta": 0.3}
# the paper's sizes: 25 % of the pooled 60,000
CIFAR_03 = {"dataset": "cifar10", "images": 15_000, "beta": 0.3}
CIFAR_01 = {"dataset": "cifar10", "images": 30_000, "beta": 0.1}  # and 50 %
EMNIST = {"dataset": "emnist47", "images": 18_800, "beta": 0.3}
COMMON = {
    "num_clients": 50,
    "partition": "dirichlet",
    "test_fraction": 0.2,
    "optimizer": "sgd",
    "lr": 0.01,
    "batch_size": 10,
    "local_epochs": 1,
    "evaluate_every": 10,
    "checkpoint_every": 0,
}
GROUPS = {"fmnist": 500, "centroids": 300, "xi": 300, "features": 300, "emnist": 300}  # rounds
TITLES = {
    "pfedvmp": "pFedVMP",
    "pfedvmp-avg": "pFedVMP-avg",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "lgfedavg": "LG-FedAvg",
    "fedavg-ft": "FedAvg-FT",
    "fedavg": "FedAvg",
    "local": "Local",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "precision": {"method": "pfedvmp"},
    "diag": {"method": "pfedvmp", "centroid": "diag"},
    "count_mean": {"method": "pfedvmp", "centroid": "count_mean"},
    "mean": {"method": "pfedvmp-avg"},
    "FedPer": {"method": "fedper"},
    "FedAvg-FT": {"method": "fedavg-ft"},
}
XI, FEATURES = (1, 5, 20, 50, 100), (128, 256, 384, 512, 640)
PLACES = {
    "Fashion-MNIST, Dir(0.3)": FMNIST,
    "CIFAR-10, Dir(0.3)": CIFAR_03,
    "CIFAR-10, Dir(0.1)": CIFAR_01,
}
BLOCKS = ("num_examples", "accuracy", "accuracy_mean", "nll", "ece", "fairness_cv", "fairness_std")


def cells(
    group: str,
    rounds: int,
    seeds: int = 3,
    places: tuple[str, ...] = (),
    variants: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Yield what distinguishes each run of a group; settings at their defaults are left out."""
    if group == "fmnist":
        yield from ({"method": method, **FMNIST, "seed": 0, "rounds": rounds} for method in TITLES)
    elif group == "centroids":
        for seed in range(seeds):
            for place in places or PLACES:
                yield from (
                    {**VARIANTS[variant], **PLACES[place], "seed": seed, "rounds": rounds}
                    for variant in variants or VARIANTS
                )
    elif group == "xi":
        yield from (with_option("xi", xi, 50, rounds) for xi in XI)
    elif group == "features":
        yield from (with_option("features", width, 512, rounds) for width in FEATURES)
    elif group == "emnist":
        chosen = ("pfedvmp", "pfedvmp-avg", "fedper", "fedrep", "fedavg-ft")
        yield from ({"method": method, **EMNIST, "seed": 0, "rounds": rounds} for method in chosen)


def with_option(name: str, value: float, default: float, rounds: int) -> dict[str, Any]:
    """Return a run of pFedVMP on CIFAR-10, Dir(0.3), with one setting changed."""
    return {
        "method": "pfedvmp",
        **({} if value == default else {name: value}),
        **CIFAR_03,
        "seed": 0,
        "rounds": rounds,
    }


def settings(cell: dict[str, Any], data_dir: str, device: str) -> dict[str, Any]:
    """Return all settings of a run but the method."""
    chosen = {**COMMON, **cell, "data_dir": data_dir, "device": device, **cell.get("changed", {})}
    images = chosen.pop("images")
    if "keep" not in chosen:
        # more than are there: refused as a setting
        chosen["keep"] = images / pooled(chosen["dataset"], data_dir)
    return {key: value for key, value in chosen.items() if key not in ("method", "changed")}


@cache
def pooled(dataset: str, data_dir: str) -> int:
    """Return the number of samples that are there."""
    from bayflower.data.settings import DataSettings
    from bayflower.data.sources import load_source

    return len(load_source(DataSettings(dataset=dataset, data_dir=data_dir)).y)


def load(path: Path) -> list[dict[str, Any]]:
    """Return the runs that are there; a line that was cut off is left out."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"a broken line in {path} is left out", file=sys.stderr)
    return runs


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line, on a line of its own even if the one before was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            whole = file.read(1) == b"\n"
            file.write(b"" if whole else b"\n")
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def expected(cell: dict[str, Any], runs: list[dict[str, Any]]) -> float:
    """Return the seconds a run should take, by the slowest run like it: same method and data, else
    same data, else any; 0 if none.
    """

    def like(keys: tuple[str, ...]) -> list[float]:
        same = [one for one in runs if all(one["cell"].get(key) == cell.get(key) for key in keys)]
        return [
            one["seconds"]["wall"] / (one["cell"]["rounds"] * one["cell"]["images"]) for one in same
        ]

    rates = (
        like(("method", "centroid", "features", "dataset", "changed"))
        or like(("dataset", "changed"))
        or like(())
    )
    return max(rates, default=0.0) * cell["rounds"] * cell["images"]


class OutOfTimeError(Exception):
    """The time that `--minutes` gives is over in the middle of a run."""


def run(args: argparse.Namespace) -> int:
    """Run everything that is not there yet; return how many runs failed."""
    from bayflower.errors import ConfigError

    path, end = Path(args.out), time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    changed = dict(text.split("=", 1) for text in args.set)
    runs = load(path)
    todo: list[tuple[str, dict[str, Any]]] = []
    for group in args.only or GROUPS:
        if group == "emnist" and not (Path(args.data_dir) / "emnist47.npz").exists():
            print(f"emnist: no emnist47.npz in {args.data_dir}, left out", flush=True)
            continue
        for cell in cells(
            group,
            args.rounds or GROUPS[group],
            args.seeds,
            tuple(args.places),
            tuple(args.variants),
        ):
            cell = {**cell, "changed": changed} if changed else cell
            if cell not in [one["cell"] for one in runs] and cell not in [
                other for _, other in todo
            ]:
                todo.append((group, cell))
    place, processes = (int(number) for number in args.part.split("/"))
    todo = todo[place - 1 :: processes]
    print(f"{len(todo)} runs to do, {len(runs)} in {path}", flush=True)
    failed = 0
    for number, (group, cell) in enumerate(todo, 1):
        words = f"{number}/{len(todo)} {group}: " + " ".join(
            f"{key}={value}" for key, value in cell.items() if key != "changed"
        )
        seconds = expected(cell, runs)
        if time.monotonic() + 1.1 * seconds > end:
            print(f"{words}: not begun, it would take about {seconds:.0f} s", flush=True)
            continue
        try:
            record = {
                "group": group,
                "cell": cell,
                **measured(cell, args, words, end),
                "commit": args.commit,
                "processes": processes,
            }
        except OutOfTimeError:
            print(f"{words}: given up, {args.minutes:g} minutes are over", flush=True)
            return failed
        except Exception as error:  # the other runs may still go; this one is tried again next time
            print(f"{words}: failed", flush=True)
            print(error if isinstance(error, ConfigError) else traceback.format_exc(), flush=True)
            failed += 1
            continue
        append(path, record)
        runs.append(record)
        found = record["final"]["personal"]
        print(
            f"{words}: {100 * found['accuracy']:.2f} %, {record['seconds']['wall']:.0f} s",
            flush=True,
        )
    return failed


def measured(
    cell: dict[str, Any], args: argparse.Namespace, words: str, end: float
) -> dict[str, Any]:
    """Return what the tables need of one run."""
    import torch

    from bayflower.config import parse
    from bayflower.engines import prepare, run_to_result

    started = said = time.monotonic()

    def progress(records: list[Any]) -> None:
        nonlocal said
        now = time.monotonic()
        if now > end and len(records) < chosen.settings.rounds:
            raise OutOfTimeError
        if now - said > 20:
            said = now
            print(f"{words}: round {len(records)}, {now - started:.0f} s", flush=True)

    chosen = parse(cell["method"], settings(cell, args.data_dir, args.device))
    try:
        result = run_to_result(prepare(chosen, "fused"), progress=progress)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next run sees how much memory it has
    usage = result["usage"] or {"seconds": {}}
    curve = [
        {
            "round": one["round"],
            "train_loss": rounded(one["train_loss"]),
            **{
                view: {key: rounded(one[view][key]) for key in ("accuracy", "nll")}
                for view in ("personal", "before")
                if view in one
            },
        }
        for one in result["rounds"]
        if "personal" in one
    ]
    return {
        "method": result["method"],
        "options": dataclasses.asdict(chosen.options),
        "dataset": result["dataset"],
        "note": result["note"],
        "partition": {
            key: value
            for key, value in result["partition"].items()
            if key not in ("parts", "train_sizes", "test_sizes")
        },
        "model": result["model"],
        "seed": result["seed"],
        "rounds": len(result["rounds"]),
        "engine": result["engine"],
        "device": result["device"],
        "seconds": {**usage["seconds"], "wall": round(time.monotonic() - started, 2)},
        "usage": {key: value for key, value in usage.items() if key != "seconds"},
        "versions": result["versions"],
        "bytes_up": result["rounds"][-1]["bytes_up"],
        "remark": result["remark"],
        "faults": result["faults"],
        "curve": curve,
        "final": {
            view: {key: block[key] for key in BLOCKS}
            for view, block in result["final"].items()
            if block and view != "after"
        },
    }


def rounded(value: float | None) -> float | None:
    """Return a number of a curve, short."""
    return None if value is None else round(value, 6)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "report", "plots"])
    parser.add_argument(
        "--out",
        default=str(HERE / "results" / "pfedvmp_tables.jsonl"),
        help="file of the runs, one a line",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(GROUPS),
        metavar="GROUP",
        help=f"of {', '.join(GROUPS)}; default: all",
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds; default: 500 for fmnist, 300 for the others"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the group centroids")
    parser.add_argument(
        "--places",
        nargs="+",
        choices=list(PLACES),
        default=[],
        help="of the group centroids; default: all",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=[],
        help="of the group centroids; default: all",
    )
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=0, help="time for this call; 0 = no limit")
    parser.add_argument(
        "--part",
        default="1/1",
        help="the K-th of N parts of the runs, as K/N, for N processes that share a device",
    )
    parser.add_argument(
        "--commit", default="", help="noted with each run, for machines without git"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of every run; it is noted",
    )
    parser.add_argument("--page", default=str(HERE / "pfedvmp_tables.md"))
    parser.add_argument("--pictures", default=str(HERE / "pictures"), help="folder of the pictures")
    args = parser.parse_args(arguments)
    if args.action == "run":
        return 1 if run(args) else 0
    if args.action == "report":
        from pfedvmp_report import write_page

        return write_page(load(Path(args.out)), Path(args.page), Path(args.pictures))
    from pfedvmp_pictures import draw

    return draw(load(Path(args.out)), Path(args.pictures))


if __name__ == "__main__":
    sys.exit(main())
