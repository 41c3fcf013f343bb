"""Calibration in messages where targets are numbers: two requests after the last round.

    request    carries                        the reply holds
    hold       nothing (it rides on the test) rows, NLL and histograms of scores of held-out samples
    judge      everyone's sums                what the client uses, and its tallies

Everything else is as in `calibrating.py`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..calibration.conformal import BINS
from ..calibration.intervals import LEVELS
from ..contract import ClientHalf
from ..errors import WireError
from ..rounds.spread import LARGEST, Calibrated, Choice, Fitted, Held, One, Spread, Taken, taken_of
from ..rounds.uncertain import added
from ..tasks import Task
from ..tree import Tensors, flatten, matching, unflatten
from .calibrating import MOST_POSTERIORS, Begun, Calibrator, Order, under

FORMS = ("point", "fitted", "posterior", "calibrated")


# -- the client ------------------------------------------------------------------------------------
def begin(half: ClientHalf, adapted: Any, broadcast: Any, data: Any) -> Begun:
    """Return a client's posteriors and the sums of its held-out samples."""
    known = Spread(half)
    fitted = known.fit(adapted, broadcast, data.train)
    return Begun(adapted, known, fitted, known.hold(fitted, data.held))


def answer(order: Order, begun: Begun, data: Any, sums: Tensors) -> tuple[Tensors, Taken | None]:
    """Return (what the client replies, what it takes home if this was the last request)."""
    known: Spread = begun.known
    fitted: Fitted = begun.fitted
    own: Held = begun.own
    if order.stage == "hold":
        return dict(own._asdict()), None
    total = matching(sums, known.nothing_held())
    taken = taken_of(known, fitted, own, total, data.test, order.how, order.coverage)
    said = {"rows": own.rows, "chosen": as_vector(taken.one.choice, known)}
    said["kinds"] = torch.tensor(list(json.dumps(known.kinds).encode()), dtype=torch.uint8)
    return {**said, **flatten(taken.one.judged, "judged")}, taken


def as_vector(choice: Choice, known: Spread) -> Tensor:
    """Return what a client uses as numbers: its form, the NLL of each form on held-out samples (NaN
    = not known), and the factors (0 = none).
    """
    names = ["", *known.kinds]
    nll = [choice.nll.get(name, torch.nan) for name in names]
    factors = [0.0] * len(LEVELS) if choice.factors is None else choice.factors.tolist()
    return torch.tensor([float(names.index(choice.posterior)), *nll, *factors], dtype=torch.float64)


def from_vector(vector: Tensor, kinds: dict[str, tuple[str, str]]) -> Choice:
    """Return what a client uses; raise if it cannot be."""
    names = ["", *kinds]
    if vector.shape != (1 + len(names) + len(LEVELS),):
        raise WireError("the numbers of what the client uses are missing")
    place, nll, factors = vector[0], vector[1 : 1 + len(names)], vector[1 + len(names) :]
    if float(place) not in range(len(names)) or not bool((factors >= 0).all()):
        raise WireError("the numbers of what the client uses are impossible")
    known = {
        name: float(value)
        for name, value in zip(names, nll, strict=True)
        if bool(torch.isfinite(value))
    }
    return Choice(names[int(place)], factors if bool(factors.any()) else None, known)


# -- the server ------------------------------------------------------------------------------------
class NumbersCalibrator(Calibrator):
    """What the server collects over the two requests."""

    stages = ("hold", "judge")

    def hear(
        self,
        flat: Tensors,
        client: int,
        new: bool,
        sizes: Any,
        num_classes: int,
        task: Task | None = None,
    ) -> None:
        """Take a client's reply; raise if it is impossible for a client of these `sizes`."""
        assert task is not None
        self.task = task
        if self.stage == "hold":
            self._check_tables(flat)
            if not new:
                self.tables[client] = flat
        else:
            self.ones[client] = self._judged(flat, sizes)

    def close(self) -> None:
        """End a stage. Sums of another shape than most clients' are left out."""
        self._usual("nll")
        self.stage = self.stages[-1]

    def result(self, new: set[int], num_classes: int) -> Any:
        """Return the uncertainty of all clients that answered; None if there is none."""
        clients = {client: one for client, one in self.ones.items() if client not in new}
        if not clients:
            return None
        others = {client: one for client, one in self.ones.items() if client in new}
        total = unflatten(Held, added(list(self.tables.values())))
        return Calibrated(clients, others, total, self.kinds, self.task)

    def _check_tables(self, flat: Tensors) -> None:
        if set(flat) != set(Held._fields):
            raise WireError(f"calibration needs {Held._fields}, got {str(sorted(flat))[:80]}")
        rows, nll, scores = (flat[name] for name in Held._fields)
        fits = (
            rows.shape == ()
            and nll.ndim == 1
            and 1 <= len(nll) <= 1 + MOST_POSTERIORS
            and scores.shape == (len(nll), BINS)
            and all(leaf.dtype == torch.int64 for leaf in flat.values())
        )
        number, most = int(rows) if fits else -1, self.settings.calibration_rows
        if not 0 <= number <= most:
            raise WireError(f"it claims {number} held-out samples; calibration_rows allows {most}")
        if (
            bool((nll.double().abs() > number * (LARGEST + 1) * 2.0**32).any())
            or bool((scores < 0).any())
            or scores.sum(1).tolist() != [number] * len(nll)
        ):
            raise WireError("the sums of held-out samples are impossible")

    def _judged(self, flat: Tensors, sizes: Any) -> One:
        kinds, rows, vector = self.used(flat)
        judged = under(flat, "judged/")
        forms = {name.split("/")[0] for name in judged}
        if not forms <= set(FORMS) or "calibrated" not in forms:
            raise WireError(f"the forms of a model must be among {FORMS}")
        found = {
            form: matching(under(judged, f"{form}/"), self.task.zero())
            for form in FORMS
            if form in forms
        }
        for form, tally in found.items():
            if not self.task.possible(tally) or int(tally.num_examples) > 2 * sizes.test_size:
                raise WireError(f"the tallies of {form!r} are inconsistent")
        self.kinds = self.kinds or kinds
        return One(rows, from_vector(vector, kinds), found)


def calibrator_for(settings: Any, task: str) -> Calibrator:
    """Return what collects the calibration of a task."""
    return Calibrator(settings) if task == "classification" else NumbersCalibrator(settings)
