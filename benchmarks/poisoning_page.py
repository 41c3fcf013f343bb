"""Write benchmarks/results/poisoning.md from the rows that benchmarks/poisoning.py and
benchmarks/poisoning_cost.py measured; benchmarks/results/poisoning_reading.md is put behind them.

python -m benchmarks.poisoning_page                  write the page
python -m benchmarks.poisoning_page FILE [FILE ...]  take rows over first, in place of older ones
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

HERE = Path(__file__).parent / "results"
ROWS, PAGE = HERE / "poisoning.jsonl", HERE / "poisoning.md"
READING = HERE / "poisoning_reading.md"
NAMES = {"scaled": "×100"}
ATTACKS = ("random", "flip", "scaled", "count", "certainty", "absent")
OTHERS = {
    "longer flip": "flip × 1.7",
    "noise": "noise",
    "nothing": "nothing",
    "against mean": "against the mean",
    "little": "a little",
    "shift": "shift",
    "one entry": "one entry",
}
KEYS = ("method", "robust", "attackers", "attack", "data", "seed", "epochs")
WORDS = {1: "One attacker", 3: "Three attackers"}
LONGER = 5  # local epochs of the methods that one epoch a round leaves half trained
LEAST = 3  # seeds from which an interval is given
Row = dict[str, Any]

INTRO = """# Poisoning

Written by `python -m benchmarks.poisoning_page` from `poisoning.jsonl`, which
`benchmarks/poisoning.py` and `benchmarks/poisoning_cost.py` measured. Ten clients on all of digits,
the default partition, `robust=gate`, 20 rounds of one epoch; figures are those after the last
round, mean over seeds. All methods but `local`, which has no server. The attackers are the one or
three clients with the most data, up to 18 % of all samples each. Their updates go through the
server's checks first; a refused one counts as honest.

* random: a random direction of 100 times the norm, always the same one
* flip: the change with its sign turned round
* ×100: the change times 100
* count: flip, and a count of 10⁸
* certainty: flip, and a certainty of 10⁴ times (FedMAP: the largest log weight; MetaVD: a lower
  log α); "= flip" where updates have no certainty, so that both are the same bits
* absent: no attack; the attackers do not take part. No rule can do better than this against a
  client that sends nothing of use

