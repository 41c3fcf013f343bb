"""The page of the benchmark: answers first, then who is best, plots, coverage, all numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ..report.figures import Figure
from ..report.page import Part, figures, page, table
from ..report.svg import Chart, legend
from .protocol import HELD, TESTED
from .rivals import CENTRAL, RIVALS, SERIES
from .runs import Line
from .sets import SETS
from .summary import (
    GOOD,
    METRICS,
    Best,
    Group,
    Table,
    best,
    by_mean,
    coverage,
    difference,
    mean,
    ours,
    outside,
    student,
    value,
)
from .words import Rivals, answers

TITLE = "Clients that really differ: the natural benchmark"
TALL = 1.0  # nats above the best that a plot shows
FEW = 5  # seeds
SHOWN = 40  # failing clients that are listed of a method on a data set
NAMES = {"nll": "NLL", "gap": "|covered − 90 %|", "regret": "regret"}
PLACES = {
    "here": "training clients",
    "new": "new clients",
    "moved": "models of a client on the samples of another one",
}


def made(found: Table) -> str:
    """Return the page as HTML."""
    lines = lines_of(found)
    sets = list(dict.fromkeys(group.dataset for group in found))
    parts = [Part("In short", "In short", about(lines), in_short(found))]
    for name in sets:
        some = {group: rivals for group, rivals in found.items() if group.dataset == name}
        spec = SETS[name]
        lead = f"Clients: {spec.clients}. {decision(name)} Network: {spec.settings['model']}."
        sections = [
            ("Plots", figures(plots(some))),
            *((f"{PLACES[place]}: all numbers", numbers(some, place)) for place in PLACES),
        ]
        parts.append(Part(name, name, lead, sections))
    return page(TITLE, parts, [("How this was made", protocol())])


def in_words(found: Table, names: Sequence[str]) -> str:
    """Return what the runs tell a practitioner, in Markdown; `names` are the files beside it."""
    said = about(lines_of(found))
    text = [
        "# What clients that really differ tell a practitioner",
        "",
        f"Written by `bayflower natural` from its runs: {said} "
        f"Plots and all numbers: {', '.join(f'[{name}]({name})' for name in names)}.",
    ]
    for one in answers(found):
        text += ["", f"## {one.question}", "", *(f"* {line}" for line in one.lines)]
    return "\n".join(text) + "\n"


def lines_of(found: Table) -> list[Line]:
    """Return all runs of a table."""
    every = [runs for rivals in found.values() for runs in rivals.values()]
    return [line for runs in every for line in runs.values()]


def about(lines: Sequence[Line]) -> str:
    """Return what was run."""
    spent = sum(line["seconds"] for line in lines)
    commits = sorted({line["commit"] or "unknown" for line in lines})
    devices = sorted({line["device"] for line in lines})
    torches = sorted({line["torch"] for line in lines})
    seeds = sorted({line["seed"] for line in lines})
    return (
        f"{len(lines)} runs, {spent / 60:.0f} CPU minutes; seeds {seeds[0]} to {seeds[-1]}; "
        f"{', '.join(devices)}; torch {', '.join(torches)}; commit {', '.join(commits)}. "
        "Intervals are 95 %, Student's over seeds, paired."
        + (" So few seeds show that the runs go through, and little more." if few(lines) else "")
    )


def few(lines: Sequence[Line]) -> bool:
    """Return whether there are too few seeds for the intervals to say much."""
    return len({line["seed"] for line in lines}) < FEW


def decision(name: str) -> str:
    """Return the decision of a data set in words."""
    spec = SETS[name]
    ratios = ", ".join(map(str, spec.ratios))
    if spec.decision == "ask":
        return f"Decision: answer or ask; a wrong answer costs {ratios}, asking 1."
    what = "event" if spec.level is None else f"value above {spec.level:.3g}"
    return f"Decision: act or not; a missed {what} costs {ratios}, a false alarm 1."


def in_short(found: Table) -> list[tuple[str, str]]:
    """Return the answers, who is best, and how coverage holds."""
    told = "".join(
        f"<dt>{escape(one.question)}</dt><dd><ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in one.lines)
        + "</ul></dd>"
        for one in answers(found)
    )
    return [
        ("What this tells a practitioner", f'<div class="verdict"><dl>{told}</dl></div>'),
        ("Who is best", winners(found)),
        ("Do 90 % statements hold?", held(found)),
    ]


def winners(found: Table) -> str:
    """Return who is best in each group, for training and new clients."""
    rows = []
    for group, rivals in found.items():
        for place in ("here", "new"):
            cells = [f"{group.dataset}, {group.amount}", PLACES[place]]
            for metric in METRICS:
                at = (place, metric)
                first = best(rivals, *at)
                if first is None:
                    cells.append("–")
                    continue
                level = f" (level: {', '.join(first.level)})" if first.level else ""
                cells.append(f"{first.rival} {first.mean:.3f}{level}{federated(rivals, first, at)}")
            rows.append(cells)
    head = ["data, samples a client", "who", *(NAMES[metric] for metric in METRICS)]
    words = (
        "<p>Lowest mean over seeds; <em>level</em>: the paired interval of the difference does "
        "not leave 0 out; <em>federated</em>: the best one that does not need all samples in one "
        "place.</p>"
    )
    return words + table(head, rows, left=True)


def federated(rivals: Rivals, first: Best, at: tuple[str, str]) -> str:
    """Return the best federated rival, where the best of all needs all samples in one place."""
    others = {name: runs for name, runs in rivals.items() if name not in CENTRAL}
    second = best(others, *at) if first.rival in CENTRAL and others else None
    return f"; federated: {second.rival} {second.mean:.3f}" if second else ""


def held(found: Table) -> str:
    """Return coverage of the recommended methods, with the clients outside their interval."""
    rows, lines = [], []
    for group, rivals in found.items():
        for name in ours(rivals):
            runs = rivals[name]
            share, new = coverage(runs, "here"), coverage(runs, "new")
            away, number = outside(runs, "here")
            right = "yes" if GOOD[0] <= share <= GOOD[1] else "no"
            width = mean(runs, "here", "width")
            rows.append(
                [
                    *(f"{group.dataset}, {group.amount}", name, percent(share), right),
                    *(f"{away} of {number}", percent(new), f"{width:.2f}"),
                ]
            )
            each = [
                f"seed {seed} client {place}: {covered} of {tested} ({low}–{high})"
                for seed, line in sorted(runs.items())
                for place, covered, tested, low, high in line["here"]["outside"]
            ]
            if each:
                more = f" and {len(each) - SHOWN} more" if len(each) > SHOWN else ""
                lines.append(
                    f"<li>{escape(group.dataset)}, {escape(group.amount)}, {escape(name)}: "
                    f"{escape('; '.join(each[:SHOWN]))}{more}</li>"
                )
    head = ["data, samples a client", "method", "covered", "88 to 93 %", "clients outside 99 %"]
    head += ["covered, new clients", "width"]
    listed = f"<h4>Clients outside their interval</h4><ul>{''.join(lines)}</ul>" if lines else ""
    return table(head, rows) + listed


def percent(share: float) -> str:
    """Return a share in per cent."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


