"""Moments of a Gaussian tilted by a sigmoid site, and the site's own Gaussian factor: the
arithmetic of expectation propagation.

    paper         here             meaning
    z_{m,-k}      cavity_mean      mean of the cavity N(z)
    z_{s,-k}      cavity_var       its variance
    f_k           f                the site is σ(f z)
    C_m, C_s      m, s             mean and variance of C = f z under the cavity
    E_d           powers           E[σ(C)^d]
    g1, g2        slopes           first and second derivative of log E[σ(C)] in m
    z_m, z_s      Tilted           mean and variance of cavity × site, normalised
    λ_k, η_k      Tilted.site      precision and shift of the Gaussian that stands for the site

    z_m = z_{m,-k} + f z_{s,-k} g1,    z_s = z_{s,-k} + f² z_{s,-k}² g2   (never divides by f, E-N9)
    λ_k = −f² g2 / (1 + f² z_{s,-k} g2),    η_k = (f g1 − f² g2 z_{m,-k}) / (1 + f² z_{s,-k} g2)
                                                            (no difference of large numbers)

Back-ends give g1 and g2:

    trapezoid  the site's average by the trapezoid rule on ±8 standard deviations, 65 nodes: to
               3e-13 for |m| ≤ 3, s ≤ 4
    quadrature the same with as many nodes as asked for (the paper's Quad-FedNP-n)
    thm2       the paper's closed form with corrected constants (E-N1, E-N2, E-N3): E_d ≈ σ(a_d (m +
               b_d) / √(1 + ζ² a_d² s))
    logz       derivatives of log of that form for d = 1 alone
    probit     the site is Φ(ζ f z) instead; then everything is exact in closed form

With σ log-concave of curvature at most ¼, λ_k lies in [0, f²/4] (E-N5), that is g2 in [−1/(4 + s),
0]; approximate back-ends are projected there, exact ones are inside but for rounding. (A probit's
curvature reaches ζ² instead of ¼.) All functions act element by element, run under vmap and can be
differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .gaussian import Diagonal

Backend = Literal["trapezoid", "quadrature", "thm2", "logz", "probit"]
# of cavity mean, cavity variance, f
Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ZETA2 = math.pi / 8
NODES = 65
REACH = 8.0  # standard deviations on either side
TAIL = 30.0  # from −TAIL down, φ/Φ is its asymptotic series
MOST_SPREAD = 25.0  # largest f² z_{s,-k}: up to here every back-end has been measured


class Tilted(NamedTuple):
    """Cavity × site: its mean and variance, and the Gaussian factor that stands for the site."""

    mean: Tensor
    variance: Tensor
    site: Diagonal


def tilt(cavity_mean: Tensor, cavity_var: Tensor, f: Tensor, slopes: Slopes) -> Tilted:
    """Return the moments of N(cavity) σ(f z) and the site's own factor, projected to 0 ≤ λ ≤ f²/4;
    exact at f = 0.
    """
    g1, g2 = slopes(cavity_mean, cavity_var, f)
    spread = f.square() * cavity_var
    g2 = torch.minimum(
        torch.maximum(g2, -1 / (1 / curvature(slopes) + spread)), torch.zeros_like(g2)
    )
    left = 1 + spread * g2  # z_s / z_{s,-k}, in [1/(1 + s/4), 1]
    site = Diagonal(-f.square() * g2 / left, (f * g1 - f.square() * g2 * cavity_mean) / left)
    return Tilted(cavity_mean + f * cavity_var * g1, cavity_var * left, site)


def curvature(slopes: Slopes) -> float:
    """Return the largest curvature of −log site at f = 1: ¼ of σ; ζ² of the probit, another site,
    whose moments are exact.
    """
    return ZETA2 if slopes is probit else 0.25


def bounded(f: Tensor, cavity_var: Tensor) -> Tensor:
    """Return f clipped so that f² z_{s,-k} ≤ 25: beyond, moments are less accurate and nothing is
    gained (E-N4).
    """
    most = (MOST_SPREAD / cavity_var).sqrt()
    return torch.minimum(torch.maximum(f, -most), most)


def make_slopes(name: Backend, nodes: int = NODES) -> Slopes:
    """Return the back-end called `name`; `nodes` is read by `quadrature` alone."""
    if name not in get_args(Backend):
        raise ValueError(f"back-end must be one of {', '.join(get_args(Backend))}, got {name!r}")
    return quadrature(nodes) if name == "quadrature" else BACKENDS[name]


def quadrature(nodes: int) -> Slopes:
    """Return the back-end with this many nodes of the trapezoid rule."""
    if nodes < 3:
        raise ValueError(f"nodes must be at least 3, got {nodes}")
    return partial(trapezoid, nodes=nodes)


def nodes_of(slopes: Slopes) -> int | None:
    """Return the nodes of a back-end that is the trapezoid rule, None for another."""
    if isinstance(slopes, partial):
        return slopes.keywords["nodes"]
    return NODES if slopes is trapezoid else None


def trapezoid(
    cavity_mean: Tensor, cavity_var: Tensor, f: Tensor, nodes: int = NODES
) -> tuple[Tensor, Tensor]:
    """Return (g1, g2) by sums over nodes: with u = 1 − σ(C) under the tilted weights, g1 = E[u] and
    g2 = Var[u] − E[u (1 − u)].

    That is g2 = (1 − 3 E2/E1 + 2 E3/E1) − g1² without its cancellation, and weights are a softmax:
    far tails neither under- nor overflow.
    """
    t, log_weight = grid(nodes, f)
    c = f[..., None] * (cavity_mean[..., None] + cavity_var.sqrt()[..., None] * t)
    weight = torch.softmax(log_weight + logsigmoid(c), -1)
    u = torch.sigmoid(-c)
    g1 = (weight * u).sum(-1)
    g2 = (weight * ((u - g1[..., None]).square() - u * torch.sigmoid(c))).sum(-1)
    return g1, g2


def thm2(cavity_mean: Tensor, cavity_var: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g1, g2) of the paper's Theorem 2 with corrected constants; ratios of E_d are formed
    from logarithms.
    """
    first, second, third = (
        log_power(f * cavity_mean, f.square() * cavity_var, d) for d in (1, 2, 3)
    )
    r2, r3 = (second - first).exp(), (third - first).exp()
    return 1 - r2, (1 - 3 * r2 + 2 * r3) - (1 - r2).square()


