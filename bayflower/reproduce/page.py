"""The pages of results, from the folder of finished runs: RESULTS.md with the findings, a file a
paper with its tables, an appendix with quick forms, and the pictures. `written` makes them, and the
same runs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cache import Cache
from .drawn import pictures
from .findings import Finding, findings, said
from .pairs import DECIDED, FEW, STATES, Pair, counts, levels, pairs, paper_of, share_decided
from .show import LEGEND, Shown, facts, listed, look, unit, words
from .sweep import Plan
from .tables import Table
from .verdict import decide, sentences

MARKER = "<!-- Below this line nothing is generated; `bayflower reproduce --write` keeps it. -->"
FOLDER = "experiments/tables"  # from the page
QUICK = "quick"
TITLES = {
    "decide": "The deciding experiments",
    "fedbps": "FedBPS",
    "fedmap": "FedMAP",
    "fednp": "FedNP",
    "metavd": "MetaVD",
    "pfedvmp": "pFedVMP",
    "ours": "Sweeps of our own",
}
HEAD = """# Results

What the finished runs in `experiments/results` say. `bayflower reproduce --all --write RESULTS.md`
writes this page, the tables it links to and the pictures; `--check` in place of `--write` compares
them. No number is typed. The last round counts, never the best one. A difference is paired by seed,
and its interval is Student's at 95 % over seeds. *Level* means that the interval lies within one
point of zero, *undecided* that it has zero in it or that fewer than two seeds are there.
"""
COUNTED = f"""
A published pair is the paper's own method against one baseline in one column. It counts where one
of both has at least 80 % of the accuracy that the paper prints, and it is decided with three seeds:
reproduced, refuted, or level. *{FEW.capitalize()}* are trained pairs with one or two seeds.
"""


def written(path: Path, tables: list[Table], plan: Plan, cache: Cache) -> dict[Path, str]:
    """Return every file of the results by its path; `path` is the page with the findings."""
    full = replace(plan, form="full")
    level = levels(tables, full, cache)
    judged = {table.id: pairs(table, full, cache, level) for table in tables}
    found = findings({table.id: table for table in tables}, plan, cache)
    every = [pair for some in judged.values() for pair in some]
    drawn = pictures({table.id: table for table in tables}, plan, cache, found, every)
    folder = path.parent / FOLDER
    files = {folder / name: picture for name, (_, picture) in drawn.items()}
    texts: dict[str, list[str]] = {}
    appendix: list[str] = []
    for table in tables:
        chosen, cells, small = best(table, plan, cache)
        if chosen.form == QUICK or any(one.values for one in small):
            quick = look(table, replace(plan, form=QUICK), cache)
            appendix += section(table, replace(plan, form=QUICK), quick)
        if chosen.form == QUICK or not any(one.runs for one in cells):
            continue
        lines = section(table, chosen, cells)
        if claims := sentences(decide(table, chosen, cache)):
            lines += [*claims, ""]
        texts.setdefault(paper_of(table), []).extend(lines)
    for paper, lines in texts.items():
        files[folder / f"{paper}.md"] = "\n".join([*opening(paper), *lines])
    if appendix:
        files[folder / f"{QUICK}.md"] = "\n".join([*opening(QUICK), *appendix])
    lines = [HEAD, "## Findings", "", *(line for one in found for line in sentence(one)), ""]
    for name, (title, _) in drawn.items():
        lines += [f"*{title}*", "", f"![{title}]({FOLDER}/{name})", ""]
    lines += ["## Published pairs", COUNTED, *counted(tables, judged), ""]
    lines += ["## Undecided comparisons", "", *open_questions(found), ""]
    lines += ["## Tables", "", *contents(tables, plan, cache), "", *everything(cache)]
    kept = path.read_text().partition(MARKER)[2] if path.exists() else "\n"
    files[path] = "\n".join(lines) + f"\n{MARKER}{kept or chr(10)}"
    return files


def write_page(path: Path, tables: list[Table], plan: Plan, cache: Cache) -> list[Path]:
    """Write the files of the results and return their paths."""
    files = written(path, tables, plan, cache)
    for place, text in files.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return list(files)


def differing(path: Path, tables: list[Table], plan: Plan, cache: Cache) -> list[Path]:
    """Return the files that are missing or have other bytes than the runs give."""
    files = written(path, tables, plan, cache)
    return [
        place for place, text in files.items() if not place.exists() or place.read_text() != text
    ]


# -- the page --------------------------------------------------------------------------------------
def sentence(finding: Finding) -> list[str]:
    """Return a finding as an item of a list."""
    table = finding.evidence[0].table
    link = f"[{table}]({FOLDER}/{table.partition('-')[0]}.md#{table})"
    rounds = f" ({finding.rounds} rounds)" if finding.rounds else ""
    return [
        f"* **{finding.question}** {finding.answer}. {finding.text} {link}{rounds}",
        *(f"    * {said(one)}" for one in finding.evidence),
    ]


def counted(tables: Sequence[Table], judged: dict[str, list[Pair]]) -> list[str]:
    """Return a table of verdicts by published table, and their sum."""
    lines = [f"| table | pairs | {' | '.join(STATES)} |", "|---" * (len(STATES) + 2) + "|"]
    for table in tables:
        if some := judged[table.id]:
            lines.append(row(table.id, some))
    every = [pair for some in judged.values() for pair in some]
    decided, trained = share_decided(every)
    share = f" ({decided / trained:.0%})" if trained else ""
    tail = f"Decided with three seeds or more: {decided} of {trained} pairs in trained columns"
    return [*lines, row("all", every), "", f"{tail}{share}."]


def row(name: str, some: Sequence[Pair]) -> str:
    """Return a line of verdicts."""
    number = counts(some)
    cells = " | ".join(str(number[state]) if number[state] else "–" for state in STATES)
    return f"| {name} | {len(some)} | {cells} |"


def open_questions(found: Sequence[Finding]) -> list[str]:
    """Return the questions whose comparisons are not all decided, and how many are not."""
    lines = []
    for finding in found:
        left = [one for one in finding.evidence if one.verdict not in DECIDED]
        absent = sum(one.difference is None for one in left)
        more = f", {absent} of them not run" if absent else ""
        if left:
            lines.append(f"* {finding.question} {len(left)} of {len(finding.evidence)}{more}.")
    return lines


def contents(tables: Sequence[Table], plan: Plan, cache: Cache) -> list[str]:
    """Return a line a table: where it is, and what of it was run."""
    lines = [
        "| table | what | form | cells with a number | methods not yet here | runs | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        chosen, cells, small = best(table, plan, cache)
        runs = list({id(run): run for one in cells for run in one.runs}.values())
        done = sum(bool(one.values) for one in cells)
        quick = sum(bool(one.values) for one in small)
        absent = sum(one.cell.spec is None for one in cells)
        file = QUICK if chosen.form == QUICK else paper_of(table)
        name = f"[{table.id}]({FOLDER}/{file}.md#{table.id})" if runs else table.id
        seconds = f"{sum(run['seconds'] for run in runs):.0f}" if runs else "–"
        also = f" and {quick} quick" if quick else ""
        numbers = f"{done}{also} of {len(cells)} | {absent} cells | {len(runs)} | {seconds}"
        lines.append(f"| {name} | {table.title} | {chosen.form if runs else '–'} | {numbers} |")
    return lines


def everything(cache: Cache) -> list[str]:
    """Return a sentence on all runs."""
    runs: list[Any] = [record["result"] for record in cache.everything()]
    if not runs:
        return []
    return [
        f"{len(runs)} finished runs in all; devices: {listed(runs, 'device')}; "
        f"commits: {listed(runs, 'commit')}."
    ]


# -- the files of the papers -----------------------------------------------------------------------
def opening(paper: str) -> list[str]:
    """Return the first lines of a file of tables."""
    if paper == QUICK:
        return [
            "# Appendix: quick forms",
            "",
            "A quick table shows that its runs go through. It is no evidence about a method.",
            f"[Results](../../RESULTS.md) has the findings. {LEGEND}",
            "",
        ]
    return [
        f"# {TITLES.get(paper, paper)}: tables",
        "",
        f"{LEGEND} A dash is a cell that was not run in full; [quick forms]({QUICK}.md) are in the "
        "appendix. *Not yet* is a method that does not exist here. What the forms are: "
        "[docs/evidence.md](../../docs/evidence.md). [Results](../../RESULTS.md) has the findings.",
        "",
    ]


def best(table: Table, plan: Plan, cache: Cache) -> tuple[Plan, list[Shown], list[Shown]]:
    """Return the form to show, its cells, and the quick form's cells for those that the full form
    lacks (empty where it has them).
    """
    shown = {form: look(table, replace(plan, form=form), cache) for form in ("full", QUICK)}
    if not any(one.values for one in shown["full"]):
        return replace(plan, form=QUICK), shown[QUICK], []
    small = [
        two if two.values and not one.values else one._replace(values=[], runs=[])
        for one, two in zip(*shown.values(), strict=True)
    ]
    return replace(plan, form="full"), shown["full"], small


def section(table: Table, plan: Plan, found: list[Shown]) -> list[str]:
    """Return a table's part of a file."""
    width = len(table.columns)
    cells = ["–" if one.cell.spec and not one.runs else words(one) for one in found]
    how = f"`bayflower reproduce {table.id}{' --quick' if plan.form == QUICK else ''}`"
    heads = [f"{column.name} [{unit(table, column.metric)}]" for column in table.columns]
    lines = [f'<a id="{table.id}"></a>', "", f"## {table.title}", "", f"{table.caption} {how}", ""]
    lines += ["| | " + " | ".join(heads) + " |", "|---" * (width + 1) + "|"]
    for place, line in enumerate(table.rows):
        some = cells[place * width : (place + 1) * width]
        lines.append(f"| {line.name} | " + " | ".join(some) + " |")
    if table.picture and plan.form != QUICK:
        lines += ["", f"![{table.title}](../../{table.picture})"]
    return [*lines, "", *facts(table, plan, found, folder=False), ""]
