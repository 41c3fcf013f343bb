"""The section on uncertainty: point against posterior against calibrated model, on the clients' own
test samples and on shifted ones; risk against coverage; prediction sets by client.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from .collect import Group
from .figures import SHOWN, Figure, rows_for
from .page import figures, spread, table
from .panels import calibrated
from .svg import Chart, Rows, legend
from .text import FORMS

COLUMNS = (
    ("accuracy, %", "accuracy", 100, 1),
    ("NLL", "nll", 1, 3),
    ("Brier", "brier", 1, 3),
    ("ECE, %", "ece", 100, 1),
    ("error AUROC, %", "error_auroc", 100, 1),
    ("covered, %", "coverage", 100, 1),
    ("classes a set", "set_size", 1, 2),
    ("worst site's NLL", "worst_client_nll", 1, 3),
)
DRAWS = 2000
SURE = 95  # per cent
COARSE = 0.1  # a calibration error that chance explains; beyond it a test has no power


def section(groups: Sequence[Group], reliability: Sequence[Figure]) -> str:
    """Return whether probabilities can be trusted: words and pictures."""
    some = [group for group in groups if said(group)]
    parts = [f"<p>{escape(words(some))}</p>"] if some else []
    parts.append(figures([*risks(some), *coverages(some), *reliability]))
    return "".join(parts)


def tables(groups: Sequence[Group]) -> str:
    """Return the tables of forms and of shifted samples; "" if no run was calibrated."""
    some = [group for group in groups if said(group)]
    if not some:
        return ""
    parts = ["<h4>Uncertainty of the personal models</h4>", forms_table(some, "clients")]
    if any(one.get("new_clients") for group in some for one in said(group)):
        parts.append("<h4>Uncertainty at new sites</h4>" + forms_table(some, "new_clients"))
    return "".join([*parts, shifted_table(some)])


def trusted(group: Group) -> str:
    """Return in a sentence or two whether the probabilities of a method can be trusted."""
    runs = said(group)
    if not runs:
        bars = [run.result["final"]["personal"].get("reliability") for run in group.runs]
        known = [one["top_label"] for one in bars if one]
        if not known:
            return f"{group.title}: not known; the runs have no reliability diagram."
        return f"{group.title}: not calibrated (calibration=off). {honest(known)[2]}"
    good, coarse, text = honest(
        [one["clients"]["forms"]["calibrated"]["reliability"] for one in runs]
    )
    inside, sets = coverage_words(group)
    answer = "yes" if good and inside else "no" if not good and not inside else "in part"
    if good and inside and coarse:
        answer = "too few test samples to tell"
    return f"{group.title}: {answer}. {text} {sets}"


def honest(diagrams: Sequence[Sequence[dict[str, Any]]]) -> tuple[bool, bool, str]:
    """Return whether stated and true confidence differ by no more than chance explains in most
    runs, whether chance explains so much that this says little, and words. Chance:
    the ECE of 2,000 draws in which every bin is right as often as it says.
    """
    errors, limits, excess = [], [], []
    for bars in diagrams:
        kept = [bar for bar in bars if bar["count"]]
        number = np.array([bar["count"] for bar in kept])
        stated = np.array([min(max(bar["confidence"], 0.0), 1.0) for bar in kept])
        right = np.array([bar["accuracy"] for bar in kept])
        total = number.sum()
        draws = np.random.default_rng(0).binomial(number, stated, (DRAWS, len(kept)))
        chance = np.abs(draws - number * stated).sum(1) / total
        errors.append(float((number * np.abs(right - stated)).sum() / total))
        limits.append(float(np.percentile(chance, SURE)))
        excess.append(float((number * (stated - right)).sum() / total))
    within = sum(error <= limit for error, limit in zip(errors, limits, strict=True))
    good = 2 * within > len(errors)
    text = f"Stated and true confidence differ by {100 * statistics.fmean(errors):.1f} points; "
    text += f"chance alone explains up to {100 * statistics.fmean(limits):.1f}"
    if not good:
        text += f": the models are too {'sure' if statistics.fmean(excess) > 0 else 'cautious'}"
    return good, statistics.fmean(limits) > COARSE, text + "."


def coverage_words(group: Group) -> tuple[bool, str]:
    """Return whether the sets of every client cover what they promise, and words."""
    shares, outside = [], {}
    for run in group.runs:
        if one := run.result.get("uncertainty"):
            shares.append(one["clients"]["forms"]["calibrated"]["coverage"])
            for row in one["clients"]["per_client"]:
                if not row["covered_low"] <= row["covered"] <= row["covered_high"]:
                    few = row["covered"] < row["covered_low"]
                    outside[run.name(row["client"])] = "few" if few else "many"
    promise, covered = said(group)[0]["coverage"], statistics.fmean(shares)
    text = f"Sets that promise {100 * promise:.0f} % hold the truth for {100 * covered:.1f} %"
    if not outside:
        return True, text + ", at every site within chance."
    named = [f"{name} (too {how})" for name, how in list(outside.items())[:6]]
    more = f" and {len(outside) - 6} more" if len(outside) > 6 else ""
    return False, f"{text}, but not within chance at {', '.join(named)}{more}."


def said(group: Group) -> list[dict[str, Any]]:
    """Return what the runs of a group say of uncertainty."""
    return calibrated(group)


def words(groups: Sequence[Group]) -> str:
    """Return in words which models use a posterior, and how the pictures were made."""
    used = []
    for group in groups:
        rows = [row for one in said(group) for row in one["clients"]["per_client"]]
        number = sum(row["posterior"] is not None for row in rows)
        used.append(f"{group.title} {number} of {len(rows)}")
    return (
        f"Personal models that use a posterior: {', '.join(used)}. From the others it is withheld, "
        "because on held-out samples it does not help."
    )


def forms_table(groups: Sequence[Group], who: str) -> str:
    """Return the table of forms, a row a method and form."""
    rows: list[list[str]] = []
    for group in groups:
        for form, name in FORMS.items():
            blocks = [
                one[who]["forms"][form]
                for one in said(group)
                if one.get(who) and form in one[who]["forms"]
            ]
            if not blocks:
                continue
            cells = []
            for _, key, factor, digits in COLUMNS:
                values = [factor * b[key] for b in blocks if b.get(key) is not None]
                cells.append(spread(values, digits))
            rows.append([f"{group.title}: {name}", *cells])
    return table(["method: form", *(head for head, *_ in COLUMNS)], rows)


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
            for key, factor, digits in (("accuracy", 100, 1), ("nll", 1, 3), ("ece", 100, 1)):
                means = [
                    statistics.fmean(factor * block["shifted"][test][form][key] for block in some)
                    for form in ("point", "calibrated")
                ]
                cells.append(" → ".join(f"{mean:.{digits}f}" for mean in means))
            for alarm in ("entropy", "information", "distance"):
                rates = [
                    100 * block["alarms"][test][alarm]
                    for block in some
                    if block["alarms"][test][alarm] is not None
                ]
                cells.append(spread(rates, 1))
            rows.append([f"{group.title}: {test}", *cells])
    if not rows:
        return ""
    heads = ["method: shift", "accuracy, %", "NLL", "ECE, %"]
    heads += ["entropy alarms, %", "information alarms, %", "distance alarms, %"]
    text = "<h4>Shifted samples, point → calibrated</h4>"
    return text + table(heads, rows)


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
        run = next(run for run in group.runs if run.result.get("uncertainty"))
        if len(rows) > rows_for([group]):
            continue  # the sentence above says how many are outside
        names = [run.name(row["client"]) for row in rows]
        chart = Rows(f"coverage of {group.title}", names, (0.0, 1.02), "share covered")
        chart.rule(one["coverage"], 0.0, one["coverage"], -float(len(rows)))
        for place, row in enumerate(rows):
            number = row["num_examples"]
            low, high = row["covered_low"] / number, row["covered_high"] / number
            text = f"{names[place]}: {row['covered']} of {number}, {low:.2f}–{high:.2f}"
            where = (low, max(high, low + 0.004), chart.at(place, -0.6), chart.at(place, 0.6))
            chart.bar(*where, series, text)
            chart.point(row["coverage"], chart.at(place), series, text)
        text = (
            f"Sets that promise {100 * one['coverage']:.0f} %: what each client's sets cover "
            f"(points), and the 99 % interval for its numbers of samples (bars); seed {run.seed}."
        )
        found.append(Figure(f"Prediction sets: {group.title}", chart.svg(), text))
    return found
