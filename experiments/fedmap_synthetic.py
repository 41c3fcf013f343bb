"""The tables in fedmap_synthetic.md, from finished runs: FedMAP's synthetic tables (1, 3 and 4) and
the map behind our defaults, rounds × epochs × sigma² in three scenarios.

    bayflower reproduce ours-fedmap-20x2 ours-fedmap-20x5 ours-fedmap-50x5 ours-fedmap-100x5
    bayflower reproduce ours-fedmap-weights
    python experiments/fedmap_synthetic.py

The first two do the runs that are missing, the third writes the page. What stands in the page
between `<!-- made: NAME -->` and `<!-- end -->` is replaced; the rest is written by hand and kept.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bayflower.reproduce import Cache, find
from bayflower.reproduce.show import listed, look
from bayflower.reproduce.sweep import Plan

HERE = Path(__file__).parent
# scenario → (the paper's table, what it is)
SCENARIOS = {
    "label": ("1", "label skew"),
    "feature": ("3", "feature skew"),
    "quantity": ("4", "quantity skew"),
}
SCHEDULES = ((20, 2), (20, 5), (50, 5), (100, 5))
SHOWN = (50, 5)  # the schedule of the page's tables
SIGMA2 = (1, 5, 15, 50, 100, 300, 1000)
FEDMAP = "FedMAP, sigma² = 100"
# heading → (row of our tables, column of the paper's)
METHODS = {
    "local": ("Local", "Individual"),
    "fedmap": (FEDMAP, "FedMAP"),
    "fedbn": ("FedBN", "FedBN"),
    "fedprox": ("FedProx", "FedProx"),
    "fedavg": ("FedAvg", "FedAvg"),
    "fedavg-ft": ("FedAvg-FT", ""),
}
ALL, FIRST, LAST = range(10), range(5), range(5, 10)  # clients
Run = dict[str, Any]
Runs = dict[tuple[str, str], list[Run]]  # (row, scenario) → a run a seed
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(table: str, cache: Cache) -> Runs:
    """Return the runs of one of our tables."""
    # no data folder: the data are synthetic
    found = look(find(table), Plan(data_dir=""), cache)
    return {
        (one.cell.row.name, one.cell.column.settings["scenario"]): one.runs
        for one in found
        if not one.cell.column.metric
    }


def balanced(run: Run, clients: range = ALL) -> float:
    """Return a run's mean balanced accuracy over some clients, in %."""
    each = run["final"]["personal"]["per_client"]
    return 100 * statistics.mean(each[client]["balanced_accuracy"] for client in clients)


def spread(values: list[float], digits: int = 1) -> str:
    """Return mean ± standard deviation over seeds."""
    if not values:
        return "not run"
    text = f"{statistics.mean(values):.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def paper(scenario: str, clients: range) -> list[str]:
    """Return the paper's means over clients, from its printed clients (its averages do not all
    agree with them, E-M9).
    """
    cells = {
        (one.row.client, one.column.name): one.mean
        for one in find(f"fedmap-{SCENARIOS[scenario][0]}").cells("full")
    }
    found = []
    for _, column in METHODS.values():
        values = [cells[client, column] for client in clients] if column else []
        found.append(f"{statistics.mean(map(float, values)):.2f}" if values else "–")
    return found


def tables(runs: dict[tuple[int, int], Runs]) -> list[str]:
    """Return the paper's three tables: means over all clients and over the skewed ones."""
    rows = []
    for scenario, (number, title) in SCENARIOS.items():
        for clients, label in ((ALL, "all"), (LAST, "6–10")):
            cells = [
                spread([balanced(run, clients) for run in runs[SHOWN][row, scenario]])
                for row, _ in METHODS.values()
            ]
            rows.append([f"Table {number}, {title}", label, *cells])
        rows.append(["*paper*", "all", *paper(scenario, ALL)])
        rows.append(["*paper*", "6–10", *paper(scenario, LAST)])
    return grid(["scenario", "clients", *METHODS], rows)


def differences(runs: dict[tuple[int, int], Runs]) -> list[str]:
    """Return FedMAP less local training, seed by seed."""
    rows = []
    for scenario in SCENARIOS:
        pairs = list(
            zip(
                runs[SHOWN][FEDMAP, scenario],
                runs[SHOWN]["Local", scenario],
                strict=True,
            )
        )
        row = [scenario]
        for clients in (ALL, LAST, FIRST):
            gaps = [balanced(ours, clients) - balanced(alone, clients) for ours, alone in pairs]
            row.append(", ".join(f"{gap:+.1f}" for gap in gaps).replace("-", "−"))
        rows.append(row)
    return grid(["scenario", "all clients", "clients 6–10", "clients 1–5"], rows)


