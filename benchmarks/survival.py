"""TCGA-BRCA, 6 regions: C-index of federated survival models on FLamby's pooled test split.

    python benchmarks/survival.py --data-dir DATA

DATA has brca.npz, whose array `test` is FLamby's split. The network is FLamby's: one linear layer
of 39 inputs, with Cox's loss (`likelihood=cox`), and for comparison 20 intervals of time
(`likelihood=hazard`). `pooled` is one client with all training samples. Every method chooses among
CHOICES, for each likelihood, by the C-index on validation samples, which are part of its training
samples: the test samples decide nothing. Writes results/survival.json and .md.

The C-index is Harrell's over all 222 test samples, every one with the risk of its own region's
model, computed pair by pair from the predictions; `binned` is that of `result.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.reproduce.cache import commit
from bayflower.rounds import solo
from bayflower.rounds.result import result
from bayflower.tree import to

HERE = Path(__file__).parent / "results"
METHODS = ("pooled", "fedavg", "fedavg-ft", "fedmap", "fedbps", "local")
SHARED: dict[str, Any] = {
    "dataset": "brca",
    "task": "survival",
    "model": "linear",
    "test_fraction": 0,
    "rounds": 30,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "robust": "off",  # the sites of this study are trusted
}
CHOICES: dict[str, dict[str, Any]] = {
    "lr 0.01": {"lr": 0.01, "local_epochs": 1, "batch_size": 64},
    "lr 0.003": {"lr": 0.003, "local_epochs": 1, "batch_size": 64},
    "lr 0.01, whole clients": {"lr": 0.01, "local_epochs": 1, "batch_size": 1024},
}
# a method's own setting, tried with the first of the choices
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "fedmap": {"sigma2 0.1": {"sigma2": 0.1}},
}
SPLITS = (100, 101)  # seeds of the validation samples
VALIDATION = 0.3
PUBLISHED = (
    ("FLamby, FedAvg", 0.735),
    ("FLamby, pooled", 0.704),
    ("FLamby, best federated", 0.842),
)
KEPT = ("nll", "c_index_uno", "integrated_brier", "calibration_error", "c_index_within")
STUDENT = 2.776  # 97.5 % quantile of Student's t, 4 degrees of freedom


HEAD = """# Survival on TCGA-BRCA, 6 regions

`benchmarks/survival.py`: {rounds} rounds, Adam; seeds 0 to 4; fused engine; {device};
{cpu_seconds:.0f} CPU seconds for all {number} runs; commit {commit}. Each method chose its
settings, for each likelihood, by the C-index on 30 % of its training samples, held out twice (first
table). The test samples decided nothing.

{choices}

The model is FLamby's: one linear layer of 39 inputs, here without a bias, which Cox's loss does not
see. Inputs are standardised by everyone's training rows. The split is FLamby's: {samples} test
samples with {events} events, all regions pooled; each is judged by the model of its own region.
C-index: Harrell's, pair by pair; *within*: only pairs of the same region. Seeds change the initial
weights and the batches, not the split, so ± (95 % over seeds) says nothing about other patients:
the standard error of a C-index over test samples (bootstrap) is {chance:.3f}.
"""
FOOT = """FLamby's numbers are those it published, with its own training settings, of global models.
`result.json` has the C-index from tables of 256 bins of the risk and the intervals of time, which
clients can add; over all runs it differs by at most {gap:.3f} from the exact one. The NLL is of the
interval of an event, so it is not comparable between 50 intervals (Cox) and 20.
"""


def standard_error(risk: np.ndarray, y: np.ndarray) -> float:
    """Return the standard deviation of the C-index over 200 bootstrap samples."""
    draw, found = np.random.default_rng(0), []
    for _ in range(200):
        rows = draw.integers(0, len(y), len(y))
        found.append(harrell(risk[rows], y[rows, 0], y[rows, 1] > 0))
    return statistics.stdev(found)


def harrell(risk: np.ndarray, time_: np.ndarray, event: np.ndarray) -> float:
    """Return the share of comparable pairs in which the earlier event has the higher risk; equal
    risks count half.
    """
    right = pairs = 0.0
    for i in np.flatnonzero(event):
        later = (time_ > time_[i]) | ((time_ == time_[i]) & ~event)
        right += (risk[later] < risk[i]).sum() + 0.5 * (risk[later] == risk[i]).sum()
        pairs += later.sum()
    return float(right / pairs)


def risks(prepared: Any, outcome: Any, view: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (risk, (time, event)) of all test samples by their own client's model."""
    run, server, half = prepared.run, prepared.halves.server, prepared.halves.client
    said, seen = [], []
    for one in prepared.federation.clients:
        data = solo.samples(one, torch.device("cpu"), run.settings.torch_dtype())
        keys = {"seed": run.settings.seed, "client": one.client, "round": run.settings.rounds}
        sent = server.pack(server.broadcast(outcome.server_state, one.client))
        broadcast = half.unpack(server.broadcast_type, dict(sent))
        state = to(outcome.client_states[one.client], "cpu")
        state = solo.adapt(half, state, broadcast, data.train, "finetune", **keys)
        with torch.no_grad():
            found = half.predict(view, state, broadcast, data.test.x, {})
        said.append(half.model.task.risk(found.double()).numpy())
        seen.append(one.y_test)
    return np.concatenate(said), np.concatenate(seen)


