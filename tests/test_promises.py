"""Each promise of SECURITY.md and of the fault matrix names tests that are there."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PAGES = ("SECURITY.md", "docs/fault-matrix.md", "docs/robust.md", "docs/threat-model.md")
PAGES += ("docs/site-policy.md", "docs/privacy.md")
NAMED = re.compile(r"`(?:tests/)?((?:[a-z_]+/)*test_[a-z_]+\.py)`")


def tables(text: str) -> list[tuple[str, list[str]]]:
    """Return (heading, rows) of each table of a page."""
    found = re.findall(r"^(\|.*\|)\n\|[-| ]+\|\n((?:\|.*\|\n)+)", text, re.M)
    return [(head, rows.splitlines()) for head, rows in found]


def files(named: str) -> list[Path]:
    """Return the test files that a name on a page can mean."""
    return [path for path in TESTS.rglob(Path(named).name) if path.as_posix().endswith(f"/{named}")]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page):
    for name in NAMED.findall((ROOT / page).read_text()):
        (path,) = files(name)
        tree = ast.parse(path.read_text())
        tests = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
        assert any(one.name.startswith("test_") for one in tests), f"{page}: {name} has no test"


def test_every_promise_names_a_test():
    kept = [
        (head, rows)
        for head, rows in tables((ROOT / "SECURITY.md").read_text())
        if re.search(r"\| (attack|promise) ", head)
    ]
    assert len(kept) == 4  # clients, the gate, the server, state
    for head, rows in kept:
        assert len(rows) > 5
        for row in rows:
            assert NAMED.search(row), f"no test is named under {head}: {row[:80]}"


def test_the_fault_matrix_is_what_was_measured_and_every_fault_names_a_test():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from faultpage import page
    finally:
        sys.path.pop(0)
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "faults.py").read_text()))
    content = json.loads((ROOT / "docs" / "fault-matrix.json").read_text())
    written = (ROOT / "docs" / "fault-matrix.md").read_text()
    assert written == page(content, text.split("\n\n")[2].replace("\n", " ").strip())
    (rows,) = [rows for head, rows in tables(written) if head == "| fault | shown in |"]
    titles = {row["title"] for row in content["rows"]}
    assert {row.split("|")[1].strip() for row in rows} == titles
    assert all(NAMED.search(row) for row in rows)
