"""The part of a personal model's card about its uncertainty where targets are no classes, and what
the files have about it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calibration import intervals
from ..calibration.conformal import ENOUGH
from ..rounds.spread import INTERVALS, SHOWN, Taken, shown
from ..tasks import Task
from ..tree import Tensors
from .network import NARROW


def extras_of(taken: Taken, task: Task) -> Tensors:
    """Return what surrounds the network, by the names of numbers.py."""
    found: Tensors = {}
    choice = taken.one.choice
    if choice.posterior:
        own = taken.fitted.posteriors[choice.posterior]
        for name, value in own.items():
            key = f"posterior/{name}"
            found[key] = value.detach().cpu().float() if key in NARROW else value.detach().cpu()
    if intervals.has_factors(task):
        factor = intervals.factor_at(task, choice.factors, taken.coverage)
        if choice.factors is not None and factor is not None:
            found["interval/factors"] = choice.factors.cpu()
        known = intervals.width(task, taken.coverage) if factor is None else factor
        found["interval/factor"] = torch.tensor(known, dtype=torch.float64)
    return found


def block(taken: Taken, task: Task, client: int) -> dict[str, Any]:
    """Return the block "uncertainty" of a card."""
    choice, one = taken.one.choice, taken.one
    kind, origin = taken.kinds.get(choice.posterior, ("", ""))
    tested = one.judged["calibrated"]
    measured = task.summarise({client: tested})
    forms = {form: shown(task, {client: tally}) for form, tally in one.judged.items()}
    return {
        "used": "posterior" if choice.posterior else "point",
        "why": why(taken),
        "posterior": {"name": choice.posterior, "kind": kind, "origin": origin}
        if choice.posterior
        else None,
        "calibration": {"how": taken.how} if one.rows or taken.total_rows else None,
        "held_out": {
            "num_examples": one.rows,
            "num_examples_of_everyone": taken.total_rows,
            "nll": {name or "point": value for name, value in choice.nll.items()},
        },
        "intervals": {
            "level": taken.coverage,
            "conformal": choice.factors is not None,
            "factor": intervals.factor_at(task, choice.factors, taken.coverage),
            "promise": promise(taken, task),
            "num_tested": measured["num_examples"],
            "measured": {key: measured.get(key) for key in INTERVALS if key in measured},
        },
        "sets": None,
        "doubt": "The width of the interval.",
        "tests": {"test": forms} if measured["num_examples"] else None,
        "alarms": {},
        "information": {"offered": False, "why": "It is a measure of classes."},
        "abstention": None,
    }


def why(taken: Taken) -> str:
    """Return in words which form is used, and what decided it."""
    choice, rows, total = taken.one.choice, taken.one.rows, taken.total_rows
    if not taken.kinds:
        return "The point is used: the outputs are not those of a Linear layer."
    if not (rows or total):
        return (
            f"The posterior {choice.posterior} of the last layer is used as it was fitted: no "
            "samples were held out to judge it."
        )
    whose = f"the client's {rows} held-out samples and everyone's {total}"
    if taken.how != "shrunk":
        whose = f"{rows if taken.how == 'client' else total} held-out samples"
    if not choice.posterior:
        return f"The point is used: on {whose} no posterior has a lower NLL."
    return f"The posterior {choice.posterior} is used: on {whose} it has the lowest NLL."


def promise(taken: Taken, task: Task) -> str:
    """Return what intervals promise, in one sentence or two."""
    level, rows = taken.coverage, taken.one.rows
    if task.whole:
        return "An interval is a range of classes, by their probabilities."
    if taken.one.choice.factors is None:
        return (
            f"An interval holds {level:.0%} of the predictive distribution: noise, and the "
            "uncertainty of the last layer. No held-out samples checked it."
        )
    text = f"For about {level:.0%} of new samples the interval holds the target, if they are like "
    if taken.how == "global":
        return text + f"everyone's {taken.total_rows} held-out samples."
    if taken.how == "shrunk" and rows < ENOUGH:
        return text + (
            f"the client's {rows} held-out samples, filled up to {ENOUGH} with everyone's "
            f"{taken.total_rows}, and these are like the client's."
        )
    return text + f"the client's {rows} held-out samples (exchangeable)."


def metrics_of(summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the metrics of a card."""
    keys = ("num_examples", *SHOWN, *INTERVALS)
    return None if summary is None else {key: summary[key] for key in keys if key in summary}


def targets_of(y: Tensor) -> dict[str, Any]:
    """Return what training targets are like: mean and standard deviation."""
    known = y.double()
    return {"mean": float(known.mean()), "std": float(known.std(correction=0))}
