"""Flower's own programs when something dies or fails: survived deaths, clear errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import assert_same_bits
from flowerapp import WORK, bayflower, clean, words

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.files.children import marked

pytestmark = pytest.mark.flower


def reference(rounds: int) -> object:
    return execute(prepare(parse("fedmap", {**WORK, "rounds": rounds}), "loop")).server_state


def start(out: Path, *more: str, env: dict | None = None, **settings) -> subprocess.Popen:
    out.parent.mkdir(exist_ok=True)
    return subprocess.Popen(
        words(["run", "fedmap"], out, "deployment", *more, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def wait_for_round(out: Path, round: int, process: subprocess.Popen, timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        known = checkpoint.read(out) if out.exists() else None
        if known is not None and known.round >= round:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError(f"round {round} was not reached")


def processes_of(out: Path, word: str) -> list[int]:
    """Return the processes of the run in `out` whose command line has `word`."""
    found = []
    for pid in marked((out / "logs" / "mark").read_text()):
        try:
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_killed_server_is_resumed_to_the_same_bits(tmp_path):
    """SIGKILL to the ServerApp's process after round 1 of 3: a clear end, code 1, and --resume goes
    on to the reference.
    """
    out = tmp_path / "out"
    process = start(out, rounds=3)
    wait_for_round(out, 1, process)
    victims = processes_of(out, "flwr-serverapp") or processes_of(out, "serverapp")
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(said.strip().splitlines()) == 1, said
    assert clean(out)
    stopped = checkpoint.read(out).round
    assert 1 <= stopped < 3
    done = bayflower(["run", "fedmap"], out, "deployment", "--resume", rounds=3)
    assert done.returncode == 0, done.stderr
    want = reference(3)
    assert_same_bits(checkpoint.server_state(checkpoint.read(out), type(want)), want)


@pytest.mark.parametrize("victim", ["flower-supernode", "clientapp"])
def test_a_killed_client_comes_back_with_its_state(tmp_path, victim):
    """SIGKILL to a SuperNode, or to the process of its ClientApp, in round 2 of 3: the run ends
    with the bits of the reference.
    """
    out = tmp_path / "out"
    process = start(out, rounds=3)
    wait_for_round(out, 1, process)
    deadline = time.monotonic() + 60
    victims: list[int] = []
    while not victims and time.monotonic() < deadline:
        victims = processes_of(out, victim)[:1]
        time.sleep(0.05)
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    want = reference(3)
    assert_same_bits(checkpoint.server_state(checkpoint.read(out), type(want)), want)
    assert json.loads((out / "result.json").read_text())["faults"] == []
    assert clean(out)


def one_line(done: subprocess.CompletedProcess, code: int, text: str) -> None:
    assert done.returncode == code, (done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert text in lines[0], lines[0]


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one_line(
            bayflower(["run", "fedmap"], tmp_path / "out", "deployment", "--port", str(port)),
            2,
            f"port {port} cannot be used",
        )


def test_a_serverapp_that_raises(tmp_path):
    """The checkpoint can be neither read nor written because a folder has its name."""
    out = tmp_path / "out"
    process = start(out)
    deadline = time.monotonic() + 60
    while not (out / "logs" / "mark").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (out / checkpoint.FILE).mkdir(exist_ok=True)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert len(said.strip().splitlines()) == 1, said
    assert "checkpoint" in said
    assert clean(out)


def test_clients_that_all_raise(tmp_path):
    """No client can keep its state, because a file lies where its folder should be."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "state").write_text("in the way")
    done = bayflower(["run", "fedmap"], out, "ray")
    one_line(done, 1, "no client could be trained")
    assert "client" in done.stderr
    assert clean(out)


def test_a_supernode_that_never_comes(tmp_path):
    out = tmp_path / "out"

    from bayflower.errors import BayflowerError
    from bayflower.flower.processes import Flower, run_app

    class Short(Flower):
        def start_supernode(self, client: int) -> None:
            if client != 1:
                super().start_supernode(client)

    import bayflower.flower.processes as processes

    original = processes.Flower
    processes.Flower = Short
    try:
        with pytest.raises(
            BayflowerError, match=r"1 of 2 clients connected within 15 s; start the others"
        ):
            run_app(
                "deployment",
                {**WORK, "method": "fedmap", "wait": 15},
                2,
                out,
                0,
                lambda status: None,
            )
    finally:
        processes.Flower = original
    assert clean(out)


def test_being_killed_itself_leaves_nothing_that_goes_on(tmp_path):
    """SIGKILL to `bayflower run`: all of Flower's programs end with it, and nothing of it stays in
    the folder for temporary files.
    """
    out, rest = tmp_path / "out", tmp_path / "rest"
    rest.mkdir()
    process = start(out, env={**os.environ, "TMPDIR": str(rest)})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        (out / "logs" / "mark").exists() and processes_of(out, "flower-supernode")
    ):
        time.sleep(0.1)
    assert list(rest.glob("bayflower-*"))
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while not (clean(out) and not list(rest.glob("bayflower-*"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert clean(out)
    assert not list(rest.glob("bayflower-*"))
