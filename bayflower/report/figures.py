"""The figures every method has: curves, clients, fairness, calibration, the partition, bytes and
seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import methods
from ..shown import quantiles
from .collect import Group, same_data
from .svg import Chart, around, legend

SHOWN = 8  # groups in one picture; more cannot be told apart


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
        if not any(points for _, points in lines):
            continue
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
    """Return every client's accuracy by method, and its gain over training alone where that was
    run.
    """
    some = [group for group in groups[:SHOWN] if group.by_client()]
    if not some:
        return []
    means = [mean_by_client(group) for group in some]
    base = means[0]
    order = sorted(base, key=lambda client: (base[client], client))
    names = {client: name for group in some for client, name in group.named.items()}
    chart = Chart(
        "accuracy of each client",
        (-0.5, len(order) - 0.5),
        around([100 * v for m in means for v in m.values()], most=100.0),
        x_title=f"client, by the accuracy with {some[0].title}",
        y_title="accuracy, %",
        width=1120.0,
    )
    chart.axes(x_names=[short(names[client]) for client in order])
    for series, (group, mean) in enumerate(zip(some, means, strict=True)):
        for place, client in enumerate(order):
            if client in mean:
                shift = (series - (len(some) - 1) / 2) * 0.6 / max(len(some), 1)
                chart.point(
                    place + shift,
                    100 * mean[client],
                    series,
                    f"{group.title}, {names[client]}: {100 * mean[client]:.1f} %",
                )
    words = "Personal models on each client's own test data after the last round" + (
        ", mean over seeds." if len(some[0].runs) > 1 else "."
    )
    found = [
        Figure(
            "Accuracy of each client",
            chart.svg(),
            words,
            legend([group.title for group in some], lines=False),
            wide=True,
        )
    ]
    return found + gains(groups)


def short(name: str) -> str:
    """Return a client's name for an axis: its number alone where it has no other name."""
    return name.removeprefix("client ").split(",")[0][:12]


def mean_by_client(group: Group) -> dict[str, float]:
    """Return the mean over seeds of each client's accuracy, by identity."""
    by_client: dict[str, list[float]] = {}
    for (_, client), value in group.by_client().items():
        by_client.setdefault(client, []).append(value)
    return {client: statistics.fmean(values) for client, values in by_client.items()}


def gains(groups: Sequence[Group]) -> list[Figure]:
    """Return, for each method, how much better each client is than with its own data alone."""
    alone = next(
        (group for group in groups if methods.get(group.method).server.shares_nothing), None
    )
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        if alone is None or group is alone or not same_data(group, alone):
            continue
        own, mine = alone.by_client(), group.by_client()
        both = sorted(own.keys() & mine.keys())
        by_client: dict[str, list[float]] = {}
        for seed, client in both:
            by_client.setdefault(client, []).append(100 * (mine[seed, client] - own[seed, client]))
        if not by_client:
            continue
        mean = sorted((statistics.fmean(values), client) for client, values in by_client.items())
        chart = Chart(
            f"gain of {group.title} over local training",
            (-0.5, len(mean) - 0.5),
            around([v for v, _ in mean] + [0.0]),
            x_title="clients, by gain",
            y_title="points of accuracy",
        )
        chart.axes(x_names=[short(group.named[client]) for _, client in mean])
        for place, (value, client) in enumerate(mean):
            chart.bar(
                place - 0.4,
                place + 0.4,
                0.0,
                value,
                series,
                f"{group.named[client]}: {value:+.1f} points",
            )
        chart.rule(-0.5, 0.0, len(mean) - 0.5, 0.0)
        better = sum(value > 0 for value, _ in mean)
        average = statistics.fmean(value for value, _ in mean)
        words = (
            f"{better} of {len(mean)} clients are better off than with their own data alone; "
            f"mean {average:+.1f} points."
        )
        found.append(Figure(f"Gain over local training: {group.title}", chart.svg(), words))
    return found


def fairness(groups: Sequence[Group]) -> list[Figure]:
    """Return how the clients' accuracies are spread, a box a method."""
    some = [
        (group, sorted(100 * value for value in group.by_client().values()))
        for group in groups[: 2 * SHOWN]
    ]
    some = [(group, values) for group, values in some if values]
    if not some:
        return []
    left = 20.0 + 6.6 * max(len(group.title) for group, _ in some)
    span = around([value for _, values in some for value in values], most=100.0)
    chart = Chart(
        "spread of the clients' accuracies",
        span,
        (-0.6, len(some) - 0.4),
        x_title="accuracy, %",
        left=min(left, 260.0),
        height=60.0 + 34.0 * len(some),
    )
    chart.axes(y_names=[group.title for group, _ in some])
    for series, (group, values) in enumerate(some):
        low, first, middle, third, high = quantiles(values)
        text = (
            f"{group.title}: lowest {low:.1f}, quartiles {first:.1f}, {middle:.1f}, "
            f"{third:.1f}, highest {high:.1f}"
        )
        chart.rule(low, series, high, series)
        chart.bar(first, third, series - 0.25, series + 0.25, series, text, kind="box")
        chart.point(middle, series, series, text)
        chart.rule(low, series - 0.12, low, series + 0.12)
        chart.rule(high, series - 0.12, high, series + 0.12)
    words = "Box: the middle half of the clients, mark: the median, line: lowest to highest. "
    words += "A fair method has a narrow box and no long tail to the left."
    return [Figure("Fairness: the spread over clients", chart.svg(), words)]
