"""The page of the networks that people bring, from the files of `bayflower bench networks`.

    python benchmarks/network_page.py benchmarks/results/networks_*.json \
        > benchmarks/results/networks.md

Files of one machine may hold parts of the networks.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TITLE = "# Networks that people bring\n"
HEAD = (
    "`bayflower bench networks` (docs/benchmarks.md). Each cell: a round stacked, how many times "
    "faster that is than the same clients one by one in the same run, and the largest difference "
    "between states after one step in float64, stacked and by {beside}."
)
NEAR = 1e-9
WHY = (
    "Why some agree less: torch's Hardswish and Hardsigmoid, and on a GPU its slopes of "
    "weight_norm, have float32's digits in float64, too. FedBPS's mask ranks weights: where scores "
    "agree to all digits, another weight may be the one that is personal."
)
SHARED = " The networks shared the device, so that a round takes longer than alone."


def commit(content: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the state of the code with which a row was measured."""
    found: str = row.get("commit") or content["environment"]["commit"] or "unknown"
    return found[:8]


def cell(row: dict[str, Any] | None) -> str:
    """Return what one network and method have shown."""
    if row is None:
        return "not run"
    if row["failed"]:
        return row["failed"]
    ratio, apart = row.get("one_by_one_ratio"), row.get("apart")
    said = [
        f"{row['ms']:,.0f} ms" if row["ms"] >= 100 else f"{row['ms']:.3g} ms",
        "–" if ratio is None else f"{ratio:.2g}×" if ratio < 10 else f"{ratio:.0f}×",
        row.get("how") or "not compared" if apart is None else f"{apart:.0e}",
    ]
    if row["trained"] != "stacked":
        said.append(row["trained"])
    return ", ".join(said)


def page(contents: Iterable[dict[str, Any]]) -> str:
    """Return the page; one table a machine and state of the code."""
    places: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for content in contents:
        where = content["environment"]
        key = where["device"], f"torch {where['torch']}", f"{where['threads']} threads"
        for row in content["rows"]:
            own = (f"commit {commit(content, row)}",)
            if row.get("at_once"):
                own += (f"{row['at_once']} networks at a time",)
            places[(*key, *own)].append(row)
    found = [TITLE]
    for place, rows in places.items():
        good = [row for row in rows if not row["failed"]]
        methods = list(dict.fromkeys(row["method"] for row in rows))
        beside = next((row["beside"] for row in good if row.get("beside")), "others")
        stacked = sum(row["trained"] == "stacked" for row in good)
        apart = [row["apart"] for row in good if row.get("apart") is not None]
        found += [
            f"## {', '.join(place)}\n",
            HEAD.format(beside=beside) + "\n",
            f"{good[0]['data']}; medians of {good[0]['num_rounds']} rounds after "
            f"{good[0]['warm_up']} that do not count. {len(good)} of {len(rows)} pairs trained, "
            f"{stacked} of them stacked; {sum(one < NEAR for one in apart)} of {len(apart)} agree "
            "within 1e-9. A pair that was refused shows the line that its user gets."
            f"{SHARED if rows[0].get('at_once') else ''}\n",
            f"| network | weights | {' | '.join(methods)} |",
            f"|---|---|{'---|' * len(methods)}",
        ]
        for name in dict.fromkeys(row["network"] for row in rows):
            mine = {row["method"]: row for row in rows if row["network"] == name}
            weights = next((row["weights"] for row in mine.values() if row.get("weights")), 0)
            cells = [cell(mine.get(method)) for method in methods]
            found.append(f"| {name} | {weights:,} | {' | '.join(cells)} |")
        found += [f"\n{WHY}\n"] if any(one >= NEAR for one in apart) else [""]
    return "\n".join(found)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    print(page(json.loads(file.read_text()) for file in parser.parse_args().files), end="")


if __name__ == "__main__":
    main()
