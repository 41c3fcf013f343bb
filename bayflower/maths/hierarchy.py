"""One client of a Gaussian hierarchy: the posterior of its parameters under the prior that everyone
shares, from a quadratic approximation of its likelihood, and predictions under it.

    symbol      here          shape        meaning
    theta       point(...)    (d,)         the client's parameters, theta = gamma + L z
    gamma       gamma         (d,)         mean of the prior
    L           root          (d, d)       root of its covariance, Sigma = L Lᵀ
    z           z             (d,)         the parameters in units of the prior
    G           slope         (d,)         ∂ Σ_i −log p(y_i|theta) / ∂theta
    Lambda      precision     (d, d)       Σ_i J_iᵀ I_i J_i, J_i = ∂f_i/∂theta, I_i of the task
    D           data          (d, d)       the data's share, 0 ≤ D ≤ 1
    V           spread(...)   (d, d)       covariance of the posterior

    H = 1 + Lᵀ Lambda L,   D = H⁻¹ Lᵀ Lambda L = 1 − H⁻¹,   V = L (1 − D) Lᵀ
    z ← z − t H⁻¹ (Lᵀ G + z)         Gauss–Newton, t the longest of 1, ½, … that is no worse
    log p(y) ≈ −NLL(theta) − ½ ‖z‖² + ½ log det(1 − D)                      (Laplace)

Nothing is divided by a variance, so a variance may be as small as it likes. A network that is
linear in its parameters with Gaussian noise has a quadratic likelihood: one step is exact. The
task's extra parameters (a noise, cut points) are no part of theta: all clients share one value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..networks.model import Batch, Model
from ..stacked.rewriting import used
from ..tasks import EXTRA, Task
from ..tree import Tensors
from .gradients import grad, vjp

LENGTHS = tuple(0.5**i for i in range(8))  # of a step, the longest first
PIECE = 1024  # samples in one pass
DRAWS = 64  # points that stand for a Gaussian over the outputs


class Fit(NamedTuple):
    """The quadratic approximation of a client's −log-likelihood."""

    nll: Tensor  # ()
    slope: Tensor  # (d,)
    precision: Tensor  # (d, d)


class Shared(NamedTuple):
    """What a client says of the extra parameters that all clients share."""

    slope: Tensor  # (E,) of the expected −log-likelihood
    information: Tensor  # (E, E)


# -- vectors -------------------------------------------------------------------------------------
def varied(params: Tensors) -> tuple[str, ...]:
    """Return the names of the parameters that differ between clients, in their order."""
    return tuple(sorted(name for name in params if name != EXTRA))


def size(params: Tensors) -> int:
    """Return d."""
    return sum(params[name].numel() for name in varied(params))


def vector(params: Tensors) -> Tensor:
    """Return theta (d,), float64."""
    return torch.cat([params[name].reshape(-1).double() for name in varied(params)])


