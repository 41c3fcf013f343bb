"""Individual training: nothing leaves, and rounds continue each client's own model."""

from __future__ import annotations

import torch
from conftest import small_prepared, worst_difference

from bayflower.engines import execute
from bayflower.rounds import solo
from bayflower.tree import flatten


def test_a_client_alone_gets_the_same_model_whoever_else_is_there():
    """Three rounds among others equal three rounds alone."""
    prepared = small_prepared("local", "fused", rounds=3)
    outcome = execute(prepared)
    half, (params, buffers) = prepared.halves.client, prepared.halves.initial
    client = prepared.federation.clients[2]
    data = solo.samples(client, torch.device("cpu"), torch.float32)
    state = half.init(params, buffers)
    nothing = prepared.halves.server.init(params, buffers, ())
    assert flatten(nothing) == {}
    for round in (1, 2, 3):
        state = solo.train(
            half, state, nothing, data.train, seed=0, client=client.client, round=round
        ).state
    assert worst_difference(outcome.client_states[client.client], state) < 1e-4


def test_nothing_is_sent_but_the_count():
    prepared = small_prepared("local", "fused")
    half, (params, buffers) = prepared.halves.client, prepared.halves.initial
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32).train
    nothing = prepared.halves.server.init(params, buffers, ())
    trained = solo.train(half, half.init(params, buffers), nothing, data, seed=0, client=0, round=1)
    assert set(flatten(trained.update)) == {"num_examples"}
    assert flatten(prepared.halves.server.broadcast(nothing, 0)) == {}
    parameters = 4 * prepared.halves.model.num_parameters
    for record in execute(small_prepared("local", "fused", evaluate_every=0)).rounds:
        assert max(record["bytes_up"], record["bytes_down"]) < parameters, (
            "five clients together need less than one model"
        )
