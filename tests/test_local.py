"""Individual training: nothing leaves, and rounds continue each client's own model."""

from __future__ import annotations

import torch
from conftest import small_prepared, worst_difference

from bayflower import solo
from bayflower.engines import execute
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
        state = solo.train(half, state, nothing, data.train, seed=0, client=client.client, round=round).state
    assert worst_difference(outcome.client_states[client.client], state) < 1e-4


def test_nothing_is_sent_but_the_count():
    prepared = small_prepared("local", "fused")
    outcome = execute(prepared)
    one_number = 128 + 8
    assert [record["bytes_up"] for record in outcome.rounds] == [5 * one_number] * 2
    assert [record["bytes_down"] for record in outcome.rounds] == [0, 0]
