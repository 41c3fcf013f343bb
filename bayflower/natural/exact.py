"""The posterior of a linear hierarchy, with all samples in one place: what a federation can at best
hope for. Gibbs sampling, exact but for its finite number of draws.

    θ_c ~ N(γ, diag(v))     weights of client c, intercept included (its last input is 1)
    γ_j ~ N(0, SLOPE²), of the intercept N(0, WIDE²)
    v_j ~ inverse χ² with one degree of freedom around START²
    numbers    z = xᵀθ_c + noise,  z standardised; noise² with density 1/noise²
    classes    softmax of (0, xᵀθ_c1, …), by Pólya–Gamma variables (Polson, Scott and Windle 2013):
               given ω ~ PG(1, η − o), a class against all others, whose log-sum is o, is a
               regression with κ = [y = j] − ½:  precision Xᵀ diag(ω) X,  shift Xᵀ (κ + ω o)
    times      the hazard of every interval is a class of its own among those at risk

New clients' weights are drawn with γ and v of the training clients; they do not change these.
A Pólya–Gamma variable is a sum of TERMS exponential ones and the mean of all further ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from ..data import ClientData, Federation
from ..tasks import Task
from ..tasks.survival import Hazards
from .forecast import Forecast, Said

BURN, DRAWS = 200, 400
WIDE, SLOPE, START = 5.0, 1.0, 0.5
TERMS = 24


class Stack(NamedTuple):
    """Training samples of all clients, padded with rows of zeros."""

    x: np.ndarray  # (clients, rows, d)
    real: np.ndarray  # (clients, rows) bool
    y: np.ndarray  # (clients, rows)
    num_old: int  # clients that γ and v are learned from


class Drawn(NamedTuple):
    """The state of the prior."""

    gamma: np.ndarray  # (d,)
    variance: np.ndarray  # (d,)


def stacked(clients: Sequence[ClientData], targets: Sequence[np.ndarray], num_old: int) -> Stack:
    """Return the clients' samples, an input 1 added."""
    most = max(1, *(len(one) for one in targets))
    wide = clients[0].x_train.shape[1] + 1
    x, real = np.zeros((len(clients), most, wide)), np.zeros((len(clients), most), bool)
    y = np.zeros((len(clients), most))
    for place, (one, own) in enumerate(zip(clients, targets, strict=True)):
        x[place, : len(own)] = with_one(one.x_train)
        real[place, : len(own)], y[place, : len(own)] = True, own
    return Stack(x, real, y, num_old)


def with_one(x: np.ndarray) -> np.ndarray:
    """Return inputs in float64 with a last column of ones."""
    return np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], 1)


