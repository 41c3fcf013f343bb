"""Figures of calibration, of the partition, and of what a run costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .collect import Found, Group
from .figures import SHOWN, Figure
from .svg import Chart, Rows, label


def reliability(groups: Sequence[Group]) -> list[Figure]:
    """Return reliability diagrams of each method, accuracy over confidence, bars by bin: of the
    models as trained and, where that was done, as calibrated. The diagram of all classes is left
    out for two, where it is the other one and its mirror image.
    """
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        personal = [run.result["final"]["personal"] for run in group.runs]
        shown = [one["clients"]["forms"]["calibrated"] for one in calibrated(group)]
        wanted = [
            ("top label", "confidence of the predicted class", "as trained", "ece", personal),
            ("all classes", "probability of each class", "as trained", "ece_allclass", personal),
            ("calibrated", "confidence of the predicted class", "as calibrated", "ece", shown),
        ]
        for name, words, state, key, blocks in wanted:
            if name == "all classes" and any("scores" in block for block in blocks):
                continue
            kind = "top_label" if name == "top label" else "all_class"
            kept: list[Any] = [block.get("reliability") or {} for block in blocks]
            bars = pooled(kept if name == "calibrated" else [one.get(kind, []) for one in kept])
            if not bars:
                continue
            chart = diagram(f"reliability of {group.title}, {words}", words, bars, series)
            errors = [block[key] for block in blocks if block.get(key) is not None]
            note = f"The models {state}. "
            if errors:
                note += f"Expected calibration error {100 * statistics.fmean(errors):.1f} %. "
            note += "On the line, confidence is honest; below it, too high."
            found.append(Figure(f"Reliability, {name}: {group.title}", chart.svg(), note))
    return found


def diagram(
    name: str,
    words: str,
    bars: Sequence[dict[str, Any]],
    series: int,
    share: str = "share that is right",
) -> Chart:
    """Return a reliability diagram."""
    chart = Chart(
        name,
        (0.0, 1.0),
        (0.0, 1.0),
        x_title=words,
        y_title=share,
        width=360.0,
        height=330.0,
    ).axes()
    for bar in bars:
        text = f"{bar['low']:.1f}–{bar['high']:.1f}: {bar['count']} predictions, "
        text += f"{bar['accuracy']:.2f} right at {bar['confidence']:.2f}"
        chart.bar(bar["low"] + 0.01, bar["high"] - 0.01, 0.0, bar["accuracy"], series, text)
    chart.rule(0.0, 0.0, 1.0, 1.0)
    for bar in bars:
        text = f"mean confidence {bar['confidence']:.2f}"
        chart.point(bar["confidence"], bar["accuracy"], series, text)
    return chart


def calibrated(group: Group) -> list[dict[str, Any]]:
    """Return what the runs of a group say of uncertainty."""
    return [one for run in group.runs if (one := run.result.get("uncertainty"))]


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
    """Return who has how many samples of which class as bubbles, a row a client; without class
    counts, bars of the clients' sizes.
    """
    said = run.result["partition"]
    name = f"{run.result['dataset']}, {said.get('kind', 'its own')} partition, seed {run.seed}"
    if not counts:
        sizes = said.get("train_sizes") or [0]
        span, title = (0.0, max(sizes) * 1.05), "training samples"
        rows = Rows(
            f"sizes of clients, {name}", [run.name(i) for i in range(len(sizes))], span, title
        )
        for client, size in enumerate(sizes):
            text = f"{run.name(client)}: {size} training samples"
            rows.bar(0.0, size, rows.at(client, -0.8), rows.at(client, 0.8), 0, text)
        words = "Training samples of each client."
        if "accuracy" in run.result["final"]["personal"]:
            words += " Which classes they have is not known here: the data are not at hand."
        return Figure(f"The partition: {name}", rows.svg(), words)
    most = max((value for row in counts for value in row), default=1) or 1
    classes = len(counts[0])
    labels = run.result.get("classes") or [str(k) for k in range(classes)]
    thick = 26
    chart = Rows(
        f"partition of {name}",
        [run.name(i) for i in range(len(counts))],
        (-0.6, classes - 0.4),
        "class",
        thick,
        labels,
    )
    room = min((chart.right - chart.left) / (classes + 0.2), thick) / 2
    for client, row in enumerate(counts):
        for k, value in enumerate(row):
            if value:
                chart.circle(
                    k,
                    chart.at(client),
                    max(1.0, room * (value / most) ** 0.5),
                    0,
                    f"{run.name(client)}, class {labels[k]}: {value} training samples",
                )
    words = (
        f"Training samples of each class; the area of a bubble is their number (largest: {most})."
    )
    return Figure(f"The partition: {name}", chart.svg(), words)


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
            for group in groups[:SHOWN]
            if (value := group.mean(pick)) is not None
        ]
        if not rows:
            continue
        span = (0.0, 1.08 * max(value for _, value in rows) or 1.0)
        chart = Rows(heading, [title for title, _ in rows], span, x_title)
        for place, (title, value) in enumerate(rows):
            low, high = chart.at(place, -0.8), chart.at(place, 0.8)
            chart.bar(0.0, value, low, high, place, f"{title}: {label(value)}")
        words = (
            "Content of all messages of a round."
            if heading.startswith("Bytes")
            else "On the device that each run names at the end; runs on different devices do not "
            "compare."
        )
        found.append(Figure(heading, chart.svg(), words))
    return found
