"""The ray engine on a cluster that is there already: two Ray nodes on one host, found by
RAY_ADDRESS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bayflower.files.children import MARK, end, marked
from bayflower.flower.processes import free_port

pytestmark = pytest.mark.flower
BIN = Path(sys.executable).parent
COUNT = (
    "import ray; ray.init(logging_level='error'); print(len([n for n in ray.nodes() if "
    "n['Alive']]), len(ray.available_resources()) > 0)"
)
WORK = {
    "dataset": "digits",
    "keep": 0.1,
    "min_size": 8,
    "batch_size": 16,
    "local_epochs": 1,
    "rounds": 2,
    "device": "cpu",
    "evaluate_every": 1,
}


@pytest.fixture
def cluster():
    """The address of a cluster of two nodes with one CPU each, and its environment."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: Ray's sockets are files
    mark = "a" * 31 + "1"
    address = f"127.0.0.1:{free_port()}"
    env = {**os.environ, MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    start = [
        str(BIN / "ray"),
        "start",
        "--num-cpus",
        "1",
        "--object-store-memory",
        str(200 * 2**20),
        "--disable-usage-stats",
    ]
    try:
        for words in (
            [
                "--head",
                "--port",
                address.split(":")[1],
                "--include-dashboard",
                "false",
                "--temp-dir",
                str(folder),
            ],
            ["--address", address],
        ):
            done = subprocess.run(
                [*start, *words], env=env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
        yield folder, {**env, "RAY_ADDRESS": address}
    finally:
        end(mark)
        shutil.rmtree(folder, ignore_errors=True)
    assert marked(mark) == []


def drivers(folder: Path) -> int:
    """Return how many programs have used the cluster."""
    return len(list(folder.glob("session_2*/logs/python-core-driver-*.log")))


def test_a_run_on_two_ray_nodes_has_the_bits_of_the_loop(cluster, tmp_path):
    folder, env = cluster
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["2", "True"], done.stderr
    before = drivers(folder)
    sets = [word for key, value in WORK.items() for word in ("--set", f"{key}={value}")]
    results = {}
    for engine in ("ray", "loop"):
        out = tmp_path / engine
        words = [
            sys.executable,
            "-m",
            "bayflower",
            "run",
            "fedmap",
            "--engine",
            engine,
            "--clients",
            "3",
            *sets,
            "--out",
            str(out),
        ]
        done = subprocess.run(
            words,
            env=env if engine == "ray" else os.environ,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        results[engine] = json.loads((out / "result.json").read_text())
    assert results["ray"]["final"] == results["loop"]["final"]
    assert drivers(folder) > before  # it was this cluster that trained
