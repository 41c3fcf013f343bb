"""The policy of a site holds whatever the server sends. Both sides log what was asked, what left
and what arrived.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from bayflower.client_app import app
from bayflower.errors import BayflowerError
from bayflower.files import audit
from bayflower.flower import guard, records
from bayflower.flower.app import client_data, run_of, serve
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.policy import rules
from bayflower.wire.protocol import request_header

STRICT = """
methods = ["fedavg", "pfedvmp"]
networks = ["nets:Net"]
send = ["update", "metrics", "tally", "inputs", "calibration"]
max_rounds = 5
max_reply_mb = 0.5
small_change = "refuse"
[floor]
min_count = 5
[ceiling]
lr = 0.1
local_epochs = 2
"""
WORK = {"num_clients": 3, "partition": "iid", "test_fraction": 0.2, "calibration": "off"}
WORK |= {"rounds": 1, "local_epochs": 1, "batch_size": 16, "device": "cpu", "lr": 0.05}


@pytest.fixture
def nodes(tmp_path):
    """Three nodes with policies of their own; client 1's is strict."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(180, 6)).astype("float32")
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "hospital.npz", x=x, y=(x[:, 0] > 0).astype(int))
    made = contexts(range(3))
    for k, context in enumerate(made):
        (tmp_path / f"{k}.toml").write_text(STRICT if k == 1 else rules.written())
        context.node_config |= {
            "policy": str(tmp_path / f"{k}.toml"),
            "audit-dir": str(tmp_path / f"audit-{k}"),
            "data-dir": str(tmp_path / "data"),
            "state-dir": str(tmp_path / f"state-{k}"),
        }
        context.run_config = {
            **WORK,
            "method": "fedavg",
            "dataset": str(tmp_path / "data" / "hospital.npz"),
        }
    return made


def lines(path, *events):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in found if not events or one["event"] in events]


def test_what_left_a_client_is_what_arrived(nodes, tmp_path, monkeypatch):
    """A run that all allow: what each client logs as sent has the digest that the server logs as
    arrived, and nothing else has left. Both chains are whole.
    """
    log = tmp_path / "server.jsonl"
    monkeypatch.setenv(audit.VARIABLE, str(log))
    config = {**nodes[0].run_config, "out": str(tmp_path / "out"), "wait": 5}
    serve(InProcessGrid(app, nodes), config)
    arrived = {one["digest"]: one for one in lines(log, "arrived")}
    assert len(arrived) == 6  # a round and a test for three clients
    assert [one["client"] for one in lines(log, "hello")] == [0, 1, 2]
    assert lines(log, "fault") == []
    sent: dict[str, int] = {}
    for k in range(3):
        own = tmp_path / f"audit-{k}" / "audit.jsonl"
        assert [one["event"] for one in lines(own)] == ["asked", "sent"] * 3
        assert [one["kind"] for one in lines(own, "asked")] == ["query", "train", "evaluate"]
        asked, left = lines(own, "asked")[1], lines(own, "sent")[1]
        assert (asked["header"]["method"], asked["header"]["round"]) == ("fedavg", 1)
        assert set(left["records"]) == {"update", "metrics", "bayflower"}
        assert left["records"]["update"]["num_examples"] == "int64[]"
        assert left["bytes"] == arrived[left["digest"]]["bytes"]
        sent |= {one["digest"]: k for one in lines(own, "sent")[1:]}
        assert audit.verify(own).lines == 6
    assert {digest: one["client"] for digest, one in arrived.items()} == sent
    assert audit.verify(log).lines == len(lines(log))
    texts = "".join((tmp_path / f"audit-{k}" / "audit.jsonl").read_text() for k in range(3))
    first = np.load(tmp_path / "data" / "hospital.npz")["x"][0, 0]
    assert f"{first:.4f}" not in texts  # the log has names and shapes, no samples


