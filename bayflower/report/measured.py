"""The report's parts about runs whose targets are numbers or counts: error by site, intervals, PIT
histograms and tables. The verdict is that of all tasks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from .collect import Group
from .figures import SHOWN, Figure, Pick, lines_over_rounds, rows_for
from .page import figures as shown
from .page import spread, table
from .svg import Chart, Rows, around, legend
from .text import differing
from .verdict import METRICS, Verdict, leading, verdict

COLUMNS = (
    ("RMSE", "rmse", 1, 3),
    ("MAE", "mae", 1, 3),
    ("NLL", "nll", 1, 3),
    ("CRPS", "crps", 1, 3),
    ("deviance", "deviance", 1, 3),
    ("in 50 % intervals, %", "coverage_50", 100, 1),
    ("in 90 % intervals, %", "coverage_90", 100, 1),
    ("width of 90 % intervals", "width_90", 1, 3),
    ("worst site's RMSE", "worst_client_rmse", 1, 3),
)
FORMS = {
    "point": "point",
    "fitted": "posterior as fitted",
    "posterior": "posterior in use",
    "calibrated": "calibrated intervals",
}
VIEWS = (
    ("personal", "Personal models, each on its own site's test data"),
    ("global", "Global models, on the same data"),
    ("new_clients", "New sites, which never trained"),
)


def is_measured(groups: Sequence[Group]) -> bool:
    """Return whether the runs of some groups predict numbers or counts."""
    return all("rmse" in one.first["final"]["personal"] for one in groups)


OVER_ROUNDS = (("rmse", "RMSE"), ("nll", "−log p(y), nats"), ("crps", "CRPS"))


def curves(groups: Sequence[Group], keys: Sequence[tuple[str, str]] = OVER_ROUNDS) -> list[Figure]:
    """Return the metrics of rounds."""
    found = []
    for key, words in keys:
        lines = [(one.title, one.curve(picked(key))) for one in groups[:SHOWN]]
        if max((len(points) for _, points in lines), default=0) < 2:
            continue
        heading = f"{words.split(',')[0]} of the personal models over rounds"
        chart = lines_over_rounds(heading, lines, words)
        text = "Mean over seeds, on the clients' own test data, at the rounds that were tested."
        found.append(Figure(heading, chart.svg(), text, legend([name for name, _ in lines])))
    return found


def picked(key: str) -> Pick:
    """Return what finds a metric of the personal models in a round."""

    def pick(record: dict[str, Any]) -> float | None:
        found: float | None = (record.get("personal") or {}).get(key)
        return found

    return pick


def by_site(group: Group, key: str) -> dict[str, float]:
    """Return the mean over seeds of a number of each client, by identity."""
    found: dict[str, list[float]] = {}
    for (_, client), value in group.by_client(key).items():
        found.setdefault(client, []).append(value)
    return {client: statistics.fmean(values) for client, values in found.items()}


def sites(groups: Sequence[Group], key: str = "rmse") -> list[Figure]:
    """Return every client's error, or other number, by method: a row a client; many clients as a
    curve.
    """
    means = {group.title: by_site(group, key) for group in groups[:SHOWN]}
    means = {title: mean for title, mean in means.items() if mean}
    if not means:
        return []
    name, order = METRICS[key].words, sorted({one for mean in means.values() for one in mean})
    span = around([value for mean in means.values() for value in mean.values()], least=0.0)
    words = "Personal models on each client's own test data after the last round."
    heading = f"{name} of each client"
    if len(order) > rows_for(groups):
        chart = Chart(
            heading, (0.0, 100.0), span, x_title="share of the clients, best first, %", y_title=name
        ).axes()
        for series, (title, mean) in enumerate(means.items()):
            values = sorted(mean.values(), reverse=METRICS[key].sign > 0)
            line = [(100 * (i + 0.5) / len(values), value) for i, value in enumerate(values)]
            chart.line(line, series, title)
        return [Figure(heading, chart.svg(), words, legend(list(means)))]
    names = {client: text for group in groups for client, text in group.named.items()}
    rows = Rows(heading, [names[one] for one in order], span, name)
    for series, (title, mean) in enumerate(means.items()):
        for place, one in enumerate(order):
            if one in mean:
                shift = 0.6 - 1.2 * series / max(len(means) - 1, 1) if len(means) > 1 else 0.0
                text = f"{title}, {names[one]}: {mean[one]:.3f}"
                rows.point(mean[one], rows.at(place, shift), series, text)
    return [Figure(heading, rows.svg(), words, legend(list(means), lines=False))]


def gains(groups: Sequence[Group], found: Verdict) -> list[Figure]:
    """Return, for each method, how much smaller each client's error is, or how much larger another
    number, than with its own data alone.
    """
    sign = METRICS[found.metric].sign
    series, drawn = {group.title: place for place, group in enumerate(groups)}, []
    for one in found.against:
        parts = sorted(one.difference.sites, key=lambda site: -sign * site.mean)
        if one.title not in series or not parts:
            continue
        heading = f"Change of {METRICS[found.metric].words} by {one.title}"
        span = around([*(site.mean for site in parts), 0.0])
        words = f"{METRICS[found.metric].words} less that of {one.base}"
        texts = [f"{found.names[site.id]}: {site.mean:+.3f}" for site in parts]
        chart: Chart | Rows
        if len(parts) > rows_for(groups):
            chart = Chart(
                heading,
                (0.0, float(len(parts))),
                span,
                x_title="clients, the most improved first",
                y_title=words,
            ).axes(x_names=[])
            for place, site in enumerate(parts):
                where = (place + 0.1, place + 0.9, 0.0, site.mean)
                chart.bar(*where, series[one.title], texts[place])
            chart.rule(0.0, 0.0, float(len(parts)), 0.0)
        else:
            chart = rows = Rows(heading, [found.names[site.id] for site in parts], span, words)
            for place, site in enumerate(parts):
                ends = rows.at(place, -0.7), rows.at(place, 0.7)
                rows.bar(0.0, site.mean, *ends, series[one.title], texts[place])
            rows.rule(0.0, 0.0, 0.0, -float(len(parts)))
        better = sum(sign * site.mean > 0 for site in parts)
        side = "Above" if sign > 0 else "Below"
        words = f"{side} zero is better: {better} of {len(parts)} clients gain."
        drawn.append(Figure(heading, chart.svg(), words))
    return drawn


def calibrated(group: Group) -> dict[str, Any] | None:
    """Return the calibrated form of a group's first run; None without calibration."""
    said = group.first.get("uncertainty")
    return said["clients"]["forms"].get("calibrated") if said else None