def logz(cavity_mean: Tensor, cavity_var: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g1, g2) of log σ(κ m), κ = (1 + ζ² s)^{−1/2}: g1 = κ (1 − p), g2 = −κ² p (1 − p)."""
    kappa = (1 + ZETA2 * f.square() * cavity_var).rsqrt()
    p, q = torch.sigmoid(kappa * f * cavity_mean), torch.sigmoid(-kappa * f * cavity_mean)
    return kappa * q, -kappa.square() * p * q


def probit(cavity_mean: Tensor, cavity_var: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g1, g2) of log Φ(κ m), κ = (1/ζ² + s)^{−1/2}: with r = φ/Φ at a = κ m, g1 = κ r and
    g2 = −κ² r (a + r).
    """
    kappa = (1 / ZETA2 + f.square() * cavity_var).rsqrt()
    ratio, above = mills(kappa * f * cavity_mean)
    return kappa * ratio, -kappa.square() * ratio * above


def mills(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (r, a + r), r = φ(a)/Φ(a), each accurate on the whole line: three formulas, each fed
    with numbers that suit it alone.
    """
    right = a.clamp(min=0)
    middle = a.clamp(-TAIL, 0)
    x = (-a).clamp(min=TAIL)
    high = (
        (-0.5 * right.square()).exp()
        * math.sqrt(2 / math.pi)
        / torch.special.erfc(-right / math.sqrt(2))
    )
    low = math.sqrt(2 / math.pi) / torch.special.erfcx(-middle / math.sqrt(2))
    near = torch.where(a > 0, high, low)
    excess = (1 - (2 - 10 / x / x) / x / x) / x  # r − x as x → ∞
    far = a < -TAIL
    return torch.where(far, x + excess, near), torch.where(far, excess, near + a.clamp(min=-TAIL))


def powers(m: Tensor, s: Tensor, nodes: int = NODES) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[σ(C)^d], d = 1, 2, 3, C ~ N(m, s), by the trapezoid rule."""
    t, log_weight = grid(nodes, m)
    weight, sigma = (
        torch.softmax(log_weight, -1),
        torch.sigmoid(m[..., None] + s.sqrt()[..., None] * t),
    )
    return (weight * sigma).sum(-1), (weight * sigma**2).sum(-1), (weight * sigma**3).sum(-1)


def log_power(m: Tensor, s: Tensor, d: int) -> Tensor:
    """Return log E_d of Theorem 2: log σ(a_d (m + b_d) / √(1 + ζ² a_d² s)), a_d = 2d (1 −
    2^{−1/d}), b_d = log(2^{1/d} − 1).
    """
    a, b = constants(d)
    return logsigmoid(a * (m + b) * (1 + ZETA2 * a * a * s).rsqrt())


def constants(d: int) -> tuple[float, float]:
    """Return (a_d, b_d): σ^d has the value ½ and the slope a_d/4 where a σ of slope a_d, shifted by
    b_d, has them (E-N2, E-N3).
    """
    return 2 * d * (1 - 2 ** (-1 / d)), math.log(2 ** (1 / d) - 1)


def grid(nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes on ±8 standard deviations and the logarithm of
    their weights, up to a constant.
    """
    t = torch.linspace(-REACH, REACH, nodes, dtype=like.dtype, device=like.device)
    return t, -0.5 * t.square()


BACKENDS: dict[str, Slopes] = {"trapezoid": trapezoid, "thm2": thm2, "logz": logz, "probit": probit}
