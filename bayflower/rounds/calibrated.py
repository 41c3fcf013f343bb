"""The calibrated uncertainty of many clients: what every engine returns, and its part of
result.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import metrics
from ..calibration import conformal, shifts, trust
from ..calibration.curves import Chosen
from ..contract import ClientHalf
from ..data import DataSettings, rng
from ..files.atomic import load_tensors, save_tensors
from ..networks.model import Batch, Model
from ..networks.parts import looks_up
from ..tree import flatten, unflatten
from . import spread
from .deciding import ALARMS, Choice, Held, alike, whole
from .solo import Samples
from .uncertain import (
    FORMS,
    Fitted,
    Judged,
    Uncertain,
    fit_alone,
    hold_alone,
    judge_alone,
    score_alone,
    settled,
)

FILE, FORMAT = "calibration.safetensors", "bayflower-calibration-4"
OLDER = ("bayflower-calibration-3", "bayflower-calibration-2")  # the same with fewer sides
TEST = "test"  # the samples as they are; other names are shifts
SHOWN = ("accuracy", "nll", "ece", "ece_allclass", "worst_client_accuracy")


class One(NamedTuple):
    """One client: its number of held-out samples, what it uses, and its tallies by test."""

    rows: int
    chosen: Chosen
    judged: dict[str, Judged]
    choice: Choice | None = None  # where it is known; it stays with the client


class Taken(NamedTuple):
    """The uncertainty that one client takes home with its model."""

    kinds: dict[str, tuple[str, str]]  # posteriors by name: kind and origin
    layer: str | None  # the last layer, None if the logits are not a Linear layer's output
    fitted: Fitted
    choice: Choice
    one: One
    how: str  # calibration: shrunk, client or global
    coverage: float
    total_rows: int  # held-out samples of everyone


class Calibrated(NamedTuple):
    """Training clients and new clients, and everyone's sums."""

    clients: dict[int, One]
    new_clients: dict[int, One]
    total: Held
    kinds: dict[str, tuple[str, str]]  # posteriors by name: kind and origin


def tests_of(test: Batch, model: Model, *, seed: int, client: int) -> dict[str, Batch]:
    """Return a client's test samples as they are and with each shift; places in a table of words
    cannot be shifted.
    """
    found = {TEST: test}
    for kind in () if looks_up(model.module_for(False)) else shifts.kinds(test.x):
        draw: np.random.Generator = rng(seed, "shift", client)
        found[kind] = test._replace(x=shifts.shifted(test.x, kind, draw))
    return found


def take_home(
    half: ClientHalf,
    adapted: Any,
    broadcast: Any,
    data: Samples,
    total: Held | None,
    settings: DataSettings,
    *,
    seed: int,
    client: int,
) -> Taken:
    """Return one client's uncertainty from its adapted state, its samples and everyone's sums; with
    `total` None from its own held-out samples alone.
    """
    uncertain = Uncertain(half, settings.sets == "class")
    fitted = fit_alone(uncertain, adapted, broadcast, data.train, data.num_held)
    own = hold_alone(uncertain, fitted, data.held)
    own = own if total is None else alike(own, total)
    how = settings.calibration if total is not None else "client"
    everyone = whole(own) if total is None else total
    own = score_alone(uncertain, fitted, own, everyone, data.held, how)
    everyone = whole(own) if total is None else total
    chosen, choice = settled(uncertain, fitted, own, everyone, data.held, how, settings.coverage)
    tests = tests_of(data.test, half.model, seed=seed, client=client) if len(data.test.y) else {}
    judged = judge_alone(uncertain, fitted, choice, tests)
    one = One(int(own.rows.sum()), chosen, judged, choice)
    rows = int(everyone.rows)
    return Taken(
        uncertain.kinds, uncertain.layer, fitted, choice, one, how, settings.coverage, rows
    )


def save_total(folder: Path, found: Any) -> None:
    """Write everyone's sums, from which personal models are calibrated later."""
    kind = FORMAT if isinstance(found, Calibrated) else spread.FORMAT
    save_tensors(folder / FILE, flatten(found.total), {"format": kind})


def load_spread(folder: Path) -> spread.Held | None:
    """Return everyone's sums of a run whose targets are numbers; None if it was not calibrated."""
    path = folder / FILE
    if not path.exists():
        return None
    what = "everyone's sums of calibration"
    return unflatten(spread.Held, load_tensors(path, spread.FORMAT, what)[0])