def probabilities(runs: dict[tuple[int, int], Runs]) -> list[str]:
    """Return NLL and ECE of the same runs."""
    rows = []
    for name, key, scale, digits in (("NLL", "nll", 1, 2), ("ECE", "ece", 100, 1)):
        for scenario in SCENARIOS:
            row = [scenario, name]
            for method, _ in METHODS.values():
                some = runs[SHOWN][method, scenario]
                values = [scale * run["final"]["personal"][key] for run in some]
                row.append(spread(values, digits))
            rows.append(row)
    return grid(["scenario", "", *METHODS], rows)


def sigma_map(runs: dict[tuple[int, int], Runs]) -> list[str]:
    """Return FedMAP over sigma², beside local training and FedAvg on the same schedule."""
    lines = []
    rows_of = ["Local", "FedAvg", *(f"FedMAP, sigma² = {value}" for value in SIGMA2)]
    head = ["rounds × epochs", "local", "FedAvg", *map(str, SIGMA2)]
    for scenario, (number, title) in SCENARIOS.items():
        for clients, label in ((ALL, "all clients"), (LAST, "clients 6–10")):
            if scenario == "feature" and clients == LAST:
                continue  # all its clients are alike
            rows = [
                [f"{rounds} × {epochs}"]
                + [
                    spread([balanced(run, clients) for run in found[row, scenario]])
                    for row in rows_of
                ]
                for (rounds, epochs), found in runs.items()
            ]
            lines += [f"Table {number}, {title}, {label}", "", *grid(head, rows)]
    return lines


def weights(found: Runs) -> list[str]:
    """Return balanced accuracy and the effective number of clients for each way of weighting."""
    modes = ("mean", "count", "uniform", "sum")
    rows = []
    for scenario, (number, title) in SCENARIOS.items():
        row = [f"Table {number}, {title}"]
        for mode in modes:
            some = found[mode, scenario]
            text = spread([balanced(run) for run in some])
            effective = [run["last"]["effective_clients"] for run in some]
            row.append(f"{text} ({statistics.mean(effective):.2f})" if some else text)
        rows.append(row)
    return grid(["scenario", *modes], rows)


def origin(groups: list[Runs]) -> list[str]:
    """Return where the numbers come from."""
    runs = {id(run): run for found in groups for some in found.values() for run in some}.values()
    torch = ", ".join(sorted({run["versions"]["torch"] for run in runs}))
    return [
        f"{len(runs)} runs, {sum(run['seconds'] for run in runs):,.0f} s in all; "
        f"device: {listed(runs, 'device')}; commit: {listed(runs, 'commit')}; torch {torch}.",
        "",
    ]


def write(page: Path, cache: Cache) -> None:
    """Replace the page's made blocks."""
    runs = {
        (rounds, epochs): read(f"ours-fedmap-{rounds}x{epochs}", cache)
        for rounds, epochs in SCHEDULES
    }
    ways = read("ours-fedmap-weights", cache)
    makers: dict[str, Callable[[], list[str]]] = {
        "runs": lambda: origin([*runs.values(), ways]),
        "tables": lambda: tables(runs),
        "differences": lambda: differences(runs),
        "probabilities": lambda: probabilities(runs),
        "map": lambda: sigma_map(runs),
        "weights": lambda: weights(ways),
    }
    text = page.read_text()
    names = [name for _, name, _, _ in BLOCK.findall(text)]
    if sorted(names) != sorted(makers):
        raise SystemExit(f"{page} must have one block of each of {', '.join(makers)}, has {names}")

    def made(block: re.Match[str]) -> str:
        return block[1] + "\n" + "\n".join(makers[block[2]]()) + "\n" + block[4]

    page.write_text(BLOCK.sub(made, text))
    print(f"written: {page}")


def main(words: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "runs", help="folder of finished runs"
    )
    parser.add_argument("--page", type=Path, default=HERE / "fedmap_synthetic.md")
    args = parser.parse_args(words)
    write(args.page, Cache(args.results, print))


if __name__ == "__main__":
    main()
