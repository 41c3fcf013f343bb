"""Uncertainty and defaults on real data: every method with its default settings on six data sets.

    python benchmarks/uncertainty.py run --data-dir data --jobs 8 --datasets digits,heart
    python benchmarks/uncertainty.py page

`run` appends one line a run to results/uncertainty.jsonl and leaves out runs that are there. `page`
writes results/uncertainty.md from it. The data sets are digits (scikit-learn), UCI heart disease,
WISDM, TCGA-BRCA (event or not as two classes), Fashion-MNIST (a fifth of it) and Office-Caltech-10,
read from --data-dir as .npz files; docs/data.md says how to get them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUNS = HERE / "results" / "uncertainty.jsonl"
sys.path.insert(0, str(HERE.parent))
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "num_clients": 10, "rounds": 30},
    "heart": {"dataset": "heart", "partition": "natural", "num_clients": 4, "rounds": 30},
    "wisdm": {"dataset": "wisdm.npz", "partition": "natural", "num_clients": 36, "rounds": 30},
    "brca": {"dataset": "brca-event.npz", "partition": "natural", "num_clients": 6, "rounds": 30},
    "fmnist": {"dataset": "fmnist", "num_clients": 10, "rounds": 20, "keep": 0.2},
    "officecaltech": {
        "dataset": "officecaltech",
        "partition": "natural",
        "num_clients": 4,
        "rounds": 30,
    },
}
NEEDED = {"fedbn": {"digits": "mlp-bn", "heart": "mlp-bn", "wisdm": "mlp-bn", "brca": "mlp-bn"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("--methods", default="all", help="names joined by commas")
    parser.add_argument("--datasets", default="all", help="names joined by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    parser.add_argument("--out", type=Path, default=RUNS)
    given = parser.parse_args()
    if given.what == "page":
        from uncertaintypage import write_page

        write_page(given.out)
        return
    run_all(given)


def run_all(given: argparse.Namespace) -> None:
    """Do the runs that are missing, several at a time."""
    from bayflower.methods import METHODS

    methods = sorted(METHODS) if given.methods == "all" else given.methods.split(",")
    datasets = list(DATASETS) if given.datasets == "all" else given.datasets.split(",")
    done = {(r["method"], r["dataset"], r["seed"]) for r in read(given.out)}
    wanted = [
        (method, dataset, seed)
        for seed in range(given.seeds)
        for dataset in datasets
        for method in methods
        if (method, dataset, seed) not in done
    ]
    begun = time.monotonic()
    if "brca" in datasets:
        two_classes(Path(given.data_dir))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{len(wanted)} runs, {len(done)} done before")
    context = multiprocessing.get_context("spawn")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool, given.out.open("a") as file:
        stop = time.time() + given.seconds
        tasks = {
            pool.submit(one_run, *key, given.device, given.data_dir, stop): key for key in wanted
        }
        for number, task in enumerate(as_completed(tasks), 1):
            key = tasks[task]
            try:
                line = task.result()
            except Exception as error:
                print(f"{key}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                continue
            if line is None:
                continue
            file.write(json.dumps(line) + "\n")
            file.flush()
            forms = line["uncertainty"]["clients"]["forms"]
            print(
                f"{number}/{len(wanted)} {' '.join(map(str, key))}: {line['seconds']:.1f} s, "
                f"accuracy {forms['point']['accuracy']:.3f}, NLL {forms['point']['nll']:.3f} → "
                f"{forms['calibrated']['nll']:.3f}",
                flush=True,
            )
    print(f"{time.monotonic() - begun:.0f} s")


def one_run(
    method: str, dataset: str, seed: int, device: str, data_dir: str, stop: float
) -> dict[str, Any] | None:
    """Return one run with default settings; None if it would begin too late."""
    if time.time() > stop:
        return None
    import torch

    torch.set_num_threads(1)
    from bayflower.config import parse
    from bayflower.engines import execute, prepare
    from bayflower.reproduce.cache import commit
    from bayflower.rounds.result import result

    values = {**DATASETS[dataset], "seed": seed, "device": device, "data_dir": data_dir}
    if values["dataset"].endswith(".npz"):
        values["dataset"] = str(Path(data_dir) / values["dataset"])
    if (model := NEEDED.get(method, {}).get(dataset)) is not None:
        values["model"] = model
    values |= {"evaluate_every": 0, "checkpoint_every": 0}
    begun = time.perf_counter()
    prepared = prepare(parse(method, values), "fused")
    outcome = execute(prepared)
    content = result(*prepared[:2], prepared.federation, prepared.halves, outcome)
    personal = content["final"]["personal"]
    return {
        "method": method,
        "dataset": dataset,
        "seed": seed,
        "rounds": values["rounds"],
        "device": content["device"],
        "seconds": time.perf_counter() - begun,
        "commit": commit(),
        "torch": content["versions"]["torch"],
        "model": content["model"],
        "accuracy": personal["accuracy"],
        "worst": personal["worst_client_accuracy"],
        "nll": personal["nll"],
        "uncertainty": content["uncertainty"],
        "other_site": other_site(prepared, outcome)
        if dataset in ("heart", "wisdm", "brca")
        else None,
        "usage": content["usage"],
        "remark": content["remark"],
    }


def other_site(prepared: Any, outcome: Any) -> dict[str, Any]:
    """Return the numbers of every client's model on the test rows of the next client."""
    import torch

    from bayflower.rounds import solo
    from bayflower.rounds.calibrated import One, forms, rates, take_home
    from bayflower.rounds.uncertain import Uncertain, judge_alone
    from bayflower.tree import to

    run, server, half = prepared.run, prepared.halves.server, prepared.halves.client
    cpu, dtype = torch.device("cpu"), run.settings.torch_dtype()
    clients = prepared.federation.clients
    data = [solo.samples(one, cpu, dtype) for one in clients]
    found = {}
    for place, one in enumerate(clients):
        keys = {"seed": run.settings.seed, "client": one.client}
        sent = server.pack(server.broadcast(outcome.server_state, one.client))
        broadcast = half.unpack(server.broadcast_type, dict(sent))
        state = to(outcome.client_states[one.client], "cpu")
        state = solo.adapt(
            half, state, broadcast, data[place].train, "finetune", round=run.settings.rounds, **keys
        )
        total = outcome.calibrated.total
        taken = take_home(half, state, broadcast, data[place], total, run.data, **keys)
        known = Uncertain(half, run.data.sets == "class")
        known.kinds = taken.kinds
        there = data[(place + 1) % len(data)].test
        judged = judge_alone(known, taken.fitted, taken.choice, {"test": there})
        found[one.client] = One(taken.one.rows, taken.one.chosen, judged)
    return {"forms": forms(found, "test"), "alarms": rates(found, "test")}


def two_classes(folder: Path) -> None:
    """Write TCGA-BRCA with "event or not" as its two classes."""
    import numpy as np

    path = folder / "brca-event.npz"
    if path.exists():
        return
    known = np.load(folder / "brca.npz")
    event = known["y"][:, 1].astype(np.int64)
    x = known["x"].astype(np.float32)
    np.savez(path, x=x, y=event, client=known["client"], test=known["test"])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
