"""The same app under Flower's simulation and as real processes: equal bits, survived deaths, clear
ends. Slow: `make flower` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NEEDED, assert_same_bits
from flowerapp import WORK, bayflower, clean, personal

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.files.children import marked
from bayflower.methods import METHODS

pytestmark = pytest.mark.flower
# and FedAvg; `make flower-all` takes every method of the table
FIVE = ("fedavg", "fedbps", "fedmap", "fednp", "metavd", "pfedvmp")


def test_the_readmes_three_ways(tmp_path):
    """The three commands of the README's first screen, with less work."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
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
        folder = tmp_path / "out" / name / "seed-0"
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


def test_flwr_run_as_a_user_types_it(tmp_path):
    """`flwr run` on this repository from another folder: the background SuperLink it starts is its
    own, and is ended by its mark.
    """
    from bayflower.files.children import MARK, end
    from bayflower.flower.processes import free_port

    root = Path(__file__).parents[2]
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
        'method="fedmap" dataset="digits" num_clients=2 rounds=2 local_epochs=1 '
        f'set="keep=0.1 device=cpu" out="{tmp_path / "out"}"'
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
    from bayflower.flower.bundle import write_app
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