def point(theta: Tensor, like: Tensors) -> Tensors:
    """Return the parameters with theta in them; the others are those of `like`."""
    names = varied(like)
    parts = theta.split([like[name].numel() for name in names])
    moved = {
        name: part.reshape(like[name].shape).to(like[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }
    return {name: moved.get(name, value) for name, value in like.items()}


# -- likelihood ----------------------------------------------------------------------------------
def jacobians(model: Model, params: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (f of each sample (B, outputs), ∂f/∂theta of what the network gives (B, network, d)),
    in evaluation mode.
    """
    names, count = varied(params), model.task.network

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        def outputs(some: Tensors) -> tuple[Tensor, Tensor]:
            # the class's own function: a pass that is not the prediction is not watched
            out = Model.forward(model, {**params, **some}, buffers, x[None], train=False)[0][0]
            return out[:count], out

        _, pull, out = vjp(outputs, {name: params[name] for name in names}, has_aux=True)  # type: ignore[misc]
        unit = torch.eye(count, dtype=out.dtype, device=out.device)
        rows = vmap(pull)(unit)[0]
        return out, torch.cat([rows[name].reshape(count, -1) for name in names], -1)

    with used("mapped"):
        return vmap(one)(x)


def pieces(batch: Batch) -> list[Batch]:
    """Return the samples in pieces of at most PIECE, targets in float64: slopes that cancel, such
    as those of a softmax along (1, 1), cancel to the last bits.
    """
    starts = range(0, batch.x.shape[0], PIECE)
    y = batch.y.double() if batch.y.is_floating_point() else batch.y
    batch = Batch(batch.x, y, batch.mask.double())
    return [Batch(*(tensor[start : start + PIECE] for tensor in batch)) for start in starts]


def fit(model: Model, params: Tensors, buffers: Tensors, batch: Batch) -> Fit:
    """Return the quadratic approximation at `params`, float64; masked samples add nothing."""
    total: list[Tensor] = []
    task, count = model.task, model.task.network
    for part in pieces(batch):
        out, rows = (found.double() for found in jacobians(model, params, buffers, part.x))

        def nll(out: Tensor, part: Batch = part) -> Tensor:
            return (task.nll(out, part.y, part.mask) * part.mask).sum()

        slope = grad(nll)(out)[:, :count] * part.mask[:, None]
        curve = task.curvature(out, part.y, part.mask)[:, :count, :count]
        curve = curve * part.mask[:, None, None]
        found = [
            nll(out),
            torch.einsum("bo,bod->d", slope, rows),
            torch.einsum("bod,bop,bpe->de", rows, curve, rows),
        ]
        total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
    return Fit(*total)


def loss(model: Model, params: Tensors, buffers: Tensors, batch: Batch) -> Tensor:
    """Return Σ −log p(y_i|theta), float64."""
    total = batch.mask.new_zeros((), dtype=torch.float64)
    for part in pieces(batch):
        out, _ = Model.forward(model, params, buffers, part.x, train=False)
        nll = model.task.nll(out.double(), part.y, part.mask)
        total = total + (nll * part.mask).sum()
    return total


# -- posterior -----------------------------------------------------------------------------------
def started(theta: Tensor, gamma: Tensor, root: Tensor) -> Tensor:
    """Return z of a theta from which to go on: least squares, where the prior is narrow near 0."""
    inner = root.mT @ root
    ridge = 1e-10 * inner.diagonal().sum() + 1e-30
    unit = torch.eye(len(gamma), dtype=root.dtype, device=root.device)
    return solved(inner + ridge * unit, root.mT @ (theta - gamma))


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix⁻¹ right for a positive definite matrix; nothing waits for a check."""
    factor = torch.linalg.cholesky_ex(matrix)[0]
    columns = right if right.ndim == matrix.ndim else right[..., None]
    found = torch.cholesky_solve(columns, factor)
    return found if right.ndim == matrix.ndim else found[..., 0]


def improved(
    model: Model,
    z: Tensor,
    gamma: Tensor,
    root: Tensor,
    like: Tensors,
    buffers: Tensors,
    batch: Batch,
) -> Tensor:
    """Return z after one Gauss–Newton step on the −log posterior."""
    now = fit(model, point(gamma + root @ z, like), buffers, batch)
    unit = torch.eye(len(z), dtype=z.dtype, device=z.device)
    step = -solved(unit + root.mT @ now.precision @ root, root.mT @ now.slope + z)

    def objective(length: Tensor) -> Tensor:
        there = z + length * step
        nll = loss(model, point(gamma + root @ there, like), buffers, batch)
        return nll + 0.5 * there.square().sum()

    before = now.nll + 0.5 * z.square().sum()
    lengths = torch.tensor(LENGTHS, dtype=z.dtype, device=z.device)
    after = vmap(objective)(lengths)
    rounding = 10 * torch.finfo(batch.mask.dtype).eps * (1 + before.abs())
    good = after <= before + rounding  # NaN is not
    first = good & (good.to(torch.int64).cumsum(0) == 1)
    length = torch.where(first, lengths, 0.0).sum()
    return z + torch.where(length > 0, length * step, 0.0)


def data_share(precision: Tensor, root: Tensor) -> Tensor:
    """Return D."""
    inner = root.mT @ precision @ root
    unit = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    found = solved(unit + inner, inner)
    return 0.5 * (found + found.mT)


def spread(data: Tensor, root: Tensor) -> Tensor:
    """Return V."""
    unit = torch.eye(len(data), dtype=data.dtype, device=data.device)
    return root @ (unit - data) @ root.mT


def evidence(nll: Tensor, z: Tensor, data: Tensor) -> Tensor:
    """Return log p(y) of the client's data under the prior, by Laplace's approximation."""
    unit = torch.eye(len(data), dtype=data.dtype, device=data.device)
    factor = torch.linalg.cholesky_ex(unit - data)[0]
    return -nll - 0.5 * z.square().sum() + factor.diagonal().log().sum()


def shared(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, covariance: Tensor
) -> Shared:
    """Return slope and information of the extra parameters e in E_θ[−log p(y|θ, e)], to second
    order in θ around its posterior: nll + ½ tr(I J V Jᵀ).
    """
    task, count = model.task, model.task.network
    total: list[Tensor] = []
    for part in pieces(batch):
        out, rows = (found.double() for found in jacobians(model, params, buffers, part.x))
        wide = torch.einsum("bod,de,bpe->bop", rows, covariance, rows)

        def expected(
            extra: Tensor, out: Tensor = out, wide: Tensor = wide, part: Batch = part
        ) -> Tensor:
            full = torch.cat([out[:, :count], extra.expand(len(out), -1)], -1)
            curve = task.curvature(full, part.y, part.mask)[:, :count, :count]
            each = task.nll(full, part.y, part.mask) + 0.5 * (curve * wide).sum((-2, -1))
            return (each * part.mask).sum()

        information = task.curvature(out, part.y, part.mask)[:, count:, count:]
        found = [
            grad(expected)(params[EXTRA].double()),
            (information * part.mask[:, None, None]).sum(0),
        ]
        total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
    return Shared(*total)


# -- prediction ----------------------------------------------------------------------------------
def wide_prediction(task: Task, out: Tensor, covariance: Tensor) -> Tensor:
    """Return the prediction where the network's outputs have this covariance (B, network,
    network): in closed form for numbers, else the mean over points of a Gaussian.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if task.name == "regression":
        return task.widened(out, variance)
    count = task.network
    unit = torch.eye(count, dtype=out.dtype, device=out.device)
    tiny = 1e-6 * variance.sum(-1) + 1e-12
    factor = torch.linalg.cholesky_ex(covariance + tiny[:, None, None] * unit)[0]
    points = torch.tensor(normal_points(count), dtype=out.dtype, device=out.device)
    moved = torch.einsum("bop,jp->jbo", factor, points) + out[:, :count]
    rest = out[:, count:].expand(len(points), *out[:, count:].shape)
    return task.mixed(task.predict(torch.cat([moved, rest], -1)))


@lru_cache(maxsize=16)
def normal_points(count: int) -> tuple[tuple[float, ...], ...]:
    """Return DRAWS points of a standard normal distribution in `count` dimensions, each beside its
    mirror image: mean 0, variance 1 along every axis. One axis: quantiles; more: Kronecker's
    sequence with the roots of x^{count+1} = x + 1.
    """
    half = torch.arange(1, DRAWS // 2 + 1, dtype=torch.float64)
    if count == 1:
        share = ((half - 0.5) / DRAWS)[:, None]
    else:
        base = 2.0
        for _ in range(50):
            base = (1 + base) ** (1 / (count + 1))
        steps = torch.tensor([base ** -(i + 1) for i in range(count)], dtype=torch.float64)
        share = (0.5 + half[:, None] * steps).remainder(1.0).clamp(1e-6, 1 - 1e-6)
    found = torch.special.ndtri(share)
    found = torch.cat([found, -found])
    return tuple(map(tuple, (found / found.square().mean(0).sqrt()).tolist()))
