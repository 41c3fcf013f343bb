"""The scripts of experiments/ work from the first run to the page: tiny runs on digits, cut off and
taken up again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TINY = [
    "--rounds",
    "2",
    "--device",
    "cpu",
    "--set",
    "dataset=digits",
    "--set",
    "keep=0.1",
    "--set",
    "num_clients=3",
    "--set",
    "stacking=no",
    "--set",
    "batch_size=40",
]


@pytest.fixture
def tables(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import pfedvmp_tables

    return pfedvmp_tables


def test_pfedvmp_from_run_to_page(tables, tmp_path, capsys, monkeypatch):
    out, page, pictures = tmp_path / "runs.jsonl", tmp_path / "page.md", tmp_path / "pictures"
    where = ["--out", str(out), "--page", str(page), "--pictures", str(pictures)]
    assert tables.main(["report", *where]) == 0
    assert page.read_text().count("\nnot run") == 5
    assert "None" not in page.read_text()
    page.write_text(page.read_text() + "\nWritten by hand.\n")

    monkeypatch.setitem(sys.modules, "flwr", None)  # the machine with the GPU need not have it
    assert tables.main(["run", *where, *TINY, "--only", "xi", "fmnist", "--commit", "c0ffee"]) == 0
    assert "13 runs to do" in capsys.readouterr().out
    runs = tables.load(out)
    assert len(runs) == 13
    assert {run["commit"] for run in runs} == {"c0ffee"}
    assert all(run["curve"][-1]["round"] == 2 and run["seconds"]["training"] > 0 for run in runs)
    assert {"personal", "before"} == set(runs[0]["final"])

    lines = out.read_text().splitlines()
    # cut off while the last line was written
    out.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:50])
    assert tables.main(["run", *where, *TINY, "--only", "fmnist", "xi", "--commit", "c0ffee"]) == 0
    assert "1 runs to do" in capsys.readouterr().out
    assert [json.dumps(run["cell"], sort_keys=True) for run in tables.load(out)] == [
        json.dumps(run["cell"], sort_keys=True) for run in runs
    ]

    pytest.importorskip("matplotlib")
    assert tables.main(["plots", *where]) == 0
    assert {path.name for path in pictures.iterdir()} >= {"pfedvmp_rounds.svg", "pfedvmp_xi.svg"}
    assert tables.main(["report", *where]) == 0
    text = page.read_text()
    assert "pFedVMP " in text
    assert "Settings were changed" in text
    assert "c0ffee" in text
    assert "pictures/pfedvmp_rounds.svg" in text
    assert text.endswith("Written by hand.\n")


def test_no_run_is_begun_that_would_not_end_in_time(tables, tmp_path, capsys):
    out = tmp_path / "runs.jsonl"
    tables.append(
        out,
        {
            "cell": {"method": "fedper", "dataset": "fmnist", "images": 10, "rounds": 1},
            "seconds": {"wall": 60.0},
        },
    )
    assert tables.main(["run", "--out", str(out), "--minutes", "1", "--only", "fmnist"]) == 0
    assert capsys.readouterr().out.count("not begun") == 8
    assert len(tables.load(out)) == 1


def test_sentences_follow_the_numbers(tables):
    from pfedvmp_report import difference, order

    def run(accuracy: float, cv: float) -> dict:
        return {
            "final": {"personal": {"accuracy": accuracy, "fairness_cv": cv, "num_examples": 100}}
        }

    lines = order({"pfedvmp": run(0.9, 0.1), "fedper": run(0.8, 0.05), "fedavg-ft": None})
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


def test_fedbps_figure_is_drawn_from_the_finished_runs(tmp_path):
    done = script("fedbps_pictures.py", "--figure", str(tmp_path / "a.svg"))
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "experiments" / "pictures" / "fedbps_personal.svg").read_text()
    assert (tmp_path / "a.svg").read_text().count("<path") == committed.count("<path")
    done = script("fedbps_pictures.py", "--results", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "make them by: bayflower reproduce fedbps-2" in done.stderr


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
