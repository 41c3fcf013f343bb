"""The sampler of the linear hierarchy against integrals on grids."""

from __future__ import annotations

import numpy as np
import pytest

from bayflower.data import ClientData, Federation
from bayflower.natural import exact
from bayflower.tasks.classes import Classification
from bayflower.tasks.numbers import Gaussian
from bayflower.tasks.survival import Hazards

NOTHING = np.zeros((1, 0))  # a sample without inputs: the intercept is all there is


@pytest.fixture(autouse=True)
def many_draws(monkeypatch):
    monkeypatch.setattr(exact, "DRAWS", 1200)


def federation(targets, new=(), classes=1):
    made = [
        ClientData(i, np.zeros((len(y), 0), np.float32), np.asarray(y), NOTHING, np.asarray(y[:1]))
        for i, y in enumerate((*targets, *new))
    ]
    old = len(targets)
    return Federation(tuple(made[:old]), tuple(made[old:]), classes, (0,), "", {}, "")


@pytest.mark.parametrize("tilt", [0.0, 0.7, -4.0])
def test_polya_gamma_variables_have_their_laplace_transform(tilt):
    draws = exact.polya_gamma(np.random.default_rng(0), np.full(40_000, tilt))
    for t in (0.5, 2.0, 8.0):
        truth = np.cosh(tilt / 2) / np.cosh(np.sqrt((tilt**2 / 2 + t) / 2))
        assert np.exp(-t * draws).mean() == pytest.approx(truth, abs=0.006)


def test_numbers_have_the_moments_of_the_posterior_on_a_grid():
    draw = np.random.default_rng(1)
    targets = [draw.normal(mean, 1.0, size) for mean, size in ((-1, 2), (0, 5), (2, 9), (1, 3))]
    there = federation(targets, new=[draw.normal(1.5, 1.0, 2)])
    old, new = exact.posterior(there, Gaussian(), 0)
    y = np.concatenate(targets)
    location, scale = y.mean(), y.std()
    z, owner = (y - location) / scale, np.repeat(np.arange(4), [len(t) for t in targets])
    same = (owner[:, None] == owner[None]).astype(float)
    extra = (there.new_clients[0].y_train - location) / scale
    weights, means, variances = [], [], []
    for log_v in np.linspace(-7, 5, 49):
        for log_s in np.linspace(-3, 3, 49):
            v, s = np.exp(log_v), np.exp(log_s)
            cover = s * np.eye(len(z)) + v * same + exact.WIDE**2
            logdet = np.linalg.slogdet(cover)[1]
            inverse = np.linalg.inv(cover)
            # densities in log v and log s²: of the inverse χ², and flat
            prior = -0.5 * log_v - exact.START**2 / (2 * v)
            weights.append(-0.5 * (logdet + z @ inverse @ z) + prior)
            # θ of each training client, and of a new one from its own samples given γ's posterior
            own = v * (owner[None] == np.arange(4)[:, None]) + exact.WIDE**2
            mean = own @ inverse @ z
            left = v + exact.WIDE**2 - np.einsum("cn,nm,cm->c", own, inverse, own)
            toward = np.full((1, len(z)), exact.WIDE**2)
            gamma = (toward @ inverse @ z)[0]
            spread = exact.WIDE**2 - (toward @ inverse @ toward.T)[0, 0]
            # of a new client: its samples move its θ, not γ
            gain = 1 / (len(extra) / s + 1 / v)
            first = gain * (extra.sum() / s + gamma / v)
            means.append([*mean, first])
            variances.append([*(left + s), gain + (gain / v) ** 2 * spread + s])
    p = np.exp(np.array(weights) - max(weights))
    p /= p.sum()
    mean = p @ np.array(means)
    variance = p @ (np.array(variances) + np.square(means)) - mean**2
    for place, said in enumerate((*old, *new)):
        found = said(NOTHING).value[0]
        assert found[0] == pytest.approx(location + scale * mean[place], abs=0.08)
        assert found[1] == pytest.approx(scale**2 * variance[place], rel=0.15)


def test_two_classes_have_the_probabilities_of_the_posterior_on_a_grid(monkeypatch):
    monkeypatch.setattr(exact, "DRAWS", 6000)  # three clients: the prior moves slowly
    targets = [np.array([1, 1, 1]), np.array([0, 1, 0, 0, 0]), np.array([1, 0])]
    old, _ = exact.posterior(federation(targets, classes=2), Classification(2), 0)
    theta = np.linspace(-12, 12, 601)
    hit = 1 / (1 + np.exp(-theta))
    total, found = 0.0, np.zeros(3)
    for gamma in np.linspace(-9, 9, 61):
        for log_v in np.linspace(-6, 6, 41):
            v = np.exp(log_v)
            own = np.exp(-np.square(theta - gamma) / (2 * v)) / np.sqrt(v)
            own = own / own.sum() if v < 0.01 else own * (theta[1] - theta[0]) / np.sqrt(2 * np.pi)
            each = [own * hit ** y.sum() * (1 - hit) ** (len(y) - y.sum()) for y in targets]
            masses = np.array([one.sum() for one in each])
            prior = np.exp(-(gamma**2) / (2 * exact.WIDE**2) - exact.START**2 / (2 * v)) / v**0.5
            weight = prior * masses.prod()
            total += weight
            found += weight * np.array([(one * hit).sum() for one in each]) / masses
    for place, said in enumerate(old):
        assert said(NOTHING).value[0, 1] == pytest.approx(found[place] / total, abs=0.03)


