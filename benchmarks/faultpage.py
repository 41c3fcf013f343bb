"""The page of the fault matrix, for people, from the rows that `faults.py` measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CONTAINERS = "deploy/test_containers.py"  # all faults at one position, in one run
TESTS = {  # by the beginning of a fault's title: the tests that show it, and with what
    "SuperNode killed": [CONTAINERS, "flower/test_flower_faults.py"],
    "ClientApp process killed": [CONTAINERS, "flower/test_flower_faults.py"],
    "client off the network": [CONTAINERS, "flower/test_exchange.py"],
    "link of a client": [CONTAINERS, "flower/test_exchange.py"],
    "ServerApp process killed": [CONTAINERS, "deploy/test_deploy_processes.py"],
    "SuperLink killed": [CONTAINERS, "deploy/test_deploy_processes.py"],
    "disk of a client full": [CONTAINERS, "flower/test_store.py"],
}


def tests_of(title: str) -> str:
    """Return the tests that show what is promised of a fault."""
    found = [tests for begin, tests in TESTS.items() if title.startswith(begin)]
    return ", ".join(f"`{test}`" for tests in found for test in tests)


def table_row(cells: Iterable[Any]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def page(content: dict[str, Any], head: str) -> str:
    """Return the page for people; `head` says how it was measured."""
    columns = [
        "fault",
        "position",
        "what the run did",
        "rounds repeated",
        "client states intact",
        "final result",
        "seconds",
    ]
    lines = [
        "# Fault matrix",
        "",
        f"Written by `benchmarks/faults.py`. {head} Seconds are those of a busy machine with two "
        "cores.",
        "",
        table_row(columns),
        "|---" * len(columns) + "|",
    ]
    for row in content.get("rows", []):
        if "rounds" not in row:
            lines.append(
                table_row(
                    [
                        row["title"],
                        row["position"],
                        row.get("said", "failed"),
                        "–",
                        "–",
                        "–",
                        row.get("seconds", "–"),
                    ]
                )
            )
            continue
        did = "ended with code 1; `--resume` finished it" if row["resumed"] else "went on by itself"
        if row["left_out"]:
            did += f"; the client was left out of round {row['left_out'][0]}"
        final = (
            "the reference's bits"
            if row["equal"]
            else "differs, as it must: a client missed a round"
        )
        kept = "yes" if row["state_intact"] else "NO"
        lines.append(
            table_row(
                [
                    row["title"],
                    row["position"],
                    did,
                    row["rounds_repeated"],
                    kept,
                    final,
                    row["seconds"],
                ]
            )
        )
    titles = dict.fromkeys(row["title"] for row in content.get("rows", []))
    lines += [
        "",
        "## Tests that show it",
        "",
        "`make containers` meets all faults during training in one run. The other tests meet the "
        "fault with processes, or with messages that are lost. All are in `tests/`.",
        "",
        table_row(["fault", "shown in"]),
        "|---|---|",
        *(table_row([title, tests_of(title)]) for title in titles),
    ]
    if content.get("scaling"):
        why = (
            "Light training; all containers share two cores, and Flower starts a process that "
            "imports torch for every message."
        )
        heads = ["clients", "containers", "seconds a round", "seconds a round and client"]
        lines += [
            "",
            "## Round time against number of clients",
            "",
            why,
            "",
            table_row(heads),
            "|---" * len(heads) + "|",
        ]
        lines += [table_row(row.values()) for row in content["scaling"]]
    return "\n".join(lines) + "\n"
