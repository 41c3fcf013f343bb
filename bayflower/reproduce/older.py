"""Runs of the older scripts in `experiments/`, taken into the cache where a table asks for exactly
that run.

Those files state what distinguishes a run; the rest is the protocol in the script of their commit,
repeated here. A run is taken only if every option and number of its partition that its file notes
is what the settings give today.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .cache import Cache, Say, key_of, resolved
from .sweep import Plan, jobs
from .tables import FORMS, Spec, load_tables

PFEDVMP = {
    "num_clients": 50,
    "partition": "dirichlet",
    "test_fraction": 0.2,
    "optimizer": "sgd",
    "lr": 0.01,
    "batch_size": 10,
    "local_epochs": 1,
}
DROPPED = ("method", "seed", "device", "evaluate_every", "changed")


def take(path: Path, cache: Cache, say: Say) -> int:
    """Take the runs of a file that some table asks for; return how many."""
    try:
        text = path.read_text()
        runs = fedmap_runs(json.loads(text)) if path.suffix == ".json" else pfedvmp_runs(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no file of runs that can be taken ({error}); see docs/evidence.md"
        ) from None
    wanted = {
        cache.key(job.spec, job.seed)
        for table in load_tables().values()
        for form in FORMS
        for job in jobs(table, Plan(form, 3))
    }
    taken = other = 0
    for spec, seed, result, samples, noted in runs:
        now = resolved(spec, seed)[0]
        differs = [name for name, value in noted.items() if name in now and now[name] != value]
        if differs:
            say(
                f"{spec.method}, seed {seed}: not taken, {differs[0]} was {noted[differs[0]]!r}, "
                f"now it is {now[differs[0]]!r}"
            )
            other += 1
        elif key_of(spec, seed) not in wanted:
            other += 1
        else:
            cache.put(spec, seed, result, samples)
            taken += 1
    say(f"{path}: {taken} runs taken, {other} that no table asks for or that differ")
    return taken


Run = tuple[Spec, int, dict[str, Any], int, dict[str, Any]]


def pfedvmp_runs(text: str) -> list[Run]:
    """Return the runs of experiments/results/pfedvmp_tables.jsonl."""
    found: list[Run] = []
    for line in text.splitlines():
        one = json.loads(line)
        cell, part = one["cell"], one["partition"]
        if cell.get("changed"):
            continue
        stated = {**PFEDVMP, **{key: value for key, value in cell.items() if key not in DROPPED}}
        noted = {
            **one["options"],
            "beta": part["beta"],
            "partition": part["kind"],
            "test_fraction": part["test_fraction"],
            "min_size": part["min_size"],
            "num_clients": part["num_clients"],
            "new_clients": part["new_clients"],
            "images": part["kept"],
        }
        curve = one["curve"]
        result = {
            **shared(one),
            "commit": one["commit"],
            "partition": part,
            "model": one["model"],
            "seconds": one["seconds"]["wall"],
            "rounds": one["rounds"],
            "bytes_up": one["bytes_up"],
            "curve": curve,
            "remark": one["remark"],
            "seconds_per_round": sum(
                one["seconds"][key] for key in ("training", "aggregation", "evaluation")
            )
            / one["rounds"],
            "final": one["final"],
            "origin": "experiments/results/pfedvmp_tables.jsonl",
        }
        found.append(
            (
                Spec("engine", cell["method"], tuple(sorted(stated.items()))),
                cell["seed"],
                result,
                part["pooled"],
                noted,
            )
        )
    return found


def fedmap_runs(content: dict[str, Any]) -> list[Run]:
    """Return the runs of experiments/results/fedmap_synthetic.json."""
    found: list[Run] = []
    commits = {
        tuple(map(int, text.strip().split("x"))): commit
        for texts, commit in content["commits"].items()
        for text in texts.split(",")
    }
    for one in content["runs"]:
        cell = one["cell"]
        stated = {
            "num_clients": 10,
            **{key: value for key, value in cell.items() if key not in DROPPED},
        }
        per_client = [
            {"client": client, "balanced_accuracy": value}
            for client, value in enumerate(one["balanced"])
        ]
        block = {
            "balanced_accuracy_mean": sum(one["balanced"]) / len(one["balanced"]),
            "accuracy_mean": one["accuracy"],
            "ece": one["ece"],
            "nll": one["nll"],
            "per_client": per_client,
        }
        result = {
            **shared(
                {
                    **content,
                    "method": cell["method"],
                    "dataset": "synthetic",
                    "note": "",
                    "engine": "fused",
                }
            ),
            "commit": commits[cell["rounds"], cell["local_epochs"]],
            "partition": {"kind": "synthetic", "scenario": cell["scenario"]},
            "model": {"name": cell.get("model", "mlp")},
            "seconds": one["seconds"],
            "seconds_per_round": one["seconds"] / cell["rounds"],
            "rounds": cell["rounds"],
            "curve": [],
            "remark": None,
            "final": {"personal": block},
            "last": {}
            if one["effective_clients"] is None
            else {"effective_clients": one["effective_clients"]},
            "origin": "experiments/results/fedmap_synthetic.json",
        }
        found.append(
            (
                Spec("engine", cell["method"], tuple(sorted(stated.items()))),
                cell["seed"],
                result,
                0,
                {},
            )
        )
    return found


def shared(one: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that every record of the cache has."""
    kept = {key: one[key] for key in ("method", "dataset", "note", "engine", "device", "versions")}
    return {**kept, "faults": len(one.get("faults", [])), "last": {}}
