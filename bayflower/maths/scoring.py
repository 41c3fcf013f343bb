"""The server of a Gaussian hierarchy: the prior N(gamma, L Lᵀ) that makes everyone's data most
likely, from sums over clients (`hierarchy.py` has the symbols).

With S = Σ z zᵀ and A = Σ D over K clients, in units of the prior (gamma + L δ, L Ω Lᵀ):

    slope        ∂/∂δ = Σ z              ∂/∂Ω = ½ (S − A)
    information  A                       E: X ↦ ½ Σ D X D            (Fisher's)
                                         M: X ↦ ½ Σ sym(D X z zᵀ)    (the mean of E and minus the
                                                                      Hessian)
    complete     K                       X ↦ ½ K X                   (if theta were seen)

    scoring      A δ = Σ z,              (½E + M + ½εK) X = ½ (S − A),   Ω = 1 + X
    EM           δ = Σ z / K,            Ω = 1 + (S − A)/K − δ δᵀ

A hyperprior (`Hyper`) keeps a few clients' prior in bounds: gamma ~ N(0, C), and every variance as
if ν more clients had been seen whole, at a distance s from gamma:

    slope        − Lᵀ C⁻¹ gamma          + ½ ν (s² L⁻¹ L⁻ᵀ − 1)
    information  + Lᵀ C⁻¹ L              M + ½E of ν clients with D = 1, z zᵀ = s² L⁻¹ L⁻ᵀ

Both stop where the slopes are 0, at a maximum of the marginal likelihood. EM takes as many rounds
as information is missing: hundreds where a variance is small. Scoring takes about ten. ½E + M is at
least half of minus the Hessian, so steps do not grow near the maximum, even if the model is wrong;
E alone swings for ever on such data. ε brings scoring near EM where the data say next to nothing,
so a variance of 0 is approached to D ≈ ε/10. A round changes no variance by more than a factor of
TEN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..tasks import EXTRA
from ..tree import Tensors
from .hierarchy import point, size, vector

RIDGE = 1e-3  # ε
TINY = 1e-6  # of K: a mean of which nobody's data say anything stays
TEN = 10.0
LATER = 1.5  # how fast directions of a covariance may become narrow, a power of rounds
LONGEST = 1.0  # step of an extra parameter in one round


class Hyper(NamedTuple):
    """What is thought of the prior before anyone's data are seen."""

    variance: Tensors  # C, by name of the parameters
    clients: float  # ν
    distance: float  # s


# -- messages ------------------------------------------------------------------------------------
def expected(params: Tensors, whole: bool) -> Tensors:
    """Return a posterior as a client sends it, `whole` with a full matrix; values mean nothing."""
    if not whole:
        return {f"{kind}/{name}": v for kind in ("z", "data") for name, v in params.items()}
    d, e = size(params), params[EXTRA].numel() if EXTRA in params else 0
    shapes: dict[str, tuple[int, ...]] = {"z": (d,), "data": (d, d)}
    if e:
        shapes |= {"extra_slope": (e,), "extra_information": (e, e)}
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def impossible(belief: Tensors) -> str | None:
    """Return why a posterior cannot be one, or None: the data's share is between 0 and 1."""
    for name, value in belief.items():
        if name == "data" or name.startswith("data/"):
            share = torch.linalg.eigvalsh(value) if name == "data" else value
            low, high = float(share.min()), float(share.max())
            if not -1e-4 <= low <= high <= 1 + 1e-4:
                return f"the data's share must be between 0 and 1, got {low:.3g} to {high:.3g}"
    return None


def distance(prior: Tensors, belief: Tensors) -> float:
    """Return how far a client's posterior mean is from gamma."""
    if "root" in prior:
        return float((prior["root"].double() @ belief["z"]).norm())
    std = stds(prior)
    if "z" in belief:
        return float((vector(std) * belief["z"]).norm())
    parts = [(belief[f"z/{name}"].double() * v.double()).square().sum() for name, v in std.items()]
    return float(torch.stack(parts).sum().sqrt())


