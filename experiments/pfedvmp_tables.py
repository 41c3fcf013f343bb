"""pFedVMP's page from finished runs: methods (Tables 1 and 3, Figure 3), centroids (Table 2), ξ
(Table 7), features (Table 6), and sentences that are computed from the numbers.

    bayflower reproduce ours-pfedvmp-methods ours-pfedvmp-centroids --data-dir data
    bayflower reproduce pfedvmp-6 pfedvmp-7 --seeds 1 --where dataset=cifar10 --data-dir data
    python experiments/pfedvmp_pictures.py
    python experiments/pfedvmp_tables.py

The first two do the runs that are missing, the others draw the pictures and write the page. What
stands below the page's marker is kept.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bayflower.reproduce import Cache, find
from bayflower.reproduce.show import Shown, listed, look
from bayflower.reproduce.sweep import Plan

HERE = Path(__file__).resolve().parent
CENTROIDS = "ours-pfedvmp-centroids"
# title → the column of the paper's Table 1
PLACES = {
    "Fashion-MNIST, Dir(0.3)": "FMNIST-50c Dir0.3",
    "CIFAR-10, Dir(0.3)": "Cifar10-50c Dir0.3",
    "CIFAR-10, Dir(0.1)": "Cifar10-50c Dir0.1",
}
VARIANTS = ("precision", "diag", "count_mean", "mean", "FedPer", "FedAvg-FT")
PAIRS = (
    ("precision", "count_mean"),
    ("precision", "diag"),
    ("precision", "mean"),
    ("count_mean", "mean"),
    ("precision", "FedPer"),
    ("count_mean", "FedPer"),
    ("precision", "FedAvg-FT"),
)
# name of a sweep → the table whose first row it is
SWEEPS = {"xi": "pfedvmp-7", "features": "pfedvmp-6"}
# two-sided, by degrees of freedom
T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOT_RUN = "not run"
BY_HAND = "<!-- Below this line the page is written by hand; the script keeps it. -->"
PAGE = """
# pFedVMP on Fashion-MNIST and CIFAR-10

pFedVMP ("Personalized Federated Learning via Variational Message Passing") gives each class a
centroid of features, made of the clients' Gaussian messages. This page repeats its comparison with
other methods, its ablation of the centroids, and its sweeps of ξ and of the feature dimension. It
is written by `experiments/pfedvmp_tables.py` from the finished runs in `experiments/results`; the
paper's numbers are in *italics*.

    bayflower reproduce ours-pfedvmp-methods ours-pfedvmp-centroids --data-dir data
    bayflower reproduce pfedvmp-6 pfedvmp-7 --seeds 1 --where dataset=cifar10 --data-dir data
    python experiments/pfedvmp_pictures.py
    python experiments/pfedvmp_tables.py

|  | here | the paper |
| --- | --- | --- |
| data | images pooled and drawn uniformly: Fashion-MNIST 17,500; CIFAR-10 15,000 for Dir(0.3) and \
30,000 for Dir(0.1) | the same sizes |
| clients | 50, all in every round; 80 % of a client's samples for training, 20 % for the test | \
the same |
| network | two 5×5 convolutions, 512 features | the same |
| training | SGD 0.01 without momentum, batches of 10, 1 local epoch | the same; momentum not \
mentioned |
| rounds | stated with each table | 1000 |
| seeds | one, centroids several; a seed changes partition, initialisation and batches | mean of 3 \
trials |
| ξ, α | 50, 1 where not swept; penalty as a mean over batch and coordinates (E-P1) | 50 is the \
best on CIFAR-10, Dir(0.3); α = 1 |
| small classes | `min_count` = 5: a class of which a client has fewer samples is not sent (E-P12) \
| no such limit is mentioned |
| baselines | FedRep: 5 epochs on the head before the one on the base; FedAvg-FT: 1 epoch of \
fine-tuning before a test | not stated |
| fairness | standard deviation of the clients' accuracies, and that over their mean (CV), last \
round | at the round of best accuracy |

