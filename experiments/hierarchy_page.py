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
T |= {10: 2.228, 11: 2.201, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042}
OTHERS = ("pooled", "local C=1e6", "local C=1", "local C=0.1", "local own C")
SAMPLERS = {"gibbs": "own Gibbs sampler", "nuts": "NUTS of numpyro"}
SIZES = (10, 20, 40, 80, 160)
GROUPS = ((0, 50), (50, 100), (100, 200), (200, 400), (400, 10_000))


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return mean and half the 95 % interval of first − second over seeds."""
    found = [a - b for a, b in zip(first, second, strict=True)]
    if len(found) < 2:
        return found[0], float("nan")
    nearest = max((n for n in T if n < len(found)), default=1)
    wide = T[nearest] * statistics.stdev(found) / len(found) ** 0.5
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


def runs_of(lines: list[Line], data: str) -> dict[str, dict[int, Line]]:
    """Return the runs of one data set by method and seed."""
    runs: dict[str, dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line["data"] == data:
            runs[line["method"]][line["seed"]] = line
    return runs


def gains(runs: dict[str, dict[int, Line]], method: str) -> dict[int, list[tuple[int, float]]]:
    """Return (training respondents, gain of the learned prior over a method) of every state."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for seed in sorted(runs[LEARNED].keys() & runs[method].keys()):
        mine = {c[0]: c for c in runs[LEARNED][seed]["clients"]}
        for c in runs[method][seed]["clients"]:
            found[c[0]].append((c[1], c[3] - mine[c[0]][3]))
    return found


def over_states(found: dict[int, list[tuple[int, float]]], low: int, high: int) -> list[float]:
    """Return the mean gain of each state in its runs with a size from low to below high."""
    some = {c: [g for n, g in each if low <= n < high] for c, each in found.items()}
    return [statistics.mean(each) for each in some.values() if each]


def cell(values: list[float]) -> str:
    """Return the mean over states with its interval."""
    return shown(values, [0.0] * len(values)) if values else ""


def by_size(
    runs: dict[str, dict[int, Line]], groups: Sequence[tuple[int, int]], words: str
) -> list[str]:
    """Return the gain over each method by the number of training respondents."""
    others = [method for method in OTHERS if method in runs]
    rows = [f"| {words} | states | " + " | ".join(f"over {m}" for m in others) + " |"]
    rows += ["|---|---|" + "---|" * len(others)]
    found = {method: gains(runs, method) for method in others}
    for low, high in groups:
        some = {method: over_states(found[method], low, high) for method in others}
        name = f"{low}–{high - 1}" if high < 10_000 else f"{low} and more"
        name = str(low) if high == low + 1 else name
        cells = [cell(some[method]) for method in others]
        rows.append(f"| {name} | {len(some[others[0]])} | " + " | ".join(cells) + " |")
    return rows


def votes(lines: list[Line]) -> list[str]:
    """Return the tables of the election: all respondents, and by the size of a state."""
    runs = runs_of(lines, "election88")
    rows = ["| method | log score (NLL) | learned − this | seeds |", "|---|---|---|---|"]
    for method in (LEARNED, *(m for m in OTHERS if m in runs)):
        seeds = sorted(runs[method].keys() & runs[LEARNED].keys())
        value = [runs[method][s]["nll"] for s in seeds]
        less = "" if method == LEARNED else shown([runs[LEARNED][s]["nll"] for s in seeds], value)
        rows.append(f"| {method} | {statistics.mean(value):.4f} | {less} | {len(seeds)} |")
    rows += [
        "",
        "Gain of the learned prior, in nats a held-out respondent, by size of a state. ± is over "
        "states: seeds divide the same few respondents in another way.",
        "",
        *by_size(runs, GROUPS, "training respondents"),
    ]
    thin = runs_of(lines, "election88 thinned")
    if thin:
        seeds = sorted(thin[LEARNED])
        rows += [
            "",
            f"The same where states of at least 100 respondents train on a number of them that is "
            f"drawn at random ({len(seeds)} seeds), and are tested on all others' part as before:",
            "",
            *by_size(thin, [(n, n + 1) for n in SIZES] + [(161, 10_000)], "training respondents"),
        ]
    return rows


