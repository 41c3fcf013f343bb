"""The first screen of the report: what the runs say, for somebody who decides. The sentences are
those of `verdict.py`, which the terminal prints too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from . import measured, outcomes, twoclass, uncertainty
from .collect import Group, unequal
from .learning import ending
from .page import items
from .text import size
from .verdict import (
    METRICS,
    Verdict,
    best,
    by_name,
    headline,
    more_seeds,
    sides,
    told,
    what_intervals_are,
)

LINES = 4  # methods that an answer goes through
SPEED = "clients were trained one by one"  # a remark on seconds, not on results
FEW = 30  # test samples; below, a site's own numbers say little


def section(groups: Sequence[Group], found: Verdict) -> str:
    """Return the verdict, its reasons and its caveats."""
    leading = leaders(groups, found)
    rows: list[tuple[str, list[str]]] = []
    if found.means:
        rows.append(("Best here", [best(found).removeprefix("Best here: ")]))
    if found.against:
        lines = [f"{one.title}: {told(found, one)}." for one in found.against[: 2 * LINES]]
        rows.append(("Compared with local training", lines))
        rows += gain_and_loss(found)
    elif found.rivals:
        lines = [f"Over {one.base}: {told(found, one)}." for one in found.rivals[: 2 * LINES]]
        rows.append((f"{found.rivals[0].title} leads by", lines))
    if measured.is_measured(groups) or outcomes.is_about(groups):
        room = measured if measured.is_measured(groups) else outcomes
        what = "intervals" if room is measured else "probabilities"
        said = [room.trusted(group) for group in leading]
        rows.append((f"Can the {what} be trusted?", said))
        rows.append(("What it costs", [cost(group) for group in leading]))
        rows.append(("Caveats", caveats(groups, found)))
        return verdict_of(rows, found)
    two = [text for group in leading if (text := twoclass.in_words(group))]
    if two:
        blind = twoclass.blind(leading[0])
        named = "; ".join(blind[:6]) + (f" and {len(blind) - 6} more" if len(blind) > 6 else "")
        two += (
            [f"With {leading[0].title}, the AUROC is not above chance at some sites: {named}."]
            if blind
            else []
        )
        rows.append(("What is found, what is missed", two))
    rows.append(
        ("Can the probabilities be trusted?", [uncertainty.trusted(group) for group in leading])
    )
    rows.append(("What it costs", [cost(group) for group in leading]))
    rows.append(("Caveats", caveats(groups, found)))
    return verdict_of(rows, found)


def verdict_of(rows: Sequence[tuple[str, list[str]]], found: Verdict) -> str:
    """Return the first screen: the answer, and rows of reasons."""
    text = "".join(
        f"<dt>{escape(head)}</dt><dd>{items(lines)}</dd>" for head, lines in rows if lines
    )
    return (
        f'<div class="verdict"><p class="answer">{escape(answer(found))}</p><dl>{text}</dl></div>'
    )


def answer(found: Verdict) -> str:
    """Return the verdict in one sentence or two."""
    lines = headline(found)
    if not lines or len(found.means) == 1:
        return "One method was run, so there is nothing to compare it with."
    return " ".join(lines)


def leaders(groups: Sequence[Group], found: Verdict) -> list[Group]:
    """Return the groups that the answers go through: best first, and local training."""
    by_title = {group.title: group for group in groups}
    order = [title for title in found.means if title in by_title] or list(by_title)
    chosen = order[:LINES]
    if found.alone in order and found.alone not in chosen:
        chosen[-1] = str(found.alone)
    return [by_title[title] for title in chosen]


def gain_and_loss(found: Verdict) -> list[tuple[str, list[str]]]:
    """Return who gains and who loses, by name where clients have one."""
    gains, losses = [], []
    for one in found.against[:LINES]:
        gain, lose = sides(found, one)
        if found.lasting:
            gains.append(f"{one.title}: {by_name(found, gain)}.")
            losses.append(f"{one.title}: {by_name(found, lose)}.")
        else:
            number = one.difference.clients
            gains.append(f"{one.title}: {len(gain)} of {number} clients, which have no names.")
            losses.append(f"{one.title}: {len(lose)} of {number} clients.")
    unit = METRICS[found.metric].unit
    return [(f"Who gains ({unit})", gains), (f"Who loses ({unit})", losses)]


def cost(group: Group) -> str:
    """Return what a run of a method costs."""
    rounds = [run.result["rounds"] for run in group.runs]
    seconds = statistics.fmean(sum(record["seconds"] for record in some) for some in rounds)
    up, down = (
        statistics.fmean(sum(record[key] for record in some) for some in rounds)
        for key in ("bytes_up", "bytes_down")
    )
    number = statistics.fmean(sum(record["num_clients"] for record in some) for some in rounds)
    each = f", {size((up + down) / number)} a site and round" if number else ""
    time = f"{seconds:.1f} s for {many(len(rounds[0]), 'round')} on {group.first['device']}"
    if all("simulated_seconds" in record for some in rounds for record in some):
        waited = (sum(record["simulated_seconds"] for record in some) for some in rounds)
        time += f" ({statistics.fmean(waited):.1f} s by the clients' simulated clock)"
    return f"{group.title}: {time}; {size(up)} from the sites, {size(down)} to them{each}."


def many(number: int, word: str) -> str:
    """Return e.g. "1 round", "2 rounds"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def caveats(groups: Sequence[Group], found: Verdict) -> list[str]:
    """Return what a reader must know before using the verdict."""
    lines = [*what_intervals_are(found), *more_seeds(found), *few_samples(groups)]
    seeds = {group.title: len(group.runs) for group in groups}
    if len(set(seeds.values())) > 1:
        said = ", ".join(f"{title} {number}" for title, number in seeds.items())
        lines.append(f"Numbers of seeds differ ({said}); only seeds that two methods share count.")
    methods = {group.method for group in groups}
    differ = [key for key in unequal(groups)] if len(methods) > 1 else []
    if differ:
        shown = ", ".join(differ[:8]) + (" and more" if len(differ) > 8 else "")
        lines.append(f"Not all methods ran with the same settings: {shown} differ (see Settings).")
    devices = {str(run.result.get("device")) for group in groups for run in group.runs}
    if len(devices) > 1:
        lines.append(f"Seconds do not compare: runs were on {', '.join(sorted(devices))}.")
    if note := groups[0].first.get("note"):
        lines.append(f"Data: {note}.")
    return [*lines, *remarks(groups)]


