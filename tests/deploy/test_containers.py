"""A federation in real containers: from nothing to the loop engine's bits, and every fault at one
position of a round.

`make containers` runs them; root and a Docker engine are needed. All positions:
benchmarks/faults.py.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployed import SETS, WORK, deploy, same_as_the_loop
from hostileapp import write_hostile

from bayflower.deploy import docker as engine
from bayflower.deploy import folders, keys, layout
from bayflower.errors import BayflowerError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import faults  # noqa: E402
from lab import Lab, lacking  # noqa: E402

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
    return docker.containers.run(
        image,
        list(words),
        remove=True,
        read_only=True,
        cap_drop=["ALL"],
        tmpfs={"/tmp": "mode=1777"},
        network_mode="none",
        stderr=True,
        **more,
    ).decode()


def test_the_image_has_what_it_needs_and_no_more(docker):
    said = run(
        docker,
        "python",
        "-c",
        "import os, torch, bayflower.client_app; print(os.getuid(), torch.version.cuda, "
        "bayflower.__version__)",
    )
    user, cuda, version = said.split()[-3:]
    assert (user, cuda, version) == ("10001", "None", "0.1.0")
    for tool in ("pip", "gcc", "cc", "make", "git", "curl"):
        assert run(docker, "sh", "-c", f"command -v {tool} || echo no").strip() == "no", tool
    assert "No module named pip" in run(
        docker, "sh", "-c", "python -m pip 2>&1; python3 -m pip 2>&1; true"
    )
    assert "fedmap" in run(docker, "bayflower", "methods", "--json")


def refusals(docker, made: layout.Deployment, folder: Path) -> dict[str, tuple[int, str]]:
    """Return exit code and words of SuperNodes on the federation's network that have no business
    there.
    """
    folder.mkdir()
    keys.make_authority(folder, "another", 10)
    keys.make_node_key(folder, "stranger")
    for file in folder.iterdir():
        os.chown(file, *(int(number) for number in made.user.split(":")))
    own = ["--auth-supernode-private-key", "/files/node.key"]
    strangers = {
        "unregistered": ["--root-certificates", "/trusted.crt", *own],
        "no key": ["--root-certificates", "/trusted.crt"],
        "wrong certificate": ["--root-certificates", "/files/ca.crt", *own],
        "plain text": ["--insecure"],
    }
    mounts = {
        str(folder): {"bind": "/files", "mode": "ro"},
        str(made.folder / "ca" / "ca.crt"): {"bind": "/trusted.crt", "mode": "ro"},
    }
    running = {
        name: docker.containers.run(
            made.image,
            ["flower-supernode", "--superlink", made.address(), "--max-retries", "1", *words],
            detach=True,
            network=f"{made.name}_federation",
            user=made.user,
            volumes=mounts,
        )
        for name, words in strangers.items()
    }
    try:
        return {
            name: (container.wait(timeout=120)["StatusCode"], container.logs().decode())
            for name, container in running.items()
        }
    finally:
        for container in running.values():
            container.remove(force=True)


# in the server's container: submit the app in /tmp/innocent, as `flwr run` does
SUBMIT = """
from pathlib import Path
from bayflower.deploy import layout
from bayflower.deploy.server import server_inside
server = server_inside(layout.read(Path("/server")))
words = 'out="/results/answers.json" nodes=3'
print(server.flwr("run", "/tmp/innocent", "bayflower", "--run-config", words))
"""


def attacked(made: layout.Deployment, folder: Path) -> list[dict]:
    """Return what the clients answer to a hostile app that is run in the server's container."""
    server = engine.container(made, "serverapp")
    for file in sorted(path for path in write_hostile(folder).rglob("*") if path.is_file()):
        inside = f"/tmp/innocent/{file.relative_to(folder)}"
        text = base64.b64encode(file.read_bytes()).decode()
        put = f"mkdir -p $(dirname {inside}) && echo {text} | base64 -d > {inside}"
        assert server.exec_run(["sh", "-c", put]).exit_code == 0
    done = server.exec_run(["python", "-c", SUBMIT])
    assert done.exit_code == 0, done.output
    for _ in range(300):
        found = server.exec_run(["cat", "/results/answers.json"])
        if found.exit_code == 0 and found.output.strip():
            return json.loads(found.output)
        time.sleep(1)
    raise AssertionError("the hostile app did not end")


