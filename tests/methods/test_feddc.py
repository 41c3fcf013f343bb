"""FedDC against three rounds in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small, small_prepared
from plainsteps import LR, assert_equal, both, half_rounds, mean, numbers, plain_sgd, zeros

from bayflower.clients.feddc import Memo
from bayflower.contract import Work
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.rounds import solo

ALPHA = 0.3


def test_three_rounds_equal_plain_torch():
    """[eq. 3], [eq. 5], [eq. 6], [eq. 7] with loops; the paper's
    1/(K eta) where the paper has it.
    """
    case = both("feddc", dc_alpha=ALPHA)
    w, pace = case.start, zeros(case.start)
    drifts, paces = ({client: zeros(case.start) for client in case.clients} for _ in range(2))
    for round, (state, states, updates) in enumerate(half_rounds(case, 3), start=1):
        sent, new = {}, {}
        for client in case.clients:

            def extra(module, x, h=drifts[client], g=paces[client], w=w, pace=pace):
                named = list(module.named_parameters())
                return sum(
                    ALPHA / 2 * ((h[n] - (w[n] - v)) ** 2).sum() + (v * (g[n] - pace[n])).sum()
                    for n, v in named
                )

            module, steps = plain_sgd(case, w, client, round, extra)
            theta = numbers(module)
            drifts[client] = {n: v + theta[n] - w[n] for n, v in drifts[client].items()}
            new[client] = {n: (theta[n] - w[n]) / (steps * LR) for n in theta}
            sent[client] = {n: theta[n] + drifts[client][n] for n in theta}
            assert_equal(updates[client].params, sent[client])
            assert_equal(updates[client].pace, new[client])
            assert_equal(states[client].drift, drifts[client])
        w, pace, paces = mean(case, sent), mean(case, new), new
        assert_equal(state.params, w)
        assert_equal(state.pace, pace)


@pytest.mark.parametrize(
    ("optimizer", "when", "there"),
    [
        ("adam", "sgd", False),
        ("rmsprop", "sgd", False),
        ("sgd", "sgd", True),
        ("adam", "always", True),
    ],
)
def test_the_last_term_is_there_where_a_change_is_a_gradient(optimizer, when, there):
    """The loss with and without g_i − g differs by Σ theta (g_i − g), summed number by number, or
    not at all.
    """
    prepared = small_prepared("feddc", optimizer=optimizer, dc_pace=when, dtype="float64")
    _, half, _, (params, buffers) = prepared.halves
    data = prepared.federation.clients[0]
    batch = solo.samples(data, torch.device("cpu"), torch.float64).train
    generator = torch.Generator().manual_seed(0)
    apart = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in params.items()
    }
    nothing = {name: torch.zeros_like(value) for name, value in params.items()}
    (phase,) = half.phases("train")
    losses = [
        float(half.loss(params, Work(params, buffers, memo), batch, {}, phase)[0])
        for memo in (Memo(params, nothing, apart), Memo(params, nothing, nothing))
    ]
    want = sum(
        a * b
        for name in params
        for a, b in zip(
            params[name].flatten().tolist(), apart[name].flatten().tolist(), strict=True
        )
    )
    assert losses[0] - losses[1] == pytest.approx(want if there else 0, abs=1e-10)


@pytest.mark.parametrize("model", ["mlp", "mlp-bn"])
@pytest.mark.parametrize("local_steps", [0, 7])
def test_steps_are_those_of_the_plan(model, local_steps):
    half = small_prepared("feddc", model=model, local_steps=local_steps).halves.client
    sizes = np.arange(2, 70)
    want = [
        batches.num_steps(int(size), half.phases("train")[0], half.model.coupled) for size in sizes
    ]
    assert half.steps(torch.tensor(sizes)).tolist() == want


def test_alpha_must_not_be_negative():
    with pytest.raises(ConfigError, match="dc_alpha must be finite and not negative, got -1"):
        small("feddc", dc_alpha=-1)
