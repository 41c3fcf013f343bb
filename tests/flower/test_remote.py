"""The app's server side in the process Flower gives it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import ConfigRecord

from bayflower.client_app import app
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import BayflowerError
from bayflower.flower import records
from bayflower.flower.app import serve
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.networks.model import Anatomy

WORK = {
    "num_clients": 3,
    "new_clients": 1,
    "partition": "dirichlet",
    "beta": 1.0,
    "calibration": "off",
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 16,
    "device": "cpu",
    "new_client_epochs": 1,
}
TIMES = {"seconds", "config", "engine"}

# Ray starts processes from one thread while the ServerApp computes in another: so does this, 200
# times.
FORKS = """
import os, subprocess, sys, threading
import numpy as np
from bayflower.flower.app import single_threaded

x, matrix, done = np.ones((2000, 60)), np.ones((60, 60)), 0

def work():
    global done
    while True:
        x @ matrix
        done += 1

with single_threaded():
    threading.Thread(target=work, daemon=True).start()
    before = -1
    for number in range(200):
        subprocess.run(["true"], preexec_fn=lambda: None)
        if number % 40 == 39:
            if done == before:
                os._exit(3)
            before = done
os._exit(0)
"""


@pytest.mark.slow
def test_a_fork_does_not_stop_the_products_of_a_serverapp():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-500:] or "the products stopped after a fork"


@pytest.fixture
def nodes(tmp_path):
    """Nodes whose data set lies on their own disk."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(240, 6))
    (tmp_path / "node").mkdir()
    np.savez(tmp_path / "node" / "hospital.npz", x=x, y=(x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5))
    made = contexts(range(4))
    for context in made:
        context.run_config = {
            **WORK,
            "method": "fedmap",
            "dataset": str(tmp_path / "node" / "hospital.npz"),
            "out": str(tmp_path / "node"),
        }
    return made


def untimed(result: dict) -> dict:
    rounds = [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in result["rounds"]
    ]
    return {**{key: value for key, value in result.items() if key not in TIMES}, "rounds": rounds}


def config(tmp_path, **changes) -> dict:
    """What the server is told; of the data set it knows the name only."""
    return {
        **WORK,
        "method": "fedmap",
        "dataset": "/only/on/the/nodes/hospital.npz",
        "out": str(tmp_path / "server"),
        **changes,
    }


def test_the_server_needs_no_data(tmp_path, nodes):
    """No file of the data set is where the server looks; the result is that of the loop engine,
    which has all data.
    """
    serve(InProcessGrid(app, nodes), config(tmp_path))
    got = json.loads((tmp_path / "server" / "result.json").read_text())
    run = parse("fedmap", {**WORK, "dataset": nodes[0].run_config["dataset"]})
    want = json.loads(json.dumps(run_to_result(prepare(run, "loop"))))
    assert untimed(got) == untimed(want)
    assert got["partition"]["train_sizes"] == want["partition"]["train_sizes"]
    assert (got["num_clients"], got["num_new_clients"], got["dataset"]) == (3, 1, "hospital")


def test_a_node_has_its_data_where_it_says(tmp_path, nodes):
    """`data-dir` of the node: the run-config names a data set, each node where it lies."""
    (tmp_path / "node" / "hospital.npz").rename(tmp_path / "node" / "heart.npz")
    for context in nodes:
        context.run_config["dataset"] = "heart"
        context.node_config["data-dir"] = str(tmp_path / "node")
    serve(InProcessGrid(app, nodes), config(tmp_path, dataset="heart"))
    result = json.loads((tmp_path / "server" / "result.json").read_text())
    assert result["note"] == "240 samples of heart's 920"
    assert sum(result["partition"]["train_sizes"]) + sum(result["partition"]["test_sizes"]) == 240


def test_clients_with_another_network_than_the_settings_are_named(tmp_path, nodes):
    with pytest.raises(
        BayflowerError,
        match=r"the network of clients 0, 1, 2, 3 differs from model=mlp-bn for inputs of shape "
        r"\(6,\)",
    ):
        serve(InProcessGrid(app, nodes), config(tmp_path, model="mlp-bn"))
    status = json.loads((tmp_path / "server" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "differs from model=mlp-bn" in status["reason"]


def saying(change):
    """Return our app, but client 2 says something else of itself."""

    def changed(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == 2:
            reply.content[records.HEADER] = ConfigRecord(
                {**dict(reply.content[records.HEADER]), **change}
            )
        return reply

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"input_shape": "[7]"},
            "client 2: it has inputs of other shapes than the other clients; all must prepare",
        ),
        ({"num_classes": 4}, "client 2: it has other numbers of classes than the other clients"),
        (
            {"anatomy": json.dumps({name: [] for name in Anatomy._fields})},
            "client 2: it has other networks than the other clients; all must use the same model",
        ),
    ],
)
def test_one_client_that_disagrees_is_left_out_and_named(tmp_path, nodes, change, words):
    """The majority decides; without one nothing starts, and both sides are named."""
    serve(InProcessGrid(saying(change), nodes), config(tmp_path))
    found = json.loads((tmp_path / "server" / "result.json").read_text())
    assert words in found["faults"][0]
    assert found["num_clients"] == 2
    both = [nodes[0], nodes[2]]
    with pytest.raises(BayflowerError, match="clients 0 and 2 have "):
        serve(InProcessGrid(saying(change), both), config(tmp_path / "two", min_nodes=2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_shape": "[1000000, 1000000]"}, "input_shape must be at most 8 whole numbers"),
        ({"input_shape": "[true]"}, "input_shape must be"),
        ({"num_classes": 2**40}, "num_classes must be a whole number"),
        ({"train_size": -1}, "train_size must be a whole number"),
        ({"origin": '{"partition": {"beta": 1e999}}'}, "origin cannot be read"),
        ({"origin": "[" * 100_000}, "origin cannot be read"),
        ({"anatomy": "7"}, "anatomy must contain a dict"),
        ({"anatomy": '{"trainable": [1]}'}, "anatomy must have a list of names called 'trainable'"),
        ({"client": -1}, "client must be a whole number below"),
        ({"client": True}, "client must be a whole number below"),
    ],
)
def test_facts_that_cannot_be_true_leave_the_client_out(tmp_path, nodes, change, words):
    serve(InProcessGrid(saying(change), nodes), config(tmp_path, rounds=1))
    result = json.loads((tmp_path / "server" / "result.json").read_text())
    assert result["num_clients"] == 2
    assert words in result["faults"][0]
