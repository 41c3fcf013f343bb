"""Seeds side by side: seconds of a round of N seeds in one stack beside N rounds one after another.

    python benchmarks/seeds.py [--device cuda] [--data-dir DATA] [--counts 2,4,8]
                                                        writes seeds_DEVICE.json and .md

Both ways alternate in one process, so that both meet the same noise; the times are medians over the
rounds after the first ones. Workloads whose data are not in DATA are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.fused.beside import side_by_side
from bayflower.reproduce.cache import commit

HERE = Path(__file__).resolve().parent / "results"
WARM = 4  # rounds that are not counted
REPEATS = 3
SHARED = {"calibration": "off", "evaluate_every": 0, "checkpoint_every": 0, "robust": "off"}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "digits, 10 clients, mlp": ("fedmap", {"dataset": "digits", "num_clients": 10}),
    "digits, 10 clients, linear": (
        "fedavg",
        {"dataset": "digits", "num_clients": 10, "model": "linear"},
    ),
    "Fashion-MNIST, 10 clients, cnn": (
        "fedper",
        {"dataset": "fmnist", "num_clients": 10, "keep": 0.1, "model": "cnn", "tf32": True},
    ),
    "Fashion-MNIST, 50 clients, cnn": (
        "pfedvmp",
        {"dataset": "fmnist", "num_clients": 50, "keep": 0.1, "model": "cnn", "tf32": True},
    ),
}


def rounds_of(outcome: Any) -> float:
    """Return the median seconds of a round."""
    return statistics.median(record["seconds"] for record in outcome.rounds[WARM:])


def measure(method: str, given: dict[str, Any], seeds: int) -> tuple[float, float]:
    """Return the seconds of a round of one seed alone, and of all of them side by side."""

    def ready(seed: int) -> Any:
        return prepare(parse(method, {**given, "seed": seed}), "fused")

    alone, together = [], []
    for _ in range(REPEATS):
        alone.append(statistics.mean(rounds_of(execute(ready(seed))) for seed in range(seeds)))
        jobs = [partial(execute, ready(seed)) for seed in range(seeds)]
        calls = [lambda seat, job=job: job(seat=seat) for job in jobs]
        found = side_by_side(calls)
        for one in found:
            if isinstance(one, Exception):
                raise one
        # a round of a run lasts until the others have had their turn, too
        together.append(max(rounds_of(one) for one in found))
    return statistics.median(alone), statistics.median(together)


def page(lines: list[dict[str, Any]], device: str) -> str:
    """Return the table."""
    text = [
        "# Seeds side by side",
        "",
        f"Written by `benchmarks/seeds.py` on {device}, commit {commit()}: seconds of a round of N "
        f"seeds in one stack, next to N times a round of one seed alone. Medians over rounds and "
        f"over {REPEATS} repeats that alternate; robust=off, no tests.",
        "",
        "| workload | method | seeds | alone × N, ms | side by side, ms | times faster |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        each = 1000 * line["alone"] * line["seeds"], 1000 * line["together"]
        cells = [line["work"], line["method"], line["seeds"], *(f"{ms:.1f}" for ms in each)]
        text.append(f"| {' | '.join(map(str, cells))} | {each[0] / each[1]:.2f} |")
    return "\n".join(text) + "\n"


def main() -> int:
    """Measure what the data allow and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--counts", default="2,4", help="numbers of seeds")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--results", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else "a CPU, one thread"
    name = "seeds_h200" if "H200" in device else "seeds_cuda" if cuda else "seeds_cpu"
    options.results.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for work, (method, settings) in WORK.items():
        if settings["dataset"] == "fmnist" and not (options.data_dir / "fmnist.npz").exists():
            print(f"{work}: left out, {options.data_dir / 'fmnist.npz'} is missing", flush=True)
            continue
        given = {**SHARED, **settings, "rounds": options.rounds, "device": options.device}
        given |= {"data_dir": str(options.data_dir), "stacking": "yes"}
        for count in map(int, options.counts.split(",")):
            alone, together = measure(method, given, count)
            lines.append({"work": work, "method": method, "seeds": count})
            lines[-1] |= {"alone": alone, "together": together}
            print(f"{work}, {count} seeds: {count * alone / together:.2f} times faster", flush=True)
            # after each line: an interrupted benchmark keeps what it has
            known = {"device": device, "commit": commit(), "rounds": options.rounds}
            text = json.dumps({**known, "lines": lines}, indent=1)
            (options.results / f"{name}.json").write_text(text + "\n")
            (options.results / f"{name}.md").write_text(page(lines, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
