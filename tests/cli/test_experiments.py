"""The scripts of experiments/ write their pages and draw their pictures from finished runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch):
    """The folder of the scripts, importable."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


@pytest.mark.slow
def test_pfedvmp_page_and_pictures_from_the_finished_runs(scripts, tmp_path):
    """What is committed is what the committed runs give."""
    import pfedvmp_tables

    committed = ROOT / "experiments" / "pfedvmp_tables.md"
    page = tmp_path / committed.name
    shutil.copy(committed, page)
    shutil.copytree(ROOT / "experiments" / "pictures", tmp_path / "pictures")
    where = ["--page", str(page), "--pictures", str(tmp_path / "pictures")]
    pfedvmp_tables.main(where)
    assert page.read_text() == committed.read_text()
    assert "## Reading" in page.read_text()

    pytest.importorskip("matplotlib")
    import pfedvmp_pictures

    assert pfedvmp_pictures.main(["--pictures", str(tmp_path / "drawn")]) == 0
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names == {f"pfedvmp_{name}.svg" for name in ("rounds", "centroids", "xi", "features")}
    nothing = ["--results", str(tmp_path / "none" / "runs"), "--pictures", str(tmp_path / "empty")]
    assert pfedvmp_pictures.main(nothing) == 1


def test_a_page_without_runs_says_so_and_keeps_what_was_written_by_hand(scripts, tmp_path):
    import pfedvmp_tables

    page = tmp_path / "page.md"
    where = ["--results", str(tmp_path / "none" / "runs"), "--page", str(page)]
    where += ["--pictures", str(tmp_path)]
    pfedvmp_tables.main(where)
    page.write_text(page.read_text() + "\nWritten by hand.\n")
    pfedvmp_tables.main(where)
    assert page.read_text().count("\nnot run") == 5
    assert "None" not in page.read_text()
    assert page.read_text().endswith("Written by hand.\n")


def test_fedmap_page_from_the_finished_runs(scripts, tmp_path):
    import fedmap_synthetic

    committed = ROOT / "experiments" / "fedmap_synthetic.md"
    page = tmp_path / "page.md"
    emptied = re.sub(r"(-->\n)\n[^<]*(<!-- end -->)", r"\1\2", committed.read_text())
    assert len(emptied) < len(committed.read_text()) - 3000
    page.write_text(emptied)
    fedmap_synthetic.main(["--page", str(page)])
    assert page.read_text() == committed.read_text()
    page.write_text("nothing")
    none = str(tmp_path / "none" / "runs")
    with pytest.raises(SystemExit, match="must have one block of each of runs, tables"):
        fedmap_synthetic.main(["--page", str(page), "--results", none])


def test_sentences_follow_the_numbers(scripts):
    from pfedvmp_tables import difference, order

    def run(accuracy: float, cv: float) -> dict:
        return {
            "final": {"personal": {"accuracy": accuracy, "fairness_cv": cv, "num_examples": 100}}
        }

    lines = order({"pFedVMP": run(0.9, 0.1), "FedPer": run(0.8, 0.05), "FedAvg-FT": None})
    assert "pFedVMP 90.00 is above FedPer 80.00 (+10.00), as in the paper" in lines[0]
    assert "pFedVMP 10.00 is above FedPer 5.00 (+5.00), **not as in the paper**" in lines[1]
    assert "not run" in lines[2]
    assert "standard error of about 3.00 points" in lines[-1]
    assert (
        difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 2.0, 2: 1.0, 3: 9.0})
        == "+1.00 [-1.48, +3.48], 0 is inside; above in 2 of 3"
    )
    assert difference({0: 1.0}, {1: 1.0}) == "not run"


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what a script of experiments/ said."""
    call = [sys.executable, str(ROOT / "experiments" / name), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.slow
def test_fedbps_figure_is_drawn_from_the_finished_runs(tmp_path):
    done = script("fedbps_pictures.py", "--figure", str(tmp_path / "a.svg"))
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "experiments" / "pictures" / "fedbps_personal.svg").read_text()
    assert (tmp_path / "a.svg").read_text().count("<path") == committed.count("<path")
    done = script("fedbps_pictures.py", "--results", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "make them by: bayflower reproduce fedbps-2" in done.stderr


@pytest.mark.slow
def test_fednp_figures_from_run_to_picture(tmp_path):
    for method in ("fedavg", "fednp"):
        run_command = [
            "-m",
            "bayflower",
            "run",
            method,
            "--clients",
            "3",
            "--rounds",
            "2",
            "--set",
            "keep=0.2",
            "--out",
            str(tmp_path / method),
        ]
        subprocess.run(
            [sys.executable, *run_command], check=True, capture_output=True, cwd=ROOT, timeout=200
        )
    found = script(
        "fednp_pictures.py",
        "gather",
        str(tmp_path / "fedavg"),
        str(tmp_path / "fednp"),
        "--npz",
        str(tmp_path / "a.npz"),
    )
    assert found.returncode == 0, found.stderr
    with np.load(tmp_path / "a.npz") as file:
        assert file["rows/drawn"].shape == (3, 5, 10, 32)
        spread = np.abs(file["rows/drawn"] - file["rows/mean"][:, None]).mean()
        assert 0 < spread < 10
        assert len(file["fedavg/features"]) == len(file["fednp/labels"]) > 50
    drawn = script(
        "fednp_pictures.py", "draw", "--npz", str(tmp_path / "a.npz"), "--folder", str(tmp_path)
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "silhouette" in (tmp_path / "fednp_features.svg").read_text()
    assert (tmp_path / "fednp_classifier.svg").exists()


@pytest.mark.slow
def test_dropped_weights_as_table_and_picture(tmp_path):
    """Runs, table and picture by one command; a second time from the finished runs alone."""
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "cifar10.npz",
        x=draw.integers(0, 256, (300, 16, 16, 3)).astype(np.uint8),
        y=np.arange(300) % 10,
    )
    places = {"data-dir": ".", "results": "runs", "page": "page.md", "figure": "drop.svg"}
    given = [
        word for name, place in places.items() for word in (f"--{name}", str(tmp_path / place))
    ]
    script = [
        sys.executable,
        str(ROOT / "experiments" / "metavd_drop.py"),
        "--quick",
        "--rounds",
        "2",
        "--device",
        "cpu",
        *given,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nothing = subprocess.run(
        [*script, "--no-run"], capture_output=True, text=True, env=environment, check=False
    )
    assert (nothing.returncode, nothing.stdout) == (1, "no finished run, nothing written\n")
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=True)
    assert "9 runs, 9 to do" in done.stdout
    page, picture = (tmp_path / "page.md").read_text(), (tmp_path / "drop.svg").read_text()
    assert "| nothing dropped |" in page
    assert "| p > 0.8 |" in page
    assert "<svg" in picture
    again = subprocess.run(
        [*script, "--no-run"], capture_output=True, text=True, env=environment, check=True
    )
    assert "to do" not in again.stdout
    assert (tmp_path / "drop.svg").read_text() == picture
    (row,) = [line for line in page.splitlines() if line.startswith("| SNIP")]
    assert "70.0" in row  # of the layer