*clean* is the accuracy of the honest clients' personal models without an attack, in %. Every other
accuracy is the difference from it in points, paired by seed. ± is half the 95 % interval over seeds
(Student's t), given from three seeds on. *Displacement* is the distance of the shared model from
the one without an attack, in honest steps: a step is the norm of that round's change without an
attack (FedBPS: over the entries that are shared in both).
"""


def load() -> list[Row]:
    """Return the rows that count: of `gate` those of the last rules."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines() if line]
    return [row for row in rows if row.get("robust") == "off" or row.get("version", 0) >= 5]


def key(row: Row) -> tuple[Any, ...]:
    """Return what a row is about."""
    return tuple(row.get(name) for name in KEYS)


def taken(rows: list[Row], files: Iterable[str]) -> list[Row]:
    """Return the rows with those of some files in place of older ones."""
    found = {key(row): row for row in rows}
    for file in files:
        for line in Path(file).read_text().splitlines():
            row = json.loads(line)
            found[key(row)] = row
    return sorted(found.values(), key=lambda row: [str(one) for one in key(row)])


def interval(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of a mean; None with too few values."""
    if len(values) < LEAST:
        return None
    wide: float = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return wide


def with_interval(values: Sequence[float], digits: int = 1, sign: bool = True) -> str:
    """Return a mean and half its interval."""
    wide = interval(values)
    text = f"{fmean(values):{'+' if sign else ''}.{digits}f}"
    return text if wide is None else f"{text} ± {wide:.{digits}f}"


class Case:
    """All rows of one rule, number of attackers and local epochs."""

    def __init__(self, rows: Sequence[Row], bad: int, rule: str = "gate", epochs: int = 1) -> None:
        self.bad, self.rule, self.epochs = bad, rule, epochs
        self.of: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            same = (row.get("attackers"), row.get("robust"), row.get("epochs", 1))
            if same == (bad, rule, epochs):
                self.of.setdefault((row["method"], row["attack"]), {})[row.get("seed", 0)] = row
        self.methods = sorted({method for method, _ in self.of})

    def seeds(self, method: str) -> list[int]:
        """Return the seeds that are there."""
        return sorted(self.of.get((method, "absent"), self.of.get((method, "flip"), {})))

    def lost(self, method: str, attack: str, what: str, against: str = "clean") -> list[float]:
        """Return by how many points an attack differs from the clean run, or from the run without
        the attackers, seed by seed.
        """
        found, gone = self.of.get((method, attack), {}), self.of.get((method, "absent"), {})
        if against == "clean":
            return [100 * (row[what] - row["clean"]) for row in found.values()]
        return [100 * (row[what] - gone[seed][what]) for seed, row in found.items() if seed in gone]

    def moved(self, method: str, attack: str) -> list[float]:
        """Return the displacements."""
        return [row["moved"] for row in self.of.get((method, attack), {}).values()]

    def clean(self, method: str) -> str:
        """Return the accuracy without an attack."""
        some = self.of.get((method, "absent")) or self.of[method, "flip"]
        return f"{100 * fmean(row['clean'] for row in some.values()):.1f}"

    def cell(self, method: str, attack: str, what: str) -> str:
        """Return a cell of a table."""
        rows = self.of.get((method, attack))
        if not rows:
            return "–"
        if all("same" in row for row in rows.values()):
            return "= flip"
        change = with_interval(self.lost(method, attack, what))
        if what == "always":
            return change
        far = fmean(self.moved(method, attack))
        return f"{far:.{0 if far >= 10 else 2}f} · {change}"

    def table(self, what: str) -> list[str]:
        """Return one table: a line a method, a column an attack."""
        when = (
            "in the last round alone: displacement · points from clean"
            if what == "once"
            else "in all twenty rounds: points from clean"
        )
        heads = " | ".join(NAMES.get(one, one) for one in ATTACKS)
        longer = f", {self.epochs} epochs a round" if self.epochs > 1 else ""
        lines = [f"## {WORDS[self.bad]} of ten{longer}, robust={self.rule}, {when}", ""]
        if self.rule == "off":
            lines += [
                "Before there was a rule; half of digits, seed 0, about 150 test samples.",
                "",
            ]
        lines += [f"| method | seeds | clean | {heads} |", "|---" * (len(ATTACKS) + 3) + "|"]
        for method in self.methods:
            cells = " | ".join(self.cell(method, attack, what) for attack in ATTACKS)
            number = len(self.seeds(method))
            lines.append(f"| {method} | {number} | {self.clean(method)} | {cells} |")
        return [*lines, ""]

    def where(self, meets: Callable[[str, str], str]) -> str:
        """Return the methods and attacks of which `meets` says something; copies are left out."""
        found = []
        for method in self.methods:
            for attack in ATTACKS[:-1]:
                rows = self.of.get((method, attack), {})
                if rows and not all("same" in row for row in rows.values()):
                    said = meets(method, attack)
                    found += [f"{method} ({NAMES.get(attack, attack)} {said})"] if said else []
        return ", ".join(found) or "none"

    def below(self, what: str, against: str) -> str:
        """Return where an attack costs more than five points."""

        def one(method: str, attack: str) -> str:
            points = self.lost(method, attack, what, against)
            return with_interval(points) if points and fmean(points) < -5 else ""

        return self.where(one)

    def far(self) -> str:
        """Return where the shared model is displaced by more than one honest step."""

        def one(method: str, attack: str) -> str:
            far = self.moved(method, attack)
            gone = self.moved(method, "absent")
            more = f"; absence alone {fmean(gone):.2f}" if gone else ""
            return f"{fmean(far):.2f}{more}" if fmean(far) > 1 else ""

        return self.where(one)


def others(rows: Sequence[Row]) -> list[str]:
    """Return the table of attacks within an honest size."""
    case, names = Case(rows, 1), ("flip", *OTHERS, "absent")
    methods = [one for one in case.methods if (one, "noise") in case.of]
    lines = [
        "## One attacker of ten, robust=gate, other attacks in all rounds: points from clean",
        "",
        "Changes of an honest size, or nearly: the flip times 1.7; a random direction of the",
        "honest norm; no change; −1.5 times the mean of the others, which an attacker would have",
        "to know; their mean less 1.5 standard deviations in each entry; the same number in every",
        "entry; the largest entry replaced by −1.5 times the norm. Each field of an update is",
        "changed so. Flip and absent are those of the table above, which may have more seeds.",
        "",
        f"| method | seeds | {' | '.join(OTHERS.get(one, one) for one in names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for method in methods:
        cells = " | ".join(case.cell(method, one, "always") for one in names)
        lines.append(f"| {method} | {len(case.of[method, 'noise'])} | {cells} |")
    return [*lines, ""] if methods else []


def cost(rows: Sequence[Row]) -> list[str]:
    """Return the table of what honest federations pay."""
    lines = [
        "## What honest federations pay",
        "",
        "No attacker. Accuracy in % and differences in points; on radon the negative",
        "log-likelihood in nats, where more is worse. Runs are paired by seed. Fashion-MNIST: 3 %",
        "of the images, a small network. Radon: 66 counties, each of which trains on a few homes.",
        "Heart has four clients, so that nobody is ever left out.",
        "",
        "| data | method | seeds | off | gate | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted((r for r in rows if "data" in r), key=lambda r: (r["data"], r["method"])):
        scale, digits = (1, 3) if nats(row) else (100, 1)
        off, on = ([scale * one for one in row[rule]] for rule in ("off", "gate"))
        shown = with_interval([b - a for a, b in zip(off, on, strict=True)], digits)
        means = f"{fmean(off):.{digits}f} | {fmean(on):.{digits}f}"
        lines.append(f"| {row['data']} | {row['method']} | {len(off)} | {means} | {shown} |")
    return [*lines, ""]


def nats(row: Row) -> bool:
    """Return whether a row of costs has log-likelihoods."""
    return bool(row["data"].startswith("radon"))


def paid(rows: Sequence[Row]) -> str:
    """Return who pays more than half a point, or 0.005 nats."""
    found = []
    for row in (one for one in rows if "data" in one):
        apart = [b - a for a, b in zip(row["off"], row["gate"], strict=True)]
        worse = fmean(apart) > 0.005 if nats(row) else fmean(apart) < -0.005
        if worse:
            many = apart if nats(row) else [100 * one for one in apart]
            said = with_interval(many, 3 if nats(row) else 1)
            found.append(f"{row['method']} on {row['data']} ({said})")
    return ", ".join(found) or "none"


def aims(rows: Sequence[Row]) -> list[str]:
    """Return where the aims are missed."""
    one, three, longer = Case(rows, 1), Case(rows, 3), Case(rows, 1, epochs=LONGER)
    lines = [
        "## Where the aims are missed",
        "",
        "A cell is named where the mean over seeds is beyond the aim; the number is that mean.",
        "",
        "One attacker:",
        "",
        f"* Displacement above one honest step: {one.far()}.",
        f"* One round, more than five points below clean: {one.below('once', 'clean')}.",
        f"* One round, more than five below the attacker's absence: {one.below('once', 'absent')}.",
        f"* Twenty rounds, more than five points below clean: {one.below('always', 'clean')}.",
        "* Twenty rounds, more than five points below the attacker's absence: "
        f"{one.below('always', 'absent')}.",
        f"* {LONGER} epochs a round ({', '.join(longer.methods)}), twenty rounds, more than five "
        f"points below clean: {longer.below('always', 'clean')}.",
        "",
        f"More than half a point, or 0.005 nats, paid without an attacker: {paid(rows)}.",
        "",
    ]
    if three.methods:
        lines += [
            "Three attackers, for which no aim was set:",
            "",
            "* One round, more than five points below their absence: "
            f"{three.below('once', 'absent')}.",
            "* Twenty rounds, more than five points below their absence: "
            f"{three.below('always', 'absent')}.",
            "",
        ]
    return lines


def main() -> None:
    """Take rows over, and write the page."""
    rows = taken(load(), sys.argv[1:])
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [INTRO]
    for bad in (1, 3):
        case = Case(rows, bad)
        if case.methods:
            lines += [*case.table("once"), *case.table("always")]
    longer = Case(rows, 1, epochs=LONGER)
    if longer.methods:
        lines += [*longer.table("once"), *longer.table("always")]
    lines += [*others(rows), *cost(rows), *aims(rows), READING.read_text()]
    for bad in (1, 3):
        lines += Case(rows, bad, "off").table("once")
    PAGE.write_text("\n".join(lines).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
