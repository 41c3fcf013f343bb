"""A federation in real containers: from nothing to the loop engine's bits, and every fault at one position of a round.

`make containers` runs them; root and a Docker engine are needed. All positions: benchmarks/faults.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_deploy import SETS, WORK, deploy
from test_deploy_processes import same_as_the_loop

from bayflower.deploy import engine, layout
from bayflower.errors import BayflowerError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import faults  # noqa: E402

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def docker():
    """The engine, or a skip with the reason."""
    if os.getuid():
        pytest.skip("needs root: faults are injected from outside the containers")
    try:
        return engine.client()
    except BayflowerError as error:
        pytest.skip(str(error))


def run(docker, *words: str, **more) -> str:
    """Return what a command prints in a fresh container of our image, without rights."""
    image = layout.Deployment("x", "all", 1, ("gate",), 1, "bayflower:0.1.0", "", "").image
    return docker.containers.run(image, list(words), remove=True, read_only=True, cap_drop=["ALL"], tmpfs={"/tmp": "mode=1777"},
                                 network_mode="none", stderr=True, **more).decode()  # fmt: skip


def test_the_image_has_what_it_needs_and_no_more(docker):
    said = run(
        docker, "python", "-c", "import os, torch, bayflower.client_app; print(os.getuid(), torch.version.cuda, bayflower.__version__)"
    )
    user, cuda, version = said.split()[-3:]
    assert (user, cuda, version) == ("10001", "None", "0.1.0")
    for tool in ("pip", "gcc", "cc", "make", "git", "curl"):
        assert run(docker, "sh", "-c", f"command -v {tool} || echo no").strip() == "no", tool
    assert "No module named pip" in run(docker, "sh", "-c", "python -m pip 2>&1; python3 -m pip 2>&1; true")
    assert "fedmap" in run(docker, "bayflower", "methods", "--json")


def test_from_nothing_to_a_finished_run(docker, tmp_path):
    """`docker compose up`, TLS, authenticated nodes, three clients; the result is the loop engine's."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "fed"
    layout.init(folder, clients=3)
    made = layout.read(folder)
    try:
        done = subprocess.run(
            ["docker", "compose", "-f", str(folder / "compose.yaml"), "up", "--detach", "--wait"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(deploy("status", folder, "--json").stdout)["run"] is None
        done = deploy("submit", folder, "fedmap", *SETS, "--json", timeout=600)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.strip().splitlines()[-1])["faults"] == []
        done = deploy("collect", folder, tmp_path / "home")
        assert done.returncode == 0, done.stderr
        same_as_the_loop(tmp_path / "home", WORK["rounds"])
        assert deploy("submit", folder, "fedmap", "--set", "nothing=1").returncode == 2  # the exit code comes out of the container
        for container in docker.containers.list(filters={"label": f"com.docker.compose.project={made.name}"}):
            host = container.attrs["HostConfig"]
            assert host["ReadonlyRootfs"], container.name
            assert host["CapDrop"] == ["ALL"], container.name
            assert container.attrs["State"]["Health"]["Status"] == "healthy", container.name
            assert container.exec_run(["sh", "-c", "touch /opt/x"]).exit_code, container.name
        seen = engine.container(made, "clientapp-0").exec_run(["ls", "/client", "/data"]).output.decode()
        assert "node.key" not in seen
        check = "import socket, sys; sys.exit(socket.socket().connect_ex(('superlink', 9091)))"
        assert engine.container(made, "supernode-0").exec_run(["python", "-c", check]).exit_code  # not even its name is known there
        assert not engine.container(made, "serverapp").exec_run(["python", "-c", check]).exit_code
    finally:
        engine.compose(made, "down", "--volumes", "--timeout", "5")


def test_every_fault_during_local_training(docker, tmp_path):
    """One position of benchmarks/faults.py: rounds lost, client states, final results."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    rows: list[dict] = []
    faults.matrix(list(faults.FAULTS), ["during"], tmp_path / "fed", rows.append)
    assert [row for row in rows if not row["ok"]] == []
    assert {row["fault"] for row in rows} == set(faults.FAULTS)
    by_name = {row["fault"]: row for row in rows}
    assert by_name["superlink"]["resumed"]
    assert by_name["serverapp"]["resumed"]
    assert by_name["disk"]["left_out"] == [faults.ROUND]
    assert any("space" in fault for fault in by_name["disk"]["faults"]), by_name["disk"]
