"""The section on uncertainty: point against posterior against calibrated model, on the clients' own
test samples and on shifted ones; risk against coverage; prediction sets by client.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from .collect import Group
from .figures import SHOWN, Figure, short
from .page import figures, spread, table
from .svg import Chart, legend
from .text import FORMS

COLUMNS = (
    ("accuracy, %", "accuracy", 100, 2),
    ("NLL", "nll", 1, 3),
    ("Brier", "brier", 1, 3),
    ("ECE, %", "ece", 100, 2),
    ("ECE all classes, %", "ece_allclass", 100, 2),
    ("error AUROC, %", "error_auroc", 100, 1),
    ("covered, %", "coverage", 100, 1),
    ("classes a set", "set_size", 1, 2),
    ("worst client's NLL", "worst_client_nll", 1, 3),
)


def section(groups: Sequence[Group]) -> str:
    """Return the section; "" if no run was calibrated."""
    some = [group for group in groups if said(group)]
    if not some:
        return ""
    parts = [f"<p>{escape(words(group))}</p>" for group in some]
    parts.append(forms_table(some, "clients", "test"))
    if any(one.get("new_clients") for group in some for one in said(group)):
        parts.append("<h3>New clients</h3>" + forms_table(some, "new_clients", "test"))
    parts.append(shifted_table(some))
    parts.append(figures([*risks(some), *coverages(some)]))
    return "".join(parts)


def said(group: Group) -> list[dict[str, Any]]:
    """Return what the runs of a group say of uncertainty."""
    found = [run.result.get("uncertainty") for run in group.runs]
    return [one for one in found if one]


def words(group: Group) -> str:
    """Return in words what the clients of a group use."""
    rows = [row for one in said(group) for row in one["clients"]["per_client"]]
    used = sum(row["posterior"] is not None for row in rows)
    outside = sum(not row["covered_low"] <= row["covered"] <= row["covered_high"] for row in rows)
    text = (
        f"{group.title}: {used} of {len(rows)} personal models use a posterior; from the others it "
        "is withheld, because on held-out samples it does not help. "
    )
    return text + (
        f"The sets of {outside} of {len(rows)} models cover fewer or more samples than chance "
        "explains (99 % interval)."
        if outside
        else "The sets of every model cover as many samples as they should (99 % interval)."
    )


def forms_table(groups: Sequence[Group], who: str, test: str) -> str:
    """Return the table of forms; the best NLL of each method is bold."""
    rows: list[list[str]] = []
    best: list[tuple[int, int]] = []
    for group in groups:
        nll = {}
        for form, name in FORMS.items():
            blocks = [
                one[who]["forms"][form]
                for one in said(group)
                if one.get(who) and form in one[who]["forms"]
            ]
            if not blocks:
                continue
            nll[len(rows)] = statistics.fmean(block["nll"] for block in blocks)
            cells = []
            for _, key, factor, digits in COLUMNS:
                values = [factor * b[key] for b in blocks if b.get(key) is not None]
                cells.append(spread(values, digits))
            rows.append([group.title, name, *cells])
        best += [(row, 3) for row, value in nll.items() if value == min(nll.values())]
    return table(["method", "form", *(head for head, *_ in COLUMNS)], rows, best)


def shifted_table(groups: Sequence[Group]) -> str:
    """Return how the point and the calibrated model do on shifted samples, and which alarms
    sound.
    """
    rows = []
    for group in groups:
        blocks = [one["clients"] for one in said(group)]
        for test in sorted({name for block in blocks for name in block["shifted"]}):
            some = [block for block in blocks if test in block["shifted"]]
            cells = []
            for key, factor, digits in (("accuracy", 100, 2), ("nll", 1, 3), ("ece", 100, 2)):
                for form in ("point", "calibrated"):
                    values = [factor * block["shifted"][test][form][key] for block in some]
                    cells.append(spread(values, digits))
            for alarm in ("entropy", "information", "distance"):
                rates = [
                    100 * block["alarms"][test][alarm]
                    for block in some
                    if block["alarms"][test][alarm] is not None
                ]
                cells.append(spread(rates, 1))
            rows.append([group.title, test, *cells])
    if not rows:
        return ""
    heads = ["method", "shift", "accuracy, % (point)", "(calibrated)", "NLL (point)"]
    heads += ["(calibrated)", "ECE, % (point)", "(calibrated)"]
    heads += ["entropy alarms, %", "information, %", "distance, %"]
    return "<h3>Shifted samples</h3>" + table(heads, rows)


def risks(groups: Sequence[Group]) -> list[Figure]:
    """Return the share of errors among the samples with the least doubt, by method."""
    curves: list[tuple[int, str, list[tuple[float, float]]]] = []
    for group in groups[:SHOWN]:
        by_coverage: dict[float, list[float]] = {}
        for one in said(group):
            for point in one["clients"]["forms"]["calibrated"]["risk_coverage"]:
                if point["risk"] is not None:
                    by_coverage.setdefault(point["coverage"], []).append(point["risk"])
        line = [(c, statistics.fmean(values)) for c, values in sorted(by_coverage.items())]
        if line:
            curves.append((len(curves), group.title, line))
    if not curves:
        return []
    most = max(risk for _, _, line in curves for _, risk in line)
    chart = Chart(
        "risk against coverage",
        (0.5, 1.0),
        (0.0, 1.05 * most or 1.0),
        x_title="share of samples that are decided",
        y_title="share of these that are wrong",
    )
    chart.axes()
    for series, title, line in curves:
        chart.line(line, series, title)
        for coverage, risk in line:
            chart.point(coverage, risk, series, f"{title}: {risk:.3f} wrong of {coverage:.0%}")
    key = legend([title for _, title, _ in curves])
    text = "Calibrated models decide the samples with the least doubt and abstain on the rest."
    return [Figure("Risk against coverage", chart.svg(), text, key=key)]


def coverages(groups: Sequence[Group]) -> list[Figure]:
    """Return, by method, how many test samples each client's sets cover, and the interval that
    chance explains.
    """
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        one = said(group)[0]
        rows = [row for row in one["clients"]["per_client"] if row["num_examples"]]
        if not rows:
            continue
        chart = Chart(
            f"coverage of {group.title}",
            (-0.7, len(rows) - 0.3),
            (0.0, 1.02),
            x_title="client",
            y_title="share covered",
        )
        run = next(run for run in group.runs if run.result.get("uncertainty"))
        chart.axes(x_names=[short(run.name(row["client"])) for row in rows])
        chart.rule(-0.7, one["coverage"], len(rows) - 0.3, one["coverage"])
        for place, row in enumerate(rows):
            number = row["num_examples"]
            low, high = row["covered_low"] / number, row["covered_high"] / number
            text = f"{run.name(row['client'])}: {row['covered']} of {number}, {low:.2f}–{high:.2f}"
            chart.bar(place - 0.12, place + 0.12, low, max(high, low + 0.004), series, text)
            chart.point(place, row["coverage"], series, text)
        text = (
            f"Sets that promise {one['coverage']:.0%}: what each client's sets cover (points), and "
            "the 99 % interval for its numbers of samples (bars)."
        )
        found.append(Figure(f"Prediction sets: {group.title}", chart.svg(), text))
    return found
