"""Training loops of the user's own in Flower apps."""

from __future__ import annotations

import pytest
import torch
from conftest import some
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn
from usernet import EASY, FIVE, Net, load, personal, run, strategy_of

from bayflower.clients import Plug, make_client_app
from bayflower.errors import BayflowerError
from bayflower.flower.loop import InProcessGrid, contexts


# -- own training loops --------------------------------------------------------------------------
def own_loop(method: str, state, **options) -> ClientApp:
    """Return the app of a user with a training loop of their own: Adam on what the method wants."""
    plug = Plug(method, model=Net, data=load, state=state, export=(), **options)
    app = ClientApp()
    app.query()(plug.query)
    app.evaluate()(plug.evaluate)

    @app.train()
    def train(message, context):
        job = plug.begin(message, context)
        optimizer = torch.optim.Adam(job.parameters(), lr=0.01)
        for _ in range(8):
            for rows in torch.arange(len(job.train.y)).split(16):
                optimizer.zero_grad()
                job.loss(job.train.x[rows], job.train.y[rows]).backward()
                optimizer.step()
        return job.reply()

    return app


@pytest.mark.parametrize("method", some(FIVE, ["pfedvmp"]))
def test_a_training_loop_of_the_users_own(method, tmp_path):
    strategy = run(own_loop(method, tmp_path), method, rounds=2, **EASY.get(method, {}))
    assert strategy.faults == []
    assert personal(strategy) > 0.6


RECIPE = {"label_smoothing": 0.2, "class_weights": "federation"}


@pytest.mark.parametrize("recipe", [pytest.param({}, marks=pytest.mark.slow), RECIPE])
def test_an_own_loop_with_the_methods_batches_gives_the_methods_bits(tmp_path, recipe):
    """The two calls around the very steps that make_client_app takes:
    the same state on the server.
    """
    from bayflower.data import batches

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.fc = nn.BatchNorm1d(64), nn.Linear(64, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(torch.relu(self.first(self.norm(x.flatten(1)))))

    plug = Plug("fedmap", model=Plain, data=load, state=tmp_path / "own", export=())
    app = ClientApp()
    app.query()(plug.query)
    app.evaluate()(plug.evaluate)

    @app.train()
    def train(message, context):
        job = plug.begin(message, context)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.01)
        keys = {
            "seed": 0,
            "client": job.site.client,
            "round": job.round,
            "purpose": "train",
            "coupled": True,
        }
        for (rows,) in batches.plan(len(job.train.y), job.phase, **keys):
            optimizer.zero_grad()
            job.loss(job.train.x[rows], job.train.y[rows]).backward()
            optimizer.step()
        return job.reply()

    ours = run(
        make_client_app("fedmap", model=Plain, data=load, state=tmp_path / "ours", export=()),
        "fedmap",
        rounds=2,
        net=Plain,
        optimizer="sgd",
        lr=0.01,
        run="a",
        **recipe,
    )
    theirs = run(app, "fedmap", rounds=2, net=Plain, optimizer="sgd", lr=0.01, run="b", **recipe)
    for name, value in ours.state.params.items():
        assert torch.allclose(value, theirs.state.params[name], rtol=1e-5, atol=1e-7), name
    assert ours.records[-1]["train_loss"] == pytest.approx(
        theirs.records[-1]["train_loss"], rel=1e-5
    )


def test_a_repeated_message_gets_the_first_reply_in_an_own_loop_too(tmp_path):
    plug = Plug("fedmap", model=Net, data=load, state=tmp_path)
    messages = []
    app = own_loop("fedmap", tmp_path)
    grid = InProcessGrid(
        app, contexts(range(3)), lambda message: messages.append(message) or grid.ask(message)
    )
    strategy_of("fedmap").start(grid, ArrayRecord(Net().state_dict()), num_rounds=1, timeout=60)
    asked = next(message for message in messages if message.metadata.message_type == "train")
    job = plug.begin(asked, contexts(range(3))[asked.metadata.dst_node_id - 1000])
    assert job.repeated is not None
    assert job.reply().content["metrics"] == job.reply().content["metrics"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"schedule": "cosine"}, "which sets the learning rate itself"),
        ({"mixup": 0.2}, "which augments its samples itself"),
    ],
)
def test_an_own_loop_refuses_what_it_would_have_to_do_itself(tmp_path, recipe, words):
    with pytest.raises(BayflowerError, match=words):
        run(own_loop("fedmap", tmp_path), "fedmap", rounds=3, **recipe)


def test_methods_that_are_no_loss_to_descend_are_refused_in_an_own_loop(tmp_path):
    for method in ("maml", "scaffold", "fedrep", "fedpa"):
        strategy = strategy_of(method)
        with pytest.raises(BayflowerError, match="has no single loss"):
            strategy.start(
                InProcessGrid(own_loop(method, tmp_path), contexts(range(3))),
                ArrayRecord(Net().state_dict()),
                num_rounds=3,
                timeout=60,
            )
