"""Where a hierarchy pays: FedMAP with a learned prior on real federations of numbers and votes.

    python experiments/hierarchy.py DATA [radon|parkinson|election88|thinned ...] [--seeds N]
    python experiments/hierarchy.py DATA [exact|gibbs|nuts ...]
    python experiments/hierarchy.py --page

DATA is the folder of radon.npz, parkinson.npz and election88.npz (arrays x, y, client). Every run
is a line of experiments/results/hierarchy.jsonl; `--page` makes experiments/hierarchy.md and its
picture of these lines (`hierarchy_page.py`).

* radon, parkinson: k = 2, 5, 10, 20 training samples a client, tested on others of its own. A fifth
  of the clients never train: they get k samples after the last round.
* election88: 70 % of a state's respondents train, the others are the test.
* thinned: the same, but every larger state trains on a random number of respondents, so that few
  respondents do not mean a small state with few to test.
* exact, gibbs, nuts: radon by county against the exact posterior at the learned prior, and against
  samplers of the whole hierarchy (`hierarchy_posterior.py`).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayflower.config import parse
from bayflower.data.federation import ClientData, Federation
from bayflower.fused.run import run_fused
from bayflower.rounds.halves import halves_for
from bayflower.tasks.numbers import Gaussian

HERE = Path(__file__).resolve().parent
LINES = HERE / "results" / "hierarchy.jsonl"
SAMPLES = (2, 5, 10, 20)
LEAST = 40  # samples of a client that is used for the comparison of k
MOST = 60  # test samples of a client
KEYS = ("nll", "crps", "rmse", "coverage_50", "coverage_90")
ROUNDS = 15
# name in the results: (method, settings)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "fedavg-ft": ("fedavg-ft", {}),
    "fedmap": ("fedmap", {}),
    "fedmap learned": ("fedmap", {"prior": "learned"}),
}
NUMBERS = {"task": "regression", "lr": 0.02, "local_epochs": 5}
# logistic regression of one state alone: C of its ridge, None = by cross-validation in the state
LOCAL = {"local C=1e6": 1e6, "local C=1": 1.0, "local C=0.1": 0.1, "local own C": None}
SIZES = (10, 20, 40, 80, 160, 10_000)  # training respondents of a state, of states thinned out
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def loaded(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and the owner of each sample."""
    with np.load(folder / f"{name}.npz") as found:
        return found["x"], found["y"], found["client"]