def load_total(folder: Path) -> Held | None:
    """Return everyone's sums of a run; None if it was not calibrated."""
    path = folder / FILE
    if not path.exists():
        return None
    what = "everyone's sums of calibration"
    return unflatten(Held, load_tensors(path, FORMAT, what, *OLDER)[0])


def block(found: Calibrated, how: str, coverage: float) -> dict[str, Any]:
    """Return the block "uncertainty" of result.json."""
    return {
        "calibration": how,
        "coverage": coverage,
        "rows": int(found.total.rows),
        "posteriors": {
            name: {"kind": kind, "origin": origin} for name, (kind, origin) in found.kinds.items()
        },
        "clients": group(found.clients, how, coverage),
        "new_clients": group(found.new_clients, how, coverage) if found.new_clients else None,
    }


def group(clients: Mapping[int, One], how: str, coverage: float) -> dict[str, Any]:
    """Return the numbers of some clients: each form of the model on the test samples and on shifted
    ones, and what each client uses.
    """
    tests = sorted(name for name in next(iter(clients.values())).judged if name != TEST)
    return {
        "forms": forms(clients, TEST),
        "shifted": {name: forms(clients, name) for name in tests},
        "alarms": {name: rates(clients, name) for name in (TEST, *tests)},
        "per_client": [
            per_client(client, one, how, coverage) for client, one in sorted(clients.items())
        ],
    }


def forms(clients: Mapping[int, One], test: str) -> dict[str, Any]:
    """Return the numbers of each form on one kind of samples."""
    found = {}
    for form in FORMS:
        tallies = {
            client: one.judged[test].tallies[form]
            for client, one in clients.items()
            if form in one.judged[test].tallies
        }
        if not tallies:
            continue
        summary = metrics.summarise(tallies)
        bars = summary["reliability"]["top_label"]
        trusts = trust.summarise({c: clients[c].judged[test].trusts[form] for c in tallies})
        del trusts["per_client"]
        # the sets are those of the calibrated model
        if form != "calibrated":
            trusts = {key: trusts[key] for key in ("brier", "error_auroc", "risk_coverage")}
        found[form] = {
            **{key: summary[key] for key in SHOWN},
            "ece_by_chance": metrics.by_chance(bars),
            "rms_debiased": metrics.debiased([metrics.squared_error(bars)]),
            **trusts,
            "reliability": bars,
            "worst_client_nll": max(
                (row["nll"] for row in summary["per_client"] if row["nll"] is not None),
                default=None,
            ),
        }
    return found


def rates(clients: Mapping[int, One], test: str) -> dict[str, float | None]:
    """Return the share of samples that raised each alarm."""
    parts = [one.judged[test] for one in clients.values()]
    number = sum(int(part.trusts["point"].num_examples) for part in parts)
    if not number:
        return {name: None for name in ALARMS}
    return {name: sum(int(part.alarms[name]) for part in parts) / number for name in ALARMS}


def per_client(client: int, one: One, how: str, coverage: float) -> dict[str, Any]:
    """Return what one client uses, and how it did on its own test samples."""
    judged, chosen = one.judged[TEST], one.chosen
    number = int(judged.trusts["calibrated"].num_examples)
    sets = trust.summarise({client: judged.trusts["calibrated"]})["per_client"][client]
    held = max(one.rows, conformal.ENOUGH) if how == "shrunk" else one.rows
    low, high = conformal.interval(held, number, coverage)
    nll = {
        form: float(judged.tallies[form].nll) / number if number else None
        for form in FORMS
        if form in judged.tallies
    }
    return {
        "client": client,
        "rows": one.rows,
        "num_examples": number,
        "posterior": chosen.posterior or None,
        "scale": chosen.scale,
        "uncalibrated": {"posterior": chosen.gate[0] or None, "scale": chosen.gate[1]},
        "temperature": chosen.temperature,
        "bias": chosen.share,
        "rest": chosen.rest,
        "doubt": "network" if chosen.plain else "calibrated",
        "held_out_nll": {
            "point": chosen.point,
            "posterior": chosen.gated,
            "calibrated": chosen.calibrated,
        },
        "nll": nll,
        "coverage": sets["coverage"],
        "covered": sets["covered"],
        # the 99 % interval of covered samples for these numbers of samples
        "covered_low": low,
        "covered_high": high,
        "set_size": sets["set_size"],
    }
