"""A deployment as real processes over TLS with registered node keys: equal bits, refused strangers,
resumed runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from deployed import SETS, WORK, deploy, same_as, same_as_the_loop

from bayflower.config import parse
from bayflower.deploy import folders, keys, layout
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint, children
from bayflower.flower import processes

pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("deploy")]
MORE = [word.replace("rounds=2", "rounds=3") for word in SETS]


def wait_for(what, seconds: float = 120.0, every: float = 0.2):
    """Return what `what()` returns once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(every)
    raise AssertionError("it did not happen in time")


def facts(folder: Path) -> dict:
    return json.loads((folder / "local" / "local.json").read_text())


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A deployment of three clients as processes, over TLS with registered keys."""
    folder = tmp_path_factory.mktemp("running") / "fed"
    folders.init(folder, clients=3)
    done = deploy("up", folder, "--local")
    mark = facts(folder)["mark"]
    try:
        assert done.returncode == 0, done.stderr
        yield folder
    finally:
        ended = deploy("down", folder)
        left = children.marked(mark)
        children.end(mark)
    assert ended.returncode == 0, ended.stderr
    assert left == []


def test_an_authenticated_run_has_the_bits_of_the_loop(running, tmp_path):
    done = deploy("submit", running, "fedmap", *SETS, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "deployment"
    status = deploy("status", running, "--json")
    assert status.returncode == 0, status.stderr
    known = json.loads(status.stdout)
    assert known["clients"] == {f"client-{k}": "online" for k in range(3)}
    assert known["run"]["state"] == "finished:completed"
    assert deploy("collect", running, tmp_path / "home").returncode == 0
    same_as_the_loop(tmp_path / "home", WORK["rounds"])
    for k in range(3):  # a client's state is in its own folder and in no other
        assert list((running / f"client-{k}" / "state").glob(f"*/client-{k}/round-2.safetensors"))
        assert not list((running / f"client-{k}" / "state").glob(f"*/client-{(k + 1) % 3}"))


@pytest.mark.parametrize("victim", ["superlink", "serverapp"])
def test_one_command_goes_on_after_a_kill(running, victim):
    """SIGKILL after round 1 of 3: submit ends with code 1 and says how to go on; --resume reaches
    the reference.
    """
    name = f"kill-{victim}"
    results = running / "local" / "results" / name
    words = [
        sys.executable,
        "-m",
        "bayflower",
        "deploy",
        "submit",
        str(running),
        "fedmap",
        *MORE,
        "--name",
        name,
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    wait_for(
        lambda: (
            process.poll() is not None
            or ((results / checkpoint.FILE).exists() and checkpoint.read(results).round >= 1)
        )
    )
    assert process.poll() is None, process.stderr.read()
    for pid in children.marked(facts(running)["mark"]):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if (b"bayflower.deploy.superlink" if victim == "superlink" else b"flwr-serverapp") in line:
            os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert "--resume" in said
    assert deploy("status", running).returncode == 1
    done = deploy("submit", running, "--resume", "--name", name)
    assert done.returncode == 0, done.stderr
    same_as_the_loop(results, 3)


def supernode(running: Path, seconds: float, *words: object) -> tuple[int | None, str]:
    """Return the exit code (None if it still runs) and the output of a SuperNode that dials the
    gate.
    """
    gate = f"127.0.0.1:{facts(running)['gate']}"
    # a SuperNode starts flower-superexec by its name
    env = processes.environment("stranger", running / "home", "deployment")
    with (running / "supernode.txt").open("w+") as out:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "flower-supernode"),
                "--superlink",
                gate,
                "--max-retries",
                "1",
                "--port",
                str(processes.free_port()),
                *map(str, words),
            ],
            stdout=out,
            stderr=out,
            cwd="/",
            env=env,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code, out.read()


def online(running: Path) -> int:
    nodes = json.loads(deploy("status", running, "--json").stdout)["clients"]
    return sum(state == "online" for state in nodes.values())


def test_an_unregistered_node_is_refused(running, tmp_path):
    keys.make_node_key(tmp_path, "stranger")
    trust = ["--root-certificates", running / "ca" / "ca.crt"]
    # a key nobody registered, and none at all
    for words in ([*trust, "--auth-supernode-private-key", tmp_path / "node.key"], trust):
        code, said = supernode(running, 60, *words)
        assert code not in (0, None), said
        assert "305" in said, said
    assert online(running) == 3


def test_a_wrong_certificate_is_refused(running, tmp_path):
    """The node trusts another authority, as one would that is led to a false server."""
    keys.make_authority(tmp_path, "another", 10)
    keys.make_node_key(tmp_path, "stranger")
    code, said = supernode(
        running,
        60,
        "--root-certificates",
        tmp_path / "ca.crt",
        "--auth-supernode-private-key",
        tmp_path / "node.key",
    )
    assert code not in (0, None), said
    assert "certificate" in said.lower()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(
            f"https://127.0.0.1:{facts(running)['superlink']}/health", context=context, timeout=10
        )


def test_plain_text_is_refused(running):
    code, said = supernode(running, 60, "--insecure")
    assert code not in (0, None), said
    for port in ("gate", "superlink"):
        with socket.create_connection(("127.0.0.1", facts(running)[port]), timeout=10) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in sock.recv(100)


def test_the_gate_passes_what_clients_need_and_nothing_else(running):
    context = ssl.create_default_context(cafile=str(running / "ca" / "ca.crt"))

    def ask(port: str, path: str, data: bytes = b"") -> int:
        request = urllib.request.Request(
            f"https://127.0.0.1:{facts(running)[port]}{path}",
            data or None,
            {"content-type": "application/x-protobuf"},
        )
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert ask("gate", "/health") == 200
    for path in (
        "/v1/control/list-runs",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
    ):
        assert ask("gate", path, b"\x00") in (404, 405), path
    assert ask("superlink", "/v1/control/list-runs", b"\x00") not in (404, 405)  # there it is
    assert ask("gate", "/v1/fleet/pull-messages", b"\x00") == 401  # no key


def test_the_page_does_what_it_says(tmp_path):
    """The commands of docs/deployment.md, "One machine, without Docker", as they stand."""
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    lines = [
        line
        for line in page.split("<!-- local -->")[1].split("```")[1].splitlines()
        if line.startswith("bayflower ")
    ]
    assert [line.split()[2] for line in lines] == [
        "init",
        "up",
        "submit",
        "status",
        "collect",
        "down",
    ]
    mark = ""
    try:
        for line in lines:
            done = subprocess.run(
                [sys.executable, "-m", *line.split()],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert done.returncode == 0, (line, done.stderr)
            mark = mark or (
                facts(tmp_path / "fed")["mark"] if (tmp_path / "fed" / "local").exists() else ""
            )
        assert json.loads((tmp_path / "results" / "result.json").read_text())["num_clients"] == 3
        assert children.marked(mark) == []
    finally:
        children.end(mark)


def test_what_is_lost_without_a_word_is_asked_for_again(tmp_path):
    """Client 1's replies to query, round 1 and last test vanish, and so does the message of round 2
    on its way to it.
    """
    lost = {"reply": [1, 3, 6], "ask": [5]}  # counted with those that were asked for again
    folders.init(tmp_path / "fed", clients=2, hosts=["127.0.0.1"], port=processes.free_port())
    parts = [tmp_path / "fed" / name for name in ("server", "client-0", "client-1")]
    told = json.loads((parts[2] / layout.FILE).read_text())
    detour = processes.free_port()
    (parts[2] / layout.FILE).write_text(json.dumps({**told, "port": detour}))
    words = [
        sys.executable,
        str(Path(__file__).parents[1] / "faults" / "lossy.py"),
        str(detour),
        str(told["port"]),
        str(parts[0]),
        json.dumps(lost),
    ]
    with (tmp_path / "lossy.txt").open("w") as out:
        lossy = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        for part in parts:
            done = deploy("up", part, "--local")
            assert done.returncode == 0, done.stderr
        begun = time.monotonic()
        few = [
            *(word.replace("num_clients=3", "num_clients=2") for word in SETS),
            "--set",
            "ask_again_seconds=10",
            "--set",
            "timeout=300",
        ]
        done = deploy("submit", parts[0], "fedmap", *few, "--name", "lossy", "--json", timeout=500)
        seconds = time.monotonic() - begun
    finally:
        marks = [facts(part)["mark"] for part in parts if (part / "local").exists()]
        for part in parts:
            deploy("down", part)
        lossy.terminate()
        lossy.wait()
    assert done.returncode == 0, done.stderr
    passed = (tmp_path / "lossy.txt").read_text().splitlines()
    assert [line for line in passed if line.endswith("lost")] == [
        "reply 1 lost",
        "reply 3 lost",
        "ask 5 lost",
        "reply 6 lost",
    ]
    assert json.loads(done.stdout.strip().splitlines()[-1])["faults"] == []
    same_as(
        execute(prepare(parse("fedmap", {**WORK, "num_clients": 2}), "loop")),
        parts[0] / "local" / "results" / "lossy",
        WORK["rounds"],
    )
    assert seconds < 300, seconds  # without asking again each loss would cost the timeout
    assert [pid for mark in marks for pid in children.marked(mark)] == []


def test_missing_clients_are_named(tmp_path):
    """Two machines' folders on one: the server and client 0 are up, client 1 never comes."""
    folders.init(tmp_path / "fed", clients=2, hosts=["127.0.0.1"], port=processes.free_port())
    parts = [tmp_path / "fed" / "server", tmp_path / "fed" / "client-0"]
    try:
        for part in parts:
            done = deploy("up", part, "--local")
            assert done.returncode == 0, done.stderr
        wait_for(
            lambda: (
                json.loads(deploy("status", parts[0], "--json").stdout)["clients"].get("client-0")
                == "online"
            ),
            every=1,
        )
        done = deploy("submit", parts[0], "fedmap", *SETS[:2], "--wait", "2")
        assert done.returncode == 1, done.stderr
        assert "1 of 2 clients are online; missing: client-1" in done.stderr
        assert deploy("submit", parts[0], "fedmap", "--set", "num_clients=5").returncode == 2
        assert deploy("submit", parts[1], "fedmap").returncode == 2  # a client's folder
        assert deploy("submit", parts[0], "fedmap", "--set", "nothing=1").returncode == 2
    finally:
        marks = [facts(part)["mark"] for part in parts if (part / "local").exists()]
        for part in parts:
            deploy("down", part)
    assert [pid for mark in marks for pid in children.marked(mark)] == []
