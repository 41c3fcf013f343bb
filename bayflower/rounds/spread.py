"""The uncertainty of one client's personal model where targets are no classes.

1. `fit`: a pass over the training data gives the posteriors of the last layer (`maths/laplace.py`),
   with the generalised Gauss–Newton matrix of the task's likelihood.
2. `hold`: a pass over the held-out samples gives the NLL of each form of the model (the point, and
   each posterior) and the histogram of its scores (`calibration/intervals.py`).
3. `settled`: with its own sums and everyone's a client chooses a form, and for numbers the factors
   of its intervals.
4. `judge`: the client is tested as a point, with the Laplace posterior as it was fitted, with the
   form in use, and with conformal intervals.

The sums are whole numbers that add up exactly; nothing else of the held-out samples leaves a
client. Counts and ordered classes have no conformal intervals: theirs are those of the likelihood
with the posterior's spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calibration import intervals
from ..calibration.conformal import BINS
from ..calibration.curves import STRENGTH
from ..contract import ClientHalf
from ..maths import laplace
from ..metrics import GRID, on_grid
from ..networks.last import forward_last, last_layer
from ..networks.model import Batch
from ..tasks import Task
from ..tasks.measures import LEVELS
from ..tree import Tensors, to
from .solo import Samples, numbers
from .uncertain import over, pieces

FORMAT = "bayflower-intervals-1"
POINT, LAPLACE = "", "laplace"
SHOWN = ("rmse", "mae", "nll", "crps", "deviance", "accuracy", "ece")
INTERVALS = tuple(
    f"{what}_{round(100 * level)}" for level in LEVELS for what in ("coverage", "width")
)
LARGEST = 2.0**20  # of one sample's NLL


class Fitted(NamedTuple):
    """A personal model with its posteriors."""

    params: Tensors
    buffers: Tensors
    posteriors: dict[str, Tensors]


class Held(NamedTuple):
    """What held-out samples say, as whole numbers that add up over clients. The forms are the point
    and the posteriors, in their order.
    """

    rows: Tensor
    nll: Tensor  # (forms,) in units of 2^-32
    scores: Tensor  # (forms, bins), see calibration/intervals.py


class Choice(NamedTuple):
    """What a client uses."""

    posterior: str  # "" = the point
    factors: Tensor | None  # of intervals, by level; None if the likelihood's own are used
    nll: dict[str, float]  # on its held-out samples, by form


class One(NamedTuple):
    """One client: its number of held-out samples, what it uses, and its tallies by form."""

    rows: int
    choice: Choice
    judged: dict[str, Any]


class Taken(NamedTuple):
    """The uncertainty that one client takes home with its model."""

    kinds: dict[str, tuple[str, str]]  # posteriors by name: kind and origin
    layer: str | None
    fitted: Fitted
    one: One
    how: str  # calibration: shrunk, client, global or off
    coverage: float
    total_rows: int  # held-out samples of everyone


class Calibrated(NamedTuple):
    """Training clients and new clients, and everyone's sums."""

    clients: dict[int, One]
    new_clients: dict[int, One]
    total: Held
    kinds: dict[str, tuple[str, str]]
    task: Task


