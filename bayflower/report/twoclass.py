"""What two classes allow: AUROC, sensitivity and specificity with intervals, confusion matrices,
ROC and decision curves. The second class is the positive one.

Everything comes from counts of P(positive) in 50 bins by true class (`metrics.py`). Intervals are
over samples, 95 %: Wilson's for shares, DeLong's on the logit scale for the AUROC. Seeds are
averaged, and the interval stays that of one seed's samples: seeds may share their test samples, so
counting them as more samples would make it too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .collect import Group
from .figures import SHOWN, Figure
from .page import figures, table
from .svg import Chart, legend

Z = 1.959964


class Estimate(NamedTuple):
    """A number with its 95 % interval; None where it is not defined."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def text(self, percent: bool = True) -> str:
        """Return e.g. "84 % (76–90)", "0.86 (0.80–0.91)"."""
        factor, digits, unit = (100, 0, " %") if percent else (1, 2, "")
        if self.value is None:
            return "–"
        text = f"{factor * self.value:.{digits}f}{unit}"
        if self.low is None or self.high is None:
            return text
        return f"{text} ({factor * self.low:.{digits}f}–{factor * self.high:.{digits}f})"


class Numbers(NamedTuple):
    """What is known of one method, on some clients."""

    auroc: Estimate
    sensitivity: Estimate
    specificity: Estimate
    ppv: Estimate
    npv: Estimate
    negatives: float  # samples a seed
    positives: float
    confusion: np.ndarray  # (2, 2) mean over seeds: true class, predicted class
    scores: np.ndarray  # (2, 50) mean over seeds


def numbers(blocks: Sequence[dict[str, Any]]) -> Numbers | None:
    """Return the numbers of some blocks, one a seed; None if they are not of two classes."""
    known = [block for block in blocks if block.get("scores")]
    if not known:
        return None
    confusion = np.mean([block["confusion"] for block in known], 0)
    areas = [delong(np.array(block["scores"], dtype=float)) for block in known]
    areas = [one for one in areas if one is not None]
    (tn, fp), (fn, tp) = confusion.tolist()
    return Numbers(
        area_interval(areas),  # type: ignore[arg-type]
        wilson(tp, tp + fn),
        wilson(tn, tn + fp),
        wilson(tp, tp + fp),
        wilson(tn, tn + fn),
        tn + fp,
        tp + fn,
        confusion,
        np.mean([block["scores"] for block in known], 0),
    )


def wilson(part: float, whole: float) -> Estimate:
    """Return a share with Wilson's interval."""
    if not whole:
        return Estimate(None)
    share, wide = part / whole, Z**2 / whole
    middle = (share + wide / 2) / (1 + wide)
    half = Z / (1 + wide) * math.sqrt(share * (1 - share) / whole + wide / (4 * whole))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def delong(scores: np.ndarray) -> tuple[float, float] | None:
    """Return the AUROC and its variance (DeLong, DeLong and Clarke-Pearson, 1988) from counts by
    bin; None without two samples of each class.
    """
    negatives, positives = scores
    n, p = negatives.sum(), positives.sum()
    if min(n, p) < 2:
        return None
    beaten = (np.cumsum(negatives) - negatives / 2) / n  # of a positive in each bin
    beating = (p - np.cumsum(positives) + positives / 2) / p  # of a negative in each bin
    area = float((positives * beaten).sum() / p)
    of_positives = (positives * (beaten - area) ** 2).sum() / (p - 1)
    of_negatives = (negatives * (beating - area) ** 2).sum() / (n - 1)
    return area, float(of_positives / p + of_negatives / n)