def pits(groups: Sequence[Group]) -> list[Figure]:
    """Return the PIT histogram of each method: flat if the distributions are right."""
    found = []
    for series, group in enumerate(groups[:SHOWN]):
        every = [run.result["final"]["personal"].get("pit") or [] for run in group.runs]
        if (form := calibrated(group)) and form.get("pit"):
            every = [
                run.result["uncertainty"]["clients"]["forms"]["calibrated"]["pit"]
                for run in group.runs
                if run.result.get("uncertainty")
            ]
        counts = [sum(column) for column in zip(*every, strict=False)]
        if not sum(counts):
            continue
        share = [count / sum(counts) * len(counts) for count in counts]
        heading = f"PIT: {group.title}"
        chart = Chart(
            heading,
            (0.0, 1.0),
            (0.0, max(1.5, *share)),
            x_title="F(y), the predicted probability of less",
            y_title="density",
        ).axes()
        for place, height in enumerate(share):
            low, high = place / len(share) + 0.005, (place + 1) / len(share) - 0.005
            chart.bar(low, high, 0.0, height, series, f"{height:.2f} times as many as expected")
        chart.rule(0.0, 1.0, 1.0, 1.0)
        words = (
            "Flat: the predictive distributions are right. High ends: they are too narrow. A hill: "
            "too wide. A slope: biased."
        )
        found.append(Figure(heading, chart.svg(), words))
    return found


def trusted(group: Group) -> str:
    """Return in words whether intervals hold what they promise."""
    form = calibrated(group)
    block = form or group.first["final"]["personal"]
    held = [f"{100 * block[f'coverage_{k}']:.1f} % in {k} % intervals" for k in (50, 90)]
    number = group.first["final"]["personal"]["num_examples"]
    kind = "conformal intervals" if form else "intervals of the likelihood"
    return f"{group.title}: {', '.join(held)} ({kind}, {number} test samples)."


def section(groups: Sequence[Group], drawn: Sequence[Figure]) -> str:
    """Return the intervals' coverage in words, a table of forms, and PIT histograms."""
    lines = "".join(f"<li>{escape(trusted(one))}</li>" for one in groups)
    return f"<ul>{lines}</ul>{forms(groups)}" + shown(drawn)


def forms(groups: Sequence[Group]) -> str:
    """Return the table of every form of the models; "" without calibration."""
    rows = []
    for group in groups:
        known = (group.first.get("uncertainty") or {"clients": {"forms": {}}})["clients"]["forms"]
        for form, words in FORMS.items():
            if block := known.get(form):
                cells = [
                    "–" if block.get(key) is None else f"{factor * block[key]:.{digits}f}"
                    for _, key, factor, digits in COLUMNS[:-1]
                    if key != "deviance"
                ]
                rows.append([f"{group.title}, {words}", *cells])
    if not rows:
        return ""
    head = ["model", *(name for name, key, _, _ in COLUMNS[:-1] if key != "deviance")]
    return table(head, rows)


def summary(
    groups: Sequence[Group],
    view: str,
    columns: Sequence[tuple[str, str, int, int]] = COLUMNS,
) -> str:
    """Return the table of the final test."""
    some = [group for group in groups if group.values(columns[0][1], view)]
    if not some:
        return ""
    found = verdict(some, leading(some), view)
    against = {one.title: one for one in found.against}
    columns = [one for one in columns if any(group.values(one[1], view) for group in some)]
    rows = []
    for group in some:
        cells = [
            spread([factor * value for value in group.values(key, view)], digits)
            for _, key, factor, digits in columns
        ]
        if against:
            cells += list(differing(found, against.get(group.title)))
        rows.append([group.title, *cells, str(len(group.runs))])
    more = [f"{METRICS[found.metric].words} minus local", "p"] if against else []
    return table(["method", *(name for name, *_ in columns), *more, "seeds"], rows)


def tables(
    groups: Sequence[Group],
    columns: Sequence[tuple[str, str, int, int]] = COLUMNS,
    about: str = "Errors, scores and widths are in the target's units: lower is better.",
) -> str:
    """Return the tables of all tested models."""
    made = [(words, summary(groups, view, columns)) for view, words in VIEWS]
    text = "".join(f"<h4>{escape(words)}</h4>{one}" for words, one in made if one)
    return (
        "<p class=soft>Mean ± standard deviation over seeds, after the last round. "
        f"{about}</p>" + text
    )
