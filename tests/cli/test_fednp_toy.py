"""The scripts around FedNP run from data to page: the toy problem
and the time of an update, tiny.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import some

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import fednp_toy

    return fednp_toy


@pytest.mark.slow
def test_from_data_to_page(toy, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    toy.main(
        [
            "--seeds",
            "1",
            "--rounds",
            "1",
            "1",
            "--page",
            str(page),
            "--picture",
            str(tmp_path / "toy.png"),
        ]
    )
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| FedNP") == 2
    assert (tmp_path / "toy.png").stat().st_size > 1000
    assert "SCAFFOLD" in capsys.readouterr().out


@pytest.mark.parametrize("method", some(["fedavg", "scaffold", "fedpa", "fednp"], ["fednp"]))
def test_every_method_descends(toy, method):
    data = toy.make_data(0)
    start, floor = toy.error(torch.zeros(4, dtype=torch.float64), data), toy.least(data)
    assert floor < toy.run(method, 0, rounds=5, lr=0.001).mse < start / 1.2


def test_time_of_an_update(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import moments

    moments.main(["--clients", "1", "--budget", "0", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["clients"]["1"]
    assert set(rows) == set(moments.CASES)
    assert rows["trapezoid (65 nodes)"]["variance_error"] < 1e-12
