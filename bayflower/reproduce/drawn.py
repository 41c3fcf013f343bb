"""The pictures of RESULTS.md, as SVG text. The same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..report.svg import Chart, Rows, around
from .cache import Cache
from .findings import Finding
from .pairs import DECIDED, FEW, Pair
from .show import look
from .sweep import Plan
from .tables import Table

COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b9770e", "#117a65", "#7f8c8d", "#34495e")
STYLE = (
    "svg{background:#fff;font-family:sans-serif}text{fill:#222;font-size:11px}"
    ".tick{fill:#666}.grid{stroke:#e3e3e3}.axis{fill:none;stroke:#666}.rule{stroke:#666}"
    ".line{fill:none;stroke-width:2}.mark{stroke:#fff;stroke-width:.6}.bar{opacity:.75}"
    + "".join(
        f".line.s{n}{{stroke:{colour}}}.mark.s{n},.bar.s{n}{{fill:{colour}}}"
        for n, colour in enumerate(COLOURS)
    )
)
METHODS = "ours-pfedvmp-methods"  # the table whose methods were run under the same conditions
WIDTHS = ("decide-metavd", "Dir(0.5), test")
SHOWN = (*DECIDED, "undecided", FEW)


def pictures(
    tables: Mapping[str, Table],
    plan: Plan,
    cache: Cache,
    found: Sequence[Finding],
    pairs: Sequence[Pair],
) -> dict[str, tuple[str, str]]:
    """Return by file name what a picture shows and the picture; those that have no run are left
    out.
    """
    plan = replace(plan, form="full")
    drawn = {
        "gains.svg": ("Gains over the other row, with 95 % intervals over seeds", gains(found)),
        "published.svg": (
            "Published gain in accuracy against ours, every pair in a trained column",
            published(pairs),
        ),
    }
    if METHODS in tables:
        table = tables[METHODS]
        drawn["calibration.svg"] = (
            f"Accuracy against calibration: {table.title}",
            scatter(table, plan, cache, "ece", "ECE"),
        )
        drawn["cost.svg"] = (
            f"Accuracy against cost: {table.title}",
            scatter(table, plan, cache, "", "seconds a round"),
        )
    if WIDTHS[0] in tables:
        drawn["width.svg"] = (
            "What decides MetaVD's gain: accuracy by width, one mark a seed",
            widths(tables[WIDTHS[0]], plan, cache),
        )
    return {file: (title, styled(chart)) for file, (title, chart) in drawn.items() if chart}


def styled(chart: Chart | tuple[Chart, list[str]]) -> str:
    """Return a chart that needs no page around it; a key to its series stands below it."""
    chart, names = chart if isinstance(chart, tuple) else (chart, [])
    text = chart.svg()
    if names:
        key = keyed(names, chart.width)
        tall = chart.height + key[1]
        text = text.replace(
            f'viewBox="0 0 {chart.width:.0f} {chart.height:.0f}"',
            f'viewBox="0 0 {chart.width:.0f} {tall:.0f}"',
        )
        inside = f'<g transform="translate(0,{chart.height:.0f})">{key[0]}</g></svg>'
        text = text.removesuffix("</svg>") + inside
    head, mark, rest = text.partition(">")
    return f'{head} width="{1.6 * chart.width:.0f}"{mark}<style>{STYLE}</style>{rest}\n'


def keyed(names: list[str], width: float) -> tuple[str, float]:
    """Return the key to the series, two a line, and its height."""
    chart = Chart("key", (0, width), (0, 1), width=width)
    parts = []
    for place, text in enumerate(names):
        x, y = 60 + (place % 2) * width / 2, 8 + 16 * (place // 2)
        chart.mark(x - 10, y - 4, place, text)
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}">{text}</text>')
    return "".join([*chart.parts, *parts]), 16.0 * (1 + (len(names) - 1) // 2) + 8


def gains(found: Sequence[Finding]) -> Chart | None:
    """Return a row for each comparison that has an interval."""
    rows = [
        (one.text, one.difference)
        for finding in found
        for one in finding.evidence
        if one.unit == "%" and one.difference is not None and one.difference.low is not None
    ]
    if not rows:
        return None
    ends = [value for _, d in rows for value in (d.low, d.high) if value is not None]
    chart = Rows("gains", [text for text, _ in rows], around([*ends, 0.0]), "points", thick=12)
    chart.rule(0.0, 0.0, 0.0, -float(len(rows)))
    for place, (text, d) in enumerate(rows):
        at = chart.at(place)
        assert d.low is not None
        assert d.high is not None
        series = 2 if d.low > 0 else 1 if d.high < 0 else 6
        words = f"{text}: {d.mean:+.2f} ({d.low:+.2f} to {d.high:+.2f})"
        chart.bar(d.low, d.high, chart.at(place, -0.25), chart.at(place, 0.25), series, words)
        chart.point(d.mean, at, series, words)
    return chart


def published(pairs: Sequence[Pair]) -> tuple[Chart, list[str]] | None:
    """Return ours over theirs for the accuracies that were trained."""
    trained = [pair for pair in pairs if pair.state in SHOWN and "accuracy" in pair.key]
    shown = [pair for pair in trained if pair.difference is not None]
    if not shown:
        return None
    papers = sorted({pair.table.partition("-")[0] for pair in shown})
    ours = [pair.difference.mean for pair in shown if pair.difference is not None]
    span = around([*ours, *(pair.published for pair in shown), 0.0])
    chart = Chart("published", span, span, x_title="the paper, points", y_title="ours, points")
    chart.axes()
    chart.rule(span[0], span[0], span[1], span[1])
    chart.rule(span[0], 0.0, span[1], 0.0)
    for pair, mean in zip(shown, ours, strict=True):
        words = f"{pair.table}, {pair.where}: {pair.own} against {pair.other}, {pair.state}"
        chart.point(pair.published, mean, papers.index(pair.table.partition("-")[0]), words)
    return chart, papers


def scatter(
    table: Table, plan: Plan, cache: Cache, key: str, title: str
) -> tuple[Chart, list[str]] | None:
    """Return accuracy over a metric of the personal models (`key`), or over seconds a round."""
    cells = [one for one in look(table, plan, cache) if one.cell.metric.key == "accuracy"]
    points: dict[str, tuple[float, float]] = {}
    for one in cells:
        if one.mean is None or one.cell.row.name in points:
            continue
        cost = [
            run["final"]["personal"][key] if key else run["seconds_per_round"] for run in one.runs
        ]
        points[one.cell.row.name] = (sum(cost) / len(cost), one.mean)
    if not points:
        return None
    x, y = ([point[axis] for point in points.values()] for axis in (0, 1))
    chart = Chart(title, around(x, least=0.0), around(y), x_title=title, y_title="accuracy, %")
    chart.axes()
    for series, (name, (across, up)) in enumerate(points.items()):
        chart.point(across, up, series, f"{name}: {up:.2f} %, {title} {across:.3g}")
    return chart, list(points)


def widths(table: Table, plan: Plan, cache: Cache) -> Chart | None:
    """Return every seed's accuracy by row of the experiment on width."""
    shown = [one for one in look(table, plan, cache) if one.cell.column.name == WIDTHS[1]]
    shown = [one for one in shown if one.values]
    if not shown:
        return None
    values = [value for one in shown for value in one.values]
    names = [one.cell.row.name for one in shown]
    chart = Rows("width", names, around(values), "accuracy, %", thick=14)
    for place, one in enumerate(shown):
        series = 1 if "MetaVD" in one.cell.row.name else 0
        for value in one.values:
            words = f"{one.cell.row.name}: {value:.2f} %"
            chart.point(value, chart.at(place), series, words)
    return chart
