"""MetaVD's dropped weights: bytes of a round and accuracy against the threshold, as a table and a picture, from finished runs.

    python experiments/metavd_drop.py --data-dir data --device cuda     # runs what is missing, then writes both
    python experiments/metavd_drop.py --no-run                          # writes both from what is there
    python experiments/metavd_digits.py report                          # the same picture of the small runs on digits

The runs are those of `bayflower reproduce metavd-figure-drop`, CIFAR-10, and in the same folder. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from drawing import drawing, save

from bayflower.reproduce.cache import Cache
from bayflower.reproduce.show import Shown, look, markdown
from bayflower.reproduce.sweep import Plan, run_missing
from bayflower.reproduce.tables import find

HERE = Path(__file__).parent
TABLE = "metavd-figure-drop"


class Point(NamedTuple):
    """One way of dropping: its name, megabytes of a round in both directions, accuracy of training and of new clients in percent."""

    name: str
    megabytes: float
    test: float
    new: float


def points(found: list[Shown]) -> list[Point]:
    """Return the rows of the table that have runs, means over seeds."""
    rows: dict[str, dict[str, float]] = {}
    for one in found:
        if one.mean is not None:
            rows.setdefault(one.cell.row.name, {})[one.cell.column.name] = one.mean
    return [
        Point(name, row["up"] + row["down"], row["Test"], row["OOD"]) for name, row in rows.items() if {"up", "OOD", "Test"} <= row.keys()
    ]


def draw(found: list[Point], title: str, path: Path) -> None:
    """Draw accuracy over megabytes: MetaVD's thresholds as a line, everything else as single marks."""
    with drawing("metavd") as pyplot:
        figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
        ours = sorted((one for one in found if one.name == "nothing dropped" or one.name.startswith("p >")), key=lambda one: one.megabytes)
        for label, colour, dashes, value in (("training clients", "#0072B2", "-", "test"), ("new clients", "#D55E00", "--", "new")):
            axis.plot(
                [one.megabytes for one in ours],
                [getattr(one, value) for one in ours],
                color=colour,
                linestyle=dashes,
                marker="o",
                label=label,
            )
            rest = [one for one in found if one not in ours]
            axis.plot([one.megabytes for one in rest], [getattr(one, value) for one in rest], color=colour, linestyle="", marker="x")
        for one in found:
            above = one in ours
            axis.annotate(one.name, (one.megabytes, max(one.test, one.new) if above else min(one.test, one.new)), rotation=45,
                          xytext=(0, 8 if above else -34), textcoords="offset points", fontsize="small")  # fmt: skip
        axis.set(xlabel="MB of a round, both directions, all its clients", ylabel="accuracy %", title=title)
        axis.margins(x=0.2, y=0.35)
        axis.legend(fontsize="small", loc="lower right")
        save(figure, path)


def main() -> int:
    """Run what is missing and write table and picture; return 1 if a run failed or there is nothing to draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "runs")
    parser.add_argument("--page", type=Path, default=HERE / "metavd_drop.md")
    parser.add_argument("--figure", type=Path, default=HERE / "pictures" / "metavd_drop.svg")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    args = parser.parse_args()
    changes = {"rounds": args.rounds} if args.rounds else {}
    plan = Plan("quick" if args.quick else "full", args.seeds, changes, data_dir=args.data_dir, device=args.device, minutes=args.minutes)
    table, cache = find(TABLE), Cache(args.results, print)
    failed = 0 if args.no_run else run_missing([table], plan, cache, print)
    found = look(table, plan, cache)
    known = points(found)
    if not known:
        print("no finished run, nothing written")
        return 1
    args.page.write_text(markdown(table, plan, found, level=1))
    print(f"written: {args.page}")
    draw(known, f"CIFAR-10, Dir(0.5), {plan.form} form", args.figure)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
