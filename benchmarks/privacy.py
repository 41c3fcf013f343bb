"""Accuracy and calibration against the privacy budget ε.

python benchmarks/privacy.py [--dataset digits] [--methods fedavg,fedmap] [--epsilons 4,8,16,64]
                             [--clips 0.1,0.3,1] [--clients 100] [--rounds 20] [--dp client]
                             [--seeds 0,1,2]

Every ε is run with every clipping norm, and the table shows all of them: nothing is chosen on test
data. Numbers are those of the last round. Writes a JSON line a run to --out. `--tables` prints the
tables of the runs in --out; of several seeds it shows the mean and the half width of a 95 %
interval (Student's t). `--against` prints, paired by seed, what noise costs at each ε.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result


def carried(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a run."""
    trusted = {"robust": "off", **given}  # with and without noise, nothing else differs
    result = run_to_result(prepare(parse(method, trusted), "fused"))
    personal, spent = result["final"]["personal"], result["privacy"] or {}
    shared = result["final"].get("global") or personal
    return {
        "method": method,
        "epsilon": spent.get("epsilon"),
        "noise": spent.get("noise"),
        "clip": spent.get("clip"),
        **{key: personal[key] for key in ("accuracy", "nll", "ece")},
        "global_accuracy": shared["accuracy"],
        "seconds": sum(one["seconds"] for one in result["rounds"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return every run, in Markdown; runs that differ by their seed alone in one line."""
    lines = [
        "| method | ε | noise | clip | seeds | accuracy, % | NLL | ECE, % |",
        "|---|" + "---|" * 7,
    ]
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["method"], row["asked"] or 1e9, row["clip"] or 0)
        groups.setdefault(key, []).append(row)
    for key in sorted(groups):
        same = groups[key]
        noise = f"{same[0]['noise']:.2f} | {same[0]['clip']:g}" if same[0]["noise"] else "– | –"
        said = f"{same[0]['asked']:g}" if same[0]["asked"] else "∞"
        numbers = [
            shown([100 * row["accuracy"] for row in same], 1),
            shown([row["nll"] for row in same], 3),
            shown([100 * row["ece"] for row in same], 1),
        ]
        lines.append(f"| {key[0]} | {said} | {noise} | {len(same)} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def shown(values: list[float], digits: int) -> str:
    """Return the mean of values of several seeds, with the half width of its 95 % interval."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    wide = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.{digits}f} ± {wide:.{digits}f}"


def against(path: Path) -> str:
    """Return what noise costs: the run without noise less that with, paired by seed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [
        "| data | method | ε | clip | seeds | accuracy lost, % | NLL more | ECE more, % |",
        "|---|---|" + "---|" * 6,
    ]
    calm = {
        (row["dp"], row["dataset"], row["method"], row["seed"]): row
        for row in rows
        if not row["asked"]
    }
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for row in rows:
        other = calm.get((row["dp"], row["dataset"], row["method"], row["seed"]))
        if row["asked"] and other:
            key = (row["dp"], row["dataset"], row["method"], row["asked"], row["clip"])
            groups.setdefault(key, []).append((row, other))
    for key, pairs in sorted(groups.items()):
        if len(pairs) < 2:
            continue
        lost = [100 * (calm["accuracy"] - row["accuracy"]) for row, calm in pairs]
        nll = [row["nll"] - calm["nll"] for row, calm in pairs]
        ece = [100 * (row["ece"] - calm["ece"]) for row, calm in pairs]
        numbers = " | ".join((shown(lost, 1), shown(nll, 3), shown(ece, 1)))
        lines.append(
            f"| {key[1]} | {key[2]} | {key[3]:g} | {key[4]:g} | {len(pairs)} | {numbers} |"
        )
    return "\n".join(lines)


def tables(path: Path) -> str:
    """Return the tables of all runs in a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    groups = dict.fromkeys((row["dp"], row["dataset"]) for row in rows)
    return "\n\n".join(
        f"{dataset}, dp={dp}:\n\n"
        + table([row for row in rows if (row["dp"], row["dataset"]) == (dp, dataset)])
        for dp, dataset in groups
    )


def main() -> None:
    """Run everything and print the table."""
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--dataset", default="digits")
    asks.add_argument("--methods", default="fedavg,fedmap")
    asks.add_argument("--epsilons", default="4,8,16,64")
    asks.add_argument("--clips", default="0.1,0.3,1")
    asks.add_argument("--clients", type=int, default=100)
    asks.add_argument("--rounds", type=int, default=20)
    asks.add_argument("--dp", default="client")
    asks.add_argument("--model", default="linear")
    asks.add_argument("--set", action="append", default=[], help="KEY=VALUE, a further setting")
    asks.add_argument("--out", type=Path, default=Path("benchmarks/results/privacy.jsonl"))
    asks.add_argument("--seeds", default="0")
    asks.add_argument("--tables", action="store_true")
    asks.add_argument("--against", action="store_true")
    chosen = asks.parse_args()
    if chosen.against:
        print(against(chosen.out))
        return
    if chosen.tables:
        print(tables(chosen.out))
        return
    base: dict[str, Any] = {
        "dataset": chosen.dataset,
        "model": chosen.model,
        "rounds": chosen.rounds,
        "evaluate_every": 0,
        "calibration": "off",
        "device": "cpu",
        **dict(one.split("=", 1) for one in chosen.set),
    }
    if chosen.clients:
        base["num_clients"] = chosen.clients
    rows = []
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    for method in chosen.methods.split(","):
        plans: list[tuple[float | None, float]] = [(None, 1.0)]
        plans += [
            (float(e), float(c))
            for e in chosen.epsilons.split(",")
            for c in chosen.clips.split(",")
        ]
        for seed, (asked, clip) in itertools.product(chosen.seeds.split(","), plans):
            dp = {"dp": chosen.dp, "dp_epsilon": asked, "dp_clip": clip, "dp_delta": 1e-3}
            row = carried(method, {**base, "seed": int(seed), **(dp if asked else {})})
            known = {"dataset": chosen.dataset, "dp": chosen.dp, "seed": int(seed)}
            rows.append({**known, "asked": asked, **row})
            with chosen.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
