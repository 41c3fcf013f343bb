"""Rounds a second of the fused engine on one worker and on several, `--workers` of `bayflower run`.

    python benchmarks/workers.py --workers 2 --pairs 6 --json benchmarks/results/workers.json

Each worker is one process with one torch thread. The same rounds are done on one worker and on
several, in turn, so that both meet the same load of the machine; each such pair gives a ratio. The
time of a round is the shortest of its run (the first round has other work to do and is left out).
The best pair says what the engine can do; the median says what this machine gave it. `cores` is the
processor time of all workers divided by the time of their rounds: how many cores they really had.

Where other programs take the cores away, the clock says little. So there is a second ratio, of
processor time: that of one worker and the run's own process, divided by that of the busiest of
several workers and the run's own process. It is what the clock would say on free cores if nothing
but computing took time; waiting for messages is not in it. The bits of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bayflower.config import parse
from bayflower.engines import Prepared, prepare
from bayflower.fused.workers.crew import Crew
from bayflower.fused.workers.run import run_workers
from bayflower.tree import digest

# robust=gate is on, as by default; calibration and tests are not what is measured
SHARED = {
    "dataset": "digits",
    "beta": 1.0,
    "min_size": 8,
    "evaluate_every": 0,
    "calibration": "off",
    "device": "cpu",
    "seed": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedMAP, mlp, 32 clients one by one": (
        "fedmap",
        {"num_clients": 32, "model": "mlp", "stacking": "no", "local_epochs": 6},
    ),
    "FedMAP, mlp, 32 clients in stacks of 8": (
        "fedmap",
        {
            "num_clients": 32,
            "model": "mlp",
            "stacking": "yes",
            "worker_block": 8,
            "local_epochs": 12,
        },
    ),
}


def spent_by(process: int) -> float:
    """Return the seconds of processor time that a process has used (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    """A run: its shortest round, the cores it had, the processor time of its busiest worker and of
    its own process, and the digest of what was computed.
    """

    seconds: float
    cores: float
    busiest: float
    own: float
    bits: str


def on(crew: Crew, number: int, prepared: Prepared) -> Measured:
    """Return the measurements of a run on the first workers."""
    known = dict(crew.actors)
    crew.actors = {one: known[one] for one in sorted(known)[:number]}
    calls = [(one, crew.call(one, "process")) for one in crew.workers]
    processes = crew.get(calls)
    before, own = [spent_by(one) for one in processes], time.process_time()
    try:
        found = run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew)
    finally:
        crew.actors = known
    own = time.process_time() - own
    spent = [spent_by(one) - was for one, was in zip(processes, before, strict=True)]
    rounds = [one["seconds"] for one in found.rounds]
    states = {str(client): state for client, state in found.client_states.items()}
    whole = {"server": found.server_state, "clients": states}
    return Measured(min(rounds[1:]), sum(spent) / sum(rounds), max(spent), own, digest(whole))


def main() -> None:
    """Measure, print and write."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--workers", type=int, default=2)
    asked.add_argument("--pairs", type=int, default=6)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    torch.set_num_threads(1)
    crew = Crew(str(given.workers), "cpu", given.workers)
    rows = []
    try:
        for name, (method, settings) in CASES.items():
            run = parse(method, {**SHARED, **settings, "rounds": given.rounds})
            prepared = prepare(run, "fused")
            on(crew, given.workers, prepared)  # both have all modules
            pairs = []
            for _ in range(given.pairs):
                one, many = on(crew, 1, prepared), on(crew, given.workers, prepared)
                assert one.bits == many.bits, "the number of workers changed the numbers"
                pairs.append(
                    {
                        "one": one.seconds,
                        "many": many.seconds,
                        "ratio": one.seconds / many.seconds,
                        "cores_one": one.cores,
                        "cores_many": many.cores,
                        "work_one": one.busiest + one.own,
                        "work_many": many.busiest + many.own,
                        "work_ratio": (one.busiest + one.own) / (many.busiest + many.own),
                        "load": os.getloadavg()[0],
                    }
                )
                print(name, {key: round(value, 3) for key, value in pairs[-1].items()}, flush=True)
            ratios = [pair["ratio"] for pair in pairs]
            shortest = min(p["one"] for p in pairs) / min(p["many"] for p in pairs)
            row = {
                "case": name,
                "best_pair": max(ratios),
                "median_pair": statistics.median(ratios),
                "shortest_rounds": shortest,
                "median_work_ratio": statistics.median(pair["work_ratio"] for pair in pairs),
                "pairs": pairs,
            }
            rows.append(row)
            print({key: value for key, value in row.items() if key != "pairs"}, flush=True)
    finally:
        crew.close()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    facts = {
        "workers": given.workers,
        "rounds": given.rounds,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