def area_interval(areas: Sequence[tuple[float, float]]) -> Estimate:
    """Return the mean AUROC of some seeds; the interval has the mean variance."""
    if not areas:
        return Estimate(None)
    area = statistics.fmean(one for one, _ in areas)
    variance = statistics.fmean(one for _, one in areas)
    if not 0 < area < 1 or not variance:
        return Estimate(area)
    middle, half = math.log(area / (1 - area)), Z * math.sqrt(variance) / (area * (1 - area))
    low, high = (1 / (1 + math.exp(-(middle + side * half))) for side in (-1, 1))
    return Estimate(area, low, high)


def net_benefit(scores: np.ndarray) -> list[tuple[float, float, float]]:
    """Return (threshold, net benefit of the model, of treating all): TP/n − FP/n · t/(1 − t)
    (Vickers and Elkin, 2006), at the edges of the bins, where the counts are exact.
    """
    bins, total = scores.shape[1], scores.sum()
    found = []
    for i in range(1, bins):
        odds = i / (bins - i)
        false, true = scores[:, i:].sum(1)
        every = (scores[1].sum() - odds * scores[0].sum()) / total
        found.append((i / bins, float((true - odds * false) / total), float(every)))
    return found


# -- HTML ----------------------------------------------------------------------------------------
def of_group(group: Group) -> Numbers | None:
    """Return the numbers of the personal models on all clients."""
    return numbers([run.result["final"]["personal"] for run in group.runs])


def class_names(group: Group) -> tuple[str, str]:
    """Return the names of the negative and the positive class."""
    names = group.first.get("classes") or ["class 0", "class 1"]
    return str(names[0]), str(names[1])


def in_words(group: Group) -> str | None:
    """Return a method's numbers in a sentence; None if there are not two classes."""
    found = of_group(group)
    if found is None:
        return None
    negative, positive = class_names(group)
    return (
        f"{group.title}: finds {found.sensitivity.text()} of “{positive}” and clears "
        f"{found.specificity.text()} of “{negative}”; AUROC {found.auroc.text(False)}."
    )


def section(groups: Sequence[Group], best: str) -> str:
    """Return the section; "" if the runs are not of two classes or older than these counts."""
    known = [(group, found) for group in groups if (found := of_group(group)) is not None]
    if not known:
        return ""
    negative, positive = class_names(known[0][0])
    words = (
        f"Positive is “{positive}”, negative “{negative}”. A sample counts as positive where its "
        "probability is at least one half. Personal models, all sites together. Intervals are 95 % "
        "over the test samples of one seed; they do not contain the choice of sites."
    )
    chosen = next((group for group, _ in known if group.title == best), known[0][0])
    shown = known[:SHOWN]
    return (
        f"<p>{escape(words)}</p>"
        + figures([roc(shown), decision(shown, positive)], [matrix(*one) for one in shown])
        + "<h4>All sites together</h4>"
        + totals(known)
        + f"<h4>{escape(chosen.title)}, site by site</h4>"
        + by_site(chosen)
    )


def roc(known: Sequence[tuple[Group, Numbers]]) -> Figure:
    """Return the ROC curves."""
    chart = Chart(
        "ROC curves",
        (0.0, 1.0),
        (0.0, 1.0),
        x_title="1 − specificity",
        y_title="sensitivity",
        height=330.0,
    ).axes()
    chart.rule(0.0, 0.0, 1.0, 1.0)
    for series, (group, found) in enumerate(known):
        tails = np.cumsum(found.scores[:, ::-1], 1) / np.maximum(found.scores.sum(1), 1)[:, None]
        line = [(0.0, 0.0), *zip(*tails.tolist(), strict=True)]
        chart.line(line, series, group.title)
    key = legend([f"{group.title}, {found.auroc.text(False)}" for group, found in known])
    text = "The higher the curve above the diagonal, the better positives and negatives are told "
    text += "apart. Beside the names: the area (AUROC) with its interval."
    return Figure("ROC curves", chart.svg(), text, key)


