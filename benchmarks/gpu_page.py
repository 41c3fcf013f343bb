"""The page of what a GPU has shown, from the files of `benchmarks/gpu.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import network_page
from network_page import commit

TITLE = "# What a GPU shows\n\nWritten by `python benchmarks/gpu.py FOLDER --page`.\n"
PUBLISHED = {  # seconds of all rounds, and what others took, see docs/benchmarks.md
    "pfl-cifar10": 20,
    "flute-mnist-lr": 1,
    "femnist-cnn": 15,
    "shakespeare-lstm": 60,
}
AIMS = {("fedper", "tf32"): "15 ms", ("pfedvmp", "tf32"): "25 ms"}  # a round


def page(folder: Path) -> str:
    """Return the page of the files that are there."""
    found = [TITLE]
    for name, write in SECTIONS.items():
        file = folder / f"{name}.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text())
        lines = write(content)
        if not content.get("complete", True):
            lines.append("\nNot complete: the time ended it, or nothing could be run.")
        found += [*lines, ""]
    return "\n".join(found)


def place(content: dict[str, Any]) -> str:
    """Return the machine and the state of the code."""
    where = content["environment"]
    commits = dict.fromkeys(commit(content, row) for row in content.get("rows", ()) or [{}])
    said = "commits, see the rows" if len(commits) > 1 else f"commit {next(iter(commits))}"
    return f"{where['device']}, torch {where['torch']}, {said}"


def tests(content: dict[str, Any]) -> list[str]:
    """Return what became of the tests."""
    counts = ", ".join(f"{number} {kind}" for kind, number in content["counts"].items())
    counts = counts or "none ran"
    lines = ["## Tests\n", f"{place(content)}: {counts} in {content['seconds']:.0f} s."]
    if content["not_passed"]:
        lines += ["", "Not passed:", "", *(f"* `{name}`" for name in content["not_passed"])]
    return lines


def measured(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the cases that could be measured."""
    return [row for row in content["rows"] if not row.get("failed")]


def table(*heads: str) -> list[str]:
    """Return the head of a table."""
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]


def failures(content: dict[str, Any]) -> list[str]:
    """Return the cases that could not be measured."""
    bad = [row for row in content["rows"] if row.get("failed")]
    return ["", *(f"Not measured: {row['case']}: {row['failed']}" for row in bad)] if bad else []


def methods(content: dict[str, Any]) -> list[str]:
    """Return rounds of methods on one workload, beside FedPer's."""
    rows = measured(content)
    lines = ["## Methods\n", f"{place(content)}. {data(rows)}\n"]
    lines += table("method", "products", "ms a round", "to FedPer", "aim", "commit")
    for row in rows:
        aim = AIMS.get((row["method"], row["precision"]), "")
        if row["method"] == "fednp":
            aim = "1.5 times FedPer"
        ratio = row.get("fedper_ratio")
        beside = "" if ratio is None else f"{ratio:.2f}"
        lines.append(
            f"| {row['method']} | {row['precision']} | {row['ms']:.1f} | {beside} | {aim} | "
            f"{commit(content, row)} |"
        )
    return lines + failures(content)


def overheads(content: dict[str, Any]) -> list[str]:
    """Return rounds of MetaVD beside Reptile's."""
    rows = measured(content)
    times = {(row["precision"], row["method"]): row["ms"] for row in rows}
    lines = ["## Ten clients\n", f"{place(content)}. {data(rows)}\n"]
    lines += table("method", "products", "ms a round", "samples a second", "to Reptile")
    for row in rows:
        reptile = times.get((row["precision"], "reptile"))
        ratio = f"{row['ms'] / reptile:.2f}" if reptile else ""
        lines.append(
            f"| {row['method']} | {row['precision']} | {row['ms']:.1f} | "
            f"{row['samples_per_second']:,} | {ratio} |"
        )
    lines.append("\nAims: MetaVD 1.3 times Reptile, 1.5 million samples a second in bf16.")
    return lines + failures(content)


def races(content: dict[str, Any]) -> list[str]:
    """Return the seconds of all rounds of other simulators' workloads."""
    rows = measured(content)
    lines = ["## Races\n", f"{place(content)}. Seconds of all rounds after three that warm up.\n"]
    measures = ("rounds", "all rounds", "ms a round", "samples a second", "memory")
    lines += table("workload", "products", *measures, "aim", "published elsewhere", "commit")
    for row in rows:
        aim = PUBLISHED.get(row["workload"])
        peak = f"{row['peak_memory'] / 1e9:.1f} GB" if row.get("peak_memory") else "–"
        of = "" if row["num_rounds"] == row["wanted"] else f" of {row['wanted']:,}"
        lines.append(
            f"| {row['workload']} | {row['precision']} | {row['num_rounds']:,}{of} | "
            f"{row['total']:.2f} s | {row['ms']:.2f} | {row['samples_per_second']:,} | {peak} | "
            f"{f'{aim} s' if aim else ''} | {row['rival'] or '–'} | {commit(content, row)} |"
        )
    return lines + failures(content)


def profile(content: dict[str, Any]) -> list[str]:
    """Return where the time of a round goes."""
    rows = measured(content)
    lines = ["## Where the time goes\n", f"{place(content)}\n"]
    lines += table("workload", "method", "products", "stage", "ms", "of a round")
    for row in rows:
        percent = row.get("percent")
        share = "" if percent is None else f"{percent:.0f} %"
        first = f"| {row['workload']} | {row['method']} | {row['precision']} |"
        lines.append(f"{first} {row['stage']} | {row['ms']:.2f} | {share} |")
        for one in row.get("kernels", ()):
            name = one["kernel"].replace("|", " ")[:60]
            lines.append(f"{first} of it `{name}`, {one['calls']} times | {one['ms']:.2f} | |")
    return lines + failures(content)


def single(content: dict[str, Any]) -> list[str]:
    """Return the time of steps where clients are trained one by one."""
    rows = measured(content)
    lines = ["## One by one\n", f"{place(content)}. {data(rows)}\n"]
    lines += table(
        "workload", "method", "products", "steps are", "ms a round", "ms a step", "commit"
    )
    for row in rows:
        first = f"| {row['workload']} | {row['method']} | {row['precision']} | {row['way']} |"
        own = f" {row['ms']:.1f} | {row['ms_a_step']:.3f} | {commit(content, row)} |"
        lines.append(first + own)
    lines.append("\nAim: 1 ms a step.")
    return lines + failures(content)


def networks(content: dict[str, Any]) -> list[str]:
    """Return the table of networks without its own title."""
    return network_page.page([content]).removeprefix(network_page.TITLE).strip().splitlines()


def data(rows: list[dict[str, Any]]) -> str:
    """Return what the rows were measured on."""
    said = dict.fromkeys(row["data"] for row in rows if row.get("data"))
    rounds = sorted({row["num_rounds"] for row in rows})
    counted = (
        "–".join(str(one) for one in dict.fromkeys((rounds[0], rounds[-1]))) if rounds else "0"
    )
    return f"{'; '.join(said)}. Medians of {counted} rounds after those that warm up."


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "tests": tests,
    "methods": methods,
    "overheads": overheads,
    "overheads-float32": overheads,
    "races": races,
    "profile": profile,
    "profile-ten": profile,
    "single": single,
    "networks": networks,
}
