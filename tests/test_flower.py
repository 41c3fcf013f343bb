"""The same app under Flower's simulation and as real processes: equal bits, survived deaths, clear
ends. Slow: `make flower` runs them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NEEDED, assert_same_bits

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.flower.processes import marked
from bayflower.methods import METHODS

pytestmark = pytest.mark.flower
# and FedAvg; `make flower-all` takes every method of the table
FIVE = ("fedavg", "fedbps", "fedmap", "fednp", "metavd", "pfedvmp")
WORK = {
    "dataset": "digits",
    "num_clients": 2,
    "keep": 0.1,
    "min_size": 8,
    "batch_size": 16,
    "local_epochs": 1,
    "rounds": 2,
    "model": "mlp-bn",
    "device": "cpu",
    "evaluate_every": 1,
}


def words(command: list[str], out: Path, engine: str, *more: str, **settings) -> list[str]:
    sets = [
        word for key, value in {**WORK, **settings}.items() for word in ("--set", f"{key}={value}")
    ]
    return [
        sys.executable,
        "-m",
        "bayflower",
        *command,
        "--engine",
        engine,
        "--out",
        str(out),
        *sets,
        *more,
    ]


def bayflower(
    command: list[str], out: Path, engine: str, *more: str, timeout: float = 1500, **settings
) -> subprocess.CompletedProcess:
    return subprocess.run(
        words(command, out, engine, *more, **settings),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=out.parent,
    )


def clean(out: Path) -> bool:
    """Return whether no process of the run in `out` is left."""
    return marked((out / "logs" / "mark").read_text()) == []


def personal(result: dict) -> list:
    return result["final"]["personal"]["per_client"]


def test_the_readmes_three_ways(tmp_path):
    """The three commands of the README's first screen, with less work."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    block = readme.split("<!-- engines -->")[1].split("```")[1]
    ways = [
        line.split("#")[0].split()[1:]
        for line in block.splitlines()
        if line.startswith("bayflower ")
    ]
    assert [way[-1] for way in ways] == ["fused", "ray", "deployment"]
    for way in ways:
        out = tmp_path / way[-1]
        sets = [
            word
            for key, value in {**WORK, "rounds": 1}.items()
            for word in ("--set", f"{key}={value}")
        ]
        done = subprocess.run(
            [sys.executable, "-m", "bayflower", *way, "--out", str(out), *sets],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "result.json").read_text())["engine"] == way[-1]


@pytest.mark.parametrize("engine", ["ray", "deployment"])
def test_methods_give_the_bits_of_the_loop(tmp_path, engine):
    """Several methods in one app run; global parameters, client states and per-client metrics
    against the loop engine.
    """
    names = sorted(METHODS) if os.environ.get("BAYFLOWER_ALL") else list(FIVE)
    # there every message is a process that imports torch
    fewer = {"num_clients": 1, "rounds": 1} if engine == "deployment" else {}
    done = bayflower(["compare", *names], tmp_path / "out", engine, **fewer)
    assert done.returncode == 0, done.stderr
    for name in names:
        run = parse(name, {**WORK, **NEEDED.get(name, {}), **fewer})
        want = execute(prepare(run, "loop"))
        folder = tmp_path / "out" / name
        known = checkpoint.read(folder)
        assert_same_bits(checkpoint.server_state(known, type(want.server_state)), want.server_state)
        result = json.loads((folder / "result.json").read_text())
        assert result["engine"] == engine
        for record, loop_record in zip(result["rounds"], want.rounds, strict=True):
            for key in ("bytes_up", "bytes_down", "train_loss", "num_clients", "personal"):
                assert record[key] == loop_record[key], (name, key)
        from bayflower.metrics import summarise

        assert personal(result) == summarise(want.views["personal"])["per_client"]
        assert result["faults"] == []
    assert clean(tmp_path / "out")


def reference(rounds: int) -> object:
    return execute(prepare(parse("fedmap", {**WORK, "rounds": rounds}), "loop")).server_state


