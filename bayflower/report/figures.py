"""The figures every method has: curves over rounds, clients, gains and fairness."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..shown import quantiles
from .collect import Group
from .svg import Chart, Rows, around, legend
from .verdict import Verdict, signed, verdict

SHOWN = 8  # groups in one picture; more cannot be told apart
MOST_ROWS = 60  # clients that have a row of their own; drawn ones have no names worth so many
MOST_DRAWN = 24


class Figure(NamedTuple):
    """A picture with its heading, what it shows in words, and its key."""

    heading: str
    svg: str
    words: str
    key: str = ""
    wide: bool = False


Pick = Callable[[dict[str, Any]], float | None]


def curves(groups: Sequence[Group]) -> list[Figure]:
    """Return accuracy, NLL and training loss over rounds."""

    def of(view: str, key: str, scale: float = 1.0) -> Pick:
        def pick(record: dict[str, Any]) -> float | None:
            value = (record.get(view) or {}).get(key)
            return None if value is None else scale * value

        return pick

    wanted = [
        ("Accuracy over rounds", "accuracy, %", of("personal", "accuracy", 100.0), (0.0, 100.0)),
        (
            "Loss of the personal models over rounds",
            "−log p(y), nats",
            of("personal", "nll"),
            (0.0, None),
        ),
        (
            "Training loss over rounds",
            "local objective",
            lambda record: record.get("train_loss"),
            (None, None),
        ),
    ]
    found = []
    for heading, y_title, pick, limits in wanted:
        lines = [(group.title, group.curve(pick)) for group in groups[:SHOWN]]
        if max((len(points) for _, points in lines), default=0) < 2:
            continue  # the last round alone is in the tables
        words = (
            "Mean over seeds; the band is the range of the seeds."
            if any(len(group.runs) > 1 for group in groups)
            else "One seed."
        )
        if heading.startswith("Accuracy"):
            words += (
                " Personal models on the clients' own test data, at the rounds that were tested."
            )
        found.append(
            Figure(
                heading,
                lines_over_rounds(heading, lines, y_title, limits).svg(),
                words,
                legend([name for name, _ in lines]),
            )
        )
    return found


def lines_over_rounds(
    name: str,
    lines: Sequence[tuple[str, list[tuple[float, float, float, float]]]],
    y_title: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Chart:
    """Return a chart of (round, mean, low, high), a line a title."""
    rounds = [point[0] for _, points in lines for point in points]
    values = [value for _, points in lines for point in points for value in point[1:]]
    chart = Chart(
        name,
        (min(rounds), max(rounds)),
        around(values, least=limits[0], most=limits[1]),
        x_title="round",
        y_title=y_title,
    ).axes()
    for series, (_, points) in enumerate(lines):
        chart.band([(x, low, high) for x, _, low, high in points], series)
    for series, (title, points) in enumerate(lines):
        if points:
            chart.line([(x, mean) for x, mean, _, _ in points], series, title)
    return chart


def clients(groups: Sequence[Group]) -> list[Figure]:
    """Return every client's accuracy by method, a row a client; many drawn clients as a curve."""
    some = [group for group in groups[:SHOWN] if group.by_client()]
    if not some:
        return []
    means = [mean_by_client(group) for group in some]
    order = sorted({client for mean in means for client in mean})
    span = around([100 * v for m in means for v in m.values()], most=100.0)
    key = legend([group.title for group in some], lines=False)
    words = "Personal models on each client's own test data after the last round" + (
        ", mean over seeds." if len(some[0].runs) > 1 else "."
    )
    if len(order) > rows_for(some):
        return [ranked(some, span, words)]
    base = means[0]
    order.sort(key=lambda client: (-base.get(client, 0.0), client))
    names = {client: name for group in some for client, name in group.named.items()}
    chart = Rows("accuracy of each client", [names[c] for c in order], span, "accuracy, %")
    for series, (group, mean) in enumerate(zip(some, means, strict=True)):
        for place, client in enumerate(order):
            if client in mean:
                text = f"{group.title}, {names[client]}: {100 * mean[client]:.1f} %"
                shift = 0.6 - 1.2 * series / max(len(some) - 1, 1) if len(some) > 1 else 0.0
                chart.point(100 * mean[client], chart.at(place, shift), series, text)
    return [Figure("Accuracy of each client", chart.svg(), words, key)]


def rows_for(groups: Sequence[Group]) -> int:
    """Return how many clients may have rows of their own."""
    every = [one for group in groups for run in group.runs for one in run.clients.values()]
    return MOST_ROWS if all(one.lasting for one in every) else MOST_DRAWN


