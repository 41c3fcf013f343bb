"""Two levels as real processes over TLS with registered keys: the bits of the loop engine, also if
a region's own server is killed in the middle of a round.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from deployed import WORK, deploy, ends_with_the_bits_of_the_loop, submitted

from bayflower.files import children

pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("deploy")]
ROUNDS = 2
SETTINGS = {**WORK, "num_clients": 4, "rounds": ROUNDS, "calibration": "off", "evaluate_every": 0}


def serving(mark: str, spool: Path) -> int | None:
    """Return the process of a region's ServerApp, if it has a request to answer."""
    for file in spool.glob("*/.serving"):
        waits = list((file.parent / "requests").glob("*.safetensors"))
        pid = json.loads(file.read_text() or "{}").get("pid")
        if waits and pid in children.marked(mark):
            return int(pid)
    return None


def test_a_tree_has_the_bits_of_the_loop_though_a_region_dies(tmp_path):
    folder = tmp_path / "fed"
    assert deploy("init", folder, "--clients", 4, "--regions", 2).returncode == 0
    sets = [word for k, v in SETTINGS.items() for word in ("--set", f"{k}={v}")]
    try:
        done = deploy("up", folder, "--local", timeout=900)
        assert done.returncode == 0, done.stderr
        done = deploy("submit", folder, "metavd", *sets)  # before anything starts
        assert done.returncode == 2
        assert "metavd cannot run in a tree of aggregators: it sends steps" in done.stderr
        process = submitted(folder, "fedmap", *sets)
        local = folder / "region-1" / "local"
        mark = json.loads((local / "local.json").read_text())["mark"]
        status = folder / "upper" / "local" / "results" / "tree" / "status.json"
        deadline = time.monotonic() + 900
        while not (status.exists() and (victim := serving(mark, local / "spool"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        ends_with_the_bits_of_the_loop(process, folder, tmp_path / "home", SETTINGS, 1200)
        said = (local / "logs" / "keeper.log").read_text()
        assert said.count("of this region answers") == 2, said
    finally:
        deploy("down", folder)
