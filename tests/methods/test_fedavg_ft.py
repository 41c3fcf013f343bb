"""Fine-tuning of any global model before a test, against plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import FEWER, some
from plainsteps import LR, assert_equal, both
from torch import nn

from bayflower.data import batches
from bayflower.rounds import solo

# every method whose model is one global model with a loss, a step or a state of its own
GLOBAL = ("fedpa", "moon", "scaffold", "feddyn", "feddc", "fedla", "fednp")


@pytest.mark.parametrize("method", some(GLOBAL, {"fedpa", "moon"}))
@pytest.mark.parametrize("purpose", ["finetune", "new"])
def test_the_global_model_is_tuned_by_plain_steps_on_the_loss(method, purpose):
    """Two epochs of SGD on the cross-entropy from the broadcast, whatever a round's loss is; the
    global view and the rest of the state stay as they were.
    """
    settings = {**FEWER.get(method, {}), "finetune_epochs": 2}
    case = both(method, **settings)
    half, server = case.prepared.halves.client, case.prepared.halves.server
    client, samples = case.clients[1], case.samples[case.clients[1]]
    keys = {"seed": 0, "client": client, "round": 1}
    state = half.init(*case.prepared.halves.initial)
    sent = server.broadcast(server.init(*case.prepared.halves.initial, tuple(case.clients)), client)
    trained = solo.train(half, state, sent, samples, **keys).state  # a last round that matters
    tuned = solo.adapt(half, trained, sent, samples, purpose, **{**keys, "round": 2})

    module = case.prepared.halves.model.factory().double()
    module.load_state_dict(case.start)
    (phase,) = half.phases(purpose)
    plan = batches.plan(
        len(samples.y), phase, **{**keys, "round": 2}, purpose=purpose, coupled=False
    )
    assert len(plan) == 2 * -(-len(samples.y) // phase.batch_size)
    for (rows,) in plan:
        module.zero_grad()
        nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]).backward()
        with torch.no_grad():
            for value in module.parameters():
                value -= LR * value.grad
    assert_equal(tuned.tuned, {name: value.detach() for name, value in module.named_parameters()})
    want = module(samples.x).softmax(-1).detach()
    torch.testing.assert_close(half.predict("personal", tuned, sent, samples.x, {}), want)
    before = half.predict("global", trained, sent, samples.x, {})
    assert torch.equal(half.predict("global", tuned, sent, samples.x, {}), before)
    assert not torch.allclose(before, want, atol=1e-3)