"accuracy" is correct / all over the test samples of all clients after the last round, in %, of the
model after local training (FedAvg: the global model); "before" is that of the shared part with the
own part before local training, or of the global model. ECE, CV and std are in 1/100, NLL in nats.
Seconds of training include aggregation.
"""

Run = dict[str, Any]
Cells = dict[tuple[str, str], Shown]  # by row and column


def read(table: str, cache: Cache, seeds: int = 0) -> Cells:
    """Return the cells of a table; runs on a part of a data set count, whatever is here."""
    found = look(find(table), Plan(seeds=seeds, data_dir=""), cache)
    return {(one.cell.row.name, one.cell.column.name): one for one in found}


def runs_of(found: Iterable[Shown]) -> list[Run]:
    """Return the runs behind some cells, each once."""
    return list({id(run): run for one in found for run in one.runs}.values())


def printed(table: str) -> dict[tuple[str, str], str]:
    """Return a paper's numbers by row and column."""
    cells = find(table).cells("full")
    return {(one.row.name, one.column.name): one.published for one in cells}


def paper_centroids(variant: str) -> list[float | None]:
    """Return the paper's accuracies of a variant (Tables 1 and 2), in the order of PLACES."""
    if variant == "mean":
        second = printed("pfedvmp-2")
        texts = [second.get((place.partition(", ")[2], "pFedVMP-avg"), "") for place in PLACES]
        texts[0] = ""  # Table 2 is on CIFAR-10 alone
    else:
        first, name = printed("pfedvmp-1"), "pFedVMP" if variant == "precision" else variant
        texts = [first.get((name, column), "") for column in PLACES.values()]
    return [float(text) if text else None for text in texts]


def percent(run: Run | None, key: str = "accuracy", view: str = "personal") -> float | None:
    """Return a final number of a run in %."""
    value = run["final"].get(view, {}).get(key) if run else None
    return None if value is None else 100 * value


def show(value: float | None, digits: int = 2) -> str:
    """Return a number for a table."""
    return "–" if value is None else f"{value:.{digits}f}"


def origin(runs: list[Run]) -> str:
    """Return where numbers come from: rounds, devices, commits, versions, time and data."""
    torch = ", ".join(sorted({one["versions"]["torch"] for one in runs}))
    text = (
        f"{len(runs)} runs; rounds: {listed(runs, 'rounds')}; device: {listed(runs, 'device')}; "
        f"commit: {listed(runs, 'commit')}; torch {torch}; "
        f"{sum(one['seconds'] for one in runs):.0f} s in all"
    )
    shared = max(one.get("processes", 1) for one in runs)
    text += f", of up to {shared} processes that shared the device." if shared > 1 else "."
    notes = sorted({one["note"] for one in runs if one["note"]})
    if any(one["dataset"] == "cifar10" and one["note"] for one in runs):
        notes.append(
            "the file is a uniform half of CIFAR-10, its training batches 1 and 2 and the test "
            "batch"
        )
    return text + (f" Data: {'; '.join(notes)}." if notes else "")


