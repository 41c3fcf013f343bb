"""A user's own network and data for numbers, counts, ordered classes, labels and times: the numbers
of the loop engine on the same data, and what is refused before training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, some
from flwr.app import ArrayRecord
from torch import Tensor, nn

from bayflower import load_personal
from bayflower.clients import Plug, make_client_app
from bayflower.config import parse
from bayflower.data.federation import ClientData, Federation
from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower.classes import strategy_class
from bayflower.flower.fusing import FusedGrid
from bayflower.flower.loop import InProcessGrid, contexts, run_loop
from bayflower.networks.model import Model
from bayflower.rounds.halves import make_halves
from bayflower.tasks.choice import target_sums

OUTPUTS = {"regression": 1, "counts": 1, "ordinal": 1, "labels": 2, "survival": 20}
SIZE = {"ordinal": 4, "labels": 2}
HOW = {"lr": 0.02, "local_epochs": 2, "batch_size": 16}


def net(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def drawn(task: str, client: int) -> tuple[Tensor, Tensor]:
    """Return 48 samples; numbers are far from 0, so that everyone's moments matter."""
    g = torch.Generator().manual_seed(client)
    x, e = torch.randn(48, 3, generator=g), torch.randn(48, generator=g)
    f, u = x[:, 0] - 0.5 * x[:, 1] + 0.4 * client, torch.rand(48, generator=g)
    made = {
        "regression": lambda: 500 + 20 * f + 5 * e,
        "counts": lambda: torch.poisson(torch.exp(0.5 * f), generator=g),
        "ordinal": lambda: torch.bucketize(f + 0.5 * e, torch.tensor([-1.0, 0.0, 1.0])),
        "labels": lambda: torch.stack([f + e > 0, x[:, 2] + e > 0], 1),
        "survival": lambda: torch.stack([-10 * torch.exp(-f) * u.log(), (e > -0.5).float()], 1),
    }
    return x, made[task]()


def load(task: str) -> Any:
    def data(context: Any) -> Any:
        x, y = drawn(task, int(context.node_config["partition-id"]))
        return (x[:36], y[:36]), (x[36:], y[36:])

    return data


def plugged(task: str, state: Path, grid: Any = InProcessGrid, **more: Any) -> Any:
    """Return the strategy after two rounds of FedMAP, and its result."""
    outputs = more.pop("outputs", OUTPUTS[task])
    app = make_client_app(
        "fedmap",
        model=lambda: net(outputs),
        data=load(task),
        state=state,
        classes=SIZE.get(task, 0) if task == "ordinal" else 0,
        export=(),
    )
    strategy = strategy_class("fedmap")(min_available_nodes=3, task=task, quiet=True, **HOW, **more)
    arrays = ArrayRecord(Model(lambda: net(outputs), 2).initial(0)[0])
    return strategy, strategy.start(grid(app, contexts(range(3))), arrays, num_rounds=2)


def of_the_loop(task: str) -> Any:
    """Return the outcome of the loop engine with the same clients, network and settings."""
    run = parse(
        "fedmap",
        {"dataset": "given.npz", "partition": "iid", "task": task, "rounds": 2, **HOW}
        | {"calibration": "off", "evaluate_every": 0, "input_scale": "none"},
    )
    clients = []
    for client in range(3):
        x, y = (part.numpy() for part in drawn(task, client))
        y = y.astype(np.int64) if task == "labels" else y
        clients.append(ClientData(client, x[:36], y[:36], x[36:], y[36:]))
    there = Federation(tuple(clients), (), SIZE.get(task, 1), (3,), "given", {}, "")
    sums = None
    if run.training.standardises:
        sums = [target_sums(task, one.y_train) for one in clients]
    size, outputs = there.num_classes, OUTPUTS[task]
    made = run.training.make_task(size)
    model = Model(lambda: net(outputs), size, "net", task=made)
    halves = make_halves(run, (3,), size, model, sums=sums)
    return run_loop(run, there, halves)


