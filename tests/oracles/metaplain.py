"""A slow oracle for the meta-learning family: ordinary modules, torch.autograd, loops over clients
and rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from bayflower.data import batches
from bayflower.engines import Prepared
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo

Loss = Callable[[dict, torch.Tensor, torch.Tensor], torch.Tensor]
SETTINGS = {
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.0,
    "dtype": "float64",
    "server_lr": 0.7,
    "server_momentum": 0.3,
}


def loss_of(prepared: Prepared) -> Loss:
    """Return the mean cross entropy of a network without buffers."""
    module = prepared.halves.model.factory().double()

    def loss(params, x, y):
        return nn.functional.cross_entropy(functional_call(module, params, (x,)), y)

    return loss


def slopes(value, params: dict, keep: bool) -> dict:
    found = torch.autograd.grad(value, list(params.values()), create_graph=keep)
    return dict(zip(params, found, strict=True))


def assert_rounds_agree(
    prepared: Prepared, step: Callable[[Loss, dict, list], dict], rounds: int = 2
) -> None:
    """Assert that the halves' global model is that of `step(loss, params, [(x, y), …])` in a plain
    loop, and the adapted ones too.
    """
    server, client, _, (params, buffers) = prepared.halves
    rate, momentum = prepared.run.options.server_lr, prepared.run.options.server_momentum
    clients = prepared.federation.clients[:3]
    assert len({len(data.y_train) for data in clients}) > 1
    state = server.init(params, buffers, tuple(data.client for data in clients))
    loss, phase = loss_of(prepared), client.phases("train")[0]
    theta, velocity = (
        {k: v.clone() for k, v in params.items()},
        {k: torch.zeros_like(v) for k, v in params.items()},
    )
    for round in range(1, rounds + 1):
        total, sums, weight = Total(), {name: 0.0 for name in theta}, 0
        for data in clients:
            own = solo.samples(data, torch.device("cpu"), torch.float64).train
            fresh, broadcast = client.init(params, buffers), server.broadcast(state, data.client)
            update = solo.train(
                client, fresh, broadcast, own, seed=0, client=data.client, round=round
            ).update
            total.add(server.statistic(state, data.client, update))
            mine = theta
            keys = {
                "seed": 0,
                "client": data.client,
                "round": round,
                "purpose": "train",
                "coupled": False,
            }
            for groups in batches.plan(len(own.y), phase, **keys):
                mine = {name: value.detach().requires_grad_() for name, value in mine.items()}
                direction = step(loss, mine, [(own.x[rows], own.y[rows]) for rows in groups])
                mine = {
                    name: value - SETTINGS["lr"] * direction[name] for name, value in mine.items()
                }
            weight += len(own.y)
            sums = {name: sums[name] + len(own.y) * value.detach() for name, value in mine.items()}
        state = server.finalise(state, total.value())
        velocity = {
            name: momentum * velocity[name] + sums[name] / weight - theta[name] for name in theta
        }
        theta = {name: value + rate * velocity[name] for name, value in theta.items()}
        for name, value in theta.items():
            torch.testing.assert_close(state.params[name], value, rtol=1e-7, atol=1e-10)
    for purpose in ("finetune", "new"):
        assert_adapts(prepared, state, theta, purpose)


def assert_adapts(prepared: Prepared, state, theta: dict, purpose: str) -> None:
    """Assert that the model tested is the global one after `adapt_steps` plain gradient steps."""
    server, client, model, (params, buffers) = prepared.halves
    loss, data = loss_of(prepared), prepared.federation.clients[1]
    own = solo.samples(data, torch.device("cpu"), torch.float64)
    (phase,) = client.phases(purpose)
    broadcast = server.broadcast(state, data.client)
    got = solo.adapt(
        client,
        client.init(params, buffers),
        broadcast,
        own.train,
        purpose,
        seed=0,
        client=data.client,
        round=2,
    )
    plan = batches.plan(
        len(own.train.y), phase, seed=0, client=data.client, round=2, purpose=purpose, coupled=False
    )
    assert len(plan) == prepared.run.options.adapt_steps
    for (rows,) in plan:
        theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
        direction = slopes(loss(theta, own.train.x[rows], own.train.y[rows]), theta, False)
        theta = {
            name: value - phase.optimizer.lr * direction[name] for name, value in theta.items()
        }
    with torch.no_grad():
        want = torch.softmax(functional_call(model.factory().double(), theta, (own.test.x,)), 1)
    torch.testing.assert_close(
        client.predict("personal", got, broadcast, own.test.x, {}), want, rtol=1e-6, atol=1e-9
    )


def tiny() -> tuple[Model, dict, tuple[Batch, Batch]]:
    """A smooth network of 29 parameters in float64, and two batches of unequal size."""
    model = Model(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 3, "tiny")
    params, _ = model.initial(1, torch.float64)
    draw = torch.Generator().manual_seed(0)
    groups = tuple(
        Batch(
            torch.randn(n, 3, dtype=torch.float64, generator=draw),
            torch.randint(0, 3, (n,), generator=draw),
            torch.ones(n, dtype=torch.float64),
        )
        for n in (5, 7)
    )
    return model, params, groups


def meta_loss(model, params, groups, rate: float, steps: int) -> float:
    """The definition of F, by plain autograd."""
    for _ in range(steps):
        params = {name: value.detach().requires_grad_() for name, value in params.items()}
        value = nn.functional.cross_entropy(
            model.forward(params, {}, groups[0].x, True)[0], groups[0].y
        )
        params = {
            name: params[name] - rate * slope
            for name, slope in slopes(value, params, False).items()
        }
    with torch.no_grad():
        return float(
            nn.functional.cross_entropy(
                model.forward(params, {}, groups[1].x, True)[0], groups[1].y
            )
        )


def numeric(model, params, groups, rate: float, steps: int, step: float = 1e-5) -> dict:
    """Central differences of F, entry by entry."""
    found = {name: torch.zeros_like(value) for name, value in params.items()}
    for name, value in params.items():
        for place in range(value.numel()):
            ends = []
            for sign in (1, -1):
                moved = value.detach().clone()
                moved.view(-1)[place] += sign * step
                ends.append(meta_loss(model, {**params, name: moved}, groups, rate, steps))
            found[name].view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
    return found