# -- what clients say, and what becomes of it ------------------------------------------------------
def terms(belief: Tensors, full: bool) -> Tensors:
    """Return what a client adds to the sums, from its z and D: as vector and matrix, or by the
    parameters' names where D is diagonal.
    """
    if "z" not in belief:
        names = [name.removeprefix("z/") for name in belief if name.startswith("z/")]
        own, told = ({n: belief[f"{kind}/{n}"].double() for n in names} for kind in ("z", "data"))
        number = sum(value.numel() for value in own.values())
        share = torch.stack([value.sum() for value in told.values()]).sum() / number
        return {
            "data_share": share,
            **{f"z/{name}": value for name, value in own.items()},
            **{f"excess/{name}": value.square() - told[name] for name, value in own.items()},
        }
    z, data = belief["z"], belief["data"]
    found = {"z": z, "data": data, "data_share": data.diagonal().mean()}
    found |= {name: belief[name] for name in ("extra_slope", "extra_information") if name in belief}
    if full:
        outer = torch.outer(z, z)
        products = operator(data, 0.5 * data + outer)
        return {**found, "squares": outer, "products": products}
    products = data * (0.5 * data + torch.outer(z, z))
    return {**found, "squares": z.square(), "products": products}


def climbed(
    params: Tensors,
    prior: Tensors,
    total: Tensors,
    count: Tensor,
    rate: Tensor,
    rounds: Tensor,
    hyper: Hyper | None = None,
) -> tuple[Tensors, Tensors]:
    """Return mean and root of the prior after a step from everyone's sums, `rate` of it; `rounds`
    is how many steps were taken before.
    """
    if "z" not in total:
        return after_em(params, prior, total, count, rate, hyper)
    gamma = vector(params)
    full = "root" in prior
    root = prior["root"].double() if full else vector(stds(prior)).diag()
    if hyper is not None:
        total = {**total, **with_hyper(gamma, root, total, hyper, full)}
    delta = rate * mean_step(total["z"], total.get("known", total["data"]), count)
    sums = total["squares"], total["data"], total["products"], count
    if full:
        least = (rounds + 1.0) ** -LATER
        wide = new_root(root, rate * covariance_step(*sums), total["data"] / count, least)
        moved = {"root": wide.to(prior["root"].dtype)}
        gamma = gamma + root @ delta
    else:
        std = root.diagonal()
        squares, data, products, _ = sums
        change = rate * variance_factors(squares, data.diagonal(), products, count)
        some = point(std * bounded(1 + change).sqrt(), stds(prior))
        moved = {f"std/{name}": value for name, value in some.items()}
        gamma = gamma + std * delta
    after = point(gamma, params)
    if EXTRA in params:
        step = rate * extra_step(total["extra_slope"], total["extra_information"])
        after[EXTRA] = (params[EXTRA].double() + step).to(params[EXTRA].dtype)
    return after, moved


def with_hyper(gamma: Tensor, root: Tensor, total: Tensors, hyper: Hyper, full: bool) -> Tensors:
    """Return the sums that a hyperprior changes; "known" is the information on the mean."""
    tight = 1 / vector(hyper.variance)
    apart = torch.linalg.inv(root)
    outer, more = hyper.distance**2 * apart @ apart.mT, hyper.clients
    own = unit(root)
    part = operator(own, 0.5 * own + outer) if full else own * (0.5 * own + outer)
    return {
        "z": total["z"] - root.mT @ (tight * gamma),
        "known": total["data"] + root.mT @ (tight[:, None] * root),
        "data": total["data"] + more * own,
        "squares": total["squares"] + more * (outer if full else outer.diagonal()),
        "products": total["products"] + more * part,
    }


def after_em(
    params: Tensors,
    prior: Tensors,
    total: Tensors,
    count: Tensor,
    rate: Tensor,
    hyper: Hyper | None = None,
) -> tuple[Tensors, Tensors]:
    """Return the same by EM, parameter by parameter."""
    after, moved = dict(params), dict(prior)
    for name, old in stds(prior).items():
        std, mean = old.double(), total[f"z/{name}"] / count
        excess = total[f"excess/{name}"] / count - mean.square()
        if hyper is not None:
            tight = 1 / hyper.variance[name].double()
            pull = tight * std * params[name].double()
            mean = (total[f"z/{name}"] - pull) / (count + tight * std.square())
            around = total[f"excess/{name}"] + (count * mean - 2 * total[f"z/{name}"]) * mean
            seen = hyper.clients * ((hyper.distance / std).square() - 1)
            excess = (around + seen) / (count + hyper.clients)
        factor = 1 + rate * excess
        after[name] = (params[name].double() + rate * std * mean).to(params[name].dtype)
        moved[f"std/{name}"] = (std * bounded(factor).sqrt()).to(old.dtype)
    return after, moved


