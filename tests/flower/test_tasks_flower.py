"""Numbers under Flower's simulation and as real processes: the metrics, sums and intervals of the
loop engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bayflower import load_personal
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result

pytestmark = pytest.mark.flower


@pytest.mark.parametrize(("engine", "clients"), [("ray", 3), ("deployment", 2)])
def test_numbers_are_those_of_the_loop(engine: str, clients: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    lines = ["site,a,kind,y"]
    for site in range(clients):
        for _ in range(40 if site else 3):
            a, kind = draw.normal() * 50 + 1000, ("x", "z")[int(draw.integers(2))]
            y = 20 + 3 * site + 0.1 * a + (kind == "x") + 2 * draw.normal()
            lines.append(f"s{site},{a:.3f},{kind},{y:.4f}")
    table = tmp_path / "sites.csv"
    table.write_text("\n".join(lines) + "\n")
    given = {
        "dataset": str(table),
        "target": "y",
        "sites": "site",
        "task": "regression",
        "model": "linear",
        "rounds": 2,
        "lr": 0.05,
    }
    out = tmp_path / engine
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    call = ["-m", "bayflower", "run", "fedmap", *sets]
    done = subprocess.run(
        [sys.executable, *call, "--engine", engine, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "result.json").read_text())
    loop = run_to_result(prepare(parse("fedmap", given), "loop"))
    assert found["faults"] == []
    assert found["task"] == loop["task"]  # everyone's moments of the targets
    assert found["final"]["personal"] == loop["final"]["personal"]
    assert found["uncertainty"] == loop["uncertainty"]
    homes = sorted(out.glob("state/*/client-*/personal/card.json"))
    assert len(homes) == clients
    model = load_personal(homes[-1].parent)
    ends = model.predict_interval(np.array([[1000.0, 1.0]]))  # type: ignore[attr-defined]
    assert ends.shape == (1, 2)
    assert 80 < ends.mean() < 170
