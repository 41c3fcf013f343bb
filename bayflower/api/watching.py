"""Functions of a user that see every round, and early stopping on validation samples."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..config import parse
from ..engines import prepare, train
from ..errors import ConfigError
from ..files import checkpoint, place
from ..files.records import Progress
from ..files.texts import read_json, write_json
from ..files.tracking import flat
from .training import Stop

FILE = "stopping.json"
SHARE = 0.2  # of the training samples, for validation
# whether more is better
UP = {
    **{"accuracy": True, "balanced_accuracy_mean": True, "nll": False},
    **{"rmse": False, "crps": False, "deviance": False},
}

OnRound = Callable[..., Any]


class Which(NamedTuple):
    """The run that a callback is told of."""

    label: str  # of the method
    method: str
    seed: int
    folder: Path


def callbacks_of(given: Any) -> list[OnRound]:
    """Return the functions of (round, numbers), or of (round, numbers, run), that were given, as
    one or several; an object with a function on_round counts as that.
    """
    several = isinstance(given, Iterable) and not callable(given)
    found = [] if given is None else list(given) if several else [given]
    functions = [one.on_round if hasattr(one, "on_round") else one for one in found]
    for one in functions:
        if not callable(one):
            raise ConfigError(
                "callbacks must be functions of (round, numbers), or objects with on_round, got "
                f"{type(one).__name__}"
            )
        if not (takes(one, 2) or takes(one, 3)):
            raise ConfigError(
                "callbacks must be functions of (round, numbers) or (round, numbers, run), got "
                f"{called(one)}{inspect.signature(one)}"
            )
    return functions


def called(function: OnRound) -> str:
    """Return the name of a function for an error."""
    return str(getattr(function, "__name__", type(function).__name__))


def takes(function: OnRound, number: int) -> bool:
    """Return whether a function can be called with so many arguments; one that does not tell can
    be called with two.
    """
    try:
        known = inspect.signature(function)
    except (TypeError, ValueError):
        return number == 2
    try:
        known.bind(*range(number))
    except TypeError:
        return False
    return True


class Watcher:
    """Calls functions once for each round, when its numbers are complete: its test arrives with the
    next round. A function that returns True ends the run after that round, if the run `ends` so.
    """

    def __init__(
        self, functions: Sequence[OnRound], run: Which | None = None, ends: bool = True
    ) -> None:
        self.functions, self.told, self.stopped = list(functions), 0, False
        self.run, self.ends = run, ends

    def progress(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Tell of the rounds before the last one."""
        for record in records[:-1]:
            self.tell(record)

    def finish(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Tell of the rounds that are left, at the end."""
        self.stopped = True
        for record in records:
            self.tell(record)

    def tell(self, record: Mapping[str, Any]) -> None:
        """Tell of one round, unless it is known."""
        round = int(record["round"])
        if round <= self.told:
            return
        self.told = round
        numbers = {name: value for name, value in flat(record).items() if name != "round"}
        answers = [
            function(round, dict(numbers), *(() if takes(function, 2) else (self.run,)))
            for function in self.functions
        ]
        if any(answer is True for answer in answers) and not self.ends:
            which = called(self.functions[answers.index(True)])
            raise ConfigError(
                f"the callback {which} returned True after round {round}, but no run of a "
                "comparison ends early: its methods would train for unequal times; return None, "
                "and let patience choose the rounds"
            )
        if any(answer is True for answer in answers) and not self.stopped:
            self.stopped = True
            raise Stop(round)


# -- early stopping ------------------------------------------------------------------------------
class Patience(NamedTuple):
    """How long a run waits for a better round on validation samples."""

    rounds: int
    monitor: str
    share: float

    def check(self) -> None:
        """Raise if it makes no sense."""
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ConfigError(f"patience must be a number of rounds from 1, got {self.rounds!r}")
        if self.monitor not in UP:
            raise ConfigError(f"monitor must be one of {', '.join(UP)}, got {self.monitor!r}")
        if not 0 < self.share < 1:
            raise ConfigError(f"validation must be a share in (0, 1), got {self.share}")


class Search:
    """The curve of a run on validation samples, and its best round so far."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.curve: dict[int, float] = {}

    @property
    def best(self) -> int:
        """Return the best round; the earliest of several."""
        up = UP[self.patience.monitor]
        return min(self.curve, key=lambda one: (-self.curve[one] if up else self.curve[one], one))

    def see(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the points of some rounds."""
        for record in records:
            value = (record.get("personal") or {}).get(self.patience.monitor)
            if value is not None:
                self.curve[int(record["round"])] = float(value)

    def progress(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the points of some rounds; raise when patience is at its end."""
        self.see(records)
        if self.curve and max(self.curve) - self.best >= self.patience.rounds:
            raise Stop(max(self.curve))


def rounds_by(
    patience: Patience,
    method: str,
    given: Mapping[str, Any],
    engine: str,
    folder: Path,
    watch: Callable[[Progress], Any],
    port: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (`given` with the number of rounds that validation samples choose, the choice as it is
    kept in `folder`). The samples are a share of each training client's training samples, in a run
    of its own; the run that follows trains on all of them. No test sample is seen.
    """
    patience.check()
    found = {**given, "validation": patience.share}
    found.setdefault("evaluate_every", 1)
    if engine in ("fused", "loop"):
        found["checkpoint_every"] = 0
    run = parse(method, found)
    known = run.training.make_task(2).curve
    if patience.monitor not in known:
        if patience.monitor != "accuracy":
            raise ConfigError(
                f"monitor must be one of {', '.join(known)} for task={run.training.task}, got "
                f"{patience.monitor!r}"
            )
        patience = patience._replace(monitor="nll")  # what a task without classes has
    given = dict(given)
    if run.training.schedule_rounds:  # a schedule keeps the length it has in the search
        given["schedule_rounds"] = run.training.schedule_rounds
    settings = place.digest(parse(method, given), engine)
    asked = {**patience._asdict(), "most": run.settings.rounds, "settings": settings}
    kept = read_json(folder / FILE)
    if kept.get("asked") == asked:
        return {**given, "rounds": int(kept["best"])}, kept
    prepared, search = prepare(run, engine), Search(patience)
    with tempfile.TemporaryDirectory(prefix="bayflower-") as temporary:
        out = Path(temporary)
        with watch(search.progress) as progress, suppress(Stop):
            search.see(train(prepared, found, out, progress, None, port)["rounds"])
        if saved := checkpoint.read(out):  # Flower's programs show their last rounds only
            search.see(saved.records)
    if not search.curve:
        raise ConfigError(
            f"no round was tested in {run.settings.rounds} rounds; lower evaluate_every for "
            "early stopping"
        )
    content = {"asked": asked, "best": search.best, "curve": sorted(search.curve.items())}
    keep(folder, content)
    return {**given, "rounds": search.best}, content


def keep(folder: Path, choice: Mapping[str, Any]) -> None:
    """Write how the number of rounds was chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, json.loads(json.dumps(choice)))
