"""pFedVMP's tables as a page: numbers of the runs beside the paper's, and sentences that are
computed from them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from pfedvmp_tables import FEATURES, PLACES, TITLES, VARIANTS, XI, cells, with_option

PAIRS = (
    ("precision", "count_mean"),
    ("precision", "diag"),
    ("precision", "mean"),
    ("count_mean", "mean"),
    ("precision", "FedPer"),
    ("count_mean", "FedPer"),
    ("precision", "FedAvg-FT"),
)
PAPER = {  # Table 1, Dir(0.3): Fashion-MNIST, EMNIST
    "pfedvmp": (95.60, 95.09),
    "fedper": (92.99, 90.51),
    "fedrep": (93.30, 90.48),
    "fedavg-ft": (94.93, 93.46),
}
PAPER_CV = {  # Table 3: coefficient of variation in 1/100 and standard deviation in points
    "pfedvmp": ("4.14 (3.96)", "2.73 (2.60)"),
    "fedper": ("6.73 (6.26)", "3.16 (2.86)"),
    "fedavg-ft": ("4.46 (4.23)", "2.80 (2.62)"),
}
PAPER_CENTROIDS = {  # Tables 1 and 2, in the order of PLACES
    "precision": (95.60, 80.81, 88.12),
    "mean": (None, 76.97, 87.29),
    "FedPer": (92.99, 70.56, 85.05),
    "FedAvg-FT": (94.93, 77.70, 87.93),
}
PAPER_XI = {1: 75.15, 5: 78.66, 10: 79.22, 20: 80.08, 50: 80.81, 70: 80.25, 100: 79.43}  # Table 7
PAPER_FEATURES = {128: 79.46, 256: 80.14, 384: 80.10, 512: 79.93, 640: 79.82}  # Table 6
# two-sided, by degrees of freedom
T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOT_RUN = "not run"
BY_HAND = "<!-- Below this line the page is written by hand; `report` keeps it. -->"
PAGE = """
# pFedVMP on Fashion-MNIST and CIFAR-10

pFedVMP ("Personalized Federated Learning via Variational Message Passing") gives each class a centroid of features, made of the clients'
Gaussian messages. This page repeats its comparison with other methods, its ablation of the centroids, and its sweeps of ξ and of the
feature dimension. It is made by `experiments/pfedvmp_tables.py report` from one line of JSON a run; the paper's numbers are in *italics*.

    python experiments/pfedvmp_tables.py run --data-dir data
    python experiments/pfedvmp_tables.py plots
    python experiments/pfedvmp_tables.py report

| | here | the paper |
|---|---|---|
| data | images pooled and drawn uniformly: Fashion-MNIST 17,500; CIFAR-10 15,000 for Dir(0.3) and 30,000 for Dir(0.1) | the same sizes |
| clients | 50, all in every round; 80 % of a client's samples for training, 20 % for the test | the same |
| network | two 5×5 convolutions, 512 features | the same |
| training | SGD 0.01 without momentum, batches of 10, 1 local epoch | the same; momentum not mentioned |
| rounds | stated with each table | 1000 |
| seeds | one, centroids several; a seed changes partition, initialisation and batches | mean of 3 trials |
| ξ, α | 50, 1 where not swept; penalty as a mean over batch and coordinates (E-P1) | 50 is the best on CIFAR-10, Dir(0.3); α = 1 |
| small classes | `min_count` = 5: a class of which a client has fewer samples is not sent (E-P12) | no such limit is mentioned |
| baselines | FedRep: 5 epochs on the head before the one on the base; FedAvg-FT: 1 epoch of fine-tuning before a test | not stated |
| fairness | standard deviation of the clients' accuracies, and that over their mean (CV), last round | at the round of best accuracy |

