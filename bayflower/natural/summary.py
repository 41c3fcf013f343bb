"""What the runs say: means over seeds, paired differences, who is best, and the leaderboard.

Rivals of a case have the same split with the same seed, so differences are taken seed by seed. The
95 % interval of a mean difference is Student's over seeds. It says what other divisions of the same
data would give, not what other data would.

    regret   mean over the cost ratios r of cost/(1 + r)
    gap      |covered − 90 %| of all test samples, mean over seeds
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from ..errors import ConfigError
from .rivals import RIVALS
from .runs import Line
from .scores import LEVEL
from .sets import ALL, SETS

PLACES = ("here", "new", "moved")
METRICS = ("nll", "gap", "regret")  # in which somebody is best
GOOD = (0.88, 0.93)  # share that 90 % statements may cover


class Group(NamedTuple):
    """A data set, samples a client, and whether tests are later in time."""

    dataset: str
    n: int
    later: bool

    @property
    def order(self) -> tuple[int, bool, float]:
        """Return its place in a table; all samples come last."""
        return list(SETS).index(self.dataset), self.later, math.inf if self.n == ALL else self.n

    @property
    def amount(self) -> str:
        """Return the samples in words."""
        return ("all" if self.n == ALL else str(self.n)) + (", later" if self.later else "")


class Difference(NamedTuple):
    """A mean difference with its 95 % interval over seeds; NaN ends for one seed."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sure(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


# runs by group, rival and seed
Table = dict[Group, dict[str, dict[int, Line]]]


def table_of(lines: Iterable[Line]) -> Table:
    """Return the runs by group, rival and seed; raise if rivals of a case had different splits."""
    found: Table = {}
    splits: dict[tuple[Group, int], str] = {}
    ordered = sorted(lines, key=lambda one: (one["dataset"], one["n"], one["seed"], one["rival"]))
    for line in ordered:
        if line["dataset"] not in SETS:
            raise ConfigError(f"the results have runs on {line['dataset']!r}, which is not known")
        group = Group(line["dataset"], line["n"], line["later"])
        known = splits.setdefault((group, line["seed"]), line["split"])
        if known != line["split"]:
            raise ConfigError(
                f"runs on {group.dataset}, seed {line['seed']} have different splits, so that they "
                "cannot be compared: the data have changed; choose another --results"
            )
        found.setdefault(group, {}).setdefault(line["rival"], {})[line["seed"]] = line
    return dict(sorted(found.items(), key=lambda item: item[0].order))


def value(line: Line, place: str, metric: str) -> float:
    """Return a number of a run; NaN if it has none."""
    block = line[place]
    if metric == "regret":  # None: of nobody is the outcome known
        costs = [(float(r), cost) for r, cost in block["cost"].items()]
        return float(np.mean([math.nan if c is None else c / (1 + r) for r, c in costs]))
    if metric == "gap":
        return math.nan if block["coverage"] is None else abs(block["coverage"] - LEVEL)
    found = line[metric] if metric in ("seconds", "bytes") else block[metric]
    return math.nan if found is None else float(found)


def mean(runs: Mapping[int, Line], place: str, metric: str) -> float:
    """Return the mean over the seeds that have the number; NaN if none has."""
    return student([value(line, place, metric) for line in runs.values()]).mean


def difference(
    one: Mapping[int, Line], other: Mapping[int, Line], place: str, metric: str
) -> Difference:
    """Return one − other, over the seeds in which both have the number."""
    seeds = sorted(set(one) & set(other))
    each = [value(one[s], place, metric) - value(other[s], place, metric) for s in seeds]
    return student(each)


def student(each: Sequence[float]) -> Difference:
    """Return the mean with Student's 95 % interval; NaN is left out."""
    each = [one for one in each if not math.isnan(one)]
    number = len(each)
    if not number:
        return Difference(math.nan, math.nan, math.nan, 0)
    middle = math.fsum(each) / number
    if number < 2:
        return Difference(middle, math.nan, math.nan, number)
    spread = math.sqrt(math.fsum((one - middle) ** 2 for one in each) / (number - 1))
    half = float(stdtrit(number - 1, 0.975)) * spread / math.sqrt(number)
    return Difference(middle, middle - half, middle + half, number)


