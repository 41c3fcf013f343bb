"""pFedVMP's figures from finished runs: accuracy and loss over rounds, centroids, ξ, feature
dimension. Needs matplotlib.

    python experiments/pfedvmp_pictures.py

The runs are those of `bayflower reproduce`; pfedvmp_tables.py says which, and writes the page that
shows the pictures.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from drawing import drawing, save
from pfedvmp_tables import (
    CENTROIDS,
    HERE,
    PLACES,
    VARIANTS,
    half,
    paper_centroids,
    read,
    runs_of,
    sweep,
    titles_of,
)

from bayflower.reproduce import Cache

# Okabe and Ito's colours, which colour-blind people can tell apart; dashes and marks say the same
# once more
LOOKS = {
    "pFedVMP": ("#D55E00", "-", "o"),
    "pFedVMP-avg": ("#E69F00", "--", "s"),
    "FedPer": ("#0072B2", "-", "^"),
    "FedRep": ("#56B4E9", "--", "v"),
    "LG-FedAvg": ("#009E73", "-.", "D"),
    "FedAvg-FT": ("#CC79A7", "-", "P"),
    "FedAvg": ("#000000", ":", "X"),
    "Local": ("#999999", "-.", "*"),
}


def draw(cache: Cache, folder: Path) -> int:
    """Draw every figure that has runs; return 1 if there are none."""
    count = 0
    with drawing("pfedvmp"):
        makers = {"rounds": rounds, "centroids": centroids, "xi": xi, "features": features}
        for stem, make in makers.items():
            figure = make(cache)
            if figure is None:
                print(f"{stem}: not run, not drawn")
                continue
            save(figure, folder / f"pfedvmp_{stem}.svg")
            count += 1
    return 0 if count else 1


def rounds(cache: Cache) -> Any:
    """Return accuracy and test loss after local training, over rounds, of all methods."""
    from matplotlib import pyplot

    found = read("ours-pfedvmp-methods", cache, seeds=1)
    if not runs_of(found.values()):
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    for method, (colour, dashes, mark) in LOOKS.items():
        shown = found[method, "accuracy"]
        if not shown.runs:
            continue
        one = shown.runs[0]
        x = [point["round"] for point in one["curve"]]
        for axis, key, factor in zip(axes, ("accuracy", "nll"), (100, 1), strict=True):
            y = [factor * point["personal"][key] for point in one["curve"]]
            axis.plot(
                x,
                y,
                color=colour,
                linestyle=dashes,
                marker=mark,
                markersize=5,
                markevery=max(1, len(x) // 6),
                label=method,
            )
    axes[0].set(xlabel="round", ylabel="test accuracy, %")
    axes[1].set(xlabel="round", ylabel="test NLL, nats", yscale="log")
    figure.suptitle("Fashion-MNIST, 50 clients, Dir(0.3), after local training", fontsize=11)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def centroids(cache: Cache) -> Any:
    """Return bars of mean accuracy over seeds with standard deviations, one panel a data set."""
    from matplotlib import pyplot

    found = read(CENTROIDS, cache)
    if not runs_of(found.values()):
        return None
    colours = ["#D55E00", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#CC79A7"]
    figure, axes = pyplot.subplots(1, len(PLACES), figsize=(11, 4))
    titles = titles_of(found)
    for column, (axis, place) in enumerate(zip(axes, PLACES, strict=True)):
        levels = []
        for position, variant in enumerate(VARIANTS):
            values, paper = found[variant, place].values, paper_centroids(variant)[column]
            if values:
                error = statistics.stdev(values) if len(values) > 1 else 0
                mean = statistics.mean(values)
                axis.bar(
                    position,
                    mean,
                    yerr=error,
                    capsize=4,
                    color=colours[position],
                    edgecolor="black",
                    linewidth=0.8,
                )
                levels += [mean - error, mean + error]
            if paper is not None:
                axis.plot(
                    position,
                    paper,
                    marker="x",
                    color="black",
                    markersize=8,
                    markeredgewidth=2,
                    linestyle="none",
                )
                levels.append(paper)
        low, high = min(levels, default=0), max(levels, default=100)
        axis.set_ylim(max(0, low - 0.3 * (high - low) - 1), high + 0.15 * (high - low) + 0.5)
        axis.set_xticks(range(len(VARIANTS)), list(VARIANTS), rotation=40, ha="right")
        axis.set_title(titles[column], fontsize=11)
        axis.grid(visible=False, axis="x")
    axes[0].set_ylabel("test accuracy, % (axis cut)")
    figure.suptitle(
        "bars: here, ± standard deviation over seeds; ×: paper, 1000 rounds", fontsize=11
    )
    return figure


def xi(cache: Cache) -> Any:
    """Return accuracy over ξ."""
    return curve(cache, "xi", "ξ", "Table 7", log=True)


def features(cache: Cache) -> Any:
    """Return accuracy over the feature dimension."""
    return curve(cache, "features", "feature dimension", "Table 6", log=False)


def curve(cache: Cache, name: str, label: str, table: str, log: bool) -> Any:
    """Return accuracy over one setting, here and in the paper."""
    from matplotlib import pyplot

    runs, mine, paper = sweep(name, cache)
    if not mine:
        return None
    figure, axis = pyplot.subplots(figsize=(5, 3.6))
    count = runs[0]["rounds"]
    axis.plot(
        list(mine),
        list(mine.values()),
        color="#D55E00",
        marker="o",
        label=f"here, {count} rounds, one seed",
    )
    axis.plot(
        list(paper),
        list(paper.values()),
        color="#0072B2",
        linestyle="--",
        marker="x",
        label=f"paper, {table}, 1000 rounds",
    )
    if log:
        axis.set_xscale("log")
    ticks = sorted({*mine} | ({*paper} if not log else set()))
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(
        xlabel=label,
        ylabel="test accuracy, %",
        title=half("CIFAR-10", runs) + ", 15,000 images, Dir(0.3)",
    )
    axis.title.set_fontsize(11)
    axis.legend(fontsize=10)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Draw the figures; return 1 if there are no runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "runs", help="folder of finished runs"
    )
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures", help="their folder")
    args = parser.parse_args(arguments)
    return draw(Cache(args.results, print), args.pictures)


if __name__ == "__main__":
    raise SystemExit(main())