# -- plots -----------------------------------------------------------------------------------------
def series_of(rivals: Sequence[str]) -> list[str]:
    """Return who is in the plots: methods from outside the table first, eight at most."""
    outside_table = [name for name in rivals if name not in RIVALS]
    return [*outside_table, *(name for name in SERIES if name in rivals)][:8]


def plots(groups: Mapping[Group, Rivals]) -> list[Figure]:
    """Return the plots of a data set: NLL of training and new clients, coverage, regret."""
    found = []
    for later in (False, True):
        some = {group: rivals for group, rivals in groups.items() if group.later == later}
        if not some:
            continue
        end = ", tests later in time" if later else ""
        found += [
            curve(some, "here", "nll", f"NLL of training clients{end}"),
            curve(some, "new", "nll", f"NLL of new clients{end}"),
            curve(some, "here", "coverage", f"Coverage of 90 % statements{end}"),
            curve(some, "here", "regret", f"Regret of decisions{end}"),
        ]
    return found


def curve(groups: Mapping[Group, Rivals], place: str, metric: str, heading: str) -> Figure:
    """Return one number over the samples a client, a line for each rival with its 95 % interval."""
    names = series_of(list(dict.fromkeys(name for rivals in groups.values() for name in rivals)))
    points: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    for at, rivals in enumerate(groups.values()):
        for name in names:
            if name not in rivals:
                continue
            middle = mean(rivals[name], place, metric)
            gap = student([value(line, place, metric) for line in rivals[name].values()])
            half = 0.0 if math.isnan(gap.low) else gap.high - gap.mean
            if not math.isnan(middle):
                points[name].append((float(at), middle, middle - half, middle + half))
    values = [one for some in points.values() for _, one, _, _ in some] or [0.0, 1.0]
    low, high = min(values), max(values)
    top = min(high, low + TALL) if metric == "nll" else high
    room = 0.08 * ((top - low) or 1.0)
    span = (0.5, 1.0) if metric == "coverage" else (low - room, top + room)
    chart = Chart(
        heading,
        (-0.2, len(groups) - 0.8),
        span,
        x_title="training samples a client, at most",
        y_title={"nll": "NLL", "coverage": "share covered", "regret": "regret"}[metric],
    ).axes(x_names=[group.amount.removesuffix(", later") for group in groups])
    if metric == "coverage":
        chart.rule(-0.2, 0.9, len(groups) - 0.8, 0.9)
    amounts = [group.amount for group in groups]
    shows = all(len(runs) >= FEW for rivals in groups.values() for runs in rivals.values())
    for series, name in enumerate(names):
        cut = [
            (x, *(min(max(one, span[0]), span[1]) for one in three)) for x, *three in points[name]
        ]
        if shows:
            chart.band([(x, a, b) for x, _, a, b in cut], series)
        chart.line([(x, y) for x, y, _, _ in cut], series, name, markers=False)
        for (x, y, _, _), (_, real, _, _) in zip(cut, points[name], strict=True):
            chart.point(x, y, series, f"{name}, {amounts[int(x)]}: {real:.3f}")
    words = "Bands: 95 % over seeds." if shows else "Means over seeds, too few for intervals."
    if metric == "nll" and high > top:
        words += f" Cut at {TALL:g} nats above the lowest."
    if metric == "coverage":
        words += " Cut below 50 %."
    return Figure(heading, chart.svg(), words, legend(names))


