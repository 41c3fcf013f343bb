"""Buffered rounds with stragglers: the time to a target accuracy, on a simulated clock.

    python benchmarks/buffered.py run --data-dir DIR [--seeds 100 …]  writes results/buffered.jsonl
    python benchmarks/buffered.py page                                 writes results/buffered.md

FedAvg on the loop engine. A client needs one simulated second for a round; with stragglers, 30 % of
the clients (drawn by the seed) need ten. The accuracy is that of the global model on all clients'
test samples, after every step of the server. Without stragglers and with them, synchronous rounds
give the same models: only their seconds differ, so they are computed once.

The target is 95 % of the accuracy that synchronous rounds without stragglers have at the end (mean
of their last five tests), for each seed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from intervals import half_interval, spread

from bayflower.config import parse
from bayflower.engines import Prepared, prepare
from bayflower.files.store import MemoryStore
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy
from bayflower.flower.records import to_arrays
from bayflower.rounds.clock import Clock

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "buffered.jsonl"
TIMES = 10  # a straggler's seconds
SHARE = 0.3  # of the clients
AIM = 1.2  # times the seconds without stragglers
LAST = 5  # tests whose mean is an accuracy at the end
COMMON = {
    "calibration": "off",
    "checkpoint_every": 0,
    "device": "cpu",
    "evaluate_every": 0,
    "lr": 0.01,
    "batch_size": 32,
    "model": "mlp",
}
DIGITS = {"dataset": "digits", "num_clients": 10, "local_epochs": 1}
SETS: dict[str, dict[str, Any]] = {
    "digits-alike": {**DIGITS, "partition": "iid"},
    "digits-skewed": {**DIGITS, "partition": "dirichlet", "beta": 0.5},
    "wisdm-natural": {"dataset": "wisdm", "partition": "natural", "local_epochs": 1},
}
# simulated, of rounds without stragglers
SECONDS = {"digits-alike": 14, "digits-skewed": 18, "wisdm-natural": 9}
TITLES = {
    "digits-alike": "digits, ten clients with alike data",
    "digits-skewed": "digits, ten clients with unlike data (Dirichlet, beta 0.5)",
    "wisdm-natural": "wisdm, 36 people as clients",
}
HEAD = """# Stragglers: rounds and buffered steps

FedAvg (an MLP, Adam, lr 0.01, one local epoch, batches of 32) on the loop engine with its simulated
clock: no time passed, and **all seconds are simulated**. A client needs one second for a round, and
30 % of the clients, drawn by the seed, need ten. Buffered steps have their default settings: a
buffer of 30 % of the clients, `staleness=root`, `buffer_rate=1`, `robust=gate`. All clients train
at a time.

The accuracy is that of the global model on all clients' test samples, tested after every step. The
target is 95 % of what rounds without stragglers have at the end, for each seed; a time is that of
the first test at or above it. The aim was a time of at most 1.2 times that without stragglers, and
an accuracy within noise. Intervals are 95 %, by Student's t over seeds. Rate, batch size and length
were chosen with seeds 0 to 3, whose test accuracies were looked at. The numbers here are of other
seeds, from 100 on, and nothing was changed after the first of them: they decide. The aim is met if
the whole interval of the ratio is at most 1.2, missed if the whole interval is above or a seed does
not reach the target, and undecided otherwise. An accuracy is within noise if the interval of the
paired difference has 0 in it. Written by `benchmarks/buffered.py`; every curve is in
`buffered.jsonl`.

"""
Curve = list[tuple[float, float, float]]  # seconds, accuracy, accuracy on the stragglers' data


def all_tests(ready: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the test samples of all clients."""
    clients, dtype = ready.federation.clients, ready.run.settings.torch_dtype()
    x = torch.cat([torch.as_tensor(one.x_test, dtype=dtype) for one in clients])
    return x, torch.cat([torch.as_tensor(one.y_test) for one in clients])