def few_samples(groups: Sequence[Group]) -> list[str]:
    """Return the sites with few test samples."""
    run = groups[0].runs[0]
    rows = run.result["final"]["personal"].get("per_client", [])
    few = [(run.name(row["client"]), row["num_examples"]) for row in rows]
    few = [(name, number) for name, number in few if number < FEW]
    if not few:
        return []
    named = "; ".join(f"{name}: {number}" for name, number in few[:6])
    more = f"; and {len(few) - 6} more" if len(few) > 6 else ""
    lasting = all(one.lasting for one in run.clients.values())
    where = "" if lasting else f" (seed {run.seed})"
    return [f"Few test samples{where}, so their own numbers say little: {named}{more}."]


def remarks(groups: Sequence[Group]) -> list[str]:
    """Return what the runs remark, how many replies were not used, and which runs were left out;
    the same words of several seeds once.
    """
    notes: dict[tuple[str, str], list[int]] = {}
    for group in groups:
        for run in group.runs:
            said = str(run.result.get("remark") or "").split("; ")
            said = [text for text in said if text and not text.startswith(SPEED)]
            said += [end.short] if (end := ending(run.result)) else []
            faults = run.result.get("faults") or []
            said += [f"{len(faults)} fault(s), the last: {faults[-1]}"] if faults else []
            for text in said:
                notes.setdefault((group.title, text), []).append(run.seed)
    by_text: dict[str, list[str]] = {}
    for (title, text), seeds in notes.items():
        number = len(next(group.runs for group in groups if group.title == title))
        which = "" if len(seeds) == number else f" (seed {', '.join(map(str, seeds))})"
        by_text.setdefault(text, []).append(title + which)
    lines = [f"{', '.join(titles)}: {text.rstrip('.')}." for text, titles in by_text.items()]
    for group in groups:
        for run in group.left_out:
            lines.append(
                f"{group.title}: {run.folder} has the settings and the seed of another run and is "
                "left out."
            )
    return lines
