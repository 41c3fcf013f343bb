"""A user's app on the fused engine: stacked, with the numbers of the loop engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import assert_same_bits
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import nn
from typer.testing import CliRunner
from zoo import Reversed

from bayflower import strategies
from bayflower.cli import app as command
from bayflower.clients import Plug, make_client_app
from bayflower.errors import ConfigError
from bayflower.files.store import DiskStore
from bayflower.flower.calls import Call
from bayflower.flower.crew import Options
from bayflower.flower.fusing import OWN_CODE, FusedGrid
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.flower.tryout import overrides, try_app
from bayflower.personal import made
from bayflower.personal.load import load_personal

EXAMPLES = Path(__file__).parents[2] / "examples"


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def load(context):
    """Clients of unequal size."""
    client = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(36 + 9 * client, 6, generator=draw)
    y = (x[:, :3] + 0.5 * torch.randn(len(x), 3, generator=draw)).argmax(1)
    return (x[:-12], y[:-12]), (x[-12:], y[-12:])


def passed_on(message, context, call_next):
    """Return the reply of the next mod, and count the calls."""
    before = context.state.get("calls", {"number": 0})["number"]
    reply = call_next(message, context)
    context.state["calls"] = MetricRecord({"number": before + 1})
    return reply


def started(method, folder, grid_of, **settings):
    """Return the grid, the strategy and the result of three rounds of five clients."""
    app = make_client_app(
        method, model=net, data=load, state=folder, export=(), mods=[passed_on], device="cpu"
    )
    torch.manual_seed(1)
    first = ArrayRecord(net().state_dict())
    grid = grid_of(app, contexts(range(5)))
    known = {"lr": 0.05, "local_epochs": 1, "batch_size": 16, "fraction_train": 0.7, "run": "one"}
    titles = {"fedmap": "FedMAP", "pfedvmp": "PFedVMP", "perfedavg": "PerFedAvg"}
    strategy = getattr(strategies, titles[method])(**known, **settings)
    return grid, strategy, strategy.start(grid, first, num_rounds=3)


def gap(a, b):
    """Return the largest difference of two results' arrays, relative to their size."""
    a, b = (one.arrays.to_torch_state_dict() for one in (a, b))
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedmap", {"calibration": "shrunk", "evaluate_every": 2}),
        *(
            pytest.param(method, settings, marks=pytest.mark.slow)
            for method, settings in (
                ("pfedvmp", {"calibration": "shrunk", "evaluate_every": 2}),
                ("fedmap", {}),
                ("perfedavg", {"evaluate_every": 1}),
            )
        ),
    ],
)
def test_stacked_clients_have_the_numbers_of_the_loop(method, settings, tmp_path):
    """In float64: arrays, losses, bytes, tests, calibration, mods, states on disk, personal models.
    One by one even the bits are equal.
    """
    torch.set_default_dtype(torch.float64)
    try:
        _, want, first = started(method, tmp_path / "loop", InProcessGrid, **settings)
        grid, got, second = started(
            method, tmp_path / "yes", lambda *now: FusedGrid(*now, Options("yes")), **settings
        )
        _, _, third = started(
            method, tmp_path / "no", lambda *now: FusedGrid(*now, Options("no")), **settings
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert grid.crew.stacked == 3
    assert grid.crew.remarks == []
    assert got.faults == want.faults == []
    assert gap(first, second) < 1e-9
    assert gap(first, third) == 0.0
    for one, other in zip(want.records, got.records, strict=True):
        for key in ("bytes_up", "bytes_down", "num_clients"):
            assert one[key] == other[key]
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert ("personal" in one) == ("personal" in other)
    for view, tallies in want.outcome.views.items():
        for client, tally in tallies.items():
            assert float(got.outcome.views[view][client].nll) == pytest.approx(float(tally.nll))
    if settings.get("calibration"):
        found, known = got.outcome.calibrated, want.outcome.calibrated
        assert {client: one.rows for client, one in found.clients.items()} == {
            client: one.rows for client, one in known.clients.items()
        }
    for client in range(5):
        mine, theirs = (DiskStore(tmp_path / name).load("one", client) for name in ("no", "loop"))
        assert len(mine) == min(len(theirs), 1)
        for one, other in zip(mine, theirs, strict=False):
            assert_same_bits(one.state, other.state)
        assert (tmp_path / "yes" / "one" / f"client-{client}" / "personal" / "card.json").exists()
    # a mod ran once for each message, around the training
    states = [context.state for context in grid.contexts.values()]
    assert sum(state["calls"]["number"] for state in states if "calls" in state) == 9


class OwnBackward(nn.Module):
    """The network with slopes of one's own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(Reversed.apply(self.body(x))))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedmap", "fedbps"])
def test_a_network_that_torch_func_cannot_differentiate_runs_in_an_app(method, tmp_path):
    """Calibration and personal models included; one by one, with the bits of the loop."""
    found = []
    for name, grid_of in (("loop", InProcessGrid), ("fused", FusedGrid)):
        app = make_client_app(
            method, model=OwnBackward, data=load, state=tmp_path / name, device="cpu", export=()
        )
        torch.manual_seed(1)
        first = ArrayRecord(OwnBackward().state_dict())
        grid = grid_of(app, contexts(range(3)))
        kind = {"fedmap": strategies.FedMAP, "fedbps": strategies.FedBPS}[method]
        strategy = kind(lr=0.05, local_epochs=1, run="one", calibration="shrunk")
        found.append(strategy.start(grid, first, num_rounds=2))
        assert strategy.faults == []
        for client in range(3):
            folder = tmp_path / name / "one" / f"client-{client}" / "personal"
            model = load_personal(folder, OwnBackward)
            assert model.predict_proba(torch.randn(4, 6).numpy()).shape == (4, 3)
    assert gap(*found) == 0.0
    assert "one by one because the network cannot be stacked" in grid.crew.remarks[0]


def test_one_broken_client_does_not_stop_the_others(tmp_path):
    """A client whose mod fails, and one whose training fails, give error replies."""

    def broken(message: Message, context, call_next):
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("disk full")
        return call_next(message, context)

    app = make_client_app("fedmap", model=net, data=load, state=tmp_path, export=(), mods=[broken])
    grid = FusedGrid(app, contexts(range(5)), Options("yes"))
    strategy = strategies.FedMAP(lr=0.05, local_epochs=1, batch_size=16)
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=1)
    assert strategy.records[0]["num_clients"] == 4
    assert grid.crew.stacked == 4
    assert "client 2" in strategy.faults[0]
    assert "disk full" in strategy.faults[0]


def test_a_training_loop_of_ones_own_runs_one_by_one(tmp_path):
    plug = Plug("fedmap", model=net, data=load, state=tmp_path, export=())
    app = ClientApp()
    app.query()(plug.query)
    app.evaluate()(plug.evaluate)

    @app.train()
    def train(message, context):
        job = plug.begin(message, context)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        job.loss(job.train.x, job.train.y).backward()
        optimizer.step()
        return job.reply()

    results = []
    for kind in (InProcessGrid, FusedGrid):
        torch.manual_seed(1)
        grid = kind(app, contexts(range(3)))
        first = ArrayRecord(net().state_dict())
        results.append(strategies.FedMAP(lr=0.05).start(grid, first, num_rounds=2))
    assert gap(*results) == 0.0
    assert grid.crew.remarks == [OWN_CODE]


def test_a_call_pauses_and_is_dropped():
    seen = []

    def work(call):
        seen.append("begun")
        try:
            call.pause()
            seen.append("resumed")
            call.pause()
        finally:
            seen.append("ended")
        return 1

    call = Call(work)
    assert not call.resume()
    assert seen == ["begun"]
    assert not call.resume()
    call.drop()
    assert seen == ["begun", "resumed", "ended"]
    assert call.over
    assert call.result is None


def test_try_writes_the_result(tmp_path, monkeypatch):
    """`bayflower try` on an example with a training loop of its own: a table, a note, a file."""
    monkeypatch.setattr(made, "exported", lambda *_: "not written")  # no test of programs
    words = ["try", str(EXAMPLES / "heart_hospitals"), "--clients", "4", "--engine", "fused"]
    words += ["--run-config", f'num-server-rounds=1 local-epochs=1 data-dir="{tmp_path}"']
    words += ["--state-dir", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert "fedmap on heart_hospitals, 4 clients, 1 rounds" in done.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["engine"] == "fused"
    assert result["remark"] == OWN_CODE
    assert len(result["final"]["personal"]["per_client"]) == 4
    again = CliRunner().invoke(command, words)
    assert "holds a run; give another folder" in str(again.exception)


def test_what_try_refuses(tmp_path):
    app = EXAMPLES / "fedavg_app"
    with pytest.raises(ConfigError, match="engine must be loop or fused, got 'ray'; `flwr run`"):
        try_app(app, 1, engine="ray")
    assert overrides(['a=1 b="two words"', "c=0.5 d=true"]) == {
        "a": 1,
        "b": "two words",
        "c": 0.5,
        "d": True,
    }
    with pytest.raises(ConfigError, match=r"--run-config cannot be read .* write it as 'key=1"):
        overrides(["a=unquoted"])
    with pytest.raises(ConfigError, match="--run-config cannot be read"):
        overrides([str(tmp_path / "none.toml")])
