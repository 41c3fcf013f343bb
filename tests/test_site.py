"""The site builds strictly, has every page, and says nothing that the repository does not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    call = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        call, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in DOCS.glob("*.md"):
        assert (
            tmp_path / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        ).exists(), page.name
    reference = (tmp_path / "api" / "index.html").read_text()
    for name in (
        "make_client_app",
        "load_personal",
        "BayflowerStrategy",
        "ClientHalf",
        "each_round",
        "personalise",
    ):
        assert name in reference, name


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert menu == {page.name for page in DOCS.glob("*.md")}


def test_the_numbers_of_the_decision_table_are_in_the_experiments():
    """Every number with a decimal point in choose.md's first table stands in one of the pages it
    points to.
    """
    text = (DOCS / "choose.md").read_text()
    table = text.split("## The evidence")[0]
    pages = "".join(
        (DOCS / target).read_text()
        for target in re.findall(
            r"\]\((\.\./(?:experiments|benchmarks/results)/[^)#]+\.md)\)", text
        )
    )
    for target, anchor in re.findall(r"\]\((\.\./experiments/[^)#]+)#([^)]+)\)", text):
        results = (DOCS / target).read_text()
        pages += results.split(f'<a id="{anchor}"></a>')[1].split("<a id=")[0]
    numbers = re.findall(r"\b\d+\.\d+\b", table)
    assert len(numbers) >= 12
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", pages), number


def test_the_errata_that_are_explained_are_those_of_the_modules():
    text = (DOCS / "methods.md").read_text()
    for stem, letter in (
        ("fedmap", "M"),
        ("pfedvmp", "P"),
        ("fedbps", "B"),
        ("metavd", "V"),
        ("fednp", "N"),
    ):
        modules = "".join(
            (ROOT / "bayflower" / side / f"{stem}.py").read_text()
            for side in ("strategies", "clients")
        )
        told = set(re.findall(rf"E-{letter}\d+", text))
        assert len(told) >= 3, stem
        assert told <= set(re.findall(rf"E-{letter}\d+", modules)), stem


def test_every_method_is_on_the_page_of_methods():
    from bayflower.methods import ROWS

    text = (DOCS / "methods.md").read_text()
    for row in ROWS:
        assert (
            row.title.lower() in text.lower() or f"`{row.name}`" in text or row.stem in text.lower()
        ), row.name