"accuracy" is correct / all over the test samples of all clients after the last round, in %, of the model after local training (FedAvg: the
global model); "before" is that of the shared part with the own part before local training, or of the global model. ECE, CV and std are in
1/100, NLL in nats. Seconds of training include aggregation.
"""

Runs = dict[tuple, dict[str, Any]]


def name(cell: dict[str, Any]) -> tuple:
    """Return what tells a run from the others of its group."""
    return tuple(
        sorted((key, value) for key, value in cell.items() if key not in ("rounds", "changed"))
    )


def pick(runs: list[dict[str, Any]], group: str) -> tuple[int, Runs]:
    """Return the number of rounds that most runs of a group have (of two equals the larger), and
    these runs by name.
    """
    wanted = {
        name(cell) for cell in cells(group, 0, 1 + max((one["seed"] for one in runs), default=0))
    }
    sets: dict[tuple[int, str], Runs] = {}
    for one in runs:
        if name(one["cell"]) in wanted:
            sets.setdefault(
                (one["cell"]["rounds"], json.dumps(one["cell"].get("changed", {}))), {}
            )[name(one["cell"])] = one
    best = max(sets, key=lambda key: (len(sets[key]), key[0]), default=(0, ""))
    return best[0], sets.get(best, {})


def percent(
    found: dict[str, Any] | None, key: str = "accuracy", view: str = "personal"
) -> float | None:
    """Return a final number of a run in %."""
    value = found["final"].get(view, {}).get(key) if found else None
    return None if value is None else 100 * value


def show(value: float | None, digits: int = 2) -> str:
    """Return a number for a table."""
    return "–" if value is None else f"{value:.{digits}f}"


def origin(found: Runs) -> str:
    """Return where numbers come from: rounds, devices, commits, versions, time, what the data are,
    what was changed.
    """
    some = list(found.values())
    said = {
        key: ", ".join(sorted({str(one[key] or "not noted") for one in some}))
        for key in ("rounds", "device", "commit")
    }
    torch = ", ".join(sorted({one["versions"]["torch"] for one in some}))
    text = (
        f"{len(some)} runs; rounds: {said['rounds']}; device: {said['device']}; commit: "
        f"{said['commit']}; torch {torch}; "
    )
    text += f"{sum(one['seconds']['wall'] for one in some):.0f} s in all"
    shared = max(one.get("processes", 1) for one in some)
    text += f", of up to {shared} processes that shared the device." if shared > 1 else "."
    notes = sorted({one["note"] for one in some if one["note"]})
    if any(one["dataset"] == "cifar10" and one["note"] for one in some):
        notes.append(
            "the file is a uniform half of CIFAR-10, its training batches 1 and 2 and the test "
            "batch"
        )
    text += f" Data: {'; '.join(notes)}." if notes else ""
    changed = some[0]["cell"].get("changed")
    return text + (
        f" **Settings were changed, so this is not the experiment described above:** {changed}."
        if changed
        else ""
    )


def half(title: str, found: Runs) -> str:
    """Return a title that does not call a half of CIFAR-10 by the whole's name."""
    return (
        title.replace("CIFAR-10", "half of CIFAR-10")
        if any(one["note"] for one in found.values())
        else title
    )


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return ["", *("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]), ""]


def methods_table(runs: list[dict[str, Any]], group: str, column: int) -> list[str]:
    """Return the table of all methods of a group and what it says about their order."""
    rounds, found = pick(runs, group)
    if not found:
        return ["", NOT_RUN]
    got = {cell["method"]: found.get(name(cell)) for cell in cells(group, rounds)}
    rows = []
    for method, one in got.items():
        theirs = [
            show(PAPER[method][column]) if method in PAPER else "–",
            PAPER_CV.get(method, ("–", "–"))[column],
        ]
        if one is None:
            rows.append([TITLES[method], NOT_RUN, *["–"] * 8, *theirs])
            continue
        before = "before" if "before" in one["final"] else "global"
        numbers = [
            percent(one),
            percent(one, view=before),
            percent(one, "accuracy_mean"),
            percent(one, "nll"),
            percent(one, "ece"),
            percent(one, "fairness_cv"),
            percent(one, "fairness_std"),
        ]
        numbers[3] = None if numbers[3] is None else numbers[3] / 100
        spent = one["seconds"]
        train = spent.get("training", 0) + spent.get("aggregation", 0)
        rows.append(
            [
                TITLES[method],
                *map(show, numbers),
                f"{train:.0f}",
                f"{spent.get('evaluation', 0):.0f}",
                *theirs,
            ]
        )
    head = [
        "method",
        "accuracy",
        "before",
        "mean of clients",
        "NLL",
        "ECE",
        "CV",
        "std",
        "training, s",
        "evaluation, s",
    ]
    head += ["*paper: accuracy*", "*paper: CV (std)*"]
    return ["", origin(found), *grid(head, rows), *order(got)]


def order(got: dict[str, Any]) -> list[str]:
    """Return sentences on pFedVMP against FedPer and FedAvg-FT, from the numbers alone."""
    ours, lines = got.get("pfedvmp"), []
    for other in ("fedper", "fedavg-ft"):
        for key, what, want in (("accuracy", "accuracy", 1), ("fairness_cv", "fairness CV", -1)):
            a, b = percent(ours, key), percent(got.get(other), key)
            if a is None or b is None:
                lines.append(f"* {what}, pFedVMP against {TITLES[other]}: {NOT_RUN}.")
                continue
            word = "above" if a > b else "below" if a < b else "equal to"
            holds = "as in the paper" if (a - b) * want > 0 else "**not as in the paper**"
            lines.append(
                f"* {what}: pFedVMP {a:.2f} is {word} {TITLES[other]} {b:.2f} ({a - b:+.2f}), "
                f"{holds}."
            )
    if ours:
        p, n = ours["final"]["personal"]["accuracy"], ours["final"]["personal"]["num_examples"]
        lines.append(
            f"* One seed; an accuracy on {n} test samples has a standard error of about "
            f"{100 * math.sqrt(p * (1 - p) / n):.2f} points."
        )
    return lines


def by_seed(found: Runs, variant: str, place: dict[str, Any]) -> dict[int, float]:
    """Return a variant's accuracy in % for each seed that was run."""
    return {
        one["seed"]: percent(one)
        for one in found.values()
        if name(one["cell"]) == name({**VARIANTS[variant], **place, "seed": one["seed"]})
    }  # type: ignore[misc]


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation over seeds."""
    if not values:
        return NOT_RUN
    return f"{statistics.mean(values):.2f}" + (
        f" ± {statistics.stdev(values):.2f} ({len(values)})" if len(values) > 1 else " (1)"
    )


def difference(a: dict[int, float], b: dict[int, float]) -> str:
    """Return the mean of paired differences with its 95 % t-interval, and how many seeds have a
    above b.
    """
    gaps = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not gaps:
        return NOT_RUN
    text, signs = (
        f"{statistics.mean(gaps):+.2f}",
        f"above in {sum(gap > 0 for gap in gaps)} of {len(gaps)}",
    )
    if 1 < len(gaps) <= len(T_95):
        reach = T_95[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps))
        verdict = "differs from 0" if abs(statistics.mean(gaps)) > reach else "0 is inside"
        text += (
            f" [{statistics.mean(gaps) - reach:+.2f}, {statistics.mean(gaps) + reach:+.2f}], "
            f"{verdict}"
        )
    return f"{text}; {signs}"


def centroids_table(runs: list[dict[str, Any]]) -> list[str]:
    """Return the table of centroids and their paired differences."""
    _, found = pick(runs, "centroids")
    if not found:
        return ["", NOT_RUN]
    titles = [
        half(
            title,
            {key: one for key, one in found.items() if one["cell"]["dataset"] == place["dataset"]},
        )
        for title, place in PLACES.items()
    ]
    rows = []
    for variant in VARIANTS:
        theirs = PAPER_CENTROIDS.get(variant, (None,) * 3)
        mine = [spread(list(by_seed(found, variant, place).values())) for place in PLACES.values()]
        rows.append(
            [
                variant,
                *(m if t is None else f"{m}; *{t:.2f}*" for m, t in zip(mine, theirs, strict=True)),
            ]
        )
    pairs = []
    for a, b in PAIRS:
        mine = [
            difference(by_seed(found, a, place), by_seed(found, b, place))
            for place in PLACES.values()
        ]
        theirs = zip(
            PAPER_CENTROIDS.get(a, (None,) * 3), PAPER_CENTROIDS.get(b, (None,) * 3), strict=True
        )
        gaps = ["" if x is None or y is None else f"; *{x - y:+.2f}*" for x, y in theirs]
        pairs.append([f"{a} − {b}", *(m + gap for m, gap in zip(mine, gaps, strict=True))])
    words = (
        "Paired over seeds: mean difference in points, its 95 % t-interval, and in how many "
        "seeds the first is above the second."
    )
    return [
        "",
        origin(found),
        *grid(["centroid or method", *titles], rows),
        words,
        *grid(["", *titles], pairs),
    ]


def sweep(runs: list[dict[str, Any]], group: str) -> tuple[Runs, dict[int, float]]:
    """Return the runs of ξ or of the features, and accuracy in % by value."""
    _, found = pick(runs, group)
    values, default = (XI, 50) if group == "xi" else (FEATURES, 512)
    pairs = [
        (value, percent(found.get(name(with_option(group, value, default, 0))))) for value in values
    ]
    return found, {value: accuracy for value, accuracy in pairs if accuracy is not None}


def sweep_table(runs: list[dict[str, Any]], group: str, paper: dict[int, float]) -> list[str]:
    """Return the table of ξ or of the features beside the paper's."""
    found, mine = sweep(runs, group)
    if not mine:
        return ["", NOT_RUN]
    columns = sorted({*paper, *mine})
    rows = [
        ["here", *(show(mine.get(value)) for value in columns)],
        ["*paper*", *(show(paper.get(value)) for value in columns)],
    ]
    best = max(mine, key=lambda value: mine[value])
    text = f"Best here: {best} ({mine[best]:.2f} %); worst: {min(mine.values()):.2f} %. One seed. "
    text += f"Best in the paper: {max(paper, key=lambda value: paper[value])}."
    return ["", origin(found), *grid(["", *map(str, columns)], rows), text]


def picture(path: Path, page: Path, words: str) -> list[str]:
    """Return a link to a picture that is there."""
    return ["", f"![{words}]({os.path.relpath(path, page.parent)})"] if path.exists() else []


def write_page(runs: list[dict[str, Any]], page: Path, pictures: Path) -> int:
    """Write the page from the runs that are there; keep what was written by hand."""

    def drawn(stem: str, words: str) -> list[str]:
        return picture(pictures / f"pfedvmp_{stem}.svg", page, words)

    cifar = half(
        "CIFAR-10, 15,000 images, Dir(0.3)",
        {name(one["cell"]): one for one in runs if one["cell"]["dataset"] == "cifar10"},
    )
    lines = [
        PAGE.strip(),
        "",
        "## Fashion-MNIST, all methods (Tables 1 and 3, Figure 3)",
        *methods_table(runs, "fmnist", 0),
    ]
    lines += [
        *drawn("rounds", "accuracy and loss over rounds"),
        "",
        "## Centroids (Table 2)",
        *centroids_table(runs),
    ]
    lines += [
        *drawn("centroids", "accuracy by centroid"),
        "",
        f"## ξ (Table 7), {cifar}",
        *sweep_table(runs, "xi", PAPER_XI),
    ]
    lines += [
        *drawn("xi", "accuracy over ξ"),
        "",
        f"## Feature dimension (Table 6), {cifar}",
        *sweep_table(runs, "features", PAPER_FEATURES),
    ]
    lines += [
        *drawn("features", "accuracy over the feature dimension"),
        "",
        "## EMNIST-47 subset, Dir(0.3)",
        "",
    ]
    lines += [
        "The paper's numbers are those of EMNIST itself: other data.",
        *methods_table(runs, "emnist", 1),
    ]
    _, marker, kept = page.read_text().partition(BY_HAND) if page.exists() else ("", "", "")
    page.write_text("\n".join(lines) + "\n\n" + BY_HAND + (kept if marker else "\n"))
    print(f"written: {page}, {len(runs)} runs")
    return 0
