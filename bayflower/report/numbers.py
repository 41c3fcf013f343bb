"""The tables of the report: the final test by method, and where the numbers come from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .collect import Group, brief
from .page import spread, table
from .text import differing
from .verdict import METRICS, verdict


class Column(NamedTuple):
    """A column of the table: heading, key of the final block, factor, digits, and the metric of
    each client whose verdict decides what is bold.
    """

    heading: str
    key: str
    factor: float
    digits: int
    judged: str = ""


COLUMNS = (
    Column("accuracy, mean of sites, %", "accuracy_mean", 100, 1, "accuracy"),
    Column("all samples, %", "accuracy", 100, 1),
    Column("worst site, %", "worst_client_accuracy", 100, 1),
    Column("balanced, %", "balanced_accuracy_mean", 100, 1, "balanced_accuracy"),
    Column("NLL", "nll", 1, 3, "nll"),
    Column("ECE, %", "ece", 100, 1, "ece"),
    Column("fairness CV, %", "fairness_cv", 100, 1),
)
SPREADING = ("fairness_cv", "worst_client_accuracy")  # say nothing of a single client


def summary(groups: Sequence[Group], view: str = "personal") -> str:
    """Return the table of the final test. Bold is a method that is better than every other beyond
    noise, over several seeds.
    """
    some = [group for group in groups if group.values("accuracy", view)]
    if not some:
        return ""
    found = verdict(some, "accuracy", view)
    against = {one.title: one for one in found.against}
    rows = []
    for group in some:
        cells = []
        for column in COLUMNS:
            values = [column.factor * value for value in group.values(column.key, view)]
            alone = column.key in SPREADING and max(group.values("num_clients", view)) < 2
            cells.append("–" if alone else spread(values, column.digits))
        if against:
            cells += list(differing(found, against.get(group.title)))
        rows.append([group.title, *cells, str(len(group.runs))])
    best = [
        (place, j)
        for j, column in enumerate(COLUMNS, 1)
        if column.judged and (place := winner(some, column.judged, view)) is not None
    ]
    more = ["minus local, points", "p"] if against else []
    head = ["method", *(column.heading for column in COLUMNS), *more, "seeds"]
    return table(head, rows, best)


def winner(groups: Sequence[Group], metric: str, view: str) -> int | None:
    """Return which group is better than all others beyond noise, over at least two seeds."""
    found = verdict(groups, metric, view)
    if not found.rivals or len(found.rivals) < len(groups) - 1:
        return None
    sign = METRICS[metric].sign
    if not all(one.better(sign) and one.difference.seeds > 1 for one in found.rivals):
        return None
    return [group.title for group in groups].index(next(iter(found.means)))


def tables(groups: Sequence[Group]) -> str:
    """Return the tables of all tested models."""
    wanted = (
        ("personal", "Personal models, each on its own site's test data"),
        ("global", "Global models, on the same data"),
        ("new_clients", "New sites, which never trained"),
    )
    shown = [(words, summary(groups, view)) for view, words in wanted]
    text = "".join(f"<h4>{escape(words)}</h4>{one}" for words, one in shown if one)
    return (
        "<p class=soft>Mean ± standard deviation over seeds, after the last round, never the best "
        "one. Bold: better than every other method beyond noise, over two seeds or more.</p>" + text
    )


def origins(groups: Sequence[tuple[str, Group]]) -> str:
    """Return where the numbers of groups on named data come from: network, rounds, seeds, engine,
    device and versions.
    """
    rows = []
    for name, group in groups:
        one = group.first
        seconds = statistics.fmean(
            sum(record["seconds"] for record in run.result["rounds"]) for run in group.runs
        )
        data = (
            f"{name}{', ' + one['note'] if one.get('note') else ''}, "
            f"{one['partition'].get('kind', '')}"
        )
        versions = one.get("versions", {})
        new = one.get("num_new_clients", 0)
        model = one.get("model", {})
        rows.append(
            [
                group.title,
                data,
                f"{one.get('num_clients', '?')}{f' + {new} new' if new else ''}",
                f"{model.get('name', '?')}, {model.get('parameters', 0):,} parameters",
                str(len(one["rounds"])),
                ", ".join(str(run.seed) for run in group.runs),
                f"{one.get('engine', '?')}, {one.get('device', '?')}",
                f"{seconds:.1f}",
                f"bayflower {versions.get('bayflower', '?')}, torch {versions.get('torch', '?')}",
            ]
        )
    head = ["method", "data", "clients", "network", "rounds", "seeds", "engine, device", "seconds"]
    return table([*head, "versions"], rows, left=True)


def settings(groups: Sequence[Group], unequal: dict[str, dict[str, object]]) -> str:
    """Return the settings in which groups on the same data differ; "" if none."""
    if not unequal:
        return ""
    rows = [
        [group.title, ", ".join(f"{key}={brief(unequal[key][group.title])}" for key in unequal)]
        for group in groups
    ]
    return table(["method", "settings that are not the same for all"], rows, left=True)