def course(settings: dict[str, Any], slow: list[int]) -> tuple[Curve, list[str]]:
    """Return the curve of a run, and its faults."""
    run = parse("fedavg", settings)
    ready = prepare(run, "loop")
    federation, halves = ready.federation, ready.halves
    x, y = all_tests(ready)
    late = torch.cat(
        [torch.full((len(one.y_test),), one.client in slow) for one in federation.clients]
    )
    curve: Curve = []

    def look(strategy: Any, round: int, forced: bool) -> None:
        if not forced:
            logits, _ = halves.model.forward(
                strategy.state.params, strategy.state.buffers, x, train=False
            )
            right = (logits.argmax(-1) == y).double()
            past = sum(record["simulated_seconds"] for record in strategy.records)
            curve.append((past, float(right.mean()), float(right[late].mean())))

    clock = Clock(run.aggregation.seconds(), run.settings.seed)
    strategy = make_strategy(run, after_round=look, clock=clock, quiet=True, keep_personal=False)
    app = federation_app(run, federation, halves, MemoryStore())
    grid = InProcessGrid(app, contexts(one.client for one in federation.clients))
    params, buffers = halves.initial
    strategy.start(grid, to_arrays({**params, **buffers}), num_rounds=run.settings.rounds)
    return curve, list(strategy.faults)


def measure(name: str, seed: int, folder: str) -> dict[str, Any]:
    """Return the curves of one seed."""
    begin = time.process_time()
    settings = {**COMMON, **SETS[name], "seed": seed}
    if settings["dataset"] != "digits":
        settings["data_dir"] = folder
    number = len(prepare(parse("fedavg", settings), "loop").federation.clients)
    slow = sorted(random.Random(seed).sample(range(number), round(SHARE * number)))
    seconds, size = SECONDS[name], max(1, int(SHARE * number))
    fast = number - len(slow)
    # a client that has replied waits for the next step: a part of the others' time
    steps = [int(0.85 * seconds * at / size) for at in (number, fast + len(slow) / TIMES)]
    buffered = {**settings, "aggregation": "buffered"}
    named = ",".join(f"{one}:{TIMES}" for one in slow)
    rounds, _ = course({**settings, "rounds": seconds, "client_seconds": "0:1"}, slow)
    even, _ = course({**buffered, "rounds": steps[0]}, slow)
    uneven, faults = course({**buffered, "rounds": steps[1], "client_seconds": named}, slow)
    return {
        "data": name,
        "seed": seed,
        "clients": number,
        "slow": slow,
        "buffer": size,
        "rounds": rounds,
        "buffered": even,
        "buffered_stragglers": uneven,
        "faults": faults,
        "cpu_seconds": round(time.process_time() - begin, 1),
        "machine": f"cpu ({platform.machine()})",
        "torch": torch.__version__,
    }


def reached(curve: Curve, target: float, times: float = 1.0) -> float:
    """Return the seconds until the target, infinity if it is not reached."""
    return next((times * at for at, accuracy, _ in curve if accuracy >= target), math.inf)


def ending(curve: Curve, until: float, place: int = 1) -> float:
    """Return the mean of the last tests up to a time."""
    return statistics.fmean([one[place] for one in curve if one[0] <= until][-LAST:])


def interval(values: list[float]) -> str:
    """Return mean ± half of the 95 % interval, by Student's t; of the finite numbers, and how many
    others there are.
    """
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        lost = f"not reached by {len(values) - len(known)} of {len(values)} seeds"
        return f"{lost} (others: {interval(known)})" if known else lost
    return spread(values, 2)


