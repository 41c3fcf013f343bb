"""The report's parts about times to an event and about several labels: curves and calibration at a
horizon, each label's AUROC and AUPRC, and tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from . import measured
from .collect import Group
from .figures import SHOWN, Figure
from .page import figures as shown
from .page import table
from .panels import diagram, pooled
from .svg import Chart, Rows, around, legend

SURVIVAL, LABELS = "c_index", "macro_auroc"  # metrics that tell the task
COLUMNS = {
    SURVIVAL: (
        ("C-index", "c_index", 1, 3),
        ("Uno's C-index", "c_index_uno", 1, 3),
        ("C-index within sites", "c_index_within", 1, 3),
        ("integrated Brier score", "integrated_brier", 1, 3),
        ("Brier score at the horizon", "brier", 1, 3),
        ("calibration error, %", "calibration_error", 100, 1),
        ("NLL", "nll", 1, 3),
    ),
    LABELS: (
        ("macro AUROC, %", "macro_auroc", 100, 1),
        ("macro AUPRC, %", "macro_auprc", 100, 1),
        ("micro AUROC, %", "micro_auroc", 100, 1),
        ("micro AUPRC, %", "micro_auprc", 100, 1),
        ("labels right, %", "label_accuracy", 100, 1),
        ("calibration error, %", "calibration_error", 100, 1),
        ("NLL", "nll", 1, 3),
    ),
}
ROUNDS = {
    SURVIVAL: (("c_index", "C-index"), ("nll", "−log p, nats")),
    LABELS: (("macro_auroc", "macro AUROC"), ("nll", "−log p, nats")),
}
ABOUT = {
    SURVIVAL: "C-indices: higher is better; all others: lower is better.",
    LABELS: "AUROC, AUPRC and labels right: higher is better; the others: lower is better.",
}

Draw = Callable[[Sequence[Group]], list[Figure]]


def kind_of(groups: Sequence[Group]) -> str:
    """Return the metric that tells the task of some groups; "" of another task."""
    blocks = [one.first["final"]["personal"] for one in groups]
    return next((key for key in COLUMNS if all(key in block for block in blocks)), "")


def is_about(groups: Sequence[Group]) -> bool:
    """Return whether the runs of some groups predict times to an event, or several labels."""
    return bool(kind_of(groups))


def blocks_of(group: Group) -> list[dict[str, Any]]:
    """Return the personal models' block of every run."""
    return [run.result["final"]["personal"] for run in group.runs]


def over_rounds(groups: Sequence[Group]) -> Sequence[tuple[str, str]]:
    """Return the metrics that are drawn over rounds."""
    return ROUNDS[kind_of(groups)]


def pictures(groups: Sequence[Group]) -> tuple[Draw, ...]:
    """Return what draws the figures of the task."""
    if kind_of(groups) == SURVIVAL:
        return (survival_curves, calibration, brier)
    return (by_label, reliability)


# -- times to an event ---------------------------------------------------------------------------
def mean_curve(group: Group, key: str) -> list[tuple[float, float]]:
    """Return (time, mean over seeds) of a number of the curve; of the first run's times where runs
    have other intervals.
    """
    runs = [block.get("curve") or [] for block in blocks_of(group)]
    times = [[row["time"] for row in rows] for rows in runs]
    alike = [rows for rows, some in zip(runs, times, strict=True) if some == times[0]]
    found = []
    for rows in zip(*alike, strict=True):
        values = [row[key] for row in rows if row[key] is not None]
        if values:
            found.append((float(rows[0]["time"]), statistics.fmean(values)))
    return found


def survival_curves(groups: Sequence[Group]) -> list[Figure]:
    """Return the mean predicted curve of each method beside Kaplan and Meier's."""
    lines = {group.title: mean_curve(group, "predicted") for group in groups[:SHOWN]}
    lines = {title: [(0.0, 1.0), *line] for title, line in lines.items() if line}
    if not lines:
        return []
    seen = next(line for group in groups if (line := mean_curve(group, "observed")))
    last = max(line[-1][0] for line in lines.values())
    heading = "Share without the event over time"
    chart = Chart(
        heading, (0.0, last), (0.0, 1.0), x_title="time", y_title="share without the event"
    ).axes()
    for series, (title, line) in enumerate(lines.items()):
        chart.line(line, series, title)
    for before, after in zip([(0.0, 1.0), *seen], seen, strict=False):
        chart.rule(*before, *after)
    words = (
        "Lines in colour: mean of the predicted curves of all test samples. Thin line: what was "
        "seen (Kaplan and Meier). Near each other, the level is right."
    )
    return [Figure(heading, chart.svg(), words, legend(list(lines)))]


