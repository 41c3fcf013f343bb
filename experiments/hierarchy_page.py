"""The page and the picture of `hierarchy.py`, from its lines."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drawing import drawing, save

Line = dict[str, Any]
LEARNED = "fedmap learned"
ORDER = ("local", "pooled", "fedavg-ft", "fedmap", LEARNED)
# 97.5 % quantiles of Student's t by degrees of freedom
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
GROUPS = ((0, 50), (50, 100), (100, 200), (200, 400), (400, 10_000))


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return mean and half the 95 % interval of first − second over seeds."""
    found = [a - b for a, b in zip(first, second, strict=True)]
    if len(found) < 2:
        return found[0], float("nan")
    wide = T.get(len(found) - 1, 2.0) * statistics.stdev(found) / len(found) ** 0.5
    return statistics.mean(found), wide


def shown(first: Sequence[float], second: Sequence[float]) -> str:
    """Return a difference with its interval; bold where the interval leaves 0 out."""
    mean, wide = paired(first, second)
    text = f"{mean:+.3f} ± {wide:.3f}"
    return f"**{text}**" if abs(mean) > wide else text


def few(lines: list[Line], data: str, who: str) -> list[str]:
    """Return the table of one data set: rows by k and method."""
    groups: dict[tuple[int, str], dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line["data"] == data and line.get("who") == who:
            groups[line["k"], line["method"]][line["seed"]] = line
    rows = [
        "| k | method | NLL | learned − this | CRPS | learned − this | 50 % covers | 90 % covers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for k in sorted({k for k, _ in groups}):
        best = groups[k, LEARNED]
        for method in ORDER:
            runs = groups[k, method]
            seeds = sorted(runs.keys() & best.keys())
            value = {
                key: [runs[s][key] for s in seeds]
                for key in ("nll", "crps", "coverage_50", "coverage_90")
            }
            less = {
                key: "" if method == LEARNED else shown([best[s][key] for s in seeds], value[key])
                for key in ("nll", "crps")
            }
            rows.append(
                f"| {k} | {method} | {statistics.mean(value['nll']):.3f} | {less['nll']} | "
                f"{statistics.mean(value['crps']):.3f} | {less['crps']} | "
                f"{100 * statistics.mean(value['coverage_50']):.0f} | "
                f"{100 * statistics.mean(value['coverage_90']):.0f} |"
            )
    return rows


def votes(lines: list[Line]) -> list[str]:
    """Return the tables of the election: all respondents, and by the size of a state."""
    runs: dict[str, dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line["data"] == "election88":
            runs[line["method"]][line["seed"]] = line
    seeds = sorted(runs[LEARNED])
    rows = ["| method | log score (NLL) | learned − this |", "|---|---|---|"]
    for method, found in runs.items():
        value, best = [found[s]["nll"] for s in seeds], [runs[LEARNED][s]["nll"] for s in seeds]
        less = "" if method == LEARNED else shown(best, value)
        rows.append(f"| {method} | {statistics.mean(value):.4f} | {less} |")
    others = [method for method in ("pooled", "local C=1", "local C=0.1") if method in runs]
    rows += [
        "",
        "Gain of the learned prior, in nats a held-out respondent, by size of a state:",
    ]
    rows += ["", "| respondents | states | " + " | ".join(f"over {m}" for m in others) + " |"]
    rows += ["|---|---|" + "---|" * len(others)]
    for low, high in GROUPS:
        cells, count = [], 0
        for method in others:
            first, second = [], []
            for s in seeds:
                mine = {c[0]: c for c in runs[LEARNED][s]["clients"] if low <= c[1] < high}
                theirs = {c[0]: c for c in runs[method][s]["clients"]}
                weight = sum(c[2] for c in mine.values())
                first.append(sum(theirs[c][3] * mine[c][2] for c in mine) / weight)
                second.append(sum(c[3] * c[2] for c in mine.values()) / weight)
                count = len(mine)
            cells.append(shown(first, second))
        until = f"{low}–{high}" if high < 10_000 else f"{low} and more"
        rows.append(f"| {until} | {count} | " + " | ".join(cells) + " |")
    return rows


def picture(lines: list[Line], path: Path) -> None:
    """Draw the gain of every state against its number of respondents."""
    runs = {(r["method"], r["seed"]): r for r in lines if r["data"] == "election88"}
    seeds = sorted({seed for _, seed in runs})
    with drawing("hierarchy") as pyplot:
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axis, method in zip(axes, ("pooled", "local C=1"), strict=True):
            gains: dict[int, list[tuple[int, float]]] = defaultdict(list)
            for s in seeds:
                mine = {c[0]: c for c in runs[LEARNED, s]["clients"]}
                for c in runs[method, s]["clients"]:
                    gains[c[0]].append((c[1], c[3] - mine[c[0]][3]))
            sizes = [np.mean([n for n, _ in found]) for found in gains.values()]
            means = [np.mean([g for _, g in found]) for found in gains.values()]
            errors = [np.std([g for _, g in found]) / len(found) ** 0.5 for found in gains.values()]
            axis.errorbar(sizes, means, errors, fmt="o", markersize=4, linewidth=1)
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_xlabel("training respondents of a state")
            axis.set_title(f"over {method.replace(' C=1', '')} logistic regression")
        axes[0].set_ylabel("gain in log score (nats)")
        save(figure, path)


def sampled(line: Line) -> list[str]:
    """Return what the sampler says."""
    rows = ["| | learned | sampled |", "|---|---|---|"]
    for name, ours, mean, std in zip(
        line["names"], line["learned"], line["sampled"], line["sampled_std"], strict=True
    ):
        rows.append(f"| {name} | {ours:.4f} | {mean:.4f} ± {std:.4f} |")
    middle, most, worst = line["away"]
    low, five, half, ninety, high = line["ratio"]
    return [
        *rows,
        "",
        f"{line['counties']} counties, {line['draws']} draws. The posterior means at the learned "
        f"prior are {middle:.3f} sampled posterior standard deviations away (median; 95 %: "
        f"{most:.3f}; worst: {worst:.3f}). Standard deviations are {half:.3f} times the sampled "
        f"ones (median; 5–95 %: {five:.3f}–{ninety:.3f}; all: {low:.3f}–{high:.3f}).",
    ]


def make(source: Path, folder: Path) -> None:
    """Write the page and the picture."""
    lines = [json.loads(text) for text in source.read_text().splitlines()]
    every = {line["data"] for line in lines}
    seeds = {d: len({r["seed"] for r in lines if r["data"] == d}) for d in sorted(every)}
    commits = Counter(line["commit"] for line in lines)
    runs = {(r["data"], r.get("k"), r.get("method"), r["seed"]): r for r in lines}
    seconds = sum(run.get("seconds", 0) for run in runs.values())
    counted = ", ".join(f"{data} {number}" for data, number in seeds.items())
    text = [
        "# Where a hierarchy pays",
        "",
        "`experiments/hierarchy.py`: linear models on real federations, FedMAP with learned priors "
        "against training alone, one model for all, FedAvg with fine-tuning, and FedMAP's fixed "
        f"prior (defaults). {lines[-1]['rounds']} rounds, fused engine, {lines[0]['device']}, "
        f"{seconds:.0f} CPU seconds of training; seeds: {counted}; commit {', '.join(commits)}. "
        "NLL and CRPS: lower is better, in the target's units. Differences are paired by seed, ± "
        "is the 95 % interval (Student's t) over seeds, bold where it leaves 0 out. *pooled* is "
        "least squares, or logistic regression, on everyone's training samples together, which a "
        "federation may not do.",
        "",
    ]
    reading = folder / "results" / "hierarchy_reading.md"
    if reading.exists():
        text += [reading.read_text().rstrip(), ""]
    titles = {
        "radon": "Radon by county (log radon; floor, uranium)",
        "parkinson": "Parkinson by patient (motor UPDRS; 19 inputs)",
    }
    for data, title in titles.items():
        if data not in seeds:
            continue
        for who, words in (("train", "clients that train"), ("new", "new clients")):
            text += [f"## {title}: {words}", "", *few(lines, data, who), ""]
    if "election88" in seeds:
        picture(lines, folder / "pictures" / "hierarchy_election88.svg")
        text += ["## Vote of 1988 by state", "", *votes(lines), ""]
        text += ["![gain against respondents](pictures/hierarchy_election88.svg)", ""]
    for line in lines:
        if line.get("who") == "gibbs":
            text += ["## Radon: the learned prior against the whole posterior (Gibbs)", ""]
            text += [*sampled(line), ""]
    (folder / "hierarchy.md").write_text("\n".join(text))
    print(f"written: {folder / 'hierarchy.md'}")