def test_the_server_is_told_which_client_refuses_and_by_which_rule(nodes, tmp_path, monkeypatch):
    """The run goes on with the clients that allow it; the strict one has read no data."""
    for context in nodes:
        context.run_config["lr"] = 0.5
    loaded = []

    def load(source, seed, client, *more):
        loaded.append(client)
        return client_data(source, seed, client, *more)

    monkeypatch.setattr("bayflower.flower.app.client_data", load)
    config = {**nodes[0].run_config, "out": str(tmp_path / "out"), "min_nodes": 2, "wait": 5}
    serve(InProcessGrid(app, nodes), config)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert any(
        "client 1 refuses this request: the site's policy forbids it (rule ceiling.lr): lr must be "
        "at most 0.1, got 0.5" in fault
        for fault in result["faults"]
    ), result["faults"]
    assert set(loaded) == {0, 2}
    own = lines(tmp_path / "audit-1" / "audit.jsonl")
    assert {one["event"] for one in own} == {"asked", "refused"}
    assert "ceiling.lr" in own[1]["why"]


def ask(context, kind: str, **header):
    """Return the reply of a node to a message whose header a hostile server wrote."""
    grid = InProcessGrid(app, [context])
    content = RecordDict({records.HEADER: ConfigRecord(header)})
    return grid.ask(Message(content, dst_node_id=context.node_id, message_type=kind))


def head(config, method="fedavg", round=1, **settings):
    """Return the header of a training request with these settings."""
    run = run_of({**config, **settings}, method)
    known = {"run": "r", "seed": 0, "evaluate": False, "purpose": "finetune"}
    return request_header(method=method, round=round, instructions=run.instructions(), **known)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"lr": 0.2}, "ceiling.lr"),
        ({"local_epochs": 3}, "ceiling.local_epochs"),
        ({"method": "fedprox"}, "methods"),
        ({"method": "pfedvmp", "min_count": 1}, "floor.min_count"),
        ({"round": 6}, "max_rounds"),
    ],
)
def test_a_message_is_checked_even_if_the_run_config_is_innocent(nodes, changes, rule):
    reply = ask(nodes[1], "train", **head(nodes[1].run_config, **changes))
    assert reply.has_error()
    assert reply.error.code == guard.REFUSED
    assert f"client 1 refuses this request: the site's policy forbids it (rule {rule})" in (
        reply.error.reason
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dataset": "/etc/passwd.csv"}, "datasets"),
        ({"dataset": "{data}/../secret.npz"}, "datasets"),
        ({"dataset": "{data}/hospital.npz,/etc/x.npz"}, "datasets"),
        ({"test": "/etc/passwd.csv"}, "datasets"),
        ({"model": "os:abort"}, "networks"),
        ({"rounds": 9}, "max_rounds"),
        ({"method": "fedavg,fedprox"}, "methods"),
    ],
)
def test_a_run_config_is_checked_before_data_are_read(nodes, changes, rule, monkeypatch):
    monkeypatch.setattr("bayflower.flower.app.client_data", None)
    monkeypatch.setattr("bayflower.flower.app.raw_client", None)
    folder = nodes[1].node_config["data-dir"]
    changes = {key: str(value).replace("{data}", folder) for key, value in changes.items()}
    if "test" in changes:
        nodes[1].run_config.pop("test_fraction")
    nodes[1].run_config |= changes
    reply = ask(nodes[1], "query", protocol=records.PROTOCOL)
    assert f"(rule {rule})" in reply.error.reason, reply.error.reason


def test_what_may_not_leave_is_not_computed_and_not_sent(nodes, monkeypatch):
    asked = ask(nodes[1], "query", protocol=records.PROTOCOL, labels=True)
    assert "(rule send): 'labels' may not leave this site" in asked.error.reason
    # an app that adds a record of its own
    grid = InProcessGrid(other := ClientApp(mods=[guard.guarded]), [nodes[1]])

    @other.train()
    def train(message, context):
        return Message(RecordDict({"more": ConfigRecord({"x": 1})}), reply_to=message)

    message = Message(RecordDict(), dst_node_id=nodes[1].node_id, message_type="train")
    assert "(rule send): 'more' may not leave" in grid.ask(message).error.reason