def standard(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return inputs standardised by everyone's training samples; these moments add up."""
    return (x - x[train].mean(0)) / x[train].std(0).clip(1e-9)


def outcome(
    name: str, train: list[ClientData], new: list[ClientData], classes: int, **more: Any
) -> tuple[Any, Any, float]:
    """Return (what a run gave, its task, seconds)."""
    method, settings = METHODS.get(name, ("fedmap", {"prior": name.split()[-1]}))
    usual = {"dataset": "given.npz", "partition": "iid", "model": "linear", "calibration": "off"}
    usual |= {"device": "cpu", "rounds": ROUNDS, "evaluate_every": 1000, "stacking": "yes"}
    run = parse(method, {**usual, **more, **settings})
    shape = train[0].x_train.shape[1:]
    there = Federation(tuple(train), tuple(new), classes, shape, "given", {}, "")
    halves = halves_for(run, there)
    start = time.process_time()
    found = run_fused(run, there, halves)
    return found, halves.model.task, time.process_time() - start


def write(line: dict[str, Any]) -> None:
    """Add a run to the results, with where it was made."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    line |= {"commit": commit, "device": f"cpu ({platform.machine()})", "torch": torch.__version__}
    LINES.parent.mkdir(exist_ok=True)
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print({key: value for key, value in line.items() if key != "clients"}, flush=True)


# -- k samples a client ----------------------------------------------------------------------------
def few_samples(folder: Path, name: str, k: int, seed: int, methods: list[str]) -> None:
    """Run some methods, and the pooled model, with k training samples a client."""
    x, y, owner = loaded(folder, name)
    draw = np.random.default_rng([seed, k])
    known = [c for c in np.unique(owner) if (owner == c).sum() >= LEAST]
    known = list(np.random.default_rng(seed).permutation(known))
    parts = {c: draw.permutation(np.flatnonzero(owner == c)) for c in known}
    new = known[: len(known) // 5]
    old = known[len(known) // 5 :]
    train = np.concatenate([parts[c][:k] for c in old])
    x = standard(x, train)

    def data(number: int, c: int) -> ClientData:
        rows, test = parts[c][:k], parts[c][k : k + MOST]
        return ClientData(number, x[rows], y[rows], x[test], y[test])

    made = [data(number, c) for number, c in enumerate([*old, *new])]
    old_data, new_data = made[: len(old)], made[len(old) :]
    common = {"data": name, "k": k, "seed": seed, "rounds": ROUNDS}
    for method in methods:
        found, task, seconds = outcome(method, old_data, new_data, 1, seed=seed, **NUMBERS)
        for who, views in (("train", found.views), ("new", found.new_clients)):
            said = task.summarise(views["personal"])
            write({**common, "method": method, "who": who, "seconds": seconds, **picked(said)})
    design = np.c_[x, np.ones(len(x))]
    weights, *_ = np.linalg.lstsq(design[train], y[train], rcond=None)
    freedom = max(len(train) - design.shape[1], 1)
    noise = float(np.square(y[train] - design[train] @ weights).sum() / freedom)
    task = Gaussian("known", noise**0.5, float(y[train].mean()), float(y[train].std()))
    for who, some in (("train", old_data), ("new", new_data)):
        tallies = {}
        for one in some:
            mean = torch.as_tensor(np.c_[one.x_test, np.ones(len(one.x_test))] @ weights)
            said = torch.stack([mean, torch.full_like(mean, noise)], -1)
            tallies[one.client] = task.tally(said, torch.as_tensor(one.y_test), mean * 0 + 1)
        write({**common, "method": "pooled", "who": who, **picked(task.summarise(tallies))})


def picked(said: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that the page shows."""
    return {key: float(said[key]) for key in KEYS} | {"num_clients": said["num_clients"]}


# -- votes -----------------------------------------------------------------------------------------
def election(folder: Path, seed: int, federated: bool = True, thinned: bool = False) -> None:
    """Run the vote by state; a line has every state's log score. With `thinned` states of at least
    100 respondents train on a number drawn from SIZES, and are tested as before.
    """
    from sklearn.linear_model import LogisticRegression

    x, y, owner = loaded(folder, "election88")
    x = np.c_[x[:, [0, 1, 2, 3, 5]], x[:, 0] * x[:, 1]]  # without the region; black women
    draw = np.random.default_rng(seed)
    states = list(np.unique(owner))
    parts = {c: draw.permutation(np.flatnonzero(owner == c)) for c in states}
    cut = {c: max(2, round(0.7 * len(parts[c]))) for c in states}
    used = dict(cut)
    for c in states if thinned else ():
        if len(parts[c]) >= 100:
            used[c] = min(cut[c], int(draw.choice(SIZES)))
    train = np.concatenate([parts[c][: used[c]] for c in states])
    x = standard(x, train)
    clients = [
        ClientData(
            number, x[rows[: used[c]]], y[rows[: used[c]]], x[rows[cut[c] :]], y[rows[cut[c] :]]
        )
        for number, (c, rows) in enumerate(parts.items())
    ]
    sizes = {one.client: (len(one.y_train), len(one.y_test)) for one in clients}
    name = "election88 thinned" if thinned else "election88"
    common = {"data": name, "seed": seed, "rounds": ROUNDS}

    def note(method: str, scores: dict[int, float], seconds: float) -> None:
        total = sum(scores[c] * sizes[c][1] for c in scores) / sum(n for _, n in sizes.values())
        rows = [[c, *sizes[c], round(scores[c], 5)] for c in scores]
        write({**common, "method": method, "nll": total, "seconds": seconds, "clients": rows})

    if federated:
        found, task, seconds = outcome("fedmap learned", clients, [], 2, seed=seed)
        views = found.views["personal"]
        scores = {c: task.summarise({c: t})["nll"] for c, t in views.items()}
        note("fedmap learned", scores, seconds)

    def score(model: Any, one: ClientData) -> float:
        sides = model.predict_proba(one.x_test)
        p = sides[np.arange(len(one.y_test)), np.searchsorted(model.classes_, one.y_test)]
        return float(-np.log(p).mean())

    everyone = LogisticRegression(C=1.0, max_iter=1000).fit(x[train], y[train])
    note("pooled", {one.client: score(everyone, one) for one in clients}, 0.0)
    for name, strength in LOCAL.items():
        if thinned and strength == 1e6:  # without end where classes can be told apart
            continue
        own = {}
        for one in clients:
            if len(np.unique(one.y_train)) == 1:  # no boundary to learn: the share, smoothed
                p = (one.y_train.sum() + 1) / (len(one.y_train) + 2)
                own[one.client] = float(-np.log(np.where(one.y_test == 1, p, 1 - p)).mean())
            else:
                best = strength or chosen(one.x_train, one.y_train, seed)
                model = LogisticRegression(C=best, max_iter=5000)
                own[one.client] = score(model.fit(one.x_train, one.y_train), one)
        note(name, own, 0.0)


def chosen(x: np.ndarray, y: np.ndarray, seed: int) -> float:
    """Return the strength that a state chooses by cross-validation on its own respondents."""
    place = np.random.default_rng(seed).permutation(len(y)) % 5
    scores = []
    for c in STRENGTHS:
        total = 0.0
        for fold in range(min(5, len(y))):
            weights = ridge(x[place != fold], y[place != fold], c)
            f = np.c_[np.ones((place == fold).sum()), x[place == fold]] @ weights
            total += float(np.logaddexp(0, np.where(y[place == fold] == 1, -f, f)).sum())
        scores.append(total)
    return STRENGTHS[int(np.argmin(scores))]


def ridge(x: np.ndarray, y: np.ndarray, strength: float) -> np.ndarray:
    """Return intercept and weights of logistic regression by Newton's method: C Σ loss + ½ |w|²;
    the intercept is held by a sample of each class that counts 0.05.
    """
    wide = np.c_[np.ones(len(y)), x]
    mild = np.r_[1.0, np.zeros(x.shape[1])]
    weights = np.zeros(wide.shape[1])
    ridge_of = np.diag(1 - mild) / strength
    for _ in range(12):
        p = 1 / (1 + np.exp(-np.clip(wide @ weights, -30, 30)))
        own = 1 / (1 + np.exp(-weights[0]))
        slope = wide.T @ (p - y) + ridge_of @ weights + mild * 0.05 * (2 * own - 1)
        curve = (wide * (p * (1 - p))[:, None]).T @ wide + ridge_of
        curve += np.diag(mild) * (0.1 * own * (1 - own) + 1e-6)
        weights = weights - np.clip(np.linalg.solve(curve, slope), -3, 3)
    return weights


def main() -> None:
    """Run what is asked for."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("data", nargs="?", type=Path)
    asked.add_argument("what", nargs="*")
    asked.add_argument("--seeds", type=int, default=10)
    asked.add_argument("--methods", default=",".join(METHODS), help="of radon and parkinson")
    asked.add_argument("--page", action="store_true")
    args = asked.parse_args()
    torch.set_num_threads(1)
    for what in args.what if args.data else ():
        if what in ("exact", "gibbs", "nuts"):
            import hierarchy_posterior

            for line in getattr(hierarchy_posterior, what)(*loaded(args.data, "radon")):
                write(line)
            continue
        for seed in range(args.seeds):
            if what == "election88":
                election(args.data, seed)
            elif what == "thinned":
                election(args.data, seed, thinned=True)
            else:
                for k in SAMPLES:
                    few_samples(args.data, what, k, seed, args.methods.split(","))
    if args.page:
        from hierarchy_page import make

        make(LINES, HERE)


if __name__ == "__main__":
    main()