def candidates(method: str) -> dict[str, dict[str, Any]]:
    """Return the settings that a method may choose, by name."""
    first = next(iter(CHOICES.values()))
    return {**CHOICES, **{name: {**first, **more} for name, more in OWN.get(method, {}).items()}}


def trained(method: str, given: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return (what was prepared, its outcome, its result) of a run."""
    given = {**SHARED, **given}
    if method == "pooled":
        given |= {"partition": "iid", "num_clients": 1}
    prepared = prepare(parse("local" if method == "pooled" else method, given), "fused")
    outcome = execute(prepared)
    return prepared, outcome, result(*prepared, outcome)


def validated(method: str, likelihood: str, data_dir: str) -> dict[str, float]:
    """Return the mean C-index on validation samples of each candidate."""
    found = {}
    for name, settings in candidates(method).items():
        some = {
            **settings,
            "data_dir": data_dir,
            "likelihood": likelihood,
            "validation": VALIDATION,
        }
        runs = [trained(method, {**some, "seed": seed})[2] for seed in SPLITS]
        found[name] = statistics.mean(one["final"]["personal"]["c_index"] for one in runs)
        print(method, likelihood, name, f"{found[name]:.3f}", flush=True)
    return found


def once(
    method: str, likelihood: str, seed: int, data_dir: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics of one run."""
    given = {**settings, "data_dir": data_dir, "likelihood": likelihood, "seed": seed}
    begun = time.process_time()
    prepared, outcome, content = trained(method, given)
    found: dict[str, Any] = {"method": method, "likelihood": likelihood, "seed": seed}
    for view in ("personal", "global"):
        block = content["final"].get(view)
        if block:
            risk, y = risks(prepared, outcome, view)
            exact = harrell(risk, y[:, 0], y[:, 1] > 0)
            kept = {key: block[key] for key in KEPT}
            found[view] = {"c_index": exact, "binned": block["c_index"], **kept}
            found["samples"], found["events"] = block["num_examples"], block["events"]
            if view == "personal":
                found["standard_error"] = standard_error(risk, y)
    return {**found, "cpu_seconds": round(time.process_time() - begun, 2)}


def over_seeds(runs: list[dict[str, Any]], view: str, key: str) -> str:
    """Return mean ± half a 95 % interval."""
    values = [run[view][key] for run in runs]
    half = STUDENT * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def page(runs: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the page."""
    chance = statistics.mean(run["standard_error"] for run in runs if run["likelihood"] == "cox")
    counts = {key: runs[0][key] for key in ("samples", "events")}
    names = list(dict.fromkeys(name for method in METHODS for name in candidates(method)))
    table = [f"| model | likelihood | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for likelihood, scores in about["validated"].items():
        for method, found in scores.items():
            best = max(found, key=found.get)
            cells = [f"{found[name]:.3f}" if name in found else "" for name in names]
            cells = [f"**{c}**" if n == best else c for n, c in zip(names, cells, strict=True)]
            table.append(f"| {method} | {likelihood} | {' | '.join(cells)} |")
    said = {**SHARED, **about, **counts, "choices": "\n".join(table)}
    lines = [HEAD.format(**said, number=len(runs), chance=chance)]
    for likelihood, title in (("cox", "Cox"), ("hazard", "Discrete hazards, 20 intervals")):
        lines += [
            f"## {title}",
            "",
            "| model | C-index | Uno's C | within | integrated Brier | NLL | calibration error |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for method in METHODS:
            if not any(r["likelihood"] == likelihood for r in runs):
                continue
            some = [r for r in runs if (r["method"], r["likelihood"]) == (method, likelihood)]
            views = ("personal", "global") if method == "fedmap" else ("personal",)
            for view in views:
                keys = ("c_index", "c_index_uno", "c_index_within", "integrated_brier", "nll")
                cells = [over_seeds(some, view, key) for key in (*keys, "calibration_error")]
                name = method + (", mean of the prior" if view == "global" else "")
                lines.append(f"| {name} | {' | '.join(cells)} |")
        if likelihood == "cox":
            lines += [f"| {name} | {value} | | | | | |" for name, value in PUBLISHED]
        lines.append("")
    gap = max(abs(run["personal"]["c_index"] - run["personal"]["binned"]) for run in runs)
    lines.append(FOOT.format(gap=gap))
    return "\n".join(lines)


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, runs = time.process_time(), []
    scores: dict[str, dict[str, dict[str, float]]] = {"cox": {}, "hazard": {}}
    for likelihood, best in scores.items():
        for method in METHODS:
            best[method] = found = validated(method, likelihood, options.data_dir)
            chosen = candidates(method)[max(found, key=found.get)]  # type: ignore[arg-type]
            for seed in range(options.seeds):
                runs.append(once(method, likelihood, seed, options.data_dir, chosen))
                print(json.dumps(runs[-1]), flush=True)
    about = {
        "device": f"one core of a CPU ({platform.machine()})",
        "commit": commit(),
        "cpu_seconds": time.process_time() - begun,
        "validated": scores,
    }
    kept = {"about": about, "settings": SHARED, "runs": runs}
    (options.out / "survival.json").write_text(json.dumps(kept, indent=1) + "\n")
    (options.out / "survival.md").write_text(page(runs, about))


if __name__ == "__main__":
    main()