def test_two_requests_do_not_tell_of_one_sample(nodes, tmp_path):
    """The server asks for the first 40 and then for the first 39 training samples: the difference
    of the answers would tell of one. A site that refuses small changes answers only the first; one
    that notices them answers both, and its log says so.
    """
    for rows, refused in ((40, False), (40, False), (39, True), (15, False)):
        for k in (0, 1):
            nodes[k].run_config["train_rows"] = rows
            reply = ask(nodes[k], "query", protocol=records.PROTOCOL)
            assert reply.has_error() == (k == 1 and refused), reply
            if reply.has_error():
                assert "(rule min_change): fewer than 5 samples" in reply.error.reason
                assert "class" not in reply.error.reason  # which would tell of the sample
    for k in (0, 1):
        noticed = lines(tmp_path / f"audit-{k}" / "audit.jsonl", "small change")
        assert "1 sample changed in all samples" in noticed[0]["why"]
        assert "1 sample changed in training samples, class 0" in noticed[1]["why"]


@pytest.mark.parametrize("small_change", ["notice", "refuse"])
def test_two_answers_give_a_patients_row_away_unless_small_changes_are_refused(
    nodes, tmp_path, small_change
):
    """The attack: class means of 40 and of 39 training samples, from a network whose features are
    the inputs. n·mean − (n − 1)·mean' is the missing row of the table.
    """
    means: dict[int, list] = {}

    def spy(message):
        reply = grid.ask(message)
        if message.metadata.message_type == "train" and reply.has_content():
            flat = records.arrays(reply, records.UPDATE)
            means[rows] = [flat[name].double().numpy() for name in ("counts", "means")]
        return reply

    node = nodes[0]
    policy = rules.Policy(small_change=small_change)
    (tmp_path / "0.toml").write_text(rules.written(policy))
    hostile = {"method": "pfedvmp", "model": "linear", "num_clients": 1, "min_size": 2}
    hostile |= {"set": "input_scale=none lr=1e-12 centroid=count_mean"}
    node.run_config |= hostile
    del node.run_config["lr"]
    grid = InProcessGrid(app, [node], spy)
    for rows in (40, 39):
        node.run_config["train_rows"] = rows
        config = {**node.run_config, "out": str(tmp_path / f"out-{rows}"), "wait": 2}
        if rows == 39 and small_change == "refuse":
            with pytest.raises(BayflowerError, match="rule min_change"):
                serve(grid, config)
            assert set(means) == {40}
            return
        serve(grid, config)
    (n, mean), (fewer, other) = means[40], means[39]
    (label,) = np.flatnonzero(n - fewer)
    stolen = n[label] * mean[label] - fewer[label] * other[label]
    table = np.load(tmp_path / "data" / "hospital.npz")["x"]
    assert np.abs(table - stolen).max(1).min() < 1e-5  # today's leak, and the log has it
    noticed = lines(tmp_path / "audit-0" / "audit.jsonl", "small change")
    assert "1 sample changed in all samples" in noticed[0]["why"]


def test_a_site_whose_policy_or_log_is_broken_answers_nothing(nodes, tmp_path):
    (tmp_path / "1.toml").write_text("methods = fedavg")
    reply = ask(nodes[1], "query", protocol=records.PROTOCOL)
    assert "client 1 refuses this request: the policy" in reply.error.reason
    assert "cannot be read" in reply.error.reason
    log = tmp_path / "audit-0" / "audit.jsonl"
    assert not ask(nodes[0], "query", protocol=records.PROTOCOL).has_error()
    log.write_text(log.read_text().replace('"kind":"query"', '"kind":"train"'))
    before = log.read_text()
    assert ask(nodes[0], "query", protocol=records.PROTOCOL).has_error()
    assert log.read_text() == before