def decision(known: Sequence[tuple[Group, Numbers]], positive: str) -> Figure:
    """Return the decision curves."""
    lines = [(group.title, net_benefit(found.scores)) for group, found in known]
    most = max(value for _, line in lines for _, value, _ in line)
    lowest = -0.15 * max(most, 0.05)
    chart = Chart(
        "decision curves",
        (0.0, 1.0),
        (lowest, max(1.1 * most, 0.05)),
        x_title="probability from which one would act",
        y_title="net benefit",
        height=330.0,
    ).axes()
    chart.rule(0.0, 0.0, 1.0, 0.0)
    every = [(t, value) for t, _, value in lines[0][1] if value >= lowest]
    for (x0, y0), (x1, y1) in pairwise(every):
        chart.rule(x0, y0, x1, y1)
    for series, (title, line) in enumerate(lines):
        chart.line([(t, value) for t, value, _ in line if value >= lowest], series, title)
    text = f"Net benefit of acting on the model: true “{positive}” found, less false alarms at the "
    text += "price that the threshold implies, per sample. Thin lines: act on nobody (0) and on "
    text += "everybody. A model is worth using where its line is above both."
    return Figure("Decision curves", chart.svg(), text, legend([title for title, _ in lines]))


def matrix(group: Group, found: Numbers) -> str:
    """Return a confusion matrix as a figure."""
    names = class_names(group)
    head = "".join(f'<th scope="col">predicted: {escape(name)}</th>' for name in names)
    rows = []
    for i, name in enumerate(names):
        cells = []
        for j in (0, 1):
            number, total = found.confusion[i][j], found.confusion[i].sum()
            share = f"{100 * number / total:.0f} %" if total else "–"
            kind = "right" if i == j else "wrong"
            cells.append(f"<td class={kind}><b>{count(number)}</b>{share}</td>")
        rows.append(f'<tr><th scope="row">truly: {escape(name)}</th>{"".join(cells)}</tr>')
    seeds = ", mean over seeds" if len(group.runs) > 1 else ""
    return (
        f"<figure><h4>Confusion matrix: {escape(group.title)}</h4><table class=matrix><thead><tr>"
        f"<td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table><figcaption>Test "
        f"samples of all sites{seeds}; per cent of each row.</figcaption></figure>"
    )


def totals(known: Sequence[tuple[Group, Numbers]]) -> str:
    """Return the table of all methods."""
    rows = [[group.title, *cells(found)] for group, found in known]
    head = ["method", "AUROC", "sensitivity", "specificity", "positives that are right"]
    return table([*head, "negatives that are right", "positive + negative samples"], rows)


def cells(found: Numbers) -> list[str]:
    """Return numbers as cells of a table."""
    shares = (found.sensitivity, found.specificity, found.ppv, found.npv)
    samples = f"{count(found.positives)} + {count(found.negatives)}"
    return [found.auroc.text(False), *(one.text() for one in shares), samples]


def count(number: float) -> str:
    """Return a number of samples, which as a mean over seeds need not be whole."""
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.1f}"


def clients(group: Group) -> dict[str, Numbers]:
    """Return the numbers of each client by name."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for run in group.runs:
        for row in run.result["final"]["personal"]["per_client"]:
            who = run.clients.get(int(row["client"]))
            if who and row.get("scores"):
                blocks.setdefault(who.id, []).append(row)
    known = {group.named[client]: numbers(some) for client, some in blocks.items()}
    return {name: found for name, found in known.items() if found is not None}


def by_site(group: Group) -> str:
    """Return the table of a method's clients."""
    rows = [[name, *cells(found)] for name, found in clients(group).items()]
    head = ["site", "AUROC", "sensitivity", "specificity", "positives that are right"]
    return table([*head, "negatives that are right", "positive + negative samples"], rows)


def blind(group: Group) -> list[str]:
    """Return the clients at which a method does not tell the classes apart beyond chance."""
    return [
        f"{name}: {found.auroc.text(False)}"
        for name, found in clients(group).items()
        if found.auroc.low is not None and found.auroc.low <= 0.5
    ]
