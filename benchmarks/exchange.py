"""What workers cost that share one device: seconds of a round outside training, for 1, 2 and 4.

    python benchmarks/exchange.py --device cuda --data-dir DATA   writes exchange_DEVICE.json, .md

`bayflower run --workers N` starts workers by Ray. Here plain processes stand in for Ray's actors:
the same worker, the same messages, pipes instead of Ray's object store. On one device several
workers train no faster than one, so training is not what is measured. A round's exchange is the
time from the server's state to the sum of all workers, less the training of the busiest worker:
the state is packed and sent, sums are added in a tree, reports come back.

A model is fitted to it: seconds = a + bytes · (b + c · workers + d · log2 workers), bytes those of
a network in float32. With it the page says what 8 and 64 devices would give if training were shared
evenly: a prediction, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.fused.workers import herd
from bayflower.fused.workers.crew import Crew
from bayflower.fused.workers.run import run_workers
from bayflower.fused.workers.worker import Worker
from bayflower.reproduce.cache import commit
from bayflower.tree import digest

HERE = Path(__file__).resolve().parent / "results"
WARM = 3  # rounds that are not counted
NUMBERS = (1, 2, 4)
PREDICTED = (2, 4, 8, 64)
SHARED = {
    **{"num_clients": 64, "partition": "iid", "worker_block": 8, "stacking": "yes"},
    **{"calibration": "off", "evaluate_every": 0, "checkpoint_every": 0, "tf32": True},
}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "digits, linear": ("fedavg", {"dataset": "digits", "model": "linear"}),
    "digits, mlp": ("fedmap", {"dataset": "digits", "model": "mlp"}),
    "Fashion-MNIST, cnn": ("fedmap", {"dataset": "fmnist", "model": "cnn", "keep": 0.2}),
}


class Reference(NamedTuple):
    """Something that a worker has made and keeps."""

    worker: int
    number: int
    ready: Any  # the call that makes it


class Kept(NamedTuple):
    """Something that the worker has itself."""

    number: int


def serve(pipe: Any) -> None:
    """Do what a worker is asked until it is told to end."""
    worker, kept = Worker(), dict[int, Any]()
    while (asked := pipe.recv()) is not None:
        name, numbers, args = asked
        if name == "fetch":
            pipe.send(kept[numbers[0]])
            continue
        try:
            given = [kept[one.number] if isinstance(one, Kept) else one for one in args]
            found = getattr(worker, name)(*given)
            several = found if len(numbers) > 1 else (found,)
            kept.update(zip(numbers, several, strict=True))
            pipe.send(None)
        except Exception as error:  # the caller hears of it
            pipe.send(error)


class Processes(Crew):
    """Workers as plain processes of this machine."""

    def __init__(self, number: int, gpu: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.gpu, self.lost, self.made = gpu, 0, 0
        self.actors, self.lines, self.all = {}, {}, []
        for one in range(number):
            mine, yours = context.Pipe()
            self.all.append(context.Process(target=serve, args=(yours,), daemon=True))
            self.all[-1].start()
            self.actors[one], self.lines[one] = mine, ThreadPoolExecutor(1)

    def put(self, thing: Any) -> Any:
        """Return the thing: it is sent to each worker that needs it."""
        return thing

    def call(self, worker: int, name: str, *args: Any, returns: int = 1) -> Any:
        """Return references of what the worker will have made; its calls are done in order."""
        numbers = list(range(self.made, self.made + returns))
        self.made += returns
        ready = self.lines[worker].submit(self._done, worker, name, numbers, args)
        found = [Reference(worker, number, ready) for number in numbers]
        return found if returns > 1 else found[0]

    def _done(self, worker: int, name: str, numbers: list[int], args: tuple[Any, ...]) -> None:
        given = [self._sent(worker, one) if isinstance(one, Reference) else one for one in args]
        self._asked(worker, name, numbers, given, True)

    def _sent(self, worker: int, one: Reference) -> Any:
        return Kept(one.number) if one.worker == worker else self._fetched(one)

    def _asked(self, worker: int, name: str, numbers: list[int], args: Any, calls: bool) -> Any:
        pipe = self.actors[worker]
        pipe.send((name, numbers, args))
        found = pipe.recv()
        if calls and found is not None:
            raise found
        return found

    def _fetched(self, one: Reference) -> Any:
        one.ready.result()
        line = self.lines[one.worker]
        return line.submit(self._asked, one.worker, "fetch", [one.number], (), False).result()

    def get(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return what workers have made, in order."""
        return [self._fetched(one) for _, one in calls]

    def close(self) -> None:
        """End the processes."""
        for one, pipe in self.actors.items():
            self.lines[one].submit(pipe.send, None).result()
            self.lines[one].shutdown()
        for process in self.all:
            process.join(10)


class Spent(NamedTuple):
    """Seconds of a round: of all workers' work as the server sees it, and of the busiest one."""

    whole: float
    busiest: float


