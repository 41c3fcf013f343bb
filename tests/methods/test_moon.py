"""MOON against two rounds in plain torch, the second with a last local model of its own."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, mean, numbers, plain_sgd

from bayflower.clients.moon import cosine
from bayflower.errors import ConfigError


def test_two_rounds_equal_plain_torch():
    """[eq. 3] as a ratio of exponentials, [eq. 4] with a weight that matters."""
    mu, tau = 2.0, 0.3
    case = both("moon", mu=mu, moon_temperature=tau)
    world, last = case.start, {}

    def frozen(params):
        module = case.prepared.halves.model.factory().double()
        module.load_state_dict(params)
        return module.requires_grad_(False)

    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        models = {}
        for client in case.clients:
            globally, before = frozen(world), frozen(last.get(client, world))

            def contrast(module, x, globally=globally, before=before):
                z, near, far = (one.base(x) for one in (module, globally, before))
                a, b = (
                    torch.exp(torch.nn.functional.cosine_similarity(z, other) / tau)
                    for other in (near, far)
                )
                return mu * -(a / (a + b)).log().mean()

            models[client] = numbers(plain_sgd(case, world, client, round, contrast)[0])
            assert_equal(updates[client].params, models[client], rtol=1e-5, atol=1e-8)
            assert_equal(states[client].params, models[client], rtol=1e-5, atol=1e-8)
        last, world = models, mean(case, models)
        assert_equal(state.params, world, rtol=1e-5, atol=1e-8)


def test_the_cosine_has_a_gradient_at_zero():
    a = torch.zeros(2, 3, requires_grad=True)
    cosine(a, torch.ones(2, 3)).sum().backward()
    assert bool(a.grad.isfinite().all())


@pytest.mark.parametrize(("key", "value"), [("mu", -1), ("moon_temperature", 0)])
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"{key} must"):
        small("moon", **{key: value})