def ranked(groups: Sequence[Group], span: tuple[float, float], words: str) -> Figure:
    """Return the clients' accuracies in order, a line a method."""
    chart = Chart(
        "accuracy of each client",
        (0.0, 100.0),
        span,
        x_title="share of the clients, worst first, %",
        y_title="accuracy, %",
    ).axes()
    for series, group in enumerate(groups):
        values = sorted(100 * value for value in group.by_client().values())
        line = [(100 * (i + 0.5) / len(values), value) for i, value in enumerate(values)]
        chart.line(line, series, group.title)
    key = legend([group.title for group in groups])
    text = f"{words} Each line has that method's clients in order, from the worst to the best."
    return Figure("Accuracy of each client", chart.svg(), text, key)


def mean_by_client(group: Group) -> dict[str, float]:
    """Return the mean over seeds of each client's accuracy, by identity."""
    by_client: dict[str, list[float]] = {}
    for (_, client), value in group.by_client().items():
        by_client.setdefault(client, []).append(value)
    return {client: statistics.fmean(values) for client, values in by_client.items()}


def gains(groups: Sequence[Group], found: Verdict | None = None) -> list[Figure]:
    """Return, for each method, how much better each client is than with its own data alone; the
    interval of a client is over seeds.
    """
    found = found or verdict(groups)
    series = {group.title: place for place, group in enumerate(groups)}
    shown = []
    for one in found.against:
        sites = one.difference.sites
        if one.title not in series:
            continue
        ends = [100 * v for s in sites for v in (s.low, s.mean, s.high) if v is not None]
        span = around([*ends, 0.0])
        many = len(sites) > rows_for(groups)
        name = f"gain of {one.title} over {one.base}"
        if many:
            chart = Chart(
                name,
                (0.0, float(len(sites))),
                span,
                x_title="clients, by gain",
                y_title="points of accuracy",
            ).axes(x_names=[])
            for place, site in enumerate(sites):
                text = f"{found.names[site.id]}: {100 * site.mean:+.1f} points"
                where = (place + 0.1, place + 0.9, 0.0, 100 * site.mean)
                chart.bar(*where, series[one.title], text)
            chart.rule(0.0, 0.0, float(len(sites)), 0.0)
        else:
            rows = Rows(name, [found.names[s.id] for s in sites], span, "points of accuracy")
            chart = rows
            for place, site in enumerate(sites):
                text = f"{found.names[site.id]}: {100 * site.mean:+.1f} points"
                low, high = rows.at(place, -0.7), rows.at(place, 0.7)
                rows.bar(0.0, 100 * site.mean, low, high, series[one.title], text)
                if site.low is not None and site.high is not None:
                    rows.rule(100 * site.low, rows.at(place), 100 * site.high, rows.at(place))
            rows.rule(0.0, 0.0, 0.0, -float(len(sites)))
        better = sum(site.mean > 0 for site in sites)
        words = f"{better} of {len(sites)} clients are better off than with their own data alone; "
        words += f"mean {signed(found, one.difference.mean)} points."
        if any(site.low is not None for site in sites):
            words += " Thin lines: 95 % intervals over seeds."
        shown.append(Figure(f"Gain over local training: {one.title}", chart.svg(), words))
    return shown


def fairness(groups: Sequence[Group]) -> list[Figure]:
    """Return how the clients' accuracies are spread, a box a method; nothing of single clients."""
    some = [
        (group, sorted(100 * value for value in group.by_client().values()))
        for group in groups[:SHOWN]
        if max(group.values("num_clients"), default=0) > 1
    ]
    some = [(group, values) for group, values in some if values]
    if not some:
        return []
    span = around([value for _, values in some for value in values], most=100.0)
    names = [group.title for group, _ in some]
    chart = Rows("spread of the clients' accuracies", names, span, "accuracy, %")
    for series, (group, values) in enumerate(some):
        low, first, middle, third, high = quantiles(values)
        text = (
            f"{group.title}: lowest {low:.1f}, quartiles {first:.1f}, {middle:.1f}, "
            f"{third:.1f}, highest {high:.1f}"
        )
        at = chart.at
        chart.rule(low, at(series), high, at(series))
        chart.bar(first, third, at(series, -0.8), at(series, 0.8), series, text, kind="box")
        chart.point(middle, at(series), series, text)
        chart.rule(low, at(series, -0.4), low, at(series, 0.4))
        chart.rule(high, at(series, -0.4), high, at(series, 0.4))
    words = "Box: the middle half of the clients, mark: the median, line: lowest to highest. "
    words += "A fair method has a narrow box and no long tail to the left."
    return [Figure("Fairness: the spread over clients", chart.svg(), words)]
