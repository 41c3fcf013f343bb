"""FedALA against rounds in plain torch with the paper's gradient of the weights, and its limits."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds, mean
from torch import nn

from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.rounds import solo


def slopes(case, numbers, x, y):
    """Return ∇F at these numbers, by backpropagation through a module."""
    module = case.prepared.halves.model.factory().double()
    module.load_state_dict(copy.deepcopy(numbers))
    nn.functional.cross_entropy(module(x), y).backward()
    return {name: value.grad for name, value in module.named_parameters()}


def plain_round(case, client, round, world, own, weights, purpose="train"):
    """One client's round, weight by weight: [eq. 1], [eq. 2] with the paper's gradient, and SGD."""
    samples, half = case.samples[client], case.prepared.halves.client
    weigh, local = half.phases(purpose)
    keys = {"seed": 0, "client": client, "round": round, "purpose": purpose, "coupled": False}

    def mixed():
        found = dict(world)
        for n, w in weights.items():
            found[n] = own[n] + (world[n] - own[n]) * w
        return found

    for (rows,) in batches.plan(len(samples.y), weigh, **keys):
        grads = slopes(case, mixed(), samples.x[rows], samples.y[rows])
        for n, w in weights.items():
            step = w - half.config.ala_rate * (world[n] - own[n]) * grads[n]
            weights = {**weights, n: step.clamp(0, 1)}
    theta = mixed()
    for (rows,) in batches.plan(len(samples.y), local, **keys):
        grads = slopes(case, theta, samples.x[rows], samples.y[rows])
        theta = {n: v - LR * grads[n] for n, v in theta.items()}
    return theta, weights


@pytest.mark.parametrize("tensors", [2, 0])
def test_three_rounds_equal_plain_torch(tensors):
    """A large rate, so that weights leave 1, and some reach 0 and are clipped."""
    case = both("fedala", ala_tensors=tensors, ala_rate=3000.0, local_epochs=1)
    world, names = case.start, case.prepared.halves.client.mixed
    order = [n for n, _ in case.prepared.halves.model.factory().named_parameters()]
    assert set(names) == set(order[-tensors:] if tensors else order)
    own = {k: world for k in case.clients}
    weights = {k: {n: torch.ones_like(world[n]) for n in names} for k in case.clients}
    for round, (state, states, updates) in enumerate(half_rounds(case, 3), start=1):
        for k in case.clients:
            own[k], weights[k] = plain_round(case, k, round, world, own[k], weights[k])
            assert_equal(updates[k].params, own[k], rtol=1e-6, atol=1e-9)
            assert_equal(states[k].weights, weights[k], rtol=1e-6, atol=1e-9)
        if round == 1:  # both models were one
            assert all(bool((w == 1).all()) for w in states[case.clients[0]].weights.values())
        world = mean(case, own)
        assert_equal(state.params, world, rtol=1e-6, atol=1e-9)
    every = torch.cat([w.flatten() for k in weights for w in weights[k].values()])
    assert float((every < 0.9).double().mean()) > 0.01
    assert bool((every == 0).any())
    assert bool(((every > 0.05) & (every < 0.95)).any())


def test_personal_is_the_mixture_learned_again_and_trained():
    case = both("fedala", ala_rate=100.0, local_epochs=1)
    half, k = case.prepared.halves.client, case.clients[1]
    state, states, _ = list(half_rounds(case, 2))[-1]
    own, weights = states[k].params, states[k].weights
    keys = {"seed": 0, "client": k, "round": 3}
    tuned = solo.adapt(half, states[k], state, case.samples[k], "finetune", **keys)
    want, _ = plain_round(case, k, 3, state.params, own, weights, "finetune")
    assert_equal(tuned.tuned, want, rtol=1e-6, atol=1e-9)
    x = case.samples[k].x
    mixed = {n: own[n] + (state.params[n] - own[n]) * w for n, w in weights.items()}
    for view, numbers in (
        ("personal", want),
        ("before", {**state.params, **mixed}),
        ("global", state.params),
    ):
        got = half.predict(view, tuned, state, x, {})
        said = half.model.forward(numbers, {}, x, train=False)[0].softmax(1)
        torch.testing.assert_close(got, said, rtol=1e-6, atol=1e-9)
    fresh = half.init(*case.prepared.halves.initial)
    torch.testing.assert_close(
        half.predict("before", fresh, state, x, {}), half.predict("global", fresh, state, x, {})
    )


def test_with_weights_that_hardly_move_it_is_fedavg():
    case, other = both("fedala", ala_rate=1e-12), both("fedavg")
    rounds = zip(half_rounds(case, 2), half_rounds(other, 2), strict=True)
    for (state, _, _), (want, _, _) in rounds:
        assert_equal(state.params, want.params, rtol=1e-9, atol=1e-11)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="ala_rate must be positive"):
        small("fedala", ala_rate=-1.0)
    with pytest.raises(ConfigError, match="ala_epochs must be at least 1"):
        small("fedala", ala_epochs=0)
