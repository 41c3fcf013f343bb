"""What workers cost that share one device: seconds of a round outside training, for 1 to 8.

    python benchmarks/exchange.py --device cuda --data-dir DATA   writes exchange_DEVICE.json, .md

The workers are those of `bayflower run --workers N`, started by Ray. On one device several workers
train hardly faster than one, so training is not what is measured. A round's exchange is the time
from the server's state to the sum of all workers, less the training of the busiest worker: the
state is packed and sent, sums are added in a tree, reports come back.

A model is fitted to what 1, 2 and 4 workers cost:

    seconds = a + b · workers + bytes · (c + d · log2 workers) + e · kept / workers

bytes are those of the network in float32; kept are those of the clients' states, of which each
worker puts a copy beside it after a round. 8 workers show whether the model can be believed. With
it the page says what 8 and 64 devices would give if training were shared evenly: a prediction, not
a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.fused.workers import herd
from bayflower.fused.workers.crew import Crew, ray
from bayflower.fused.workers.run import run_workers
from bayflower.reproduce.cache import commit
from bayflower.tree import digest, flatten

HERE = Path(__file__).resolve().parent / "results"
WARM = 3  # rounds that are not counted
NUMBERS = (1, 2, 4, 8)
FITTED = 4  # workers at most whose exchanges the model is fitted to
PREDICTED = (2, 4, 8, 64)
LONGER = (1, 20)  # times as much training a round
SHARED = {
    **{"num_clients": 64, "partition": "iid", "worker_block": 8, "stacking": "yes"},
    **{"calibration": "off", "evaluate_every": 0, "checkpoint_every": 0, "tf32": True},
}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "digits, linear": ("fedavg", {"dataset": "digits", "model": "linear"}),
    "digits, mlp": ("fedmap", {"dataset": "digits", "model": "mlp"}),
    "Fashion-MNIST, cnn, no states": (
        "fedavg",
        {"dataset": "fmnist", "model": "cnn", "keep": 0.2},
    ),
    "Fashion-MNIST, cnn": ("fedmap", {"dataset": "fmnist", "model": "cnn", "keep": 0.2}),
}


class Spent(NamedTuple):
    """Seconds of a round: of all workers' work as the server sees it, and of the busiest one."""

    whole: float
    busiest: float


class Measured(NamedTuple):
    """Seconds of the rounds that count, the bytes of all clients' states, and the final bits."""

    spent: list[Spent]
    rounds: list[float]
    kept: int
    bits: str


def measured(number: int, prepared: Any, gpu: bool) -> Measured:
    """Do a run with some workers."""
    spent: list[Spent] = []
    plain = herd.Herd.train

    def timed(self: Any, *args: Any) -> Any:
        begun = time.perf_counter()
        found = plain(self, *args)
        busiest = max(sum(one.seconds.values()) for one in found.reports)
        spent.append(Spent(time.perf_counter() - begun, busiest))
        return found

    crew = Crew(str(number), "cuda" if gpu else "cpu", number)
    herd.Herd.train = timed  # type: ignore[method-assign, assignment]
    try:
        found = run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew)
    finally:
        herd.Herd.train = plain  # type: ignore[method-assign]
        crew.close()
    kept = sum(
        value.numel() * value.element_size()
        for state in found.client_states.values()
        for value in flatten(state).values()
    )
    rounds = [one["seconds"] for one in found.rounds]
    return Measured(spent[WARM:], rounds[WARM:], kept, digest({"server": found.server_state}))


def terms(line: dict[str, Any], workers: int) -> list[float]:
    """Return what a, b, c, d, e are multiplied with."""
    size = line["bytes"]
    return [1, workers, size, size * math.log2(workers), line["kept"] / workers]


