"""Calibration in messages: three requests after the last round, each with everyone's sums so far.

    request    carries                        the reply holds
    hold       nothing (it rides on the test) the client's table of held-out NLL
    score      everyone's table               the client's histograms of scores and of doubt
    judge      everyone's sums                what the client uses, and its tallies

The sums of training clients add up exactly, so replies may come in any order. A client that does
not answer, or whose sums are impossible, is left out of them and reported. A client remembers its
posteriors from one request to the next (`Memory`).

Which samples a client holds out it knows from its own settings (our app). A user's own app learns
it from the strategy (`holding.py`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import metrics
from ..calibration import curves, trust
from ..calibration.curves import Chosen
from ..contract import ClientHalf
from ..data import DataSettings
from ..errors import WireError
from ..rounds import deciding, uncertain
from ..rounds.calibrated import Calibrated, One, Taken, tests_of
from ..rounds.deciding import Held
from ..rounds.uncertain import Judged, Uncertain
from ..tasks import Task
from ..tree import Tensors, flatten, matching, unflatten

STAGES = ("hold", "score", "judge")
MOST_POSTERIORS = 8
MOST_TESTS = 8
MOST_TEXT = 4096  # bytes


# -- the client ------------------------------------------------------------------------------------
class Order:
    """What the server asks of a client; `read` checks what came with a message."""

    def __init__(self, stage: str, how: str, coverage: float, sets: str) -> None:
        self.stage, self.how, self.coverage, self.sets = stage, how, coverage, sets

    def text(self) -> str:
        """Return the order for a message's header."""
        return json.dumps([self.stage, self.how, self.coverage, self.sets])

    @classmethod
    def read(cls, text: Any) -> Order:
        """Return the order in a header; raise if it is none."""
        try:
            stage, how, coverage, sets = json.loads(text)
            settings = DataSettings(calibration=how, coverage=coverage, sets=sets)
        except (TypeError, ValueError) as error:
            raise WireError(f"the order to calibrate cannot be read: {error}") from None
        if stage not in STAGES or not settings.calibrated:
            raise WireError(f"the order to calibrate must be one of {STAGES}, got {stage!r}")
        return cls(stage, how, float(coverage), sets)


class Begun(NamedTuple):
    """What a client needs again in the next request: its adapted state, posteriors and tables."""

    adapted: Any
    known: Any  # Uncertain, or Spread where targets are numbers
    fitted: Any
    own: Any


class Memory:
    """What clients of this process began, at most `numbers` numbers; the oldest go first. In a new
    process it is made again, with the same bits.
    """

    def __init__(self, numbers: int) -> None:
        self.numbers, self.begun = numbers, OrderedDict[tuple[Any, ...], Begun]()
        self.lock = threading.Lock()

    def recall(self, key: tuple[Any, ...]) -> Begun | None:
        """Return what was begun with these inputs, and forget it; None if it is not here."""
        with self.lock:
            return self.begun.pop(key, None)

    def keep(self, key: tuple[Any, ...], begun: Begun) -> None:
        """Remember what was begun."""
        with self.lock:
            self.begun[key] = begun
            while sum(map(size, self.begun.values())) > self.numbers:
                self.begun.popitem(last=False)


def size(begun: Begun) -> int:
    """Return how many numbers a client's part of the memory has."""
    parts = (begun.adapted, begun.fitted, begun.own)
    return sum(leaf.numel() for part in parts for leaf in flatten(part).values())


MEMORY = Memory(2**25)


def begin(order: Order, half: ClientHalf, adapted: Any, broadcast: Any, data: Any) -> Begun:
    """Return a client's posteriors and the tables of its held-out samples."""
    known = Uncertain(half, order.sets == "class")
    fitted = uncertain.fit_alone(known, adapted, broadcast, data.train, data.num_held)
    return Begun(adapted, known, fitted, uncertain.hold_alone(known, fitted, data.held))


def answer(
    order: Order,
    half: ClientHalf,
    begun: Begun,
    data: Any,
    sums: Tensors,
    *,
    seed: int,
    client: int,
) -> tuple[Tensors, Taken | None]:
    """Return (what the client replies, what it takes home if this was the last request)."""
    _, known, fitted, own = begun
    if order.stage == "hold":
        every = deciding.whole(own)
        return {"rows": every.rows, "raw": every.raw, "table": every.table}, None
    blank = known.nothing_held()
    total = matching({"scores": blank.scores, "doubts": blank.doubts, **sums}, blank)
    own = uncertain.score_alone(known, fitted, own, total, data.held, order.how)
    if order.stage == "score":
        return {"scores": own.scores, "doubts": own.doubts}, None
    chosen, choice = uncertain.settled(
        known, fitted, own, total, data.held, order.how, order.coverage
    )
    judged = uncertain.judge_alone(
        known, fitted, choice, tests_of(data.test, half.model, seed=seed, client=client)
    )
    one = One(int(own.rows.sum()), chosen, judged, choice)
    taken = Taken(
        known.kinds, known.layer, fitted, choice, one, order.how, order.coverage, int(total.rows)
    )
    said = {"rows": own.rows.sum(), "chosen": as_vector(chosen, known.kinds)}
    said["kinds"] = torch.tensor(list(json.dumps(known.kinds).encode()), dtype=torch.uint8)
    return {**said, **flatten(judged, "judged")}, taken


