"""FedBPS's Figure 3 from the finished runs of `bayflower reproduce fedbps-2`: what is personal,
layer by layer, and accuracy over p.

    python experiments/fedbps_pictures.py --figure experiments/pictures/fedbps_personal.svg

Above: the share of each layer's entries that are personal, over rounds, at p = 70 %, mean over
seeds. Below: accuracy over p, mean and standard deviation over seeds, and the paper's Table 2. A
data set without runs is left out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from drawing import drawing, save

from bayflower.reproduce.cache import Cache
from bayflower.reproduce.show import Shown, look
from bayflower.reproduce.sweep import Plan
from bayflower.reproduce.tables import find

HERE = Path(__file__).parent
SHOWN = "p = 70 %"
# Okabe and Ito's colours
LOOKS = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#000000", "-"))


def columns(results: Path) -> dict[str, dict[str, Shown]]:
    """Return the cells of Table 2 that have runs, by data set and row."""
    table = find("fedbps-2")
    found: dict[str, dict[str, Shown]] = {}
    for one in look(table, Plan(), Cache(results)):
        if one.values:
            found.setdefault(one.cell.column.name, {})[one.cell.row.name] = one
    return found


def layers(axis: Any, shown: Shown) -> None:
    """Draw each layer's personal share over rounds."""
    curves = [run["curve"] for run in shown.runs]
    keys = [key for key in curves[0][0] if key.startswith("personal_share/")]
    for key, (colour, dashes) in zip(keys, LOOKS, strict=False):
        points = [
            100 * statistics.mean(curve[i][key] for curve in curves) for i in range(len(curves[0]))
        ]
        axis.plot(
            [one["round"] for one in curves[0]],
            points,
            color=colour,
            linestyle=dashes,
            label=key.partition("/")[2],
        )
    axis.set(
        xlabel="round",
        ylabel="personal entries, % of the layer",
        ylim=(-3, 132),
        yticks=range(0, 101, 20),
    )
    axis.legend(fontsize="small", loc="upper center", ncols=3)


def shares(axis: Any, rows: dict[str, Shown]) -> None:
    """Draw accuracy over p, here and in the paper."""
    places = [float(name.split()[2]) for name in rows]
    axis.errorbar(
        places,
        [one.mean for one in rows.values()],
        [one.sd or 0 for one in rows.values()],
        marker="o",
        capsize=4,
        color="#D55E00",
        label="here",
    )
    axis.plot(places, [one.cell.mean for one in rows.values()], "x--", color="black", label="paper")
    axis.set(xlabel="p, % of all weights", ylabel="accuracy, % (axis cut)", xticks=places)
    axis.legend(fontsize="small")


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "runs", help="folder of finished runs"
    )
    parser.add_argument("--figure", type=Path, default=HERE / "pictures" / "fedbps_personal.svg")
    args = parser.parse_args()
    found = columns(args.results)
    if not found:
        raise SystemExit(
            f"{args.results} has no runs of FedBPS's Table 2; make them by: bayflower reproduce "
            "fedbps-2 --data-dir DIR"
        )
    with drawing("fedbps", **{"font.size": 10}) as pyplot:
        figure, axes = pyplot.subplots(
            2, len(found), figsize=(4.6 * len(found), 6.6), squeeze=False
        )
        for column, (name, rows) in enumerate(found.items()):
            axes[0][column].set_title(f"{name}, p = 70 %" if SHOWN in rows else name)
            if SHOWN in rows:
                layers(axes[0][column], rows[SHOWN])
            shares(axes[1][column], rows)
        save(figure, args.figure)


if __name__ == "__main__":
    main()