def moments(gram: np.ndarray, right: np.ndarray, prior: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of every client's weights, given the prior."""
    cover = np.linalg.inv(gram + np.diag(1 / prior.variance))
    return np.einsum("cde,ce->cd", cover, right + prior.gamma / prior.variance), cover


def drawn_weights(draw: Any, mean: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Return a draw of every client's weights."""
    root = np.linalg.cholesky((cover + cover.transpose(0, 2, 1)) / 2)
    return mean + (root @ draw.normal(size=(*mean.shape, 1)))[..., 0]


def drawn_prior(draw: Any, theta: np.ndarray, prior: Drawn) -> Drawn:
    """Return a draw of γ and v from the training clients' weights."""
    count = len(theta)
    wide = np.full(theta.shape[1], SLOPE)
    wide[-1] = WIDE
    precision = count / prior.variance + 1 / wide**2
    mean = theta.sum(0) / prior.variance / precision
    gamma = mean + draw.normal(size=mean.shape) / np.sqrt(precision)
    squares = np.square(theta - gamma).sum(0) + START**2
    return Drawn(gamma, squares / draw.chisquare(count + 1, size=mean.shape))


# -- numbers ---------------------------------------------------------------------------------------
def numbers(data: Stack, draw: Any) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return (means, covariances, noise²) of all clients' weights for every draw of the prior."""
    gram = np.einsum("cnd,cne->cde", data.x, data.x)
    right = np.einsum("cnd,cn->cd", data.x, data.y)
    wide = data.x.shape[2]
    prior, noise = Drawn(np.zeros(wide), np.full(wide, START**2)), 1.0
    old, number = slice(0, data.num_old), int(data.real[: data.num_old].sum())
    found = []
    for step in range(BURN + DRAWS):
        mean, cover = moments(gram / noise, right / noise, prior)
        if step >= BURN:
            found.append((mean, cover, noise))
        theta = drawn_weights(draw, mean[old], cover[old])
        prior = drawn_prior(draw, theta, prior)
        left = (data.y[old] - np.einsum("cnd,cd->cn", data.x[old], theta)) * data.real[old]
        noise = float(np.square(left).sum() / draw.chisquare(number))
    return found


def forecast_numbers(
    draws: list[tuple[np.ndarray, np.ndarray, float]], client: int, location: float, scale: float
) -> Forecast:
    """Return the Gaussian with the moments of the mixture over draws."""
    means = np.stack([mean[client] for mean, _, _ in draws])  # (draws, d)
    cover = np.mean([one[client] for _, one, _ in draws], 0)
    noise = float(np.mean([one for _, _, one in draws]))

    def say(x: np.ndarray) -> Said:
        wide = with_one(x)
        each = wide @ means.T
        variance = each.var(1) + np.einsum("nd,de,ne->n", wide, cover, wide) + noise
        return Said(np.stack([location + scale * each.mean(1), scale**2 * variance], 1))

    return say


# -- classes ---------------------------------------------------------------------------------------
def polya_gamma(draw: Any, tilt: np.ndarray) -> np.ndarray:
    """Return draws of PG(1, tilt): 1/(2π²) Σ_k e_k / ((k − ½)² + tilt²/(4π²)), e_k ~ Exp(1)."""
    place = np.square(np.arange(1, TERMS + 1) - 0.5)
    share = 1 / (2 * np.pi**2 * (place + np.square(tilt)[..., None] / (4 * np.pi**2)))
    small = np.abs(tilt) < 1e-4
    safe = np.where(small, 1.0, tilt)
    mean = np.where(small, 0.25, np.tanh(safe / 2) / (2 * safe))
    rest = (mean - share.sum(-1)).clip(min=0)
    return (share * draw.exponential(size=share.shape)).sum(-1) + rest


def classes(data: Stack, number: int, draw: Any) -> np.ndarray:
    """Return draws of all clients' weights (draws, clients, number − 1, d)."""
    count, _, wide = data.x.shape
    others = number - 1
    priors = [Drawn(np.zeros(wide), np.full(wide, START**2)) for _ in range(others)]
    theta = np.zeros((count, others, wide))
    kept = np.zeros((DRAWS, count, others, wide), np.float32)
    x = data.x
    for step in range(BURN + DRAWS):
        for j in range(others):
            out = np.einsum("cnd,ckd->cnk", x, theta)
            rest = np.concatenate([np.zeros_like(out[..., :1]), np.delete(out, j, 2)], 2)
            top = rest.max(2)
            offset = top + np.log(np.exp(rest - top[..., None]).sum(2))
            weight = np.zeros(data.real.shape)
            weight[data.real] = polya_gamma(draw, (out[..., j] - offset)[data.real])
            gram = (x * weight[..., None]).transpose(0, 2, 1) @ x
            shift = ((data.y == j + 1) - 0.5) * data.real + weight * offset
            right = (x.transpose(0, 2, 1) @ shift[..., None])[..., 0]
            theta[:, j] = drawn_weights(draw, *moments(gram, right, priors[j]))
            priors[j] = drawn_prior(draw, theta[: data.num_old, j], priors[j])
        if step >= BURN:
            kept[step - BURN] = theta
    return kept


def forecast_classes(kept: np.ndarray, client: int) -> Forecast:
    """Return the mean of the softmax over draws."""
    own = kept[:, client].astype(np.float64)  # (draws, others, d)

    def say(x: np.ndarray) -> Said:
        out = np.einsum("nd,skd->snk", with_one(x), own)
        full = np.concatenate([np.zeros_like(out[..., :1]), out], 2)
        some = np.exp(full - full.max(2, keepdims=True))
        return Said((some / some.sum(2, keepdims=True)).mean(0))

    return say


# -- times -----------------------------------------------------------------------------------------
def forecast_times(each: list[np.ndarray], client: int) -> Forecast:
    """Return the mean of the survival function over draws; the intervals are independent."""
    own = [kept[:, client, 0].astype(np.float64) for kept in each]  # (draws, d) an interval

    def say(x: np.ndarray) -> Said:
        wide = with_one(x)
        stays = [expit(-wide @ theta.T).mean(1) for theta in own]
        return Said(np.cumprod(np.stack(stays, 1), 1))

    return say


def times(clients: Sequence[ClientData], edges: np.ndarray, num_old: int, draw: Any) -> Any:
    """Return draws of the weights of every interval's hazard."""
    found = []
    for k, end in enumerate(edges):
        begin = edges[k - 1] if k else 0.0
        some, targets = [], []
        for one in clients:
            time, event = one.y_train[:, 0], one.y_train[:, 1] > 0
            now = (time > begin) & (time <= end) & event
            at_risk = now | (time > end)
            some.append(one._replace(x_train=one.x_train[at_risk]))
            targets.append(now[at_risk].astype(float))
        found.append(classes(stacked(some, targets, num_old), 2, draw))
    return found


def posterior(there: Federation, task: Task, seed: int) -> tuple[list[Forecast], list[Forecast]]:
    """Return the forecasts of training and new clients."""
    every, old = [*there.clients, *there.new_clients], len(there.clients)
    draw = np.random.default_rng([seed, 31])
    if task.classes:
        kept = classes(stacked(every, [one.y_train for one in every], old), there.num_classes, draw)
        found = [forecast_classes(kept, place) for place in range(len(every))]
    elif isinstance(task, Hazards):
        each = times(every, np.array(task.edges), old, draw)
        found = [forecast_times(each, place) for place in range(len(every))]
    else:
        y = np.concatenate([one.y_train for one in there.clients]).astype(float)
        location, scale = float(y.mean()), float(y.std()) or 1.0
        targets = [(one.y_train - location) / scale for one in every]
        draws = numbers(stacked(every, targets, old), draw)
        found = [forecast_numbers(draws, place, location, scale) for place in range(len(every))]
    return found[:old], found[old:]