# -- numbers ---------------------------------------------------------------------------------------
def numbers(groups: Mapping[Group, Rivals], place: str) -> str:
    """Return all numbers of a data set at one place."""
    rows: list[list[str]] = []
    bold: list[tuple[int, int]] = []
    for group, rivals in groups.items():
        means = {name: mean(runs, place, "nll") for name, runs in rivals.items()}
        ranked = by_mean(means)
        for name in ranked:
            runs = rivals[name]
            gap = difference(runs, rivals[ranked[0]], place, "nll")
            away, number = outside(runs, place)
            if name == ranked[0]:
                bold.append((len(rows), 2))
            interval = "" if math.isnan(gap.low) else f" [{gap.low:.3f}, {gap.high:.3f}]"
            ratios = next(iter(runs.values()))[place]["cost"]
            each = {r: [line[place]["cost"][r] for line in runs.values()] for r in ratios}
            known = {r: [cost for cost in some if cost is not None] for r, some in each.items()}
            costs = [f"{sum(some) / len(some):.3f}" if some else "–" for some in known.values()]
            rows.append(
                [
                    *(group.amount, name, f"{means[name]:.3f}"),
                    "" if name == ranked[0] else f"{gap.mean:+.3f}{interval}",
                    f"{mean(runs, place, 'crps'):.3f}",
                    percent(coverage(runs, place)),
                    f"{mean(runs, place, 'width'):.2f}",
                    percent(mean(runs, place, "ece")),
                    f"{mean(runs, place, 'worst'):.3f}",
                    *(" / ".join(costs), f"{away} of {number}"),
                    f"{mean(runs, place, 'seconds'):.1f}",
                    f"{mean(runs, place, 'bytes') / 1e6:.2f}",
                    str(len(runs)),
                ]
            )
    head = ["samples", "rival", "NLL", "− best", "CRPS", "covered", "width", "ECE", "worst decile"]
    head += ["cost by ratio", "clients outside 99 %", "seconds", "MB", "seeds"]
    return table(head, rows, bold)


def protocol() -> str:
    """Return how the benchmark is made, in short."""
    lines = [
        "A fifth of the clients, at least one, never trains. These new clients get their n samples "
        "after the last round.",
        f"A client is tested on {100 * TESTED:.0f} % of its samples, up to a number of the data "
        "set, which are the same for every n and every rival with the same seed.",
        f"Rivals that calibrate hold {100 * HELD:.0f} % of the n samples out for it; the others "
        "train on all n.",
        "The model of a client on another one: training client k's model on the test samples of "
        "training client k + 1.",
        "exact-hierarchy has all samples in one place; it is what a federation can at best hope "
        "for with this model, not a federated method.",
        "NLL, CRPS and costs: lower is better. Regret: mean over the cost ratios r of "
        "cost/(1 + r).",
        "Clients outside 99 %: whose number of covered test samples is outside the 99 % interval "
        "of the beta-binomial distribution.",
    ]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