def groups_of(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return groups of samples with their probability of an event by the horizon."""
    return block.get("calibration_groups") or block.get("calibration") or []


def gap(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean difference between predicted and observed probability."""
    number = sum(row["num_examples"] for row in rows)
    each = [row["num_examples"] * abs(row["predicted"] - row["observed"]) for row in rows]
    return sum(each) / number if number else float("nan")


def calibration(groups: Sequence[Group]) -> list[Figure]:
    """Return predicted and observed probability of an event by the horizon, of each method."""
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        block = blocks_of(group)[0]
        rows = groups_of(block)
        if not rows:
            continue
        words = f"probability of an event by time {block['horizon']:.4g}"
        most = max(row["num_examples"] for row in rows)
        chart = Chart(
            f"calibration of {group.title}, {words}",
            (0.0, 1.0),
            (0.0, 1.0),
            x_title=f"predicted {words}",
            y_title="observed share",
            width=360.0,
            height=330.0,
        ).axes()
        chart.rule(0.0, 0.0, 1.0, 1.0)
        for row in rows:
            text = (
                f"{row['num_examples']} samples: predicted {row['predicted']:.2f}, observed "
                f"{row['observed']:.2f}"
            )
            radius = 2.5 + 7.5 * (row["num_examples"] / most) ** 0.5
            chart.circle(row["predicted"], row["observed"], radius, series, text)
        note = (
            f"First seed. Mean difference {100 * gap(rows):.1f} %. Larger circles have more "
            "samples. On the line, probabilities are honest; below it, too high."
        )
        found.append(Figure(f"Calibration at the horizon: {group.title}", chart.svg(), note))
    return found


def brier(groups: Sequence[Group]) -> list[Figure]:
    """Return the Brier score of each method over time."""
    lines = {group.title: mean_curve(group, "brier") for group in groups[:SHOWN]}
    lines = {title: line for title, line in lines.items() if len(line) > 1}
    if not lines:
        return []
    heading = "Brier score over time"
    span = around([value for line in lines.values() for _, value in line], least=0.0)
    last = max(line[-1][0] for line in lines.values())
    chart = Chart(heading, (0.0, last), span, x_title="time", y_title=heading).axes()
    for series, (title, line) in enumerate(lines.items()):
        chart.line(line, series, title)
    words = "Lower is better; 0.25 is a coin's. The integrated score is the mean over time."
    return [Figure(heading, chart.svg(), words, legend(list(lines)))]


# -- several labels ------------------------------------------------------------------------------
def names_of(group: Group) -> list[str]:
    """Return the names of the labels."""
    said = group.first.get("classes")
    number = len(group.first["final"]["personal"]["per_label"])
    known = list(said) if said and len(said) == number else range(number)
    return [str(one) if said else f"label {one}" for one in known]


def label_means(group: Group, key: str) -> list[float | None]:
    """Return the mean over seeds of a number of each label."""
    found = []
    for rows in zip(*(block["per_label"] for block in blocks_of(group)), strict=True):
        values = [row[key] for row in rows if row[key] is not None]
        found.append(statistics.fmean(values) if values else None)
    return found


def by_label(groups: Sequence[Group]) -> list[Figure]:
    """Return the AUROC and the AUPRC of each label by method, a row a label."""
    drawn, names = [], names_of(groups[0])
    for key, name in (("auroc", "AUROC"), ("auprc", "AUPRC")):
        means = {group.title: label_means(group, key) for group in groups[:SHOWN]}
        values = [value for mean in means.values() for value in mean if value is not None]
        if not values:
            continue
        heading = f"{name} of each label"
        rows = Rows(heading, names, around(values), name)
        for series, (title, mean) in enumerate(means.items()):
            shift = 0.6 - 1.2 * series / max(len(means) - 1, 1) if len(means) > 1 else 0.0
            for place, value in enumerate(mean):
                if value is not None:
                    text = f"{title}, {names[place]}: {value:.3f}"
                    rows.point(value, rows.at(place, shift), series, text)
        words = "Personal models on all clients' test data; higher is better."
        drawn.append(Figure(heading, rows.svg(), words, legend(list(means), lines=False)))
    return drawn


def reliability(groups: Sequence[Group]) -> list[Figure]:
    """Return the share of true labels by their probability, of each method."""
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        bars = pooled([block.get("reliability") or [] for block in blocks_of(group)])
        if bars:
            words = "probability of a label"
            chart = diagram(f"reliability of {group.title}", words, bars, series, "share true")
            error = statistics.fmean(group.values("calibration_error") or [float("nan")])
            note = (
                f"All labels together. Mean difference {100 * error:.1f} %. On the line, "
                "probabilities are honest; below it, too high."
            )
            found.append(Figure(f"Reliability: {group.title}", chart.svg(), note))
    return found


# -- words and tables ----------------------------------------------------------------------------
def trusted(group: Group) -> str:
    """Return in words whether probabilities are honest."""
    block = group.first["final"]["personal"]
    number = block["num_examples"]
    if kind_of([group]) == SURVIVAL:
        rows = groups_of(block)
        parts = f" in {len(rows)} groups" if len(rows) > 1 else ""
        return (
            f"{group.title}: by time {block['horizon']:.4g}, predicted and observed probability of "
            f"an event differ by {100 * gap(rows):.1f} % on average{parts} ({number} test samples, "
            f"{block['events']} events)."
        )
    error = block.get("calibration_error")
    said = "an unknown amount" if error is None else f"{100 * error:.1f} % on average"
    return (
        f"{group.title}: predicted probability and share of true labels differ by {said} "
        f"({number} test samples)."
    )


def section(groups: Sequence[Group], drawn: Sequence[Figure]) -> str:
    """Return calibration in words, and the figures."""
    lines = "".join(f"<li>{escape(trusted(one))}</li>" for one in groups)
    return f"<ul>{lines}</ul>" + shown(drawn)


def tables(groups: Sequence[Group]) -> str:
    """Return the tables of all tested models, and of each label."""
    kind = kind_of(groups)
    return measured.tables(groups, COLUMNS[kind], ABOUT[kind]) + (
        label_table(groups) if kind == LABELS else ""
    )


def label_table(groups: Sequence[Group]) -> str:
    """Return the table of each label."""
    heads, rows = ("AUROC, %", "AUPRC, %", "right, %", "known"), []
    for group in groups:
        known = [label_means(group, key) for key in ("auroc", "auprc", "accuracy")]
        counts = [str(row["num_examples"]) for row in blocks_of(group)[0]["per_label"]]
        for place, name in enumerate(names_of(group)):
            values = [one[place] for one in known]
            cells = ["–" if value is None else f"{100 * value:.1f}" for value in values]
            rows.append([group.title, name, *cells, counts[place]])
    return f"<h4>Each label</h4>{table(['method', 'label', *heads], rows)}"