def half(title: str, runs: list[Run]) -> str:
    """Return a title that does not call a half of CIFAR-10 by the whole's name."""
    part = any(one["note"] for one in runs)
    return title.replace("CIFAR-10", "half of CIFAR-10") if part else title


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return ["", *("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]), ""]


def methods(table: str, data: str, cache: Cache) -> list[str]:
    """Return the table of all methods and what it says about their order; `data`: what the paper's
    Tables 1 and 3 call the data set.
    """
    found = read(table, cache, seeds=1)
    accuracy, fairness = printed("pfedvmp-1"), printed("pfedvmp-3")
    runs = runs_of(found.values())
    if not runs:
        return ["", NOT_RUN]
    got = {row: (one.runs or [None])[0] for (row, name), one in found.items() if name == "accuracy"}
    rows = []
    for method, run in got.items():
        cv = fairness.get((method, f"{data} CV"), "")
        std = fairness.get((method, f"{data} std"), "")
        theirs = [
            accuracy.get((method, f"{data} Dir0.3"), "") or "–",
            f"{cv} ({std})" if cv else "–",
        ]
        rows.append([method, *numbers(run), *theirs])
    head = "method,accuracy,before,mean of clients,NLL,ECE,CV,std,training (s),evaluation (s)"
    titles = [*head.split(","), "*paper: accuracy*", "*paper: CV (std)*"]
    return ["", origin(runs), *grid(titles, rows), *order(got)]


def numbers(run: Run | None) -> list[str]:
    """Return a method's numbers for its row."""
    if run is None:
        return [NOT_RUN, *["–"] * 8]
    before = "before" if "before" in run["final"] else "global"
    values = [
        percent(run),
        percent(run, view=before),
        *(percent(run, key) for key in ("accuracy_mean", "nll", "ece")),
        *(percent(run, key) for key in ("fairness_cv", "fairness_std")),
    ]
    values[3] = None if values[3] is None else values[3] / 100
    spent = run.get("spent") or {}
    train = spent.get("training", 0) + spent.get("aggregation", 0)
    times = [f"{train:.0f}", f"{spent.get('evaluation', 0):.0f}"] if spent else ["–", "–"]
    return [*map(show, values), *times]


def order(got: dict[str, Run | None]) -> list[str]:
    """Return sentences on pFedVMP against FedPer and FedAvg-FT, from the numbers alone."""
    ours, lines = got.get("pFedVMP"), []
    for other in ("FedPer", "FedAvg-FT"):
        for key, what, want in (("accuracy", "accuracy", 1), ("fairness_cv", "fairness CV", -1)):
            a, b = percent(ours, key), percent(got.get(other), key)
            if a is None or b is None:
                lines.append(f"* {what}, pFedVMP against {other}: {NOT_RUN}.")
                continue
            word = "above" if a > b else "below" if a < b else "equal to"
            holds = "as in the paper" if (a - b) * want > 0 else "**not as in the paper**"
            lines.append(
                f"* {what}: pFedVMP {a:.2f} is {word} {other} {b:.2f} ({a - b:+.2f}), {holds}."
            )
    if ours:
        p, n = ours["final"]["personal"]["accuracy"], ours["final"]["personal"]["num_examples"]
        lines.append(
            f"* One seed; an accuracy on {n} test samples has a standard error of about "
            f"{100 * math.sqrt(p * (1 - p) / n):.2f} points."
        )
    return lines


def by_seed(shown: Shown) -> dict[int, float]:
    """Return a cell's accuracy in % for each seed that was run."""
    seeds = [run["partition"]["seed"] for run in shown.runs]
    return dict(zip(seeds, shown.values, strict=True))


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
    mean = statistics.mean(gaps)
    text = f"{mean:+.2f}"
    if 1 < len(gaps) <= len(T_95):
        reach = T_95[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps))
        verdict = "differs from 0" if abs(mean) > reach else "0 is inside"
        text += f" [{mean - reach:+.2f}, {mean + reach:+.2f}], {verdict}"
    return f"{text}; above in {sum(gap > 0 for gap in gaps)} of {len(gaps)}"


def titles_of(found: Cells) -> list[str]:
    """Return the headings of the places, with what part of the data was used."""
    return [
        half(place, runs_of(one for (_, column), one in found.items() if column == place))
        for place in PLACES
    ]


def centroids(cache: Cache) -> list[str]:
    """Return the table of centroids and their paired differences."""
    found = read(CENTROIDS, cache)
    runs = runs_of(found.values())
    if not runs:
        return ["", NOT_RUN]
    rows = []
    for variant in VARIANTS:
        cells = [spread(found[variant, place].values) for place in PLACES]
        theirs = [f"; *{one:.2f}*" if one else "" for one in paper_centroids(variant)]
        rows.append([variant, *(mine + text for mine, text in zip(cells, theirs, strict=True))])
    pairs = []
    for a, b in PAIRS:
        cells = [difference(by_seed(found[a, place]), by_seed(found[b, place])) for place in PLACES]
        both = zip(paper_centroids(a), paper_centroids(b), strict=True)
        gaps = [f"; *{x - y:+.2f}*" if x and y else "" for x, y in both]
        pairs.append([f"{a} − {b}", *(mine + gap for mine, gap in zip(cells, gaps, strict=True))])
    titles = titles_of(found)
    words = (
        "Paired over seeds: mean difference in points, its 95 % t-interval, and in how many "
        "seeds the first is above the second."
    )
    return [
        "",
        origin(runs),
        *grid(["centroid or method", *titles], rows),
        words,
        *grid(["", *titles], pairs),
    ]


def sweep(name: str, cache: Cache) -> tuple[list[Run], dict[int, float], dict[int, float]]:
    """Return the runs of ξ or of the features with seed 0 on CIFAR-10, accuracy in % by value, and
    the paper's.
    """
    found = read(SWEEPS[name], cache, seeds=1)
    first = next(iter(found))[0]
    row = {int(column): one for (name, column), one in found.items() if name == first}
    mine = {value: one.values[0] for value, one in row.items() if one.values}
    paper = {value: one.cell.mean for value, one in row.items() if one.cell.mean is not None}
    return runs_of(row.values()), mine, paper


def sweep_table(name: str, cache: Cache) -> list[str]:
    """Return the table of ξ or of the features beside the paper's."""
    runs, mine, paper = sweep(name, cache)
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
    return ["", origin(runs), *grid(["", *map(str, columns)], rows), text]


def write_page(cache: Cache, page: Path, pictures: Path) -> None:
    """Write the page from the runs that are there; keep what was written by hand."""

    def drawn(stem: str, words: str) -> list[str]:
        path = pictures / f"pfedvmp_{stem}.svg"
        return ["", f"![{words}]({os.path.relpath(path, page.parent)})"] if path.exists() else []

    cifar = half("CIFAR-10, 15,000 images, Dir(0.3)", sweep("xi", cache)[0])
    lines = [
        PAGE.strip(),
        "",
        "## Fashion-MNIST, all methods (Tables 1 and 3, Figure 3)",
        *methods("ours-pfedvmp-methods", "FMNIST-50c", cache),
        *drawn("rounds", "accuracy and loss over rounds"),
        "",
        "## Centroids (Table 2)",
        *centroids(cache),
        *drawn("centroids", "accuracy by centroid"),
        "",
        f"## ξ (Table 7), {cifar}",
        *sweep_table("xi", cache),
        *drawn("xi", "accuracy over ξ"),
        "",
        f"## Feature dimension (Table 6), {cifar}",
        *sweep_table("features", cache),
        *drawn("features", "accuracy over the feature dimension"),
        "",
        "## EMNIST-47 subset, Dir(0.3)",
        "",
        "The paper's numbers are those of EMNIST itself: other data.",
        *methods("ours-pfedvmp-emnist47", "EMNIST-50c", cache),
    ]
    _, marker, kept = page.read_text().partition(BY_HAND) if page.exists() else ("", "", "")
    page.write_text("\n".join(lines) + "\n\n" + BY_HAND + (kept if marker else "\n"))
    print(f"written: {page}")


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "runs", help="folder of finished runs"
    )
    parser.add_argument("--page", type=Path, default=HERE / "pfedvmp_tables.md")
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures", help="their folder")
    args = parser.parse_args(arguments)
    write_page(Cache(args.results, print), args.page, args.pictures)


if __name__ == "__main__":
    main()