def start(out: Path, *more: str, **settings) -> subprocess.Popen:
    out.parent.mkdir(exist_ok=True)
    return subprocess.Popen(
        words(["run", "fedmap"], out, "deployment", *more, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
    """The checkpoint cannot be written because a folder has its name."""
    out = tmp_path / "out"
    process = start(out)
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)
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
            BayflowerError, match=r"1 of 2 clients came within 15 s; start the others"
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
    """SIGKILL to `bayflower run`: its SuperLink and SuperNodes end with it, and the next start
    clears what is left.
    """
    out = tmp_path / "out"
    process = start(out)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        (out / "logs" / "mark").exists() and processes_of(out, "flower-supernode")
    ):
        time.sleep(0.1)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while not clean(out) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(out, "flower-superlink") == []


def test_flwr_run_as_a_user_types_it(tmp_path):
    """`flwr run` on this repository from another folder: the background SuperLink it starts is its
    own, and is ended by its mark.
    """
    from bayflower.flower.processes import MARK, end, free_port

    root = Path(__file__).parent.parent
    mark = "f" * 31 + "0"
    env = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        MARK: mark,
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    config = (
        'method="fedmap" dataset="digits" num_clients=2 keep=0.1 rounds=2 local_epochs=1 '
        f'device="cpu" out="{tmp_path / "out"}"'
    )
    try:
        done = subprocess.run(
            [
                "flwr",
                "run",
                str(root),
                "--stream",
                "--federation-config",
                "num-supernodes=2 client-resources-num-cpus=1",
                "--run-config",
                config,
            ],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / "out" / "result.json").read_text())
    finally:
        end(mark)
    assert len(result["rounds"]) == 2
    assert marked(mark) == []


CANARY_CLIENT = """
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

import bayflower.flower.client as base
from bayflower.client_app import app as inner

CANARY = 1.2345e-7
make_half = base.make_half


def planted(method, instructions, model):
    half = make_half(method, instructions, model)
    finish = half.finish

    def with_canaries(state, work, data):
        new, update = finish(state, work, data)
        for field in half.private:
            values = getattr(new, field)
            real = {k: v for k, v in values.items() if v.is_floating_point()}
            bad = {k: torch.full_like(v, CANARY) for k, v in real.items()}
            new = new._replace(**{field: {**values, **bad}})
        Path(os.environ["CANARY_LOG"], "planted").write_text("yes")
        return new, update

    half.finish = with_canaries
    return half


base.make_half = planted
pattern = torch.tensor(CANARY).numpy().tobytes()


def spy(message, context):
    reply = inner(message, context)
    for name, content in (("received", message.content), ("sent", reply.content)):
        arrays = [record for record in content.values() if isinstance(record, ArrayRecord)]
        blocks = [array.data for record in arrays for array in record.values()]
        found = any(pattern in block for block in [*blocks, repr(dict(content)).encode()])
        with Path(os.environ["CANARY_LOG"], "messages").open("a") as log:
            log.write(f"{name} {message.metadata.message_type} {'CANARY' if found else 'clean'}\\n")
    return reply


app = ClientApp()
app.train()(spy)
app.evaluate()(spy)
app.query()(spy)
"""


@pytest.mark.parametrize("engine", ["ray", "deployment"])
def test_canaries_never_travel_through_flower(tmp_path, engine, monkeypatch):
    """Private fields are overwritten with a pattern on every client; no byte of any message
    received or sent has it.
    """
    from bayflower.flower.control import write_app
    from bayflower.flower.processes import run_app

    monkeypatch.setenv("CANARY_LOG", str(tmp_path))
    config = {**WORK, "method": "fedbn,local", "optimizer": "sgd", "lr": 1e-30, "wait": 60}
    app = write_app(tmp_path / "app")
    (app / "canary.py").write_text(CANARY_CLIENT)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("bayflower.client_app:app", "canary:app"))
    run_app(engine, config, 2, tmp_path / "out", 0, lambda status: None, app)
    assert (tmp_path / "planted").exists()
    lines = (tmp_path / "messages").read_text().splitlines()
    assert len(lines) >= 2 * 2 * (1 + 2 * 3)
    assert {line.split()[-1] for line in lines} == {"clean"}
