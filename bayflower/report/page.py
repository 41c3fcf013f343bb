"""The page: one HTML file with everything in it, without scripts, for screens wide and narrow,
light and dark, and for paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .figures import Figure
from .style import style

LINKS = 12  # data sets that the navigation names at once


class Part(NamedTuple):
    """Runs on the same data: a heading, a line below it, and sections (heading, HTML)."""

    heading: str
    short: str
    lead: str
    sections: Sequence[tuple[str, str]]


def page(title: str, parts: Sequence[Part], end: Sequence[tuple[str, str]]) -> str:
    """Return the whole page; empty sections are left out. With one data set the navigation names
    its sections, with several the data sets, each of which has a line of its own sections.
    """
    bodies, links = [], []
    for number, part in enumerate(parts, 1):
        shown = [(heading, body) for heading, body in part.sections if body]
        inner = [(f"{number}-{anchor(heading)}", heading) for heading, _ in shown]
        own = f"<nav>{linked(inner)}</nav>" if len(parts) > 1 else ""
        links += [(f"data-{number}", part.short)] if len(parts) > 1 else inner
        body = "".join(
            f'<section id="{name}"><h3>{escape(heading)}</h3>{text}</section>'
            for (name, heading), (_, text) in zip(inner, shown, strict=True)
        )
        bodies.append(
            f'<section id="data-{number}"><h2>{escape(part.heading)}</h2>'
            f"<p class=soft>{escape(part.lead)}</p>{own}{body}</section>"
        )
    last = [(anchor(heading), heading) for heading, body in end if body]
    for heading, text in end:
        if text:
            bodies.append(
                f'<section id="{anchor(heading)}"><h2>{escape(heading)}</h2>{text}</section>'
            )
    top = linked([*links, *last])
    if len(links) > LINKS and len(parts) > 1:
        top = f"<details><summary>{len(parts)} data sets</summary>{linked(links)}</details>"
        top += linked(last)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        '<link rel="icon" '
        f'href="data:,"><title>{escape(title)}</title><style>{style()}</style></head>'
        f"<body><main><header><h1>{escape(title)}</h1></header><nav>{top}</nav>"
        f"{''.join(bodies)}</main></body></html>\n"
    )


def anchor(heading: str) -> str:
    """Return a heading as the name of a place."""
    return "".join(c if c.isalnum() else "-" for c in heading.lower())


def linked(places: Sequence[tuple[str, str]]) -> str:
    """Return a list of links."""
    items = [f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in places]
    return f"<ul>{''.join(items)}</ul>"


def figures(some: Sequence[Figure], more: Sequence[str] = ()) -> str:
    """Return figures side by side; `more` are figures in HTML."""
    shown = [
        f"<figure{' class=wide' if one.wide else ''}><h4>{escape(one.heading)}</h4><div "
        f'class="scroll">{one.svg}</div>{one.key}'
        f"<figcaption>{escape(one.words)}</figcaption></figure>"
        for one in some
    ] + list(more)
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: Sequence[tuple[int, int]] = (),
    left: bool = False,
) -> str:
    """Return a table, which narrow screens show as a card a row; `best` names the cells (row,
    column) in bold.
    """
    bold = set(best)
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=best' if (i, j) in bold else ''} "
            f'data-label="{escape(head[j], quote=True)}">{escape(text)}</td>'
            for j, text in enumerate(row)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    kind = "cards left" if left else "cards"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def items(lines: Sequence[str]) -> str:
    """Return lines as text, or as a list where there are several."""
    if len(lines) == 1:
        return escape(lines[0])
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation."""
    if not values:
        return "–"
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text