def bounds(values: list[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval; infinite if a number is, or if there is one alone."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return -math.inf, math.inf
    mean = statistics.fmean(values)
    half = half_interval(values)
    return mean - half, mean + half


def verdict(ratios: list[float]) -> str:
    """Return whether the aim is met, as the page says."""
    low, high = bounds(ratios)
    if not all(map(math.isfinite, ratios)) or low > AIM:
        return "missed"
    return "met" if high <= AIM else "undecided"


def noise(differences: list[float]) -> str:
    """Return where 0 is: in the interval, above it or below it."""
    low, high = bounds(differences)
    return "within noise" if low <= 0 <= high else "lower" if high < 0 else "higher"


def rows(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the numbers of all seeds, by name."""
    out: dict[str, list[float]] = {}
    for one in found:
        curves = {name: one[name] for name in ("rounds", "buffered", "buffered_stragglers")}
        until = min(curve[-1][0] for curve in curves.values())
        target = 0.95 * ending(one["rounds"], math.inf)
        base = reached(one["rounds"], target)
        new = {
            "target": 100 * target,
            "rounds": base,
            "rounds, stragglers": reached(one["rounds"], target, TIMES),
            "buffered": reached(one["buffered"], target),
            "buffered, stragglers": reached(one["buffered_stragglers"], target),
            "end": 100 * ending(one["rounds"], until),
            "end buffered": 100 * ending(one["buffered"], until),
            "end buffered, stragglers": 100 * ending(one["buffered_stragglers"], until),
            "slow": 100 * ending(one["rounds"], until, 2),
            "slow buffered, stragglers": 100 * ending(one["buffered_stragglers"], until, 2),
            "until": until,
        }
        new["ratio to rounds"] = new["buffered, stragglers"] / base
        new["ratio to buffered"] = new["buffered, stragglers"] / new["buffered"]
        new["difference"] = new["end buffered, stragglers"] - new["end"]
        new["slow difference"] = new["slow buffered, stragglers"] - new["slow"]
        for key, value in new.items():
            out.setdefault(key, []).append(value)
    return out


def page() -> str:
    """Return the page of all results."""
    found = [json.loads(line) for line in FILE.read_text().splitlines()]
    text = HEAD
    for name in SETS:
        mine = [one for one in found if one["data"] == name]
        if mine:
            text += table(name, mine)
    return text


def table(name: str, mine: list[dict[str, Any]]) -> str:
    """Return the part of the page on one data set."""
    numbers = rows(mine)
    ways = (
        ("rounds, no stragglers", "rounds", "end"),
        ("rounds, 30 % ten times slower", "rounds, stragglers", ""),
        ("buffered, no stragglers", "buffered", "end buffered"),
        ("buffered, 30 % ten times slower", "buffered, stragglers", "end buffered, stragglers"),
    )
    lines = [f"## {TITLES[name]}; {mine[0]['buffer']} replies a step", ""]
    lines += [
        "| server | simulated seconds to the target | accuracy at the end, % |",
        "|---|---|---|",
    ]
    for label, key, end in ways:
        last = interval(numbers[end]) if end else "(the same models, later)"
        lines.append(f"| {label} | {interval(numbers[key])} | {last} |")
    aim, near = verdict(numbers["ratio to rounds"]), noise(numbers["difference"])
    lines += [
        "",
        f"Target: {interval(numbers['target'])} %. Seeds: {len(mine)}. End: after "
        f"{min(numbers['until']):.0f} simulated seconds or more, mean of the last {LAST} tests.",
        "",
        "Buffered with stragglers, paired by seed:",
        "",
        f"* time to the target: {interval(numbers['ratio to rounds'])} times that of rounds "
        f"without stragglers, {interval(numbers['ratio to buffered'])} times that of buffered "
        f"steps without them: the aim of {AIM} is **{aim}**;",
        f"* accuracy at the end minus that of rounds without stragglers: "
        f"{interval(numbers['difference'])} points on all test samples (**{near}**), "
        f"{interval(numbers['slow difference'])} on those of the stragglers;",
        f"* replies not used, or clients named by robust=gate: "
        f"{sum(len(one['faults']) for one in mine)} in {len(mine)} runs.",
        "",
        f"CPU seconds of all runs: {sum(one['cpu_seconds'] for one in mine):.0f}, "
        f"{mine[0]['machine']}, torch {mine[0]['torch']}.",
        "",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--data", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(100, 120)))
    given = parser.parse_args()
    if given.what == "run":
        torch.set_num_threads(1)
        for seed in given.seeds:
            for name in given.data:
                found = measure(name, seed, given.data_dir)
                with FILE.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    else:
        (RESULTS / "buffered.md").write_text(page())


if __name__ == "__main__":
    main()
