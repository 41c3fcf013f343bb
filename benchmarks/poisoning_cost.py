"""What `robust=gate` costs federations without an attacker: the same run with `off` and `gate`.

    python -m benchmarks.poisoning_cost --out FILE   started again, it goes on where FILE ends

BAYFLOWER_DATA is the folder of heart.npz, radon.npz and Fashion-MNIST. Runs are paired by seed. On
radon each county trains on a few homes and is tested on others of its own, as
`experiments/hierarchy.py` does; there the negative log-likelihood is measured, elsewhere the
accuracy of the personal models.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayflower.config import parse
from bayflower.data.federation import ClientData, Federation
from bayflower.engines import prepare
from bayflower.fused.run import FusedRun
from bayflower.rounds.halves import halves_for
from benchmarks.poisoning import DIGITS, VERSION, known, told

FOLDER = Path(os.environ.get("BAYFLOWER_DATA", "data"))
SKEWED = {"partition": "dirichlet", "beta": 0.1}
GIVEN = {"data_dir": str(FOLDER)}
HONEST: dict[str, dict[str, Any]] = {
    "digits, Dir(0.1)": {**DIGITS, **SKEWED},
    "heart": {**DIGITS, **GIVEN, "dataset": "heart", "num_clients": 4, "partition": "natural"},
    "Fashion-MNIST, Dir(0.1)": {
        **{**DIGITS, **SKEWED, **GIVEN, "dataset": "fmnist", "keep": 0.03, "model": "mlp"},
    },
}
RADON = {
    **{"dataset": "given.npz", "partition": "iid", "model": "linear", "calibration": "off"},
    **{"device": "cpu", "rounds": 15, "evaluate_every": 0, "checkpoint_every": 0},
    **{"task": "regression", "lr": 0.02, "local_epochs": 5},
}
HOMES = {f"radon, {number} homes": number for number in (2, 5, 10, 20)}
LEAST, MOST = 40, 60  # homes of a county that takes part, and homes it is tested on
METHODS = "fedavg,fedavg-ft,scaffold,fedivon,fedmap,fednp,pfedvmp,metavd,fedla,feddc,fedprox,fedper"
NUMBERS = "fedavg,fedavg-ft,scaffold,fedprox,fedmap"


def counties(homes: int, seed: int) -> Federation:
    """Return counties that train on a few homes, four fifths of all, as the experiment has them."""
    with np.load(FOLDER / "radon.npz") as found:
        x, y, owner = found["x"], found["y"], found["client"]
    draw = np.random.default_rng([seed, homes])
    large = [one for one in np.unique(owner) if (owner == one).sum() >= LEAST]
    large = list(np.random.default_rng(seed).permutation(large))
    parts = {one: draw.permutation(np.flatnonzero(owner == one)) for one in large}
    there = large[len(large) // 5 :]
    train = np.concatenate([parts[one][:homes] for one in there])
    x = (x - x[train].mean(0)) / x[train].std(0).clip(1e-9)
    clients = []
    for number, one in enumerate(there):
        mine, test = parts[one][:homes], parts[one][homes : homes + MOST]
        clients.append(ClientData(number, x[mine], y[mine], x[test], y[test]))
    return Federation(tuple(clients), (), 1, clients[0].x_train.shape[1:], "given", {}, "")


def measured(method: str, data: str, rule: str, seed: int) -> float:
    """Return the accuracy, or the negative log-likelihood, of the personal models at the end."""
    torch.manual_seed(0)
    more: Mapping[str, Any] = {"robust": rule, "seed": seed}
    if data in HOMES:
        run, there = parse(method, {**RADON, **more}), counties(HOMES[data], seed)
        job = FusedRun(run, there, halves_for(run, there))
    else:
        made = prepare(parse(method, {**HONEST[data], **more}), "fused")
        job = FusedRun(made.run, made.federation, made.halves)
    last = job.run.settings.rounds
    for round in range(1, last + 1):
        job.round(round)
    found = job.test(job.engine, job.everyone, last, "finetune")["personal"]
    return float(job.halves.model.task.summarise(found)["nll" if data in HOMES else "accuracy"])


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="")
    parser.add_argument("--data", default=";".join((*HOMES, *HONEST)), help="with ; between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", default="", help="a file for JSON lines; its rows are skipped")
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(given.out) if given.out else None
    done = known(out, "method", "data")
    for data in given.data.split(";"):
        names = given.methods or (NUMBERS if data in HOMES else METHODS)
        for method in (one for one in names.split(",") if (one, data) not in done):
            row: dict[str, Any] = {"method": method, "data": data, "version": VERSION}
            for rule in ("off", "gate"):
                row[rule] = [measured(method, data, rule, seed) for seed in range(given.seeds)]
            told(row, out)


if __name__ == "__main__":
    main()