def as_vector(chosen: Chosen, kinds: Mapping[str, Any]) -> Tensor:
    """Return what a client uses as numbers; −1 stands for a number that is not known."""
    names = ["", *kinds]
    gate, scale = chosen.gate
    held = [chosen.point, chosen.gated, chosen.calibrated, *(chosen.fitted.get(k) for k in kinds)]
    numbers = [float(names.index(chosen.posterior)), chosen.scale, chosen.temperature]
    numbers += [chosen.share, float(names.index(gate)), scale, float(chosen.plain), chosen.rest]
    return torch.tensor(
        [*numbers, *(-1.0 if one is None else one for one in held)], dtype=torch.float64
    )


def from_vector(vector: Tensor, kinds: Mapping[str, Any]) -> Chosen:
    """Return what a client uses; raise if it cannot be."""
    names = ["", *kinds]
    if vector.shape != (11 + len(kinds),) or not bool(torch.isfinite(vector).all()):
        raise WireError("the numbers of what the client uses are missing or not finite")
    place, scale, temperature, share, gate, gated, plain, rest, *held = vector.tolist()
    if not (
        place in range(len(names))
        and gate in range(len(names))
        and 0 <= min(scale, gated) <= max(scale, gated) <= max(curves.SCALES)
        and 0 < temperature <= 2 * curves.HIGHEST
        and 0 <= share <= max(curves.SHARES)
        and plain in (0, 1)
        and 0 <= rest <= 1
    ):
        raise WireError("the numbers of what the client uses are impossible")
    known = [None if one < 0 else one for one in held]
    fitted = {name: one for name, one in zip(kinds, known[3:], strict=True) if one is not None}
    use = (names[int(place)], scale, temperature, share, (names[int(gate)], gated))
    return Chosen(*use, known[0], known[1], known[2], fitted, bool(plain), rest)


# -- the server ------------------------------------------------------------------------------------
class Calibrator:
    """What the server collects over the three requests."""

    stages: tuple[str, ...] = STAGES

    def __init__(self, settings: DataSettings) -> None:
        self.settings, self.stage = settings, STAGES[0]
        self.tables: dict[int, Tensors] = {}  # rows, raw and table by training client
        self.scores: dict[int, Tensors] = {}  # scores and doubts by training client
        self.ones: dict[int, Any] = {}
        self.kinds: dict[str, tuple[str, str]] = {}

    def order(self) -> str:
        """Return the order of the present stage, for a message's header."""
        s = self.settings
        return Order(self.stage, s.calibrated_with, s.coverage, s.sets).text()

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
        if self.stage == "hold":
            self._check_tables(flat)
            if not new:
                self.tables[client] = flat
        elif self.stage == "score":
            scores = self._scores(flat, client, num_classes, new)
            if not new:
                self.scores[client] = scores
        else:
            self.ones[client] = self._one(flat, sizes, num_classes)

    def close(self) -> None:
        """End a stage. Tables of another shape than most clients' are left out of the sums."""
        if self.stage == "hold":
            self._usual("table")
        if self.stage != STAGES[-1]:
            self.stage = STAGES[STAGES.index(self.stage) + 1]

    def _usual(self, name: str) -> None:
        """Leave tables out whose array `name` has another shape than most clients'."""
        shapes = Counter(tuple(one[name].shape) for one in self.tables.values())
        usual = shapes.most_common(1)[0][0] if shapes else ()
        self.tables = {
            client: one for client, one in self.tables.items() if one[name].shape == usual
        }

    def sums(self) -> Tensors:
        """Return everyone's sums so far."""
        found: Tensors = uncertain.added(list(self.tables.values()))
        if self.scores:
            found |= uncertain.added(list(self.scores.values()))
        return found

    def result(self, new: set[int], num_classes: int) -> Any:
        """Return the uncertainty of all clients that answered; None if there is none."""
        clients = {client: one for client, one in self.ones.items() if client not in new}
        if not clients:
            return None
        others = {client: one for client, one in self.ones.items() if client in new}
        by_class = self.settings.sets == "class"
        blank = deciding.nothing_held(len(self.kinds), num_classes, by_class)
        total = unflatten(Held, {**flatten(blank), **self.sums()})
        return Calibrated(clients, others, total, self.kinds)

    # -- checks ------------------------------------------------------------------------------------
    def _check_tables(self, flat: Tensors) -> None:
        if set(flat) != {"rows", "raw", "table"}:
            raise WireError(f"calibration needs rows, raw and table, got {str(sorted(flat))[:80]}")
        rows, raw, table = flat["rows"], flat["raw"], flat["table"]
        step = len(curves.SCALES)
        fits = (
            rows.shape == ()
            and table.ndim == 3
            and table.shape[1:] == (len(curves.SIDES), curves.FINEST)
            and raw.shape == (table.shape[0], 2)
            and (table.shape[0] - 1) % step == 0
            and table.shape[0] <= 1 + step * MOST_POSTERIORS
            and rows.dtype == raw.dtype == table.dtype == torch.int64
        )
        if not fits:
            raise WireError("the tables of held-out NLL have a shape or dtype that cannot be")
        number, most = int(rows), self.settings.calibration_rows
        if not 0 <= number <= most:
            raise WireError(f"it claims {number} held-out samples; calibration_rows allows {most}")
        worst = number * (int(curves.WORST * curves.UNIT) + 1)
        values = torch.cat([table.flatten(), raw[:, 0]])
        square = int(worst * curves.WORST) + number
        if bool((values < 0).any() | (values > worst).any()) or bool(
            (raw[:, 1] < 0).any() | (raw[:, 1] > square).any()
        ):
            raise WireError("the tables of held-out NLL have impossible values")

    def _scores(self, flat: Tensors, client: int, num_classes: int, new: bool) -> Tensors:
        blank = deciding.nothing_held(0, num_classes, self.settings.sets == "class")
        for name, like in (("scores", blank.scores), ("doubts", blank.doubts)):
            found = flat.get(name)
            if found is None or found.shape != like.shape:
                raise WireError(f"the histogram of {name} is missing or has another shape")
            if found.dtype != torch.int64 or bool((found < 0).any()):
                raise WireError(f"the histogram of {name} has impossible values")
        counts = [int(flat["scores"].sum()), *flat["doubts"].sum((1, 2)).tolist()]
        if not new and counts != [int(self.tables[client]["rows"])] * 3:
            raise WireError("the histograms count other samples than the table")
        return {"scores": flat["scores"], "doubts": flat["doubts"]}

    def used(self, flat: Tensors) -> tuple[dict[str, tuple[str, str]], int, Tensor]:
        """Return (posteriors by name, held-out rows, what was chosen) of a reply; raise if they are
        impossible.
        """
        try:
            text = bytes(flat["kinds"][:MOST_TEXT].to(torch.uint8).tolist()).decode()
            kinds = {str(k): (str(a), str(b)) for k, (a, b) in json.loads(text).items()}
            rows, vector = int(flat["rows"]), flat["chosen"].double()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise WireError(f"what the client uses cannot be read: {error}") from None
        if len(kinds) > MOST_POSTERIORS or not 0 <= rows <= self.settings.calibration_rows:
            raise WireError("what the client uses is impossible")
        return kinds, rows, vector

    def _one(self, flat: Tensors, sizes: Any, num_classes: int) -> One:
        kinds, rows, vector = self.used(flat)
        chosen = from_vector(vector, kinds)
        judged = read_judged(flat, num_classes, sizes.test_size)
        self.kinds = self.kinds or kinds
        return One(rows, chosen, judged)


