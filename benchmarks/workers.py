"""Rounds a second of the fused engine on one worker and on several, `--workers` of `bayflower run`.

    python benchmarks/workers.py --workers 2 --pairs 6 --json benchmarks/results/workers.json

Each worker is one process with one torch thread. The same rounds are done on one worker and on
several, in turn, so that both meet the same load of the machine; each such pair gives a ratio. The
time of a round is the shortest of its run (the first round has other work to do and is left out).
The best pair says what the engine can do; the median says what this machine gave it. `cores` is the
processor time of all workers divided by the time of their rounds: how many cores they really had.
The bits of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

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


def on(crew: Crew, number: int, prepared: Prepared) -> tuple[float, float, str]:
    """Return the shortest seconds of a round on the first workers, the cores they had, and the
    digest of what they computed.
    """
    known = dict(crew.actors)
    crew.actors = {one: known[one] for one in sorted(known)[:number]}
    calls = [(one, crew.call(one, "process")) for one in crew.workers]
    processes = crew.get(calls)
    before = sum(map(spent_by, processes))
    try:
        found = run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew)
    finally:
        crew.actors = known
    spent = sum(map(spent_by, processes)) - before
    rounds = [one["seconds"] for one in found.rounds]
    states = {str(client): state for client, state in found.client_states.items()}
    whole = {"server": found.server_state, "clients": states}
    return min(rounds[1:]), spent / sum(rounds), digest(whole)


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
                assert one[2] == many[2], "the number of workers changed the numbers"
                pairs.append(
                    {
                        "one": one[0],
                        "many": many[0],
                        "ratio": one[0] / many[0],
                        "cores_one": one[1],
                        "cores_many": many[1],
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