class Spread:
    """The uncertainty of personal models of one method and network; it holds no client's numbers.

    `kinds` names the posteriors, each with its kind and origin; it is known after the first `fit`.
    """

    def __init__(self, half: ClientHalf) -> None:
        self.half, self.model, self.task = half, half.model, half.model.task
        self.layer = last_layer(half.model)
        self.kinds: dict[str, tuple[str, str]] = {}

    def fit(self, state: Any, broadcast: Any, train: Batch) -> Fitted:
        """Return the model with its posteriors, in float64."""
        with torch.no_grad():
            params, buffers = numbers(self.half, state, broadcast, train.x[:1])
            seen = self.seen(params, buffers, train)
            own = self.half.spread(state, broadcast)
            known = {**params, **{laplace.SPREAD + name: value for name, value in own.items()}}
            found = self.half.posterior(known, broadcast, seen, self.layer)
        found = {name: one for name, one in found.items() if one.kind != "classes"}
        self.kinds = {name: (one.kind, one.origin) for name, one in found.items()}
        return Fitted(params, buffers, {name: one.tensors for name, one in found.items()})

    def seen(self, params: Tensors, buffers: Tensors, train: Batch) -> laplace.Seen | None:
        """Return what training samples show of the last layer; None if the outputs are not its."""
        if self.layer is None:
            return None
        total: laplace.Seen | None = None
        for part in pieces(train):
            out, features = forward_last(self.model, params, buffers, part.x, self.layer)
            if features is None:
                return None
            phi = laplace.with_bias(features, params, self.layer)
            one = laplace.see_task(self.task, out, phi, part)
            total = one if total is None else laplace.Seen(*map(torch.add, total, one))
        return total

    def predictions(self, fitted: Fitted, x: Tensor) -> Tensors:
        """Return the prediction of each form, by name; float64."""
        params, buffers = fitted.params, fitted.buffers
        out, features = forward_last(self.model, params, buffers, x, self.layer)
        out = out.double()
        found = {POINT: self.task.predict(out)}
        for name, tensors in fitted.posteriors.items():
            kind = self.kinds[name][0]
            if kind == "sampled":
                drawn = laplace.sampled_logits(self.model, params, buffers, x, tensors).double()
                variance = (drawn - out).square().mean(0)[..., : self.task.network]
            else:
                assert features is not None
                assert self.layer is not None
                phi = laplace.with_bias(features, params, self.layer)
                variance = laplace.variances(kind, tensors, phi)
            found[name] = self.task.widened(out, variance)
        return found

    # -- held-out samples --------------------------------------------------------------------------
    def nothing_held(self) -> Held:
        """Return the sums of no samples."""
        forms = 1 + len(self.kinds)
        blank = torch.zeros((), dtype=torch.int64)
        return Held(
            blank,
            torch.zeros(forms, dtype=torch.int64),
            torch.zeros(forms, BINS, dtype=torch.int64),
        )

    def hold(self, fitted: Fitted, held: Batch | None) -> Held:
        """Return the sums of one client's held-out samples."""
        if held is None or not len(held.y):
            return self.nothing_held()

        def one(batch: Batch) -> Held:
            found = self.predictions(fitted, batch.x)
            nll = [on_grid(self.nll(one, batch)).sum() for one in found.values()]
            scores = [intervals.histogram(one, batch.y, batch.mask) for one in found.values()]
            return Held((batch.mask != 0).sum(), torch.stack(nll), torch.stack(scores))

        summed: Held = to(over(held, one), "cpu")
        return summed

    def nll(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Return −log p(y) of each sample by its predictive distribution, of numbers."""
        task: Any = self.task
        scale = prediction[..., 1].sqrt()
        found = task.standard_nll((batch.y.double() - prediction[..., 0]) / scale) + scale.log()
        return torch.nan_to_num(found, LARGEST).clamp(-LARGEST, LARGEST) * (batch.mask != 0)

    def settled(self, own: Held, total: Held, how: str) -> Choice:
        """Return what a client uses, from its own sums and everyone's."""
        names = [POINT, *self.kinds]
        rows, known = int(own.rows), own.nll.double() / GRID
        nll = {name: float(known[place]) / rows for place, name in enumerate(names) if rows}
        everyone = total.nll.double() / GRID / max(int(total.rows), 1)
        if how == "client" or not int(total.rows):
            weighed, number = known, rows
        elif how == "global":
            weighed, number = everyone, int(total.rows)
        else:
            weighed, number = known + STRENGTH * everyone, int(total.rows)
        # if nothing tells: a posterior is honest about what was not seen
        honest = names.index(LAPLACE) if LAPLACE in names else 0
        place = int(weighed.argmin()) if number else honest
        factors = None
        if number and intervals.has_factors(self.task):
            factors = intervals.factors(own.scores[place], total.scores[place], how)
        return Choice(names[place], factors, nll)

    # -- tests -------------------------------------------------------------------------------------
    def judge(self, fitted: Fitted, choice: Choice, test: Batch) -> dict[str, Any]:
        """Return one client's tallies by form."""
        if not len(test.y):
            return {form: self.task.zero() for form in self.forms()}

        def one(batch: Batch) -> dict[str, Any]:
            known = self.predictions(fitted, batch.x)
            found = {"point": self.task.tally(known[POINT], batch.y, batch.mask)}
            if LAPLACE in known:
                found["fitted"] = self.task.tally(known[LAPLACE], batch.y, batch.mask)
            used = known[choice.posterior]
            found["posterior"] = self.task.tally(used, batch.y, batch.mask)
            found["calibrated"] = self.with_intervals(found["posterior"], used, choice, batch)
            return found

        judged: dict[str, Any] = to(over(test, one), "cpu")
        return judged

    def forms(self) -> list[str]:
        """Return the forms that are tested."""
        fitted = ["fitted"] if LAPLACE in self.kinds else []
        return ["point", *fitted, "posterior", "calibrated"]

    def with_intervals(self, tally: Any, used: Tensor, choice: Choice, batch: Batch) -> Any:
        """Return a tally whose intervals are those that the client uses."""
        if choice.factors is None or not intervals.has_factors(self.task):
            return tally
        scale, real = self.task.scale, batch.mask != 0  # type: ignore[attr-defined]
        y, covered, width = batch.y.double(), [], []
        for level in LEVELS:
            low, high = intervals.interval(self.task, used, level, choice.factors)
            covered.append(((low <= y) & (y <= high) & real).sum())
            wide = ((high - low) / scale).clamp(max=LARGEST)
            width.append((on_grid(wide) * real).sum().double() / GRID)
        return tally._replace(covered=torch.stack(covered), width=torch.stack(width))


def take_home(
    half: ClientHalf,
    adapted: Any,
    broadcast: Any,
    data: Samples,
    total: Held | None,
    how: str,
    coverage: float,
) -> Taken:
    """Return one client's uncertainty from its adapted state, its samples and everyone's sums; with
    `total` None from its own held-out samples alone.
    """
    spread = Spread(half)
    fitted = spread.fit(adapted, broadcast, data.train)
    calibrates = intervals.has_factors(half.model.task) and how != "off"
    own = spread.hold(fitted, data.held if calibrates else None)
    if total is None or total.nll.shape != own.nll.shape:
        total, how = own, "client" if calibrates else "off"
    return taken_of(spread, fitted, own, total, data.test, how, coverage)


def taken_of(
    spread: Spread, fitted: Fitted, own: Held, total: Held, test: Batch, how: str, coverage: float
) -> Taken:
    """Return what a client takes home, with its test."""
    choice = spread.settled(own, total, how)
    one = One(int(own.rows), choice, spread.judge(fitted, choice, test))
    return Taken(spread.kinds, spread.layer, fitted, one, how, coverage, int(total.rows))


# -- result.json -----------------------------------------------------------------------------------
def block(found: Calibrated, how: str, coverage: float) -> dict[str, Any]:
    """Return the block "uncertainty" of result.json."""
    return {
        "task": found.task.name,
        "calibration": how,
        "coverage": coverage,
        "rows": int(found.total.rows),
        "posteriors": {
            name: {"kind": kind, "origin": origin} for name, (kind, origin) in found.kinds.items()
        },
        "clients": group(found.clients, found.task),
        "new_clients": group(found.new_clients, found.task) if found.new_clients else None,
    }


def group(clients: Mapping[int, One], task: Task) -> dict[str, Any]:
    """Return the numbers of some clients: each form of the model, and what each client uses."""
    forms = {
        form: shown(task, {client: one.judged[form] for client, one in clients.items()})
        for form in next(iter(clients.values())).judged
    }
    return {
        "forms": forms,
        "per_client": [per_client(client, one, task) for client, one in sorted(clients.items())],
    }


def shown(task: Task, tallies: Mapping[int, Any]) -> dict[str, Any]:
    """Return the numbers of some tallies."""
    found = task.summarise(tallies)
    return {key: found[key] for key in (*SHOWN, *INTERVALS, "pit") if key in found}


def per_client(client: int, one: One, task: Task) -> dict[str, Any]:
    """Return what one client uses, and how it did on its own test samples."""
    found = task.summarise({client: one.judged["calibrated"]})
    keys: Sequence[str] = ("nll", *INTERVALS)
    return {
        "client": client,
        "rows": one.rows,
        "num_examples": found["num_examples"],
        "posterior": one.choice.posterior or None,
        "held_out_nll": {name or "point": value for name, value in one.choice.nll.items()},
        "factor_90": intervals.factor_at(task, one.choice.factors, 0.9),
        **{key: found.get(key) for key in keys},
    }
