"""Accuracy and calibration against the privacy budget ε.

python benchmarks/privacy.py [--dataset digits] [--methods fedavg,fedmap] [--epsilons 4,8,16,64]
                             [--clips 0.1,0.3,1] [--clients 100] [--rounds 20] [--dp client]
                             [--seeds 0,1,2] [--kinds plain,clip,noise]

Every ε is run with every clipping norm, and the table shows all of them: nothing is chosen on test
data. Of the kinds, `plain` has no privacy, `clip` cuts and adds no noise, `noise` does both.
Numbers are those of the last round. Writes a JSON line a run to --out. `--tables` prints the tables
of the runs in --out; of several seeds it shows the mean and the half width of a 95 % interval
(Student's t). `--against` prints, paired by seed, what clipping and noise cost at each ε.
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
from bayflower.privacy.noisy import Mechanism, private_half

ALONE = 0.01  # clipping alone: changes are counted in units of this noise, and it is not added
Row = dict[str, Any]


def carried(method: str, given: Row, clip: float | None = None) -> Row:
    """Return what is kept of a run; with `clip` changes are cut to that norm, without noise."""
    trusted = {"robust": "off", **given}  # with and without noise, nothing else differs
    ready = prepare(parse(method, trusted), "fused")
    if clip is not None:
        mechanism = Mechanism(clip, ALONE, float(len(ready.federation.clients)))
        half = private_half(ready.halves.server, mechanism, None)
        ready = ready._replace(halves=ready.halves._replace(server=half))
    result = run_to_result(ready)
    personal, spent = result["final"]["personal"], result["privacy"] or {}
    shared = result["final"].get("global") or personal
    return {
        "method": method,
        "epsilon": spent.get("epsilon"),
        "noise": spent.get("noise"),
        "clip": spent.get("clip", clip),
        **{key: personal[key] for key in ("accuracy", "nll", "ece")},
        "global_accuracy": shared["accuracy"],
        "seconds": sum(one["seconds"] for one in result["rounds"]),
    }


def key_of(row: Row) -> tuple[str, str, float, float]:
    """Return what tells runs apart that differ by more than their seed, in the tables' order."""
    budget = row["asked"] or (1e9 if row["clip"] else 1e10)
    return row.get("model", "linear"), row["method"], budget, row["clip"] or 0.0


def said(row: Row) -> str:
    """Return the budget of a run in words."""
    if row["asked"]:
        return f"{row['asked']:g}"
    return "∞, clipping alone" if row["clip"] else "∞"


def table(rows: list[Row]) -> str:
    """Return every run, in Markdown; runs that differ by their seed alone in one line."""
    lines = [
        "| model | method | ε | noise | clip | seeds | accuracy, % | NLL | ECE, % |",
        "|---|" + "---|" * 8,
    ]
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row), []).append(row)
    for key in sorted(groups):
        same = groups[key]
        noise = f"{same[0]['noise']:.2f}" if same[0]["noise"] else "–"
        clip = f"{same[0]['clip']:g}" if same[0]["clip"] else "–"
        numbers = [
            shown([100 * row["accuracy"] for row in same], 1),
            shown([row["nll"] for row in same], 3),
            shown([100 * row["ece"] for row in same], 1),
        ]
        first = f"{key[0]} | {key[1]} | {said(same[0])} | {noise} | {clip} | {len(same)}"
        lines.append(f"| {first} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def shown(values: list[float], digits: int) -> str:
    """Return the mean of values of several seeds, with the half width of its 95 % interval."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    wide = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.{digits}f} ± {wide:.{digits}f}"


def against(path: Path) -> str:
    """Return what privacy costs, paired by seed: the run without it less that with it, and of that
    the part of the noise, the run with clipping alone less that with both.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [
        "| data | model | method | ε | clip | seeds | accuracy lost, % | of that by noise, % "
        "| NLL more | ECE more, % |",
        "|---|---|" + "---|" * 8,
    ]

    def same(row: Row) -> tuple[Any, ...]:
        return row["dp"], row["dataset"], row.get("model", "linear"), row["method"], row["seed"]

    calm = {same(row): row for row in rows if not row["asked"] and not row["clip"]}
    cut = {(*same(row), row["clip"]): row for row in rows if not row["asked"] and row["clip"]}
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row["clip"] and same(row) in calm:
            groups.setdefault((row["dp"], row["dataset"], *key_of(row)), []).append(row)
    for key, pairs in sorted(groups.items()):
        if len(pairs) < 2:
            continue
        lost = [100 * (calm[same(row)]["accuracy"] - row["accuracy"]) for row in pairs]
        nll = [row["nll"] - calm[same(row)]["nll"] for row in pairs]
        ece = [100 * (row["ece"] - calm[same(row)]["ece"]) for row in pairs]
        clipped = [cut.get((*same(row), row["clip"])) for row in pairs]
        noise = [
            100 * (other["accuracy"] - row["accuracy"])
            for row, other in zip(pairs, clipped, strict=True)
            if other and row["asked"]
        ]
        by = shown(noise, 1) if len(noise) == len(pairs) else "–"
        numbers = " | ".join((shown(lost, 1), by, shown(nll, 3), shown(ece, 1)))
        first = f"{key[1]} | {key[2]} | {key[3]} | {said(pairs[0])} | {key[5]:g} | {len(pairs)}"
        lines.append(f"| {first} | {numbers} |")
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
    asks.add_argument("--kinds", default="plain,noise")
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
        clips = [float(one) for one in chosen.clips.split(",")]
        plans: list[tuple[float | None, float | None]] = []
        if "plain" in chosen.kinds:
            plans.append((None, None))
        if "clip" in chosen.kinds:
            plans += [(None, clip) for clip in clips]
        if "noise" in chosen.kinds:
            plans += itertools.product([float(e) for e in chosen.epsilons.split(",")], clips)
        for seed, (asked, clip) in itertools.product(chosen.seeds.split(","), plans):
            dp = {"dp": chosen.dp, "dp_epsilon": asked, "dp_clip": clip, "dp_delta": 1e-3}
            settings = {**base, "seed": int(seed), **(dp if asked else {})}
            row = carried(method, settings, None if asked else clip)
            known = {"dataset": chosen.dataset, "dp": chosen.dp, "seed": int(seed)}
            rows.append({**known, "model": chosen.model, "asked": asked, **row})
            with chosen.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
