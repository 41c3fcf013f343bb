"""MetaVD's dropped weights: bytes of a round and accuracy against the threshold, as a table and a
picture, from finished runs.

    python experiments/metavd_drop.py --data-dir data --device cuda
    python experiments/metavd_drop.py --no-run
    python experiments/metavd_digits.py report

The first runs what is missing and writes both, the second writes both from what is there. The third
draws the same picture of the small runs on digits.

The runs are those of `bayflower reproduce metavd-figure-drop`, CIFAR-10, and in the same folder.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
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
    """One way of dropping: its name, megabytes of a round in both directions, accuracy of training
    and of new clients in percent.
    """

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
        Point(name, row["up"] + row["down"], row["Test"], row["OOD"])
        for name, row in rows.items()
        if {"up", "OOD", "Test"} <= row.keys()
    ]


def draw(found: list[Point], title: str, path: Path) -> None:
    """Draw a line for each way of dropping: accuracy on the left, megabytes of a round on the
    right.
    """
    with drawing("metavd") as pyplot:
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(9, 0.42 * len(found) + 1.6), sharey=True
        )
        places = range(len(found))
        for label, colour, marker, value in (
            ("training clients", "#0072B2", "o", "test"),
            ("new clients", "#D55E00", "D", "new"),
        ):
            left.plot(
                [getattr(one, value) for one in found],
                places,
                color=colour,
                linestyle="",
                marker=marker,
                label=label,
            )
        right.barh(places, [one.megabytes for one in found], height=0.6, color="#56B4E9")
        for place, one in zip(places, found, strict=True):
            where = {
                "xytext": (-4, 0),
                "textcoords": "offset points",
                "ha": "right",
                "va": "center",
            }
            right.annotate(f"{one.megabytes:#.3g}", (one.megabytes, place), **where)
        left.set(xlabel="accuracy %", yticks=list(places), yticklabels=[one.name for one in found])
        left.invert_yaxis()  # read from the top, as in the table
        left.legend(fontsize="small")
        right.set(xlabel="MB of a round, both directions, all its clients")
        figure.suptitle(title)
        save(figure, path)


def main() -> int:
    """Run what is missing and write table and picture; return 1 if a run failed or there is nothing
    to draw.
    """
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
    plan = Plan(
        "quick" if args.quick else "full",
        args.seeds,
        changes,
        data_dir=args.data_dir,
        device=args.device,
        minutes=args.minutes,
    )
    table, cache = find(TABLE), Cache(args.results, print)
    failed = 0 if args.no_run else run_missing([table], plan, cache, print)
    found = look(table, plan, cache)
    known = points(found)
    if not known:
        print("no finished run, nothing written")
        return 1
    picture = os.path.relpath(args.figure, args.page.parent)
    args.page.write_text(
        f"{markdown(table, plan, found, level=1).rstrip()}\n\n![accuracy and megabytes for each "
        f"threshold]({picture})\n"
    )
    print(f"written: {args.page}")
    draw(known, f"CIFAR-10, Dir(0.5), {plan.form} form", args.figure)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