@pytest.mark.parametrize("task", some(sorted(OUTPUTS), ["ordinal", "regression"]))
def test_a_users_network_gives_what_the_loop_engine_gives(task: str, tmp_path: Path) -> None:
    strategy, result = plugged(task, tmp_path)
    assert strategy.faults == []
    loop = of_the_loop(task)
    assert_same_bits(strategy.state, loop.server_state)
    assert_same_bits(strategy.outcome.views, loop.views)
    assert set(result.arrays) == set(net().state_dict())  # the user's, and no more


def test_intervals_of_a_users_network_are_calibrated_and_stacks_agree(tmp_path: Path) -> None:
    more = {"calibration": "shrunk", "noise": "input", "outputs": 2}
    strategy, _ = plugged("regression", tmp_path / "loop", **more)
    assert strategy.faults == []
    found = strategy.outcome.calibrated
    assert sorted(found.clients) == [0, 1, 2]
    home = tmp_path / "loop" / strategy.run / "client-1" / "personal"
    model: Any = load_personal(home, lambda: net(2))
    x, y = drawn("regression", 1)
    ends = model.predict_interval(x[36:].numpy())
    assert np.abs(model.predict(x[36:].numpy()) - y[36:].numpy()).mean() < 25
    assert ((ends[:, 0] < y[36:].numpy()) & (y[36:].numpy() < ends[:, 1])).mean() > 0.5
    other, _ = plugged("regression", tmp_path / "fused", FusedGrid, **more)
    for name, value in strategy.state.params.items():
        torch.testing.assert_close(other.state.params[name], value, rtol=1e-4, atol=1e-5)


def test_a_training_loop_of_ones_own_descends_the_likelihood(tmp_path: Path) -> None:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    plug = Plug("fedmap", model=net, data=load("regression"), state=tmp_path, export=())
    app, losses = ClientApp(), []
    app.query()(plug.query)
    app.evaluate()(plug.evaluate)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job = plug.begin(message, context)
        moving = torch.optim.Adam(job.parameters(), lr=0.02)  # the noise is one of them
        for _ in range(10):
            moving.zero_grad()
            loss = job.loss(job.train.x, job.train.y)
            loss.backward()
            moving.step()
            losses.append(float(loss.detach()))
        return job.reply()

    strategy = strategy_class("fedmap")(min_available_nodes=3, task="regression", quiet=True)
    grid = InProcessGrid(app, contexts(range(3)))
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=2)
    assert strategy.faults == []
    assert losses[-1] < losses[0]
    assert float(strategy.state.params["task_extra"]) < 0  # less than the targets' own spread


@pytest.mark.parametrize(
    ("task", "app", "settings", "said"),
    [
        ("regression", {}, {"outputs": 3}, "has 3 outputs, but task=regression with noise=global"),
        ("regression", {"loss": nn.MSELoss()}, {}, "a loss of your own stands in for"),
        ("regression", {"y": torch.full((48,), torch.nan)}, {}, "must be finite numbers"),
        ("counts", {"y": torch.full((48,), -1.0)}, {}, "whole numbers from 0 for task=counts"),
        ("ordinal", {}, {}, "make_client_app classes=K"),
        ("ordinal", {"classes": 3}, {}, "whole numbers in 0…2"),
        ("survival", {"y": torch.zeros(48)}, {"outputs": 20}, "time and event"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    task: str, app: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    app, outputs = dict(app), settings.get("outputs", 1)
    x, y = drawn(task, 0)
    y = app.pop("y", y)
    made = make_client_app(
        "fedmap", model=lambda: net(outputs), data=lambda _: ((x, y), (x, y)), state=tmp_path, **app
    )
    strategy = strategy_class("fedmap")(min_available_nodes=2, task=task, quiet=True)
    with pytest.raises(BayflowerError, match=said):
        strategy.start(
            InProcessGrid(made, contexts(range(2))),
            ArrayRecord(net(outputs).state_dict()),
            num_rounds=1,
        )


def test_a_strategy_refuses_what_its_task_cannot() -> None:
    for method, more, said in (
        ("pfedvmp", {"task": "regression"}, "pfedvmp needs classes"),
        ("fedmap", {"task": "counts", "calibration": "shrunk"}, "got task=counts; set calib"),
        ("fedmap", {"task": "numbers"}, "task must be one of"),
    ):
        with pytest.raises(ConfigError, match=said):
            strategy_class(method)(**more)
