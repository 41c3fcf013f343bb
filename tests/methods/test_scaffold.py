"""SCAFFOLD against the paper's algorithm in plain torch: three rounds, partial participation,
option II as printed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small_prepared
from torch import nn

from bayflower.data import batches
from bayflower.maths.exact import Total
from bayflower.rounds import solo

LR = 0.05


def test_three_rounds_equal_plain_torch():
    """[eq. 1], [eq. 2], [eq. 3], [eq. 4] with loops; a client is away in each round, so |S| < N,
    and c_i differ from c.
    """
    prepared = small_prepared("scaffold", optimizer="sgd", lr=LR, dtype="float64")
    run, halves = prepared.run, prepared.halves
    params, buffers = halves.initial
    clients = prepared.federation.clients[:4]
    state = halves.server.init(params, buffers, tuple(data.client for data in clients))
    states = {data.client: halves.client.init(params, buffers) for data in clients}
    x = copy.deepcopy(params)
    c = {name: torch.zeros_like(value) for name, value in params.items()}
    own = {data.client: copy.deepcopy(c) for data in clients}
    for round in (1, 2, 3):
        total, models, weights, changes = Total(), [], [], []
        for data in clients[:round] + clients[round + 1 :]:
            client, samples = (
                data.client,
                solo.samples(data, torch.device("cpu"), torch.float64).train,
            )
            states[client], update, _ = solo.train(
                halves.client,
                states[client],
                halves.server.broadcast(state, client),
                samples,
                seed=0,
                client=client,
                round=round,
            )
            total.add(halves.server.statistic(state, client, update))

            module = halves.model.factory().double()
            module.load_state_dict(copy.deepcopy(x))
            plan = batches.plan(
                len(samples.y),
                run.training.phase("local"),
                seed=0,
                client=client,
                round=round,
                purpose="train",
                coupled=False,
            )
            for (rows,) in plan:
                module.zero_grad()
                nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]).backward()
                with torch.no_grad():
                    for name, value in module.named_parameters():
                        value -= LR * (value.grad - own[client][name] + c[name])
            y = {name: value.detach().clone() for name, value in module.named_parameters()}
            new = {
                name: own[client][name] - c[name] + (x[name] - y[name]) / (len(plan) * LR)
                for name in y
            }
            changes.append({name: new[name] - own[client][name] for name in y})
            own[client] = new
            models.append(y)
            weights.append(len(samples.y))
            for name in y:
                torch.testing.assert_close(update.params[name], y[name], rtol=1e-8, atol=1e-10)
                torch.testing.assert_close(
                    states[client].control[name], new[name], rtol=1e-7, atol=1e-9
                )
        state = halves.server.finalise(state, total.value())
        x = {
            name: sum(w * y[name] for w, y in zip(weights, models, strict=True)) / sum(weights)
            for name in x
        }
        c = {
            name: value + sum(change[name] for change in changes) / len(clients)
            for name, value in c.items()
        }
        for name in x:
            torch.testing.assert_close(state.params[name], x[name], rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(state.control[name], c[name], rtol=1e-7, atol=1e-9)
    assert max(float(value.abs().max()) for value in c.values()) > 1e-3


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_control_variate_is_the_mean_gradient_for_any_optimiser(optimizer):
    """[eq. 4] as a mean along the path: with a vanishing rate it is the gradient at x, whatever the
    optimiser divides by.
    """
    prepared = small_prepared(
        "scaffold",
        optimizer=optimizer,
        lr=1e-12,
        momentum=0.9 if optimizer == "sgd" else 0.0,
        dtype="float64",
        local_epochs=1,
    )
    halves, data = prepared.halves, prepared.federation.clients[0]
    params, buffers = halves.initial
    samples = solo.samples(data, torch.device("cpu"), torch.float64).train
    broadcast = halves.server.broadcast(halves.server.init(params, buffers, (0,)), 0)
    trained = solo.train(
        halves.client,
        halves.client.init(params, buffers),
        broadcast,
        samples,
        seed=0,
        client=data.client,
        round=1,
    )
    module = halves.model.factory().double()
    module.load_state_dict(params)
    plan = batches.plan(
        len(samples.y),
        prepared.run.training.phase("local"),
        seed=0,
        client=data.client,
        round=1,
        purpose="train",
        coupled=False,
    )
    for (rows,) in plan:
        (
            nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]) / len(plan)
        ).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(trained.state.control[name], value.grad, rtol=1e-6, atol=1e-9)