def read_judged(flat: Tensors, num_classes: int, test_size: int) -> dict[str, Judged]:
    """Return a client's tallies by test; raise if its test samples cannot give them."""
    tests = sorted({name.split("/")[1] for name in flat if name.startswith("judged/")})
    if "test" not in tests or len(tests) > MOST_TESTS:
        raise WireError(f"the tallies must be of at most {MOST_TESTS} tests, got {len(tests)}")
    found = {}
    for test in tests:
        own = {
            name.split("/", 2)[2]: leaf
            for name, leaf in flat.items()
            if name.startswith(f"judged/{test}/")
        }
        forms = sorted({name.split("/")[1] for name in own if name.startswith("tallies/")})
        if not set(forms) <= set(uncertain.FORMS) or "calibrated" not in forms:
            raise WireError(f"the forms of a model must be among {uncertain.FORMS}")
        flat_judged = matching_judged(own, forms, num_classes)
        for form in forms:
            tally, one = flat_judged.tallies[form], flat_judged.trusts[form]
            number = int(tally.num_examples)
            if not metrics.possible(tally) or not trust.possible(one, number):
                raise WireError(f"the tallies of {form!r} on {test!r} are inconsistent")
            if number > 2 * test_size:
                raise WireError(f"the tallies of {form!r} count more samples than the client has")
        found[test] = flat_judged
    return dict(sorted(found.items(), key=lambda item: item[0] != "test"))


def matching_judged(flat: Tensors, forms: list[str], num_classes: int) -> Judged:
    """Return the tallies of these forms; raise if names, shapes or dtypes are others."""
    blank, empty = metrics.zero(num_classes), trust.zero()
    tallies = {form: matching(under(flat, f"tallies/{form}/"), blank) for form in forms}
    trusts = {form: matching(under(flat, f"trusts/{form}/"), empty) for form in forms}
    alarms = under(flat, "alarms/")
    right = all(
        leaf.shape == () and leaf.dtype == torch.int64 and int(leaf) >= 0
        for leaf in alarms.values()
    )
    if not right or set(alarms) != set(deciding.ALARMS):
        raise WireError("the counts of alarms are missing or impossible")
    if len(forms) * (len(blank) + len(empty)) + len(alarms) != len(flat):
        raise WireError("the tallies have names that are not expected")
    return Judged(tallies, trusts, alarms)


def under(flat: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: leaf for name, leaf in flat.items() if name.startswith(prefix)}
