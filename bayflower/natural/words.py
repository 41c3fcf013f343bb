"""What the runs tell a practitioner: sentences that are computed, with what speaks against them.

"The shared method" is the first of `rivals.MAIN` that took part. It was named before the runs were
made, so that no test sample chose it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from .rivals import ALONE, EXACT, MAIN, TOGETHER
from .runs import Line
from .sets import ALL, SETS
from .summary import (
    GOOD,
    Difference,
    Group,
    Table,
    best,
    coverage,
    difference,
    mean,
    ours,
    outside,
    shared,
)

Rivals = Mapping[str, Mapping[int, Line]]


class Answer(NamedTuple):
    """A question with its sentences."""

    question: str
    lines: list[str]


def answers(table: Table) -> list[Answer]:
    """Return the practitioner's questions with their answers, and the counter-examples."""
    return [
        Answer("When does it pay to join?", joining(table)),
        Answer("How many samples until training alone is as good?", alone(table)),
        Answer("What does a new site get from day one?", day_one(table)),
        Answer("Which uncertainty can be acted on?", acting(table)),
        Answer("Counter-examples", against(table)),
    ]


def nats(one: Difference) -> str:
    """Return a difference with its interval."""
    if math.isnan(one.low):
        return f"{one.mean:+.3f} (one seed)"
    return f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def by_data(table: Table, later: bool = False) -> dict[str, dict[Group, Rivals]]:
    """Return the groups of each data set; `later` says whether its tests are later in time."""
    found: dict[str, dict[Group, Rivals]] = {}
    for group, rivals in table.items():
        if group.later == later:
            found.setdefault(group.dataset, {})[group] = rivals
    return found


def every(table: Table) -> list[tuple[str, dict[Group, Rivals]]]:
    """Return (name, groups) of each data set, those with later tests by themselves."""
    named = [(name, groups) for name, groups in by_data(table).items()]
    return [*named, *((f"{name} (later)", one) for name, one in by_data(table, True).items())]


def gaining(rivals: Rivals, one: str, other: str) -> tuple[int, int]:
    """Return how many clients have a lower mean NLL with `one`, of how many, over all seeds."""
    pairs = [
        (a, b)
        for seed in set(rivals[one]) & set(rivals[other])
        for a, b in zip(
            rivals[one][seed]["here"]["nlls"], rivals[other][seed]["here"]["nlls"], strict=True
        )
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return sum(a < b for a, b in known), len(known)


def joining(table: Table) -> list[str]:
    """Return where the shared method beats training alone: how often, and by data set."""
    lines, counts = [], {"pays": 0, "costs": 0, "is not shown to pay": 0}
    for name, groups in every(table):
        said: dict[str, list[str]] = {verdict: [] for verdict in counts}
        for group, rivals in groups.items():
            main = shared(rivals, MAIN)
            if main is None or ALONE not in rivals:
                continue
            gap = difference(rivals[main], rivals[ALONE], "here", "nll")
            won, number = gaining(rivals, main, ALONE)
            text = f"{size(group)} {nats(gap)}, {won} of {number} client runs gain"
            verdict = "pays" if gap.high < 0 else "costs" if gap.low > 0 else "is not shown to pay"
            said[verdict].append(text)
            counts[verdict] += 1
        clients = SETS[name.split()[0]].clients
        lines += [
            f"{name} ({clients}): joining {verdict}, NLL against alone {'; '.join(texts)}."
            for verdict, texts in said.items()
            if texts
        ]
    if not lines:
        return ["No data set has runs of both, so nothing can be said."]
    told = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items())
    cases = f"Of {sum(counts.values())} cases (a data set with a number of samples a client)"
    return [f"{cases} joining {told}.", *lines]


def size(group: Group) -> str:
    """Return the number of samples in words."""
    return "with all samples" if group.n == ALL else f"with {group.n} samples"


