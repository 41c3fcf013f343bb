"""Who takes part: the rivals that nobody may leave out, the methods that we recommend, and any
other method by its name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import methods
from ..config import parse
from ..data import Federation
from ..errors import ConfigError
from ..rounds.halves import halves_for
from ..tasks import Task
from . import exact
from .forecast import Forecast, Trained, mixed, trained
from .protocol import Case, federation, split
from .scores import Judged, judge, summary
from .sets import TASKS, Rows, Spec

MEMBERS = 3  # of the ensemble


@dataclass(frozen=True)
class Rival:
    """One that takes part. `how`: method (a federated run), pooled (one model of all samples),
    ensemble (of federated runs) or exact (`exact.py`).
    """

    name: str
    how: str = "method"
    method: str = "local"
    settings: Mapping[str, Any] = field(default_factory=dict)
    form: str = "point"  # see forecast.py
    kinds: tuple[str, ...] = ("classes", "numbers", "times")
    ours: bool = False  # whether it is one that we recommend
    linear: bool = False  # whether it is for linear models only
    deep: bool = False  # whether it needs a hidden layer

    def fits(self, spec: Spec) -> bool:
        """Return whether it can take part on a data set."""
        right = spec.linear or not self.linear
        return spec.kind in self.kinds and right and not (self.deep and spec.linear)


BAYES = ("classes", "numbers")
RIVALS = {
    one.name: one
    for one in (
        Rival("pooled", how="pooled"),
        Rival("local"),
        Rival("fedavg", method="fedavg"),
        Rival("fedavg-ft", method="fedavg-ft"),
        Rival("fedavg-ft-temperature", method="fedavg-ft", form="temperature"),
        Rival("ensemble-of-3", how="ensemble", method="fedavg-ft"),
        Rival("exact-hierarchy", how="exact", linear=True),
        Rival("fedavg-ft-calibrated", method="fedavg-ft", form="calibrated", kinds=BAYES),
        Rival("fedmap", method="fedmap", form="calibrated", ours=True),
        Rival(
            "fedmap-learned",
            method="fedmap",
            settings={"prior": "learned"},
            form="calibrated",
            ours=True,
            linear=True,
        ),
        Rival("fedbps", method="fedbps", form="calibrated", kinds=("classes",), ours=True),
        Rival(
            "pfedvmp",
            method="pfedvmp",
            form="calibrated",
            kinds=("classes",),
            ours=True,
            deep=True,
        ),
    )
}
MAIN = ("fedmap-learned", "fedmap")  # whom the practitioner's questions are about, the first there
ALONE, TOGETHER, EXACT = "local", "pooled", "exact-hierarchy"
CENTRAL = tuple(one.name for one in RIVALS.values() if one.how in ("pooled", "exact"))
SERIES = (  # in plots, after methods that are not in the table
    *("pooled", "local", "fedavg-ft", "fedavg-ft-temperature", "ensemble-of-3"),
    *("exact-hierarchy", "fedmap", "fedmap-learned"),
)


def chosen(names: Sequence[str]) -> list[Rival]:
    """Return the rivals, and after them the methods that are named; any method can be."""
    found = dict(RIVALS)
    for name in names:
        if name not in found:
            methods.get(name)  # raises if it is not known
            found[name] = Rival(name, method=name, form="calibrated")
    return list(found.values())


def only(names: Sequence[str]) -> list[Rival]:
    """Return the rivals and methods that are named, and no others."""
    known = {one.name: one for one in chosen(names)}
    return [known[name] for name in dict.fromkeys(names)]


def prepared(rival: Rival, spec: Spec, seed: int, **more: Any) -> Any:
    """Return the settings of a run."""
    usual = {"dataset": "given.npz", "partition": "iid", "device": "cpu", "evaluate_every": 10_000}
    usual |= {"stacking": "yes" if spec.linear else "auto", "seed": seed}
    usual |= {"calibration": "shrunk" if is_calibrated(rival, spec) else "off"}
    given = {**usual, "task": TASKS[spec.kind], **spec.settings, **rival.settings, **more}
    run = parse(rival.method, given)
    run.settings.refuse_workers("bayflower natural", "--jobs N for several runs at a time")
    return run


def is_calibrated(rival: Rival, spec: Spec) -> bool:
    """Return whether samples are held out for Bayflower's calibration: not for times, and not where
    the method has no such calibration.
    """
    able = "calibration" not in methods.get(rival.method).defaults
    return rival.form == "calibrated" and spec.kind in BAYES and able


def forecasts(rival: Rival, spec: Spec, there: Federation, seed: int, later: bool) -> Trained:
    """Return what a rival says after training."""
    how = "global" if later and spec.kind == "numbers" else "shrunk"
    if rival.how == "pooled":
        return pooled(rival, spec, there, seed)
    if rival.how == "exact":
        task = task_of(rival, spec, there, seed)
        return Trained(*exact.posterior(there, task, seed), 0, task)
    if rival.how == "ensemble":
        several = [
            trained(prepared(rival, spec, 1000 * (member + 1) + seed), there, rival.form, how)
            for member in range(MEMBERS)
        ]
        task = several[0].task
        old = [mixed(some, task) for some in zip(*(one.old for one in several), strict=True)]
        new = [mixed(some, task) for some in zip(*(one.new for one in several), strict=True)]
        return Trained(old, new, sum(one.num_bytes for one in several), task)
    return trained(prepared(rival, spec, seed), there, rival.form, how)


def pooled(rival: Rival, spec: Spec, there: Federation, seed: int) -> Trained:
    """Return one model of all training clients' samples, with as many steps as they take in turn:
    its batches are larger by their number. It is everybody's, new clients included.
    """
    x = np.concatenate([one.x_train for one in there.clients])
    y = np.concatenate([one.y_train for one in there.clients])
    single = there.clients[0]._replace(client=0, x_train=x, y_train=y, x_held=None, y_held=None)
    usual = parse(rival.method, {}).training.batch_size
    run = prepared(rival, spec, seed, batch_size=min(usual * len(there.clients), len(y)))
    found = trained(run, there._replace(clients=(single,), new_clients=()))
    one: Forecast = found.old[0]
    return Trained(
        [one] * len(there.clients), [one] * len(there.new_clients), found.num_bytes, found.task
    )


def task_of(rival: Rival, spec: Spec, there: Federation, seed: int) -> Task:
    """Return the task of a data set without a run."""
    return halves_for(prepared(rival, spec, seed), there).model.task


def score(rival: Rival, spec: Spec, rows: Rows, case: Case) -> dict[str, Any]:
    """Return the finished run of a rival on a case: numbers of the training clients (`here`), of
    their models at the next client (`moved`) and of new clients (`new`).
    """
    parts = split(spec, rows, case)
    held = rival.form == "temperature" or is_calibrated(rival, spec)
    there = federation(spec, rows, parts, held)
    begun = time.process_time()
    found = forecasts(rival, spec, there, case.seed, case.later)
    level = spec.level
    if level is None and spec.kind == "numbers":
        seen = np.concatenate([rows.y[own] for own in parts.train[: parts.num_old]])
        level = float(np.quantile(seen, 0.75))

    def judged(said: Forecast, client: Any) -> Judged:
        told, y = said(client.x_test), client.y_test
        how = (spec.decision, spec.ratios, level or 0.0)
        return judge(told.value, told.stated, y, found.task, *how)

    old, new = there.clients, there.new_clients
    moved = [*old[1:], old[0]]
    groups = {
        "here": [judged(said, one) for said, one in zip(found.old, old, strict=True)],
        "moved": [judged(said, one) for said, one in zip(found.old, moved, strict=True)],
        "new": [judged(said, one) for said, one in zip(found.new, new, strict=True)],
    }
    spent = time.process_time() - begun
    owners = {"here": old, "moved": old, "new": new}
    return {
        **case._asdict(),
        "rival": rival.name,
        "split": parts.digest,
        "seconds": round(spent, 3),
        "bytes": found.num_bytes,
        **{
            place: summary(
                some,
                [0 if one.y_held is None else len(one.y_held) for one in owners[place]],
                found.task,
                spec.ratios,
            )
            for place, some in groups.items()
        },
    }


def why_not(rival: Rival, spec: Spec, rows: Rows, case: Case) -> str:
    """Return why a rival cannot take part on a data set; "" if it can. Nothing is trained."""
    if not rival.fits(spec):
        return "it is not for such data or such a network"
    try:
        held = is_calibrated(rival, spec)
        there = federation(spec, rows, split(spec, rows, case), held)
        halves_for(prepared(rival, spec, case.seed), there)
    except ConfigError as error:
        return str(error)
    return ""
