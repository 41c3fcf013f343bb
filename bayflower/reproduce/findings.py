"""Findings: the questions of `findings.toml`, answered by finished runs. An answer, its intervals
and its seeds are computed; nobody types a number.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..report.paired import Difference, paired
from .cache import Cache
from .pairs import conditions, name
from .show import look
from .sweep import Plan
from .tables import Table
from .verdict import WORDS, by_seed, decide, judged

FILE = Path(__file__).parent / "findings.toml"
ANSWERS = {"reproduced": "Yes", "refuted": "No", "level": "Level", "undecided": "Undecided"}


class Evidence(NamedTuple):
    """One comparison: the claim is that the difference is above 0."""

    table: str
    text: str
    unit: str
    digits: int
    difference: Difference | None
    verdict: str


class Finding(NamedTuple):
    """A question with the comparisons that answer it."""

    question: str
    text: str
    evidence: list[Evidence]
    rounds: str = ""  # of the runs

    @property
    def answer(self) -> str:
        """Return the answer in a word, or how the comparisons divide."""
        counts = Counter(one.verdict for one in self.evidence)
        if len(counts) == 1:
            return ANSWERS[next(iter(counts))]
        number = len(self.evidence)
        said = [f"{ANSWERS[word].lower()} in {counts[word]}" for word in WORDS if counts[word]]
        return f"Of {number} comparisons {', '.join(said)}"


@remembered
def questions() -> list[dict[str, Any]]:
    """Return the findings as the file has them."""
    found: list[dict[str, Any]] = tomllib.loads(FILE.read_text())["finding"]
    return found


def findings(tables: Mapping[str, Table], plan: Plan, cache: Cache) -> list[Finding]:
    """Return every finding whose tables are given."""
    plan, found = replace(plan, form="full"), []
    for one in questions():
        evidence = taken_over(one["claims"], tables, plan, cache) if "claims" in one else []
        evidence += [
            compared(tables[names[0]], names[1:], plan, cache)
            for names in one.get("compare", [])
            if names[0] in tables
        ]
        if evidence:
            used = {item.table for item in evidence}
            rounds = {
                run["rounds"]
                for name in sorted(used)
                for cell in look(tables[name], plan, cache)
                for run in cell.runs
            }
            said = "–".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else ""
            found.append(Finding(one["question"], one["text"], evidence, said))
    return found


def taken_over(
    wanted: dict[str, Any], tables: Mapping[str, Table], plan: Plan, cache: Cache
) -> list[Evidence]:
    """Return the claims of a table that are asked for."""
    if wanted["table"] not in tables:
        return []
    return [
        Evidence(
            wanted["table"],
            f"{one.claim.row} against {one.claim.against}, {one.column}",
            one.unit,
            one.digits,
            one.difference,
            one.verdict,
        )
        for one in decide(tables[wanted["table"]], plan, cache)
        if one.claim.text.startswith(tuple(wanted["begins"]))
        and one.column in wanted.get("columns", [one.column])
    ]


def compared(table: Table, names: list[str], plan: Plan, cache: Cache) -> Evidence:
    """Return a comparison of two methods of a table."""
    where, *both = names
    cells = {name(cell, table): cell for cell in dict(conditions(table, plan)).get(where, ())}
    if strange := [one for one in both if one not in cells]:
        raise ConfigError(f"{FILE.name}: {table.id} has no {strange[0]!r} under {where!r}")
    own, other = (cells[one] for one in both)
    mine, theirs = (by_seed(cell, table, plan, cache) for cell in (own, other))
    sign = 1 if own.metric.better == "high" else -1
    common = {(seed, ""): sign * (mine[seed] - theirs[seed]) for seed in mine.keys() & theirs}
    difference = paired(common) if common else None
    verdict = judged(difference, own.metric.unit)
    by_row = not any(row.method for row in table.rows)
    where = table.title.rpartition(", ")[2] if by_row else where  # rows are clients
    text = f"{both[0]} against {both[1]}, {where}"
    return Evidence(table.id, text, own.metric.unit, own.metric.digits, difference, verdict)


def said(one: Evidence) -> str:
    """Return a comparison for a person."""
    if one.difference is None:
        return f"{one.text}: not run"
    unit = "points" if one.unit == "%" else one.unit
    low, mean, high = one.difference.low, one.difference.mean, one.difference.high
    seeds = f"{one.difference.seeds} seed{'s' if one.difference.seeds > 1 else ''}"
    if low is None or high is None:
        return f"{one.text}: {mean:+.{one.digits}f} {unit} ({seeds}, no interval)"
    interval = f"{low:+.{one.digits}f} to {high:+.{one.digits}f}"
    return f"{one.text}: {mean:+.{one.digits}f} {unit} ({interval}, {seeds})"
