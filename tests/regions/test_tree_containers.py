"""Two levels in real containers: six clients in two regions, of which one is killed in the middle
of a round and started again. The result has the bits of the flat federation.

`make containers` runs it; root and a Docker engine are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from deployed import WORK, deploy, ends_with_the_bits_of_the_loop, submitted

from bayflower.deploy import docker as engine
from bayflower.deploy import layout
from bayflower.errors import BayflowerError

pytestmark = pytest.mark.containers
ROUNDS = 2
SETTINGS = {**WORK, "num_clients": 6, "rounds": ROUNDS, "calibration": "off", "evaluate_every": 0}
# the aggregator: all of the region's containers but those of its clients
AGGREGATOR = ("superlink", "gate", "serverapp", "above", "aboveapp", "keeper")


@pytest.fixture(scope="module")
def docker():
    """The engine, or a skip with the reason."""
    if os.getuid():
        pytest.skip("needs root, as the other tests of containers")
    try:
        return engine.client()
    except BayflowerError as error:
        pytest.skip(str(error))


def wait_for(what: Callable[[], Any], process: subprocess.Popen, seconds: float = 900.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    raise AssertionError("it did not happen in time")


def inside(made: layout.Deployment, service: str, command: str) -> str:
    return engine.container(made, service).exec_run(["sh", "-c", command]).output.decode()


def test_a_region_killed_in_the_middle_changes_no_bit(docker, tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    folder = tmp_path / "fed"
    done = deploy("init", folder, "--clients", 6, "--regions", 2)
    assert done.returncode == 0, done.stderr
    upper, victim = layout.read(folder), layout.read(folder / "region-1")
    sets = [word for k, v in SETTINGS.items() for word in ("--set", f"{k}={v}")]
    sets += ["--set", "rejoin_seconds=900", "--set", "ask_again_seconds=60"]
    try:
        done = deploy("up", folder, timeout=900)
        assert done.returncode == 0, done.stderr
        known = json.loads(deploy("status", folder, "--json").stdout)["clients"]
        assert known == {"region-0": "online", "region-1": "online"}
        process = submitted(folder, "fedmap", *sets)
        look = "grep -c '\"num_clients\"' /results/tree/status.json"
        wait_for(lambda: inside(upper, "serverapp", look).strip() == "1", process)
        look = "ls /spool/*/requests /spool/*/.serving"
        wait_for(lambda: "safetensors" in inside(victim, "keeper", look), process)
        killed = [engine.container(victim, service) for service in AGGREGATOR]
        for one in killed:
            one.kill("SIGKILL")
        time.sleep(20)
        for one in killed:
            one.start()
        ends_with_the_bits_of_the_loop(process, folder, tmp_path / "home", SETTINGS, 1500)
        said = engine.container(victim, "keeper").logs().decode()
        assert said.count("of this region answers") == 2, said  # a second run after the death
    finally:
        deploy("down", folder, "--volumes")
