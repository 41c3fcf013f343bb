"""The page: one HTML file with everything in it, without scripts, for screens wide and narrow,
light and dark, and for paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from .collect import Group
from .figures import Figure

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; lighter ones
# on a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#e69f00", "#333333")
DARK = ("#56b4e9", "#ff8c42", "#2fd6a3", "#f0a6cc", "#f0e442", "#8fd0ff", "#ffb733", "#dddddd")


class Column(NamedTuple):
    """A column of the table: heading, key of the final block, factor, digits, and which way is
    better (1: more, −1: less).
    """

    heading: str
    key: str
    factor: float
    digits: int
    better: int


COLUMNS = (
    Column("accuracy, %", "accuracy", 100, 2, 1),
    Column("mean of clients, %", "accuracy_mean", 100, 2, 1),
    Column("balanced, %", "balanced_accuracy", 100, 2, 1),
    Column("NLL", "nll", 1, 3, -1),
    Column("ECE, %", "ece", 100, 2, -1),
    Column("ECE all classes, %", "ece_allclass", 100, 2, -1),
    Column("MCE, %", "mce", 100, 2, -1),
    Column("fairness CV, %", "fairness_cv", 100, 2, -1),
    Column("worst client, %", "worst_client_accuracy", 100, 2, 1),
)
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c1c1c; --soft: #5c5c5c;
  --line: #d9d9d9; --card: #fafafa; COLOURS_LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #ececec; --soft: #a9adb5; --line: #3a3e46; --card: #1e2126;
    COLOURS_DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; margin: 0 0 4px; }
h2 { font-size: 1.25rem; margin: 40px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p, li { max-width: 75ch; } .soft, figcaption { color: var(--soft); font-size: 0.875rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; }
a { color: var(--c0); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 16px; }
figure { margin: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); break-inside: avoid;
  min-width: 0; }
figure.wide { grid-column: 1 / -1; } figure.wide .scroll > svg { min-width: 640px; }
figure svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none; padding: 0;
  margin: 8px 0 0; font-size: 0.875rem; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend svg { width: 32px; height: 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
td.best { font-weight: 700; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; }
svg .title { font-size: 12.5px; }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { fill: none; stroke: var(--soft); }
svg .rule { stroke: var(--soft); stroke-width: 1.2; }
svg .line { fill: none; stroke-width: 2; }
svg .glyph { font-size: 11px; font-weight: 600; }
svg .band { stroke: none; opacity: 0.18; }
svg .mark { stroke: var(--page); stroke-width: 0.6; }
svg .bar { opacity: 0.75; }
svg .box { opacity: 0.45; }
svg .bubble { opacity: 0.7; }
SERIES
@media print { :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff;
  COLOURS_LIGHT }
  main { max-width: none; padding: 0; }
  nav { display: none; } h2 { break-after: avoid; } .scroll { overflow: visible; } }
"""


