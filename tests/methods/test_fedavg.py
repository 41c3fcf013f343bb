"""FedAvg against golden vectors and a slow round in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small, small_prepared
from torch import nn

from bayflower import methods
from bayflower.config import Training
from bayflower.contract import Phase
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Model
from bayflower.networks.papers import build
from bayflower.rounds import solo
from bayflower.strategies.fedavg import Config, State, Update


def aggregate(thetas: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    server = methods.get("fedavg").server(Config(), None)
    state = State({"w": torch.zeros_like(thetas[0])}, {})
    total = Total()
    for client, (theta, count) in enumerate(zip(thetas, counts, strict=True)):
        total.add(server.statistic(state, client, Update(torch.tensor(count), {"w": theta}, {})))
    return server.finalise(state, total.value()).params["w"]


def test_golden_average(golden):
    """[eq. 1] on the golden case."""
    case = golden["fedavg_aggregate"]
    got = aggregate(
        [torch.tensor(theta, dtype=torch.float64) for theta in case["theta"]], case["n"]
    )
    torch.testing.assert_close(
        got, torch.tensor(case["out"], dtype=torch.float64), rtol=2e-5, atol=1e-9
    )


def test_average_returns_a_lone_float32_model_to_the_bit():
    theta = torch.randn(1000) * torch.logspace(-30, 10, 1000)
    assert torch.equal(aggregate([theta], [7]), theta)


def test_integer_buffers_take_the_rounded_mean():
    server = methods.get("fedavg").server(Config(), None)
    state = State({}, {"seen": torch.tensor(0)})
    total = Total()
    for count, seen in ((30, 4), (10, 9)):
        total.add(
            server.statistic(
                state, 0, Update(torch.tensor(count), {}, {"seen": torch.tensor(seen)})
            )
        )
    after = server.finalise(state, total.value())
    assert after.buffers["seen"].dtype == torch.int64
    assert int(after.buffers["seen"]) == round((30 * 4 + 10 * 9) / 40)


def plain_training(module: nn.Module, data, plan, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The slow oracle of [eq. 2]: an ordinary module, an ordinary optimiser, an ordinary loop."""
    module.train()
    for (rows,) in plan:
        optimizer.zero_grad()
        logits = module(data.x[rows])
        nn.functional.cross_entropy(logits, data.y[rows]).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("model", ["mlp", "mlp-bn"])
def test_a_round_equals_plain_torch(optimizer, model):
    """[eq. 2] and [eq. 1]: local training of unequal clients, then the average, against torch.optim
    and a loop.
    """
    settings = {
        "optimizer": optimizer,
        "lr": 0.02,
        "weight_decay": 0.01,
        "model": model,
        "dtype": "float64",
    }
    if optimizer != "adam":
        settings["momentum"] = 0.9
    prepared = small_prepared("fedavg", **settings)
    run, halves = prepared.run, prepared.halves
    params, buffers = halves.initial
    state = halves.server.init(params, buffers, ())
    total, expected, weight = Total(), {}, 0
    for data in prepared.federation.clients[:3]:
        samples = solo.samples(data, torch.device("cpu"), torch.float64)
        trained = solo.train(
            halves.client,
            halves.client.init(params, buffers),
            state,
            samples.train,
            seed=0,
            client=data.client,
            round=1,
        )
        total.add(halves.server.statistic(state, data.client, trained.update))

        module = halves.model.factory().double()
        module.load_state_dict(copy.deepcopy({**params, **buffers}))
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
        extra = {} if optimizer == "adam" else {"momentum": 0.9}
        stepper = kinds[optimizer](module.parameters(), lr=0.02, weight_decay=0.01, **extra)
        phase = run.training.phase("local")
        plan = batches.plan(
            len(data.y_train),
            phase,
            seed=0,
            client=data.client,
            round=1,
            purpose="train",
            coupled=halves.model.coupled,
        )
        assert len({len(rows) for (rows,) in plan}) > 1, (
            "the last batch should be smaller, or the mask is not tested"
        )
        for name, value in (
            plain_training(module, samples.train, plan, stepper).state_dict().items()
        ):
            torch.testing.assert_close(
                {**trained.update.params, **trained.update.buffers}[name],
                value,
                rtol=1e-8,
                atol=1e-10,
            )
            expected[name] = expected.get(name, 0) + len(data.y_train) * value
        weight += len(data.y_train)
    after = halves.server.finalise(state, total.value())
    for name, value in after.params.items():
        torch.testing.assert_close(value, expected[name] / weight, rtol=1e-8, atol=1e-10)


def test_a_pass_without_steps_moves_running_statistics_alone():
    """`settle_epochs`: after local training, an ordinary module sees the data once more in training
    mode; clipping, decay and momentum move no weight in it.
    """
    settings = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 1.0}
    found = {}
    for epochs in (0, 1):
        prepared = small_prepared(
            "fedavg", model="mlp-bn", dtype="float64", settle_epochs=epochs, **settings
        )
        half, initial = prepared.halves.client, prepared.halves.initial
        data = prepared.federation.clients[0]
        samples = solo.samples(data, torch.device("cpu"), torch.float64)
        found[epochs] = solo.train(
            *(half, half.init(*initial), State(*initial), samples.train),
            **{"seed": 0, "client": data.client, "round": 1},
        ).update
    assert not half.plain_loop
    for name, value in found[0].params.items():
        assert torch.equal(value, found[1].params[name])
    module = prepared.halves.model.factory().double()
    module.load_state_dict({**found[0].params, **found[0].buffers})
    module.train()
    plan = batches.plan(
        *(len(data.y_train), half.phases("train")[1]),
        **{"seed": 0, "client": data.client, "round": 1, "purpose": "train"},
        coupled=prepared.halves.model.coupled,
    )
    for (rows,) in plan:
        module(samples.train.x[rows])
    for name, value in found[1].buffers.items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-8, atol=1e-10)


def test_fine_tuning_gives_a_personal_model_and_leaves_the_global_one():
    prepared = small_prepared("fedavg-ft", finetune_epochs=2)
    half, (params, buffers) = prepared.halves.client, prepared.halves.initial
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32)
    broadcast = State(params, buffers)
    tuned = solo.adapt(
        half,
        half.init(params, buffers),
        broadcast,
        data.train,
        "finetune",
        seed=0,
        client=0,
        round=1,
    )
    x = data.test.x
    personal, shared = (
        half.predict(view, tuned, broadcast, x, {}) for view in ("personal", "global")
    )
    untouched = half.predict("personal", half.init(params, buffers), broadcast, x, {})
    assert torch.equal(shared, untouched)
    assert not torch.allclose(personal, shared)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="finetune_epochs must not be negative"):
        small("fedavg", finetune_epochs=-1)
    with pytest.raises(ConfigError, match="lr must be positive"):
        Training(lr=0)
    assert small("fedavg-ft").options.finetune_epochs == 5
    assert isinstance(Training(local_steps=3).phase("x"), Phase)
    assert Training(local_steps=3).phase("x").steps == 3
    assert isinstance(build("auto", (30,), 2), Model)