def picture(lines: list[Line], path: Path) -> None:
    """Draw the gain of every state against its number of respondents, and by a number at random."""
    runs, thin = runs_of(lines, "election88"), runs_of(lines, "election88 thinned")
    with drawing("hierarchy") as pyplot:
        figure, axes = pyplot.subplots(1, 3 if thin else 2, figsize=(14 if thin else 10, 4))
        for axis, method in zip(axes, ("pooled", "local C=1"), strict=False):
            found = gains(runs, method).values()
            sizes = [np.mean([n for n, _ in each]) for each in found]
            means = [np.mean([g for _, g in each]) for each in found]
            errors = [np.std([g for _, g in each]) / len(each) ** 0.5 for each in found]
            axis.errorbar(sizes, means, errors, fmt="o", markersize=4, linewidth=1)
            axis.set_title(f"states as they are: over {method}")
        for shift, method in enumerate(m for m in OTHERS if thin and m in thin):
            each = {n: over_states(gains(thin, method), n, n + 1) for n in SIZES}
            each = {n: values for n, values in each.items() if len(values) > 1}
            middle = [statistics.mean(values) for values in each.values()]
            wide = [paired(values, [0.0] * len(values))[1] for values in each.values()]
            places = [n * 1.04**shift for n in each]
            axes[2].errorbar(places, middle, wide, fmt="o-", markersize=4, label=f"over {method}")
            axes[2].set_title("training respondents drawn at random")
            axes[2].set_ylim(-0.05, 0.3)
            axes[2].legend(fontsize=8)
        for axis in axes:
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_xlabel("training respondents of a state")
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


def exactly(lines: list[Line]) -> list[str]:
    """Return how far FedMAP is from the exact posterior at the prior it learned."""
    found = {(r["engine"], r["prior"]): r for r in lines if r.get("who") == "exact"}
    rows = [
        "| engine | prior | rounds | worst mean, in posterior standard deviations | worst standard "
        "deviation, % | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for (engine, prior), one in found.items():
        worst = one["worst"]
        rows.append(
            f"| {engine} | {prior} | {one['rounds']} | {worst['mean']:.1e} | "
            f"{100 * worst['std']:.1e} | {one['seconds']:.0f} |"
        )
    return [
        *rows,
        "",
        f"Largest errors over all {next(iter(found.values()))['counties']} counties and 3 "
        "parameters each, against the posterior at the learned prior and noise, solved densely in "
        "float64. Asked for: 0.05 and 5 %, after 30 rounds at most.",
    ]


def make(source: Path, folder: Path) -> None:
    """Write the page and the picture."""
    lines = [json.loads(text) for text in source.read_text().splitlines()]
    every = {line["data"] for line in lines}
    seeds = {d: len({r["seed"] for r in lines if r["data"] == d}) for d in sorted(every)}
    commits = Counter(line["commit"] for line in lines)
    keys = ("data", "k", "method", "seed", "engine", "prior")
    runs = {tuple(r.get(key) for key in keys): r for r in lines}
    seconds = sum(run.get("seconds", 0) for run in runs.values())
    counted = ", ".join(f"{data} {number}" for data, number in seeds.items())
    text = [
        "# Where a hierarchy pays",
        "",
        "`experiments/hierarchy.py`: linear models on real federations, FedMAP with learned priors "
        "against training alone, one model for all, FedAvg with fine-tuning, and FedMAP's fixed "
        f"prior (defaults). {lines[0]['rounds']} rounds, fused engine, {lines[0]['device']}, "
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
    if any(line.get("who") == "exact" for line in lines):
        text += ["## Radon: the exact posterior at the learned prior", "", *exactly(lines), ""]
    for line in lines:
        if line.get("who") in SAMPLERS:
            words = SAMPLERS[line["who"]]
            text += [f"## Radon: the learned prior against the whole posterior ({words})", ""]
            text += [*sampled(line), *([line["about"]] if "about" in line else []), ""]
    (folder / "hierarchy.md").write_text("\n".join(text))
    print(f"written: {folder / 'hierarchy.md'}")