def stds(prior: Tensors) -> Tensors:
    """Return the standard deviations by parameter."""
    return {name.removeprefix("std/"): value for name, value in prior.items()}


# -- steps -----------------------------------------------------------------------------------------
def mean_step(total: Tensor, share: Tensor, count: Tensor) -> Tensor:
    """Return δ (d,)."""
    return torch.linalg.solve(share + TINY * count * unit(share), total)


def variance_factors(squares: Tensor, share: Tensor, products: Tensor, count: Tensor) -> Tensor:
    """Return the diagonal of X (d,) of a prior without correlations: `squares` and `share` are the
    diagonals of S and A, `products` is Σ D∘(½D + z zᵀ).
    """
    return torch.linalg.solve(products + RIDGE * count * unit(products), squares - share)


def covariance_step(outer: Tensor, share: Tensor, products: Tensor, count: Tensor) -> Tensor:
    """Return X (d, d); `products` is the sum of `operator`s."""
    right = halved(outer - share)
    found = torch.linalg.solve(products + RIDGE * count * unit(products), right)
    return unhalved(found, len(outer))


def unit(like: Tensor) -> Tensor:
    """Return the identity matrix."""
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def new_root(root: Tensor, change: Tensor, share: Tensor, least: Tensor) -> Tensor:
    """Return the root of L (1 + X) Lᵀ, eigenvalues of the factor within a tenth and ten. A
    direction in which the data's mean `share` is below `least` gets no narrower: it could not turn.
    """
    values, vectors = torch.linalg.eigh(unit(change) + 0.5 * (change + change.mT))
    shares = (vectors * (share @ vectors)).sum(0).clamp(min=1e-12)
    lowest = (least / shares).clamp(1 / TEN, 1.0)
    return root @ vectors @ torch.diag(values.clamp(max=TEN).maximum(lowest).sqrt()) @ vectors.mT


def bounded(factor: Tensor) -> Tensor:
    """Return a factor of a variance within what one round may change."""
    return factor.clamp(1 / TEN, TEN)


def extra_step(slope: Tensor, information: Tensor) -> Tensor:
    """Return the step of the extra parameters, no longer than LONGEST."""
    ridge = 1e-9 * information.diagonal().sum() + 1e-30
    step = -torch.linalg.solve(information + ridge * unit(information), slope)
    return step.clamp(-LONGEST, LONGEST)


# -- symmetric matrices as vectors: x_ab = 2 s_ab X_ab for a ≤ b, which keeps lengths ------------
def pairs(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b and s of every pair a ≤ b."""
    a, b = torch.triu_indices(size, size, device=device)
    s = torch.full(a.shape, math.sqrt(0.5), dtype=torch.float64, device=device)
    s[a == b] = 0.5
    return a, b, s


def halved(matrix: Tensor) -> Tensor:
    """Return the vector of a symmetric matrix."""
    a, b, s = pairs(len(matrix), matrix.device)
    return 2 * s * matrix[a, b]


def unhalved(vector: Tensor, size: int) -> Tensor:
    """Return the matrix of a vector."""
    a, b, s = pairs(size, vector.device)
    half = torch.zeros(size, size, dtype=vector.dtype, device=vector.device)
    half[a, b] = vector * s
    return half + half.mT


def operator(one: Tensor, two: Tensor) -> Tensor:
    """Return X ↦ the symmetric part of one X two on vectors of symmetric matrices."""
    a, b, s = pairs(len(one), one.device)

    def product(i: Tensor, j: Tensor, k: Tensor, m: Tensor) -> Tensor:
        return one[i[:, None], j[None]] * two[k[:, None], m[None]]

    found = product(a, a, b, b) + product(b, b, a, a) + product(a, b, b, a) + product(b, a, a, b)
    return s[:, None] * s[None] * found
