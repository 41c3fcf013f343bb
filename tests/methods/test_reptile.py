"""Reptile against a plain loop: [eq. 2] on clients of unequal size, [eq. 1] with a server rate and
momentum, a step before a test.
"""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared
from metaplain import SETTINGS, assert_rounds_agree, slopes

from bayflower.engines import execute
from bayflower.errors import ConfigError


def test_two_rounds_equal_plain_torch():
    def step(loss, params, groups):
        ((x, y),) = groups
        return slopes(loss(params, x, y), params, False)

    assert_rounds_agree(small_prepared("reptile", adapt_steps=2, **SETTINGS), step)


def test_at_rate_1_without_adaptation_it_is_fedavg():
    """[eq. 1] with epsilon = 1 is the average to the bit."""
    few = {"rounds": 2, "keep": 0.15, "new_clients": 0}
    mine, plain = (execute(small_prepared(method, **few)) for method in ("reptile", "fedavg"))
    assert_same_bits(mine.server_state.params, plain.server_state.params)
    none = execute(small_prepared("reptile", **few, adapt_steps=0))
    assert_same_bits(none.views["personal"], none.views["global"])
    assert_same_bits(none.views["global"], mine.views["global"])
    assert any(
        not torch.equal(mine.views["personal"][c].nll, mine.views["global"][c].nll)
        for c in mine.views["global"]
    )


@pytest.mark.parametrize(
    ("method", "key", "value", "words"),
    [
        ("reptile", "server_lr", 0, "server_lr must be positive and finite, got 0"),
        ("reptile", "server_momentum", 1, r"server_momentum must be in \[0, 1\), got 1"),
        ("reptile", "adapt_steps", -1, "adapt_steps must be at least 0, got -1"),
        ("maml", "inner_lr", "inf", "inner_lr must be positive and finite, got inf"),
        ("maml", "inner_steps", 0, "inner_steps must be at least 1, got 0"),
        ("perfedavg", "hf_delta", -1, "hf_delta must be positive and finite, got -1"),
    ],
)
def test_settings_are_checked(method, key, value, words):
    with pytest.raises(ConfigError, match=words):
        small(method, **{key: value})


def test_momentum_and_rate_agree_between_engines():
    settings = {
        "dtype": "float64",
        "optimizer": "sgd",
        "server_lr": 0.7,
        "server_momentum": 0.5,
        "rounds": 3,
        "keep": 0.15,
        "new_clients": 0,
    }
    loop, fused = (
        execute(small_prepared("reptile", engine, **settings)) for engine in ("loop", "fused")
    )
    for name, value in loop.server_state.velocity.items():
        torch.testing.assert_close(fused.server_state.velocity[name], value, rtol=1e-8, atol=1e-11)
