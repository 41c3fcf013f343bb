"""FedNP: a round in plain torch, golden totals, expectation propagation against brute force, and
the ledger.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small
from torch import nn

from bayflower.clients.fednp import Client
from bayflower.config import Training
from bayflower.contract import Survey
from bayflower.errors import ConfigError
from bayflower.maths import npn
from bayflower.maths.exact import Total
from bayflower.maths.gaussian import Diagonal
from bayflower.networks.model import Anatomy, Batch, Model
from bayflower.networks.papers import build
from bayflower.strategies import fednp
from bayflower.strategies.fednp import Config, Server, Update

F64 = torch.float64
FLAT = Anatomy(("head.weight",), (), frozenset(), frozenset({"head.weight"}))


def server(latent: int = 1, **config) -> Server:
    return Server(Config(latent=latent, **config), FLAT)


def fresh(half: Server):
    return half.init({"head.weight": torch.zeros(2, 3, dtype=F64)}, {}, ())


def update(state, change: tuple[float, float], turns: int, count: int = 1) -> Update:
    size = state.total.precision.shape
    change = Diagonal(*(torch.full(size, value, dtype=F64) for value in change))
    return Update(
        torch.tensor(count), state.params, state.buffers, state.extra, change, torch.tensor(turns)
    )


def round_of(half: Server, state, updates: dict[int, Update]):
    total = Total()
    for client, one in updates.items():
        assert half.check(state, client, one) is None
        total.add(half.statistic(state, client, one))
    return half.finalise(state, total.value())


def test_golden_totals_and_cavities(golden):
    """[eq. 4] and [eq. 8], with the prior kept (E-N6)."""
    case = golden["fednp_aggregate"]
    half = server()
    state = fresh(half)
    state = round_of(
        half,
        state,
        {
            k: update(state, tuple(pair), 0)
            for k, pair in enumerate(case["factors_precision_shift"])
        },
    )
    assert [float(value) for value in state.total] == pytest.approx(case["total"], rel=2e-5)
    assert [float(state.total.mean()), float(state.total.variance())] == pytest.approx(
        case["global_mean_var"], rel=2e-5
    )
    client = Client(Config(latent=1), Training(), build("mlp", (4,), 2))
    for k, want in enumerate(case["cavity_mean_var"]):
        own = client.init({"w": torch.zeros(1)}, {})._replace(
            factor=fednp.entry(state.ledger, k), turns=torch.tensor(1)
        )
        cavity = client.begin(
            own, half.broadcast(state, k), Batch(*(torch.zeros(1),) * 3)
        ).memo.cavity
        assert [float(cavity.mean()), float(cavity.variance())] == pytest.approx(want, rel=2e-5)


# -- expectation propagation ---------------------------------------------------------------------
def brute_force(f: list[float]) -> tuple[float, float]:
    """The oracle: mean and variance of N(0, 1) Π σ(f_k z), by a fine sum."""
    z = np.linspace(-12, 12, 200_001)
    log = -z * z / 2 - sum(np.logaddexp(0, -one * z) for one in f)
    weight = np.exp(log - log.max())
    mean = (weight * z).sum() / weight.sum()
    return float(mean), float((weight * (z - mean) ** 2).sum() / weight.sum())


def propagate(
    f: list[float],
    rounds: int,
    damping: float = 1.0,
    share: float = 1.0,
    moments: str = "trapezoid",
    start=None,
    seed: int = 0,
):
    """Return the server's state and the clients' after EP with fixed f, through the halves' own
    begin, finish, statistic and finalise.
    """
    half = server(damping=damping, moments=moments)
    client = Client(half.config, Training(), build("mlp", (4,), 2))
    state, states = start or (
        fresh(half),
        {k: client.init({"w": torch.zeros(1)}, {}) for k in range(len(f))},
    )
    states, rng, data = (
        dict(states),
        np.random.default_rng(seed),
        Batch(*(torch.ones(1, dtype=F64),) * 3),
    )
    for _ in range(rounds):
        total = Total()
        for k in states:
            if share < 1 and rng.random() > share:
                continue
            work = client.begin(states[k], half.broadcast(state, k), data)
            work = work._replace(survey=Survey({"f": torch.tensor([f[k]], dtype=F64)}, {}))
            states[k], sent = client.finish(states[k], work, data)
            assert half.check(state, k, sent) is None
            total.add(half.statistic(state, k, sent))
        state = half.finalise(state, total.value())
    return state, states


@functools.cache
def fixed_point(f: tuple[float, ...]):
    """Return the server's state at the fixed point, by undamped steps of all clients."""
    return propagate(list(f), rounds=40)[0]


