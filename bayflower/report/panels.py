"""Figures of calibration, of the partition, and of what a run costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .collect import Found, Group
from .figures import SHOWN, Figure, short
from .svg import Chart, label


def reliability(groups: Sequence[Group]) -> list[Figure]:
    """Return a reliability diagram a method: accuracy over confidence, bars by bin."""
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        for kind, words in (
            ("top_label", "confidence of the predicted class"),
            ("all_class", "probability of each class"),
        ):
            bars = pooled(
                [
                    run.result["final"]["personal"].get("reliability", {}).get(kind, [])
                    for run in group.runs
                ]
            )
            if not bars:
                continue
            chart = Chart(
                f"reliability of {group.title}, {words}",
                (0.0, 1.0),
                (0.0, 1.0),
                x_title=words,
                y_title="share that is right",
                width=360.0,
                height=340.0,
            )
            chart.axes()
            for bar in bars:
                text = f"{bar['low']:.1f}–{bar['high']:.1f}: {bar['count']} predictions, "
                text += f"{bar['accuracy']:.2f} right at {bar['confidence']:.2f}"
                chart.bar(bar["low"] + 0.01, bar["high"] - 0.01, 0.0, bar["accuracy"], series, text)
            chart.rule(0.0, 0.0, 1.0, 1.0)
            for bar in bars:
                chart.point(
                    bar["confidence"],
                    bar["accuracy"],
                    series,
                    f"mean confidence {bar['confidence']:.2f}",
                )
            key = "ece" if kind == "top_label" else "ece_allclass"
            error = group.values(key)
            note = (
                f"Expected calibration error {100 * statistics.fmean(error):.2f} %. "
                if error
                else ""
            )
            name = "top label" if kind == "top_label" else "all classes"
            found.append(
                Figure(
                    f"Reliability, {name}: {group.title}",
                    chart.svg(),
                    note + "On the line, confidence is honest; below it, too high.",
                )
            )
    return found


def pooled(diagrams: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the bars of several diagrams put together; empty bins are left out."""
    bins: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for diagram in diagrams:
        for bar in diagram:
            if bar.get("count"):
                bins.setdefault((bar["low"], bar["high"]), []).append(bar)
    found = []
    for (low, high), bars in sorted(bins.items()):
        count = sum(bar["count"] for bar in bars)
        found.append(
            {
                "low": low,
                "high": high,
                "count": count,
                **{
                    key: sum(bar["count"] * bar[key] for bar in bars) / count
                    for key in ("confidence", "accuracy")
                },
            }
        )
    return found


def partition(run: Found, counts: Sequence[Sequence[int]] | None) -> Figure:
    """Return who has how many samples of which class as bubbles; without class counts, bars of the
    clients' sizes.
    """
    said = run.result["partition"]
    name = f"{run.result['dataset']}, {said.get('kind', 'its own')} partition, seed {run.seed}"
    if counts:
        most = max((value for row in counts for value in row), default=1) or 1
        classes = len(counts[0])
        labels = run.result.get("classes") or [str(k) for k in range(classes)]
        cell = min(560.0 / max(classes, 1), 1000.0 / max(len(counts), 1), 34.0)
        chart = Chart(
            f"partition of {name}",
            (-0.7, len(counts) - 0.3),
            (-0.7, classes - 0.3),
            x_title="client",
            y_title="class",
            width=1120.0,
            height=max(200.0, 70.0 + cell * classes),
        )
        chart.axes(
            x_names=[short(run.name(i)) for i in range(len(counts))],
            y_names=[name[:16] for name in labels],
        )
        room = (
            min((chart.right - chart.left) / len(counts), (chart.bottom - chart.top) / classes) / 2
        )
        for client, row in enumerate(counts):
            for k, value in enumerate(row):
                if value:
                    chart.circle(
                        client,
                        k,
                        max(1.0, room * (value / most) ** 0.5),
                        0,
                        f"{run.name(client)}, class {labels[k]}: {value} training samples",
                    )
        words = (
            "Training samples of each class; the area of a bubble is their number (largest: "
            f"{most})."
        )
        return Figure(f"The partition: {name}", chart.svg(), words, wide=True)
    sizes = said.get("train_sizes") or [0]
    span = (0.0, max(sizes) * 1.05)
    chart = Chart(
        f"sizes of clients, {name}",
        (-0.5, len(sizes) - 0.5),
        span,
        x_title="client",
        y_title="training samples",
        width=1120.0,
    )
    chart.axes(x_names=[short(run.name(i)) for i in range(len(sizes))])
    for client, size in enumerate(sizes):
        chart.bar(
            client - 0.4, client + 0.4, 0.0, size, 0, f"{run.name(client)}: {size} training samples"
        )
    words = (
        "Training samples of each client. Which classes they have is not known here: the data "
        "are not at hand."
    )
    return Figure(f"The partition: {name}", chart.svg(), words, wide=True)


def costs(groups: Sequence[Group]) -> list[Figure]:
    """Return bytes and seconds of a round by method."""

    def megabytes(result: dict[str, Any]) -> float:
        return float(
            sum(record["bytes_up"] + record["bytes_down"] for record in result["rounds"])
            / len(result["rounds"])
            / 1e6
        )

    def seconds(result: dict[str, Any]) -> float:
        return float(statistics.median(record["seconds"] for record in result["rounds"]))

    wanted = [
        ("Bytes of a round", "megabytes, up and down", megabytes),
        ("Seconds of a round", "seconds, median", seconds),
    ]
    found = []
    for heading, x_title, pick in wanted:
        rows = [
            (group.title, value)
            for group in groups[: 2 * SHOWN]
            if (value := group.mean(pick)) is not None
        ]
        if not rows:
            continue
        left = min(20.0 + 6.6 * max(len(title) for title, _ in rows), 260.0)
        chart = Chart(
            heading,
            (0.0, 1.08 * max(value for _, value in rows) or 1.0),
            (-0.6, len(rows) - 0.4),
            x_title=x_title,
            left=left,
            height=60.0 + 30.0 * len(rows),
        )
        chart.axes(y_names=[title for title, _ in rows])
        for series, (title, value) in enumerate(rows):
            chart.bar(0.0, value, series - 0.3, series + 0.3, series, f"{title}: {label(value)}")
        words = (
            "Content of all messages of a round."
            if heading.startswith("Bytes")
            else "On the device that each run names above; runs on different devices do not "
            "compare."
        )
        found.append(Figure(heading, chart.svg(), words))
    return found