def test_three_classes_given_the_prior_have_the_probabilities_of_a_grid(monkeypatch):
    monkeypatch.setattr(exact, "drawn_prior", lambda draw, theta, prior: prior)
    targets = [np.array([2, 2, 1]), np.array([0, 0, 0, 1])]
    old, _ = exact.posterior(federation(targets, classes=3), Classification(3), 0)
    a, b = np.meshgrid(np.linspace(-4, 4, 161), np.linspace(-4, 4, 161), indexing="ij")
    full = np.stack([np.zeros_like(a), a, b])
    probs = np.exp(full) / np.exp(full).sum(0)
    prior = np.exp(-(a**2 + b**2) / (2 * exact.START**2))
    for said, y in zip(old, targets, strict=True):
        density = prior * np.prod([probs[k] for k in y], 0)
        truth = (density * probs).sum((1, 2)) / density.sum()
        assert said(NOTHING).value[0] == pytest.approx(truth, abs=0.02)


def test_times_are_hazards_among_those_at_risk(monkeypatch):
    monkeypatch.setattr(exact, "drawn_prior", lambda draw, theta, prior: prior)
    seen = np.array([[50.0, 1], [150.0, 1], [90.0, 0], [500.0, 0], [400.0, 1]])
    there = federation([seen, seen[:2]])
    old, _ = exact.posterior(there, Hazards((100.0, 300.0)), 0)
    theta = np.linspace(-4, 4, 801)
    hit = 1 / (1 + np.exp(-theta))
    prior = np.exp(-(theta**2) / (2 * exact.START**2))
    stays = []
    # (events, survivors) of both intervals: one lost at 90 is at risk in neither, for it did not
    # complete the first one
    for events, survivors in ((1, 3), (1, 2)):
        density = prior * hit**events * (1 - hit) ** survivors
        stays.append((density * (1 - hit)).sum() / density.sum())
    truth = np.cumprod(stays)
    assert old[0](NOTHING).value[0] == pytest.approx(truth, abs=0.02)


def test_slopes_have_a_prior_of_their_own(monkeypatch):
    """One input and the intercept: means and variances at a new point, on a grid of three."""
    monkeypatch.setattr(exact, "DRAWS", 4000)
    draw = np.random.default_rng(3)
    sizes = (3, 6, 2)
    owner = np.repeat(np.arange(3), sizes)
    x = 0.2 * draw.normal(size=len(owner)).astype(np.float32)
    y = np.array([9.0, 7.0, 11.0])[owner] * x + 0.5 * draw.normal(size=len(owner))
    at = np.array([[0.6]])
    clients = tuple(
        ClientData(i, x[owner == i][:, None], y[owner == i], at, y[:1]) for i in range(3)
    )
    there = Federation(clients, (), 1, (1,), "", {}, "")
    old, _ = exact.posterior(there, Gaussian(), 0)
    location, scale = y.mean(), y.std()
    z = (y - location) / scale
    who = np.r_[owner, 0, 1, 2]  # the last places are the new point at each client
    same, known = who[:, None] == who[None], slice(0, len(z))
    columns = (np.r_[x, np.full(3, at[0, 0])].astype(float), np.ones(len(who)))
    wide = (exact.SLOPE, exact.WIDE)
    weights, means, variances = [], [], []
    for log_v in np.stack(np.meshgrid(*[np.linspace(-6, 7, 23)] * 2), -1).reshape(-1, 2):
        cover = sum(
            np.outer(column, column) * (np.exp(one) * same + width**2)
            for column, one, width in zip(columns, log_v, wide, strict=True)
        )
        prior = sum(-0.5 * one - exact.START**2 / (2 * np.exp(one)) for one in log_v)
        for log_s in np.linspace(-6, 2, 23):
            s = np.exp(log_s)
            inner = cover[known, known] + s * np.eye(len(z))
            gain = np.linalg.solve(inner, cover[known, len(z) :])
            logdet = np.linalg.slogdet(inner)[1]
            weights.append(prior - 0.5 * (logdet + z @ np.linalg.solve(inner, z)))
            means.append(gain.T @ z)
            left = cover[len(z) :, len(z) :] - gain.T @ cover[known, len(z) :]
            variances.append(left.diagonal() + s)
    p = np.exp(np.array(weights) - max(weights))
    p /= p.sum()
    mean = p @ np.array(means)
    variance = p @ (np.array(variances) + np.square(means)) - mean**2
    for place, said in enumerate(old):
        found = said(at).value[0]
        assert found[0] == pytest.approx(location + scale * mean[place], abs=0.08)
        assert found[1] == pytest.approx(scale**2 * variance[place], rel=0.15)
