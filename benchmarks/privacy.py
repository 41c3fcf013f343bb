"""Accuracy and calibration against the privacy budget ε.

python benchmarks/privacy.py [--dataset digits] [--methods fedavg,fedmap] [--epsilons 4,8,16,64]
                             [--clips 0.1,0.3,1] [--clients 100] [--rounds 20] [--dp client]

Every ε is run with every clipping norm, and the table shows all of them: nothing is chosen on test
data. Writes a JSON line a run to --out. `--tables` prints the tables of the runs in --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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
    """Return every run, in Markdown."""
    lines = ["| method | ε | noise | clip | accuracy, % | NLL | ECE, % |", "|---|" + "---|" * 6]
    order = {id(row): (row["method"], row["asked"] or 1e9, row["clip"] or 0) for row in rows}
    for row in sorted(rows, key=lambda row: order[id(row)]):
        noise = f"{row['noise']:.2f} | {row['clip']:g}" if row["noise"] else "– | –"
        said = f"{row['asked']:g}" if row["asked"] else "∞"
        numbers = f"{100 * row['accuracy']:.1f} | {row['nll']:.3f} | {100 * row['ece']:.1f}"
        lines.append(f"| {row['method']} | {said} | {noise} | {numbers} |")
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
    asks.add_argument("--tables", action="store_true")
    chosen = asks.parse_args()
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
        for asked, clip in plans:
            dp = {"dp": chosen.dp, "dp_epsilon": asked, "dp_clip": clip, "dp_delta": 1e-3}
            row = carried(method, {**base, **(dp if asked else {})})
            rows.append({"dataset": chosen.dataset, "dp": chosen.dp, "asked": asked, **row})
            with chosen.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
