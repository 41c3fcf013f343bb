"""FedIvon against quadrature, the pooled posterior of a conjugate model, and plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds
from torch import nn
from torch.func import functional_call

from bayflower.clients.fedivon import curved
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Model
from bayflower.strategies.fedivon import Config, Server, State, Update, spread

W = "0.weight"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def test_the_curvature_of_draws_is_the_expected_second_derivative():
    """[eq. 1]: E ĝ ε/sigma = E L'' by quadrature, for a loss that is no parabola."""
    nodes = np.polynomial.hermite_e.hermegauss(64)
    points, weights = doubles(nodes[0]), doubles(nodes[1]) / np.sqrt(2 * np.pi)
    mu, sigma = 0.3, 0.8
    theta = (mu + sigma * points).requires_grad_()
    loss = nn.functional.softplus(-1.7 * theta) + 0.1 * theta**4
    (slope,) = torch.autograd.grad(loss.sum(), theta, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), theta)
    got = (weights * slope.detach() * points / sigma).sum()
    torch.testing.assert_close(got, (weights * second).sum(), rtol=1e-7, atol=1e-9)


def test_the_curvature_settles_at_the_loss_and_stays_positive():
    """[eq. 2]: a constant ĥ is where h settles; no draw, however negative, makes h + delta so."""
    h = doubles([0.1])
    for _ in range(4000):
        h = curved(h, doubles([2.5]), 0.99, 1e-3)
    torch.testing.assert_close(h, doubles([2.5]))
    draws = 50 * torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double()
    every = doubles([0.1])
    for some in draws.split(1000):
        every = curved(every.expand(1000), some, 0.9, 1e-3)
        assert float(every.min()) + 1e-3 > 0


def test_one_round_on_a_conjugate_model_is_the_pooled_posterior():
    """[eq. 4]: clients with their own optimum and curvature, n samples each: the mean of the pooled
    parabola, and its precision.
    """
    model = Model(lambda: nn.Sequential(nn.Linear(3, 1, bias=False)), 2)
    server = Server(Config(ivon_decay=1e-9), model.anatomy)
    draw = torch.Generator().manual_seed(1)
    state = State(
        {W: torch.zeros(1, 3).double()}, {}, {W: torch.ones(1, 3).double()}, torch.tensor(0)
    )
    total, precision, shift = Total(), 0.0, 0.0
    for n in (20, 7, 55):
        x = torch.randn(n, 3, generator=draw).double()
        y = torch.randn(n, 3, generator=draw).double()
        mean, hess = (x * y).sum(0) / x.square().sum(0), x.square().mean(0)
        update = Update(torch.tensor(n), {W: mean[None]}, {}, {W: hess[None]})
        assert server.check(state, 0, update) is None
        total.add(server.statistic(state, 0, update))
        precision, shift = precision + x.square().sum(0), shift + (x * y).sum(0)
    after = server.finalise(state, total.value())
    torch.testing.assert_close(after.params[W][0], shift / precision, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        spread(after, Config(ivon_decay=1e-9, ivon_temperature=1.0))[W][0],
        precision.rsqrt(),
        rtol=1e-7,
        atol=1e-8,
    )
    wrong = update._replace(hess={W: doubles([[1.0, -1.0, 1.0]])})
    assert "must be above −ivon_decay" in server.check(state, 0, wrong)


def test_two_rounds_equal_plain_torch():
    """[eq. 1] to [eq. 3] by autograd with the engine's noise; [eq. 2] and [eq. 4] written out."""
    b1, b2, delta = 0.8, 0.95, 0.02
    case = both(
        "fedivon",
        ivon_momentum=b1,
        ivon_memory=b2,
        ivon_decay=delta,
        ivon_start=0.5,
        ivon_temperature=0.5,
    )
    half = case.prepared.halves.client
    module, (phase,) = half.model.factory().double(), half.phases("train")
    names = list(case.start)
    mean = case.start
    curve = {n: torch.full_like(v, 0.5) for n, v in mean.items()}
    for round, (state, _, updates) in enumerate(half_rounds(case, 2), start=1):
        found = {}
        for k in case.clients:
            samples, keys = case.samples[k], {"seed": 0, "client": k, "round": round}
            mu, h, n = dict(mean), dict(curve), len(samples.y)
            g = {name: torch.zeros_like(v) for name, v in mu.items()}
            plan = batches.plan(n, phase, **keys, purpose="train", coupled=False)
            for step, (rows,) in enumerate(plan):
                eps = batches.noise(
                    half.noise("local", 16),
                    **keys,
                    stage="train/local",
                    step=step,
                    dtype=torch.float64,
                )
                sigma = {m: (2 * n * (h[m] + delta)) ** -0.5 for m in names}
                theta = {m: (mu[m] + sigma[m] * eps[m]).requires_grad_() for m in names}
                out = functional_call(module, theta, (samples.x[rows],))
                loss = nn.functional.cross_entropy(out, samples.y[rows])
                grads = dict(
                    zip(names, torch.autograd.grad(loss, list(theta.values())), strict=True)
                )
                for m in names:
                    new = grads[m] * (theta[m].detach() - mu[m]) / sigma[m] ** 2
                    g[m] = b1 * g[m] + (1 - b1) * grads[m]
                    far = (h[m] - new) ** 2 / (h[m] + delta)
                    h[m] = b2 * h[m] + (1 - b2) * new + 0.5 * (1 - b2) ** 2 * far
                    way = (g[m] / (1 - b1 ** (step + 1)) + delta * mu[m]) / (h[m] + delta)
                    mu[m] = mu[m] - LR * way
            found[k] = (mu, h, n)
            assert_equal(updates[k].params, mu, rtol=1e-6, atol=1e-9)
            assert_equal(updates[k].hess, h, rtol=1e-6, atol=1e-9)
        total = sum(n for _, _, n in found.values())
        curve = {m: sum(n * h[m] for _, h, n in found.values()) / total for m in names}
        mean = {
            m: sum(n * (h[m] + delta) * mu[m] for mu, h, n in found.values())
            / sum(n * (h[m] + delta) for _, h, n in found.values())
            for m in names
        }
        assert_equal(state.params, mean, rtol=1e-6, atol=1e-9)
        assert_equal(state.hess, curve, rtol=1e-6, atol=1e-9)
    std = {m: (2 * total * (curve[m] + delta)) ** -0.5 for m in names}
    own = half.posterior(state.params, state, None, None)["own"]
    assert_equal(own.tensors, std, rtol=1e-6, atol=1e-9)
    draws = torch.Generator().manual_seed(0)
    noise = {
        m: torch.randn(s, generator=draws).double() for m, s in half.noise("predict", 9).items()
    }
    x, each = samples.x, []
    for draw in range(10):
        drawn = {m: mean[m] + std[m] * noise[m][draw] for m in names}
        each.append(functional_call(module, drawn, (x,)).softmax(1))
    got = half.predict("sampled", half.init(case.start, {}), state, x, noise)
    torch.testing.assert_close(got, torch.stack(each).mean(0), rtol=1e-6, atol=1e-8)


def test_settings_are_checked():
    for key, value in (("ivon_start", 0.0), ("ivon_memory", 1.0), ("predict_samples", -1)):
        with pytest.raises(ConfigError, match=f"{key} must"):
            small("fedivon", **{key: value})