def test_from_nothing_to_a_finished_run(docker, tmp_path):
    """`docker compose up`, TLS, authenticated nodes, three clients; the result is the loop
    engine's.
    """
    tmp_path.chmod(0o755)
    folder = tmp_path / "fed"
    folders.init(folder, clients=3)
    made = layout.read(folder)
    for k in range(3):
        (folder / f"client-{k}" / "data" / "patients.csv").write_text("secret")
    try:
        done = subprocess.run(
            ["docker", "compose", "-f", str(folder / "compose.yaml"), "up", "--detach", "--wait"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(deploy("status", folder, "--json").stdout)["run"] is None
        done = deploy("submit", folder, "fedmap", *SETS, "--json", timeout=600)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.strip().splitlines()[-1])["faults"] == []
        done = deploy("collect", folder, tmp_path / "home")
        assert done.returncode == 0, done.stderr
        same_as_the_loop(tmp_path / "home", WORK["rounds"])
        # the exit code comes out of the container
        assert deploy("submit", folder, "fedmap", "--set", "nothing=1").returncode == 2
        for container in docker.containers.list(
            filters={"label": f"com.docker.compose.project={made.name}"}
        ):
            host = container.attrs["HostConfig"]
            assert host["ReadonlyRootfs"], container.name
            assert host["CapDrop"] == ["ALL"], container.name
            assert container.attrs["State"]["Health"]["Status"] == "healthy", container.name
            assert container.exec_run(["sh", "-c", "touch /opt/x"]).exit_code, container.name
        seen = (
            engine.container(made, "clientapp-0")
            .exec_run(["ls", "/client", "/data"])
            .output.decode()
        )
        assert "node.key" not in seen
        check = "import socket, sys; sys.exit(socket.socket().connect_ex(('superlink', 9091)))"
        # not even its name is known there
        assert engine.container(made, "supernode-0").exec_run(["python", "-c", check]).exit_code
        assert not engine.container(made, "serverapp").exec_run(["python", "-c", check]).exit_code
        # a hostile app from the server's container gets nobody's files
        answers = attacked(made, tmp_path / "hostile")
        assert [one.get("code") for one in answers] == [7] * 3, answers
        assert "secret" not in str(answers)
        assert "is not pinned" in engine.container(made, "supernode-0").logs().decode()
        log = ["bayflower", "audit", "verify", "/audit/audit.jsonl"]
        assert engine.container(made, "clientapp-0").exec_run(log).exit_code == 0
        log[-1] = "/results/audit.jsonl"
        assert engine.container(made, "serverapp").exec_run(log).exit_code == 0
        said = refusals(docker, made, tmp_path / "stranger")
        assert all(code for code, _ in said.values()), said
        assert all("305" in said[name][1] for name in ("unregistered", "no key")), said
        assert "certificate" in said["wrong certificate"][1].lower(), said
        assert json.loads(deploy("status", folder, "--json").stdout)["clients"] == {
            f"client-{k}": "online" for k in range(3)
        }
    finally:
        engine.compose(made, "down", "--volumes", "--timeout", "5")


def test_one_run_through_every_fault(docker, tmp_path):
    """One position of benchmarks/faults.py, all in one run: it ends with the loop engine's bits,
    and every client with its own state.
    """
    if missing := lacking():
        pytest.skip(
            f"{', '.join(missing)} not found: links cannot be slowed here (package iproute2)"
        )
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    with Lab(
        tmp_path / "fed",
        2,
        {**faults.SETTINGS, "rounds": 6, "local_epochs": 40, "ask_again_seconds": 45},
        small={1: faults.SMALL_DISK},
    ) as lab:
        reference, name = faults.Reference(lab), "course"
        process = lab.submit(name)

        def meet(round: int, *injections, client: int = 0) -> list:
            """Inject faults while `client` trains in `round`; return what ends them."""
            lab.wait_for_position("during", name, client, round, process)
            return [
                end for inject in injections if (end := inject(lab, "during", process)) is not None
            ]

        (back,) = meet(2, faults.crash_clientapp, faults.cut_for(10.0, client=1))
        back()
        (healed,) = meet(3, faults.slow_link)
        lab.wait_for(lambda: lab.round(name) >= 3, process)
        healed()
        (back,) = meet(4, faults.crash_supernode, faults.cut_for(faults.LONG_SECONDS, client=1))
        back()
        for round, fault in ((5, faults.crash_serverapp), (6, faults.crash_superlink)):
            meet(round, fault)
            code, said = lab.finish(process)
            if fault is faults.crash_superlink and code == 0:
                break  # Docker had it back before anybody missed it
            assert code == 1, said
            assert "--resume" in said
            assert lab.round(name) == round - 1  # nothing is lost but the round in flight
            process = lab.submit(name, "--resume")
        else:
            code, said = lab.finish(process)
        assert code == 0, said
        assert [record["num_clients"] for record in lab.result(name)["rounds"]] == [2] * 6
        assert reference.differences(lab, name) == []
        assert faults.intact(lab, name, reference, True, (0, []))

        # whoever cannot keep a state misses a round: a run of its own
        lab.settings["rounds"], lab.name, name = faults.ROUND, "disk", "disk"
        process = lab.submit(name)
        (emptied,) = meet(faults.ROUND, faults.full_disk, client=1)
        code, said = lab.finish(process)
        emptied()
        assert code == 0, said
        result = lab.result(name)
        assert [record["num_clients"] for record in result["rounds"]] == [2, 1]
        assert any("space" in fault for fault in result["faults"]), result["faults"]
        assert faults.intact(lab, name, reference, False, (1, [faults.ROUND]))
