"""FedProx against a slow round in plain torch, where the proximal term matters."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small, small_prepared
from torch import nn

from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.rounds import solo

MU = 3.0


def test_a_round_equals_plain_torch():
    """[eq. 1]: F_k(w) + (mu/2)‖w − w^t‖² over several steps, so that w has left w^t."""
    prepared = small_prepared("fedprox", mu=MU, optimizer="sgd", lr=0.05, dtype="float64")
    run, halves = prepared.run, prepared.halves
    params, buffers = halves.initial
    data = prepared.federation.clients[0]
    samples = solo.samples(data, torch.device("cpu"), torch.float64)
    broadcast = halves.server.init(params, buffers, ())
    trained = solo.train(
        halves.client,
        halves.client.init(params, buffers),
        broadcast,
        samples.train,
        seed=0,
        client=data.client,
        round=1,
    )

    module = halves.model.factory().double()
    module.load_state_dict(copy.deepcopy(params))
    stepper = torch.optim.SGD(module.parameters(), lr=0.05)
    plan = batches.plan(
        len(data.y_train),
        run.training.phase("local"),
        seed=0,
        client=data.client,
        round=1,
        purpose="train",
        coupled=False,
    )
    losses = []
    for (rows,) in plan:
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(module(samples.train.x[rows]), samples.train.y[rows])
        for name, value in module.named_parameters():
            loss = loss + MU / 2 * ((value - params[name]) ** 2).sum()
        loss.backward()
        losses.append(float(loss.detach()) * len(rows))
        stepper.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(
            trained.update.params[name], value.detach(), rtol=1e-8, atol=1e-10
        )
    assert trained.loss == pytest.approx(sum(losses) / sum(len(rows) for (rows,) in plan), rel=1e-9)


def test_mu_must_not_be_negative():
    with pytest.raises(ConfigError, match="mu must not be negative, got -1"):
        small("fedprox", mu=-1)