class Best(NamedTuple):
    """Who has the lowest mean, and who cannot be told from it over these seeds."""

    rival: str
    mean: float
    level: tuple[str, ...]


def best(rivals: Mapping[str, Mapping[int, Line]], place: str, metric: str) -> Best | None:
    """Return the best of a group; None where nobody has the number. Only rivals with all seeds of
    the group take part.
    """
    most = max(len(runs) for runs in rivals.values())
    full = {name: runs for name, runs in rivals.items() if len(runs) == most}
    means = {name: mean(runs, place, metric) for name, runs in full.items()}
    known = {name: one for name, one in means.items() if not math.isnan(one)}
    if not known:
        return None
    first = min(known, key=lambda name: (known[name], name))
    level = tuple(
        name
        for name in known
        if name != first and not difference(full[name], full[first], place, metric).low > 0
    )
    return Best(first, known[first], level)


def coverage(runs: Mapping[int, Line], place: str) -> float:
    """Return the share of all test samples of all seeds inside their statements."""
    pairs = [(line[place]["coverage"], line[place]["samples"]) for line in runs.values()]
    known = [(share, number) for share, number in pairs if share is not None]
    total = sum(number for _, number in known)
    return sum(share * number for share, number in known) / total if total else math.nan


def outside(runs: Mapping[int, Line], place: str) -> tuple[int, int]:
    """Return how many clients' coverages lie outside their 99 % interval, of how many."""
    return (
        sum(len(line[place]["outside"]) for line in runs.values()),
        sum(line[place]["clients"] for line in runs.values()),
    )


def by_mean(means: Mapping[str, float]) -> list[str]:
    """Return names by their means, smallest first; those without one last."""
    return sorted(means, key=lambda name: (math.isnan(means[name]), means[name], name))


def shared(group: Mapping[str, Mapping[int, Line]], names: Sequence[str]) -> str | None:
    """Return the first of some rivals that has runs in a group."""
    return next((name for name in names if name in group), None)


def ours(rivals: Iterable[str]) -> list[str]:
    """Return those that we recommend."""
    return [name for name in rivals if name in RIVALS and RIVALS[name].ours]


# -- the leaderboard -------------------------------------------------------------------------------
HEAD = (
    *("dataset", "n", "later", "place", "rank", "rival", "seeds", "nll", "nll_minus_best"),
    *("low", "high", "crps", "coverage", "width", "ece", "worst_decile_nll", "regret"),
    *("clients_outside", "clients", "seconds", "bytes"),
)


def leaderboard(table: Table) -> str:
    """Return the leaderboard as CSV: a row for each rival of each group and place, best NLL first.
    The same runs give the same bytes.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for group, rivals in table.items():
        for place in PLACES:
            means = {name: mean(runs, place, "nll") for name, runs in rivals.items()}
            ranked = by_mean(means)
            for rank, name in enumerate(ranked, 1):
                runs = rivals[name]
                gap = difference(runs, rivals[ranked[0]], place, "nll")
                away, number = outside(runs, place)
                size = "all" if group.n == ALL else group.n
                writer.writerow(
                    [group.dataset, size, int(group.later), place, rank, name, len(runs)]
                    + [cell(one) for one in (means[name], gap.mean, gap.low, gap.high)]
                    + [cell(mean(runs, place, "crps")), cell(coverage(runs, place))]
                    + [cell(mean(runs, place, key)) for key in ("width", "ece", "worst", "regret")]
                    + [away, number]
                    + [cell(mean(runs, place, "seconds")), round(mean(runs, place, "bytes"))]
                )
    return out.getvalue()


def cell(number: float) -> str:
    """Return a number of the leaderboard, "" if there is none."""
    return "" if math.isnan(number) else f"{number:.4g}"