def alone(table: Table) -> list[str]:
    """Return the smallest n at which the shared method is no longer better than training alone."""
    lines = []
    for name, groups in every(table):
        compared = [
            (group, difference(rivals[main], rivals[ALONE], "here", "nll"))
            for group, rivals in groups.items()
            if (main := shared(rivals, MAIN)) is not None and ALONE in rivals
        ]
        if not compared:
            continue
        ended = next(
            (
                place
                for place in range(len(compared))
                if all(not gap.high < 0 for _, gap in compared[place:])
            ),
            None,
        )
        if ended is None:
            group, gap = compared[-1]
            lines.append(
                f"{name}: not within these data; {size(group)} the shared method is still better, "
                f"{nats(gap)} nats."
            )
        else:
            group, gap = compared[ended]
            how = "is better" if gap.low > 0 else "can no longer be told from the shared method"
            lines.append(f"{name}: {size(group)} training alone {how} ({nats(gap)} nats).")
    return lines or ["No data set has runs of both, so nothing can be said."]


def day_one(table: Table) -> list[str]:
    """Return what new clients with the fewest samples get."""
    lines = []
    for name, groups in every(table):
        group, rivals = next(iter(groups.items()))
        main = shared(rivals, MAIN)
        if main is None:
            continue
        runs = rivals[main]
        text = [f"{name}: new {SETS[group.dataset].clients} {size(group)} have an NLL of "]
        text.append(f"{mean(runs, 'new', 'nll'):.3f} with {main}")
        for other in (ALONE, TOGETHER):
            if other in rivals:
                gap = difference(runs, rivals[other], "new", "nll")
                text.append(f", {nats(gap)} against {other}")
        share = coverage(runs, "new")
        if not math.isnan(share):
            text.append(f"; its 90 % statements cover {100 * share:.1f} %")
        lines.append("".join(text) + ".")
    return lines or ["No data set has runs of the shared method, so nothing can be said."]


def acting(table: Table) -> list[str]:
    """Return for each rival how often its 90 % statements hold, and how often its decisions are
    among the cheapest.
    """
    names = list(dict.fromkeys(name for rivals in table.values() for name in rivals))
    lines, found = [], []
    for name in names:
        there = [(group, rivals) for group, rivals in table.items() if name in rivals]
        held = [GOOD[0] <= coverage(rivals[name], "here") <= GOOD[1] for _, rivals in there]
        away = [outside(rivals[name], "here") for _, rivals in there]
        cheap = 0
        for _, rivals in there:
            first = best(rivals, "here", "regret")
            cheap += first is not None and name in (first.rival, *first.level)
        worst = max(mean(rivals[name], "here", "ece") for _, rivals in there)
        bad, clients = sum(a for a, _ in away), sum(b for _, b in away)
        found.append((-sum(held) / len(held), bad / max(clients, 1), name))
        lines.append(
            f"{name}: covers 88 to 93 % in {sum(held)} of {len(there)} groups, {bad} of {clients} "
            f"clients lie outside their 99 % interval, largest mean ECE {100 * worst:.1f} %, "
            f"decisions cheapest or level with it in {cheap}."
        )
    ranked = [name for _, _, name in sorted(found)]
    order = {name: place for place, name in enumerate(ranked)}
    lines.sort(key=lambda line: order[line.split(":")[0]])
    return lines


def against(table: Table) -> list[str]:
    """Return where the shared method loses beyond the interval to one that we do not recommend, and
    where a recommended method's statements do not hold.
    """
    lines = []
    for group, rivals in table.items():
        main = shared(rivals, MAIN)
        others = [name for name in rivals if name not in (*ours(rivals), EXACT)]
        for place, who in (("here", "training clients"), ("new", "new clients")):
            gaps = {
                other: difference(rivals[main], rivals[other], place, "nll")
                for other in others
                if main is not None
            }
            lost = {other: gap for other, gap in gaps.items() if gap.low > 0}
            if lost:
                most = max(lost, key=lambda other: lost[other].mean)
                than = f"{', '.join(lost)} for {who}"
                by = f"by {nats(lost[most])} nats" + (f" ({most})" if len(lost) > 1 else "")
                lines.append(f"{group.dataset}, {group.amount}: {main} is worse than {than}, {by}.")
        shares = {name: coverage(rivals[name], "here") for name in ours(rivals)}
        wrong = {
            name: share
            for name, share in shares.items()
            if not math.isnan(share) and not GOOD[0] <= share <= GOOD[1]
        }
        if wrong:
            each = ", ".join(f"{100 * share:.1f} % ({name})" for name, share in wrong.items())
            lines.append(f"{group.dataset}, {group.amount}: 90 % statements cover {each}.")
    return lines or ["None was found in these runs."]
