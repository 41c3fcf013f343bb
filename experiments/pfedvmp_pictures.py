"""pFedVMP's figures from the runs that are there: accuracy and loss over rounds, centroids, ξ,
feature dimension. Needs matplotlib.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from drawing import drawing, save
from pfedvmp_report import (
    PAPER_CENTROIDS,
    PAPER_FEATURES,
    PAPER_XI,
    by_seed,
    half,
    name,
    pick,
    sweep,
)
from pfedvmp_tables import PLACES, TITLES, VARIANTS, cells

# Okabe and Ito's colours, which colour-blind people can tell apart; dashes and marks say the same
# once more
LOOKS = {
    "pfedvmp": ("#D55E00", "-", "o"),
    "pfedvmp-avg": ("#E69F00", "--", "s"),
    "fedper": ("#0072B2", "-", "^"),
    "fedrep": ("#56B4E9", "--", "v"),
    "lgfedavg": ("#009E73", "-.", "D"),
    "fedavg-ft": ("#CC79A7", "-", "P"),
    "fedavg": ("#000000", ":", "X"),
    "local": ("#999999", "-.", "*"),
}


def draw(runs: list[dict[str, Any]], folder: Path) -> int:
    """Draw every figure that has runs; return 1 if there are none."""
    count = 0
    with drawing("pfedvmp"):
        makers = {"rounds": rounds, "centroids": centroids, "xi": xi, "features": features}
        for stem, make in makers.items():
            figure = make(runs)
            if figure is None:
                print(f"{stem}: not run, not drawn")
                continue
            save(figure, folder / f"pfedvmp_{stem}.svg")
            count += 1
    return 0 if count else 1


def remark(found: dict[tuple, dict[str, Any]]) -> str:
    """Return what a title must add where settings were changed."""
    return " (changed settings)" if any("changed" in one["cell"] for one in found.values()) else ""


def rounds(runs: list[dict[str, Any]]) -> Any:
    """Return accuracy and test loss after local training, over rounds, of all methods."""
    from matplotlib import pyplot

    number, found = pick(runs, "fmnist")
    if not found:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    for cell in cells("fmnist", number):
        one = found.get(name(cell))
        if one is None:
            continue
        colour, dashes, mark = LOOKS[cell["method"]]
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
                label=TITLES[cell["method"]],
            )
    axes[0].set(xlabel="round", ylabel="test accuracy, %")
    axes[1].set(xlabel="round", ylabel="test NLL, nats", yscale="log")
    figure.suptitle(
        f"Fashion-MNIST, 50 clients, Dir(0.3), after local training{remark(found)}", fontsize=11
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def centroids(runs: list[dict[str, Any]]) -> Any:
    """Return bars of mean accuracy over seeds with standard deviations, one panel a data set."""
    from matplotlib import pyplot

    _, found = pick(runs, "centroids")
    if not found:
        return None
    colours = ["#D55E00", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#CC79A7"]
    figure, axes = pyplot.subplots(1, len(PLACES), figsize=(11, 4))
    for column, (axis, (title, place)) in enumerate(zip(axes, PLACES.items(), strict=True)):
        here = {
            key: one for key, one in found.items() if one["cell"]["dataset"] == place["dataset"]
        }
        levels = []
        for position, variant in enumerate(VARIANTS):
            values, paper = (
                list(by_seed(found, variant, place).values()),
                PAPER_CENTROIDS.get(variant, (None,) * 3)[column],
            )
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
        axis.set_title(half(title, here), fontsize=11)
        axis.grid(visible=False, axis="x")
    axes[0].set_ylabel("test accuracy, % (axis cut)")
    figure.suptitle(
        f"bars: here, ± standard deviation over seeds; ×: paper, 1000 rounds{remark(found)}",
        fontsize=11,
    )
    return figure


def xi(runs: list[dict[str, Any]]) -> Any:
    """Return accuracy over ξ."""
    return curve(runs, "xi", PAPER_XI, "ξ", "Table 7", log=True)


def features(runs: list[dict[str, Any]]) -> Any:
    """Return accuracy over the feature dimension."""
    return curve(runs, "features", PAPER_FEATURES, "feature dimension", "Table 6", log=False)


def curve(
    runs: list[dict[str, Any]],
    group: str,
    paper: dict[int, float],
    label: str,
    table: str,
    log: bool,
) -> Any:
    """Return accuracy over one setting, here and in the paper."""
    from matplotlib import pyplot

    found, mine = sweep(runs, group)
    if not mine:
        return None
    figure, axis = pyplot.subplots(figsize=(5, 3.6))
    count = next(iter(found.values()))["rounds"]
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
        title=half("CIFAR-10", found) + f", 15,000 images, Dir(0.3){remark(found)}",
    )
    axis.title.set_fontsize(11)
    axis.legend(fontsize=10)
    return figure