def style() -> str:
    """Return the style sheet."""
    text = STYLE
    for name, colours in (("COLOURS_LIGHT", LIGHT), ("COLOURS_DARK", DARK)):
        text = text.replace(
            name, " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))
        )
    rules = [
        f"svg .line.s{i} {{ stroke: var(--c{i}); }} svg :is(.mark, .bar, .box, .bubble, .band, "
        f".glyph).s{i} {{ fill: var(--c{i}); }}"
        for i in range(len(LIGHT))
    ]
    return text.replace("SERIES", "\n".join(rules))


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the whole page; empty sections are left out."""
    shown = [(heading, body) for heading, body in sections if body]
    names = {
        heading: "".join(c if c.isalnum() else "-" for c in heading.lower()) for heading, _ in shown
    }
    links = "".join(
        f'<li><a href="#{names[heading]}">{escape(heading)}</a></li>' for heading, _ in shown
    )
    body = "".join(
        f'<section id="{names[heading]}"><h2>{escape(heading)}</h2>{text}</section>'
        for heading, text in shown
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        '<link rel="icon" '
        f'href="data:,"><title>{escape(title)}</title><style>{style()}</style></head>'
        f"<body><main><header><h1>{escape(title)}</h1></header><nav><ul>{links}</ul></nav>{body}</main></body></html>\n"
    )


def figures(some: Sequence[Figure]) -> str:
    """Return figures side by side."""
    shown = [
        f"<figure{' class=wide' if one.wide else ''}><h3>{escape(one.heading)}</h3><div "
        f'class="scroll">{one.svg}</div>{one.key}'
        f"<figcaption>{escape(one.words)}</figcaption></figure>"
        for one in some
    ]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: Sequence[tuple[int, int]] = (),
    left: bool = False,
) -> str:
    """Return a table; `best` names the cells (row, column) in bold."""
    bold = set(best)
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=best' if (i, j) in bold else ''}>{escape(text)}</td>"
            for j, text in enumerate(row)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table{" class=left" if left else ""}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def summary(groups: Sequence[Group], view: str = "personal") -> str:
    """Return the table of the final test; the best of each column is bold."""
    some = [group for group in groups if group.values("accuracy", view)]
    if not some:
        return ""
    rows, means = [], []
    for group in some:
        found = [
            [column.factor * value for value in group.values(column.key, view)]
            for column in COLUMNS
        ]
        means.append([statistics.fmean(values) if values else None for values in found])
        rows.append(
            [
                group.title,
                *(
                    spread(values, column.digits)
                    for values, column in zip(found, COLUMNS, strict=True)
                ),
                str(len(group.runs)),
            ]
        )
    best = []
    for j, column in enumerate(COLUMNS):
        values = [(mean[j], i) for i, mean in enumerate(means)]
        known = [(column.better * value, i) for value, i in values if value is not None]
        if len(known) > 1:
            best += [(i, j + 1) for value, i in known if value == max(known)[0]]
    return table(["method", *(column.heading for column in COLUMNS), "seeds"], rows, best)


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation."""
    if not values:
        return "–"
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def origins(groups: Sequence[Group]) -> str:
    """Return where the numbers come from: data, engine, device, rounds, seeds, versions, and what
    went wrong.
    """
    rows = []
    for group in groups:
        one = group.first
        seconds = statistics.fmean(
            sum(record["seconds"] for record in run.result["rounds"]) for run in group.runs
        )
        data = (
            f"{one['dataset']}{', ' + one['note'] if one.get('note') else ''}, "
            f"{one['partition'].get('kind', '')}"
        )
        seeds = ", ".join(str(run.seed) for run in group.runs)
        versions = one.get("versions", {})
        clients = f"{one.get('num_clients', '?')} + {one.get('num_new_clients', 0)}"
        network = one["model"]["name"] if "model" in one else "?"
        said = f"bayflower {versions.get('bayflower', '?')}, torch {versions.get('torch', '?')}"
        rows.append(
            [
                group.title,
                data,
                clients,
                network,
                str(len(one["rounds"])),
                seeds,
                one.get("engine", "?"),
                one.get("device", "?"),
                f"{seconds:.1f}",
                said,
            ]
        )
    head = [
        "method",
        "data",
        "clients + new",
        "network",
        "rounds",
        "seeds",
        "engine",
        "device",
        "seconds of training",
        "versions",
    ]
    notes = remarks(groups)
    words = (
        "All numbers are those of the last round, never of the best one. Each client is "
        "tested on its own test data."
    )
    return f"<p>{words}</p>{table(head, rows, left=True)}" + (
        f"<ul class=soft>{''.join(notes)}</ul>" if notes else ""
    )


def remarks(groups: Sequence[Group]) -> list[str]:
    """Return what the runs remark, and how many replies were not used."""
    notes: list[Any] = []
    for group in groups:
        for run in group.runs:
            said = [run.result["remark"]] if run.result.get("remark") else []
            faults = run.result.get("faults") or []
            said += [f"{len(faults)} fault(s), the last: {faults[-1]}"] if faults else []
            notes += [
                f"<li>{escape(group.title)}, seed {run.seed}: {escape(text)}</li>" for text in said
            ]
    return notes
