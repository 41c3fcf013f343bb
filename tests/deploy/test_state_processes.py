"""State that cannot be lost silently, in a deployment of real processes over TLS."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import partial

import deployed
import pytest

from bayflower.deploy import folders
from bayflower.files import children, lease, vault

pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("deploy")]
deploy = partial(deployed.deploy, timeout=900)
TWO = [word.replace("num_clients=3", "num_clients=2") for word in deployed.SETS]


def test_a_federation_whose_state_is_lost_says_so(tmp_path):
    """Two --resume at once, an encrypted state that is wiped, a lost nodes.json, a backup."""
    folder = tmp_path / "fed"
    folders.init(folder, clients=2, encrypt=True)
    results = folder / "local" / "results"
    try:
        done = deploy("up", folder, "--local")
        assert done.returncode == 0, done.stderr
        done = deploy("submit", folder, "fedper", *TWO, "--name", "one", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["faults"] == []
        files = sorted((folder / "client-1" / "state").rglob("*.safetensors"))
        assert {"model.safetensors", "round-2.safetensors"} <= {path.name for path in files}
        assert all(vault.is_sealed(path.read_bytes()) for path in files)

        words = ["deploy", "submit", str(folder), "--resume", "--name", "one", "--set", "rounds=4"]
        first = subprocess.Popen([sys.executable, "-m", "bayflower", *words])
        deadline = time.monotonic() + 100
        while lease.read(results / "one" / lease.LOCK) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        second = deploy("submit", folder, "--resume", "--name", "one", "--set", "rounds=4")
        assert second.returncode == 2
        assert f"(process {first.pid} on " in second.stderr
        assert first.wait(900) == 0
        assert (results / "one" / "result-before-1.json").exists()

        (results / "nodes.json").unlink()
        lost = deploy("submit", folder, "--resume", "--name", "one", "--set", "rounds=5")
        assert lost.returncode == 1
        assert "lacks the nodes of client-0, client-1" in lost.stderr
        assert len(json.loads((results / "one" / "result.json").read_text())["rounds"]) == 4
        mended = deploy("register", folder, "--anew")
        assert mended.returncode == 0, mended.stderr
        done = deploy("backup", folder, tmp_path / "four")
        assert done.returncode == 0, done.stderr
        known = json.loads((tmp_path / "four" / "manifest.json").read_text())["runs"]["one"]
        assert known["clients"] == {"0": [3, 4], "1": [3, 4]}

        shutil.rmtree(folder / "client-1" / "state")
        done = deploy("submit", folder, "--resume", "--name", "one", "--set", "rounds=5", "--json")
        assert done.returncode == 0, done.stderr
        state, data = json.loads(done.stdout)["faults"]
        assert state.startswith("round 5, client 1: its state of round 4 is gone")
        assert "its disk was wiped, it moved, or a second machine runs with its key" in state
        assert "its store of states has another key than before" in data
        assert deploy("down", folder).returncode == 0
        done = deploy("restore", folder, tmp_path / "four")
        assert done.returncode == 0, done.stderr
        assert "one: round 4; go on with" in done.stdout
    finally:
        mark = json.loads((folder / "local" / "local.json").read_text())["mark"]
        deploy("down", folder)
        children.end(mark)