def fit(lines: list[dict[str, Any]]) -> list[float]:
    """Return a to e: those that explain the measured exchanges best in relative terms, none of them
    negative.
    """
    from scipy.optimize import nnls

    used = [line for line in lines if line["workers"] <= FITTED]
    seconds = np.array([line["exchange"] for line in used])
    matrix = np.array([terms(line, line["workers"]) for line in used]) / seconds[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1
    return list(nnls(matrix / scale, np.ones(len(used)))[0] / scale)


def modelled(known: list[float], line: dict[str, Any], workers: int) -> float:
    """Return the seconds of an exchange by the model."""
    return float(np.dot(known, terms(line, workers)))


def page(lines: list[dict[str, Any]], known: list[float], device: str, rounds: int) -> str:
    """Return the page."""
    text = [
        "# Workers that share one device",
        "",
        f"Written by `benchmarks/exchange.py` on {device}, commit {commit()}: 64 clients in blocks "
        f"of 8, {rounds} rounds of which the first {WARM} do not count, medians. Workers are Ray's "
        "actors and share the one device; the exchange is what more devices would have to pay. The "
        "server's bits were the same for all numbers of workers where *equal bits* says so. The "
        f"model was fitted to at most {FITTED} workers; the line of 8 tests it.",
        "",
        "| work | method | parameters | states, MB | workers | ms a round | busiest worker, ms "
        "| exchange, ms | model, ms | equal bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        cells = [line["work"], line["method"], f"{line['bytes'] // 4:,}"]
        cells += [f"{line['kept'] / 1e6:.1f}", line["workers"]]
        cells += [f"{1000 * line[key]:.1f}" for key in ("round", "busiest", "exchange")]
        cells.append(f"{1000 * modelled(known, line, line['workers']):.1f}")
        text.append(f"| {' | '.join(map(str, cells))} | {'yes' if line['equal'] else 'no'} |")
    a, b, c, d, e = known
    text += [
        "",
        f"Model: {1000 * a:.2f} ms + {1000 * b:.2f} ms · workers + bytes · ({1e9 * c:.2f} + "
        f"{1e9 * d:.2f} · log2 workers) ns + kept / workers · {1e9 * e:.2f} ns; bytes are those of "
        "the network in float32, kept those of all clients' states.",
        "",
        "## What more devices would give",
        "",
        "A prediction: training of one worker divided by the number of devices, plus the exchange "
        "of the model; with the training of these runs, and with twenty times as much (more "
        "clients, samples or epochs, the same network). Efficiency is the speed-up by the "
        "number of devices. Assumed: devices of the same speed with an equal share each, Ray "
        "and memory as here. Several machines also "
        "pay for their network, once a machine for the state and once a pair of machines for sums; "
        "that was not measured.",
        "",
        "| work, its training | " + " | ".join(f"{n} devices" for n in PREDICTED) + " |",
        "|---|" + "---|" * len(PREDICTED),
    ]
    for line in (one for one in lines if one["workers"] == 1):
        for factor in LONGER:
            cells, training = [], factor * line["busiest"]
            whole = training + modelled(known, line, 1)
            for number in PREDICTED:
                gain = whole / (training / number + modelled(known, line, number))
                cells.append(f"{gain:.2f} times ({100 * gain / number:.0f} %)")
            text.append(f"| {line['work']}, {1000 * training:,.0f} ms | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def write(lines: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write what was measured so far, and the page."""
    known = fit(lines)
    cuda = options.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else "CPU cores, one thread a worker"
    name = "exchange_h200" if "H200" in device else "exchange_cuda" if cuda else "exchange_cpu"
    options.results.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "commit": commit(), "model": known, "lines": lines}
    (options.results / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.results / f"{name}.md").write_text(page(lines, known, device, options.rounds))


def main() -> int:
    """Measure what the data allow and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs")
    parser.add_argument("--results", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # one Ray for all numbers of workers; where cores are fewer, workers share them
    cores = max(os.cpu_count() or 1, *NUMBERS)
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray().init(address="local", num_cpus=cores, **quiet)
    lines: list[dict[str, Any]] = []
    for work, (method, settings) in WORK.items():
        if settings["dataset"] == "fmnist" and not (options.data_dir / "fmnist.npz").exists():
            print(f"{work}: left out, {options.data_dir / 'fmnist.npz'} is missing", flush=True)
            continue
        given = {**SHARED, **settings, "rounds": options.rounds, "local_epochs": options.epochs}
        given |= {"device": options.device, "data_dir": str(options.data_dir.resolve())}
        bits = ""
        for number in NUMBERS:
            prepared = prepare(parse(method, {**given, "workers": str(number)}), "fused")
            found = measured(number, prepared, options.device != "cpu")
            bits = bits or found.bits
            line = {
                **{"work": work, "method": method, "workers": number, "equal": found.bits == bits},
                "bytes": 4 * prepared.halves.model.num_parameters,
                "kept": found.kept,
                "round": statistics.median(found.rounds),
                "busiest": statistics.median(one.busiest for one in found.spent),
                "exchange": statistics.median(one.whole - one.busiest for one in found.spent),
            }
            lines.append(line)
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, flush=True
            )
            write(lines, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