def measured(number: int, prepared: Any, gpu: bool) -> tuple[list[Spent], list[float], str]:
    """Return the seconds of each round's training and exchange, of the rounds, and the bits."""
    spent: list[Spent] = []
    plain = herd.Herd.train

    def timed(self: Any, *args: Any) -> Any:
        begun = time.perf_counter()
        found = plain(self, *args)
        busiest = max(sum(one.seconds.values()) for one in found.reports)
        spent.append(Spent(time.perf_counter() - begun, busiest))
        return found

    crew = Processes(number, gpu)
    herd.Herd.train = timed  # type: ignore[method-assign]
    try:
        found = run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew)
    finally:
        herd.Herd.train = plain  # type: ignore[method-assign]
        crew.close()
    rounds = [one["seconds"] for one in found.rounds]
    return spent[WARM:], rounds[WARM:], digest({"server": found.server_state})


def fit(lines: list[dict[str, Any]]) -> list[float]:
    """Return a, b, c, d: those that explain the measured exchanges best in relative terms, none of
    them negative.
    """
    rows = [
        [
            1,
            line["bytes"],
            line["bytes"] * line["workers"],
            line["bytes"] * math.log2(line["workers"]),
        ]
        for line in lines
    ]
    seconds = np.array([line["exchange"] for line in lines])
    matrix = np.array(rows) / seconds[:, None]
    scale = np.abs(matrix).max(0)
    from scipy.optimize import nnls

    return list(nnls(matrix / scale, np.ones(len(lines)))[0] / scale)


def modelled(known: list[float], size: int, workers: int) -> float:
    """Return the seconds of an exchange by the model."""
    a, b, c, d = known
    return a + size * (b + c * workers + d * math.log2(workers))


def page(lines: list[dict[str, Any]], known: list[float], device: str, rounds: int) -> str:
    """Return the page."""
    text = [
        "# Workers that share one device",
        "",
        f"Written by `benchmarks/exchange.py` on {device}, commit {commit()}: 64 clients in blocks "
        f"of 8, {rounds} rounds of which the first {WARM} do not count, medians. Plain processes "
        "stand in for Ray's actors. All workers share the one device, so training is not faster "
        "with more of them; the exchange is what more devices would have to pay. The server's bits "
        "were the same for 1, 2 and 4 workers where *equal bits* says so.",
        "",
        "| work | method | parameters | workers | ms a round | busiest worker, ms | exchange, ms "
        "| model, ms | equal bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        cells = [line["work"], line["method"], f"{line['bytes'] // 4:,}", line["workers"]]
        cells += [f"{1000 * line[key]:.1f}" for key in ("round", "busiest", "exchange")]
        cells.append(f"{1000 * modelled(known, line['bytes'], line['workers']):.1f}")
        text.append(f"| {' | '.join(map(str, cells))} | {'yes' if line['equal'] else 'no'} |")
    a, b, c, d = known
    text += [
        "",
        f"Model: {1000 * a:.2f} ms + bytes · ({1e9 * b:.2f} + {1e9 * c:.2f} · workers + "
        f"{1e9 * d:.2f} · log2 workers) ns, bytes those of the network in float32.",
        "",
        "## What more devices would give",
        "",
        "A prediction: training of one worker divided by the number of devices, plus the exchange "
        "of the model. Efficiency is the speed-up by the number of devices. Assumed: devices of "
        "the same speed with an equal share each, pipes and memory as here. Several machines also "
        "pay for their network, once a machine for the state and once a pair of machines for sums; "
        "that was not measured.",
        "",
        "| work | " + " | ".join(f"{n} devices" for n in PREDICTED) + " |",
        "|---|" + "---|" * len(PREDICTED),
    ]
    for line in (one for one in lines if one["workers"] == 1):
        cells = []
        whole = line["busiest"] + modelled(known, line["bytes"], 1)
        for number in PREDICTED:
            each = line["busiest"] / number + modelled(known, line["bytes"], number)
            cells.append(f"{whole / each:.2f} times ({100 * whole / each / number:.0f} %)")
        text.append(f"| {line['work']} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


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
            spent, rounds, found = measured(number, prepared, options.device != "cpu")
            bits = bits or found
            line = {
                **{"work": work, "method": method, "workers": number, "equal": found == bits},
                "bytes": 4 * prepared.halves.model.num_parameters,
                "round": statistics.median(rounds),
                "busiest": statistics.median(one.busiest for one in spent),
                "exchange": statistics.median(one.whole - one.busiest for one in spent),
            }
            lines.append(line)
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, flush=True
            )
    known = fit(lines)
    cuda = options.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else "CPU cores, one thread a worker"
    name = "exchange_h200" if "H200" in device else "exchange_cuda" if cuda else "exchange_cpu"
    options.results.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "commit": commit(), "model": known, "lines": lines}
    (options.results / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.results / f"{name}.md").write_text(page(lines, known, device, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