SAME, MIXED = [1.0] * 10, [1.5, -0.7, 0.4, 2.0, -1.2]


@pytest.mark.parametrize("f", [MIXED, [0.0, 1.0, -3.0], pytest.param(SAME, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("moments", "accuracy"),
    [("trapezoid", 0.012), ("logz", 0.07), ("probit", 0.06), ("thm2", 0.25)],
)
def test_ep_converges_to_the_posterior(f, moments, accuracy):
    """The fixed point is the posterior by brute force, up to EP's own error (0.01 here) and that of
    the back-end.
    """
    state, _ = propagate(f, rounds=20, damping=0.5, moments=moments)
    mean, var = brute_force(f)
    assert float(state.total.mean()) == pytest.approx(mean, abs=accuracy)
    assert float(state.total.variance()) == pytest.approx(var, abs=accuracy)


def test_one_client_is_exact():
    state, _ = propagate([1.7], rounds=1)
    assert [float(state.total.mean()), float(state.total.variance())] == pytest.approx(
        brute_force([1.7]), rel=1e-9
    )


def test_the_prior_is_kept():
    """E-N6: ten clients with f = 1 converge to 1.711/0.429 (and
    without the prior would run away).
    """
    state, _ = propagate(SAME, rounds=30)
    assert [float(state.total.mean()), float(state.total.variance())] == pytest.approx(
        [1.711, 0.429], abs=1e-3
    )


@pytest.mark.parametrize(
    ("f", "damping", "share", "rounds"),
    [
        pytest.param(SAME, 0.5, 1.0, 60, marks=pytest.mark.slow),
        pytest.param(MIXED, 0.5, 1.0, 45, marks=pytest.mark.slow),
        (MIXED, 1.0, 0.5, 80),
        pytest.param(SAME, 1.0, 0.5, 80, marks=pytest.mark.slow),
        pytest.param(SAME, 0.3, 0.4, 220, marks=pytest.mark.slow),
        pytest.param(MIXED, 0.3, 0.4, 220, marks=pytest.mark.slow),
    ],
)
def test_damping_and_absence_do_not_change_the_fixed_point(f, damping, share, rounds):
    want = fixed_point(tuple(f))
    got, _ = propagate(f, rounds=rounds, damping=damping, share=share)
    for a, b in zip(got.total, want.total, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_totals_are_the_sum_of_the_clients_factors():
    """Under partial participation and damping, the ledger's lines are the clients' factors, to the
    bit [eq. 4].
    """
    state, states = propagate(MIXED, rounds=7, damping=0.37, share=0.6)
    for k, one in states.items():
        if int(one.turns):
            assert_same_bits(fednp.entry(state.ledger, k), one.factor)
            assert int(state.ledger[f"{k}/turns"]) == int(one.turns)


# -- the ledger ----------------------------------------------------------------------------------
def test_a_client_that_left_is_subtracted():
    half = server()
    state, states = propagate(MIXED, rounds=40, damping=0.8)
    left = half.forget(state, 3)
    want = [
        1 + sum(states[k].factor.precision for k in (0, 1, 2, 4)),
        sum(states[k].factor.shift for k in (0, 1, 2, 4)),
    ]
    for a, b in zip(left.total, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    state, _ = propagate(
        MIXED, rounds=40, damping=0.8, start=(left, {k: one for k, one in states.items() if k != 3})
    )
    alone = fixed_point(tuple(one for k, one in enumerate(MIXED) if k != 3))
    for a, b in zip(state.total, alone.total, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert_same_bits(half.forget(left, 3), left)


def test_a_lost_factor_is_subtracted():
    """A client whose state was lost says turns = 0: what the ledger has of it goes, what it sends
    comes, and EP ends where it was.
    """
    state, states = propagate(MIXED, rounds=40, damping=0.8)
    want = state.total
    client = Client(Config(latent=1), Training(), build("mlp", (4,), 2))
    states[2] = client.init({"w": torch.zeros(1)}, {})
    once, states = propagate(MIXED, rounds=1, damping=0.8, start=(state, states))
    assert_same_bits(fednp.entry(once.ledger, 2), states[2].factor)
    assert int(once.epoch) == 0
    state, _ = propagate(MIXED, rounds=40, damping=0.8, start=(once, states))
    for a, b in zip(state.total, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_factor_the_ledger_does_not_know_is_refused_and_starts_anew():
    """A client says it changed a factor that the server never saw. It is refused; without its
    factor it comes to the same end.
    """
    state, states = propagate(MIXED, rounds=5)
    want = fixed_point(tuple(MIXED))
    half = server()
    client = Client(half.config, Training(), build("mlp", (4,), 2))
    lost = states[1]._replace(
        turns=states[1].turns + 1, factor=Diagonal(*(2 * value for value in states[1].factor))
    )
    data = Batch(*(torch.ones(1, dtype=F64),) * 3)
    work = client.begin(lost, half.broadcast(state, 1), data)._replace(
        survey=Survey({"f": torch.tensor([MIXED[1]], dtype=F64)}, {})
    )
    _, sent = client.finish(lost, work, data)
    assert "the ledger does not know" in half.check(state, 1, sent)
    states[1] = client.rejoined(lost)
    final, _ = propagate(MIXED, rounds=40, start=(half.forget(state, 1), states))
    assert int(final.epoch) == 0
    for a, b in zip(final.total, want.total, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_bad_replies_are_refused():
    half = server()
    state = fresh(half)
    assert half.check(state, 0, update(state, (0.1, -3.0), 0)) is None
    assert "num_examples" in half.check(state, 0, update(state, (0.1, 0.0), 0, count=0))
    assert "negative (E-N5)" in half.check(state, 0, update(state, (-0.1, 0.0), 0))
    assert "turns" in half.check(state, 0, update(state, (0.1, 0.0), -2))
    assert half.check(state, 0, update(state, (0.1, 0.0), -1)) is None
    state = round_of(half, state, {0: update(state, (0.5, 0.2), 0)})
    assert half.check(state, 0, update(state, (-0.4, 0.0), 1)) is None
    assert "negative" in half.check(state, 0, update(state, (-0.6, 0.0), 1))


# -- client --------------------------------------------------------------------------------------
def test_a_factor_that_is_not_finite_leaves_the_old_one():
    half = server()
    client = Client(half.config, Training(), build("mlp", (4,), 2))
    state, states = propagate([1.0], rounds=2)
    data = Batch(*(torch.ones(1, dtype=F64),) * 3)
    work = client.begin(states[0], half.broadcast(state, 0), data)._replace(
        survey=Survey({"f": torch.tensor([math.nan], dtype=F64)}, {})
    )
    after, sent = client.finish(states[0], work, data)
    assert_same_bits(after.factor, states[0].factor)
    assert float(sent.change.precision) == 0.0


@pytest.mark.parametrize("start", ["classifier", "zero"])
def test_what_the_network_predicts_before_the_first_round(start):
    """With npn_start=classifier it predicts the initial classifier, so KL_theta pulls nowhere; with
    zero it is almost 0 and pulls by np_weight/epsilon (E-N16).
    """
    model = build("mlp", (4,), 3)
    params, buffers = model.initial(0, dtype=F64)
    half = Server(Config(npn_start=start), model.anatomy)
    state = half.init(params, buffers, ())
    layers = {
        name.removeprefix("fednp.npn."): value
        for name, value in state.extra.items()
        if name.startswith("fednp.npn.")
    }
    z = npn.Gauss(torch.zeros(10, dtype=F64), torch.ones(10, dtype=F64))
    weight = params["head.weight"].clone().requires_grad_()
    kl = npn.kl_theta(npn.forward(layers, z), weight.reshape(-1), half.config.epsilon)
    (pull,) = torch.autograd.grad(kl, weight)
    if start == "classifier":
        torch.testing.assert_close(pull, torch.zeros_like(pull), rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(pull, weight.detach() / 0.1, rtol=0, atol=0.2)
        assert float(pull.abs().max()) > 1


def test_a_head_of_two_layers_is_refused():
    model = Model(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))),
        2,
        head="1",
    )
    with pytest.raises(ConfigError, match="FedNP needs a head with one weight matrix, got 2"):
        Server(Config(), model.anatomy).init(*model.initial(0), ())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("damping", 1.4, r"damping must be in \(0, 1\], got 1.4; 1 means no damping"),
        ("latent", 0, "latent must be at least 1, got 0"),
        (
            "moments",
            "exact",
            "moments must be one of trapezoid, quadrature, thm2, logz, probit, got 'exact'",
        ),
        ("epsilon", 0, "epsilon must be positive"),
        ("np_weight", -1, "np_weight must be finite and not negative"),
        ("site", "matrix", "site must be one of vector, scalar"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words):
        small("fednp", **{key: value})
