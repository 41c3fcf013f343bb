"""Posteriors over the logits of a personal model: what a pass over its training data sees of the
last layer, Laplace approximations from it, and the offsets of the logits that a posterior gives.

    f, φ     logits (C,) and what the last layer gets (D,), with a 1 behind it if there is a bias
    H        ∂²(−log p_y)/∂f² = diag(p) − p pᵀ, of every sample; for a single logit p(1 − p)
    A, B     Σ φφᵀ / n and Σ H: the Kronecker factors of the last layer's curvature, Σ φφᵀ ⊗ H
    λ        precision of the prior N(0, I/λ) over the layer's weights

    precision of the weights W:    A ⊗ B + λ I = Σ_ij (a_i b_j + λ) (u_i u_iᵀ) ⊗ (v_j v_jᵀ)
    variance of f along v_j:       Σ_i (u_iᵀφ)² / (a_i b_j + λ)
    log evidence of λ:             ½ P log λ − ½ λ |W|² − ½ Σ_ij log(a_i b_j + λ) + const

The network is linear in the last layer, so the predictive is that of the linearised network, in
closed form; it is the mean of softmax over fixed draws (`DRAWS`), the same for every sample.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..networks.model import Batch, Model
from ..stacked.constants import constant
from ..tasks import EXTRA, Task
from ..tree import Tensors

DRAWS = 64  # of the logits
WEIGHT_DRAWS = 16  # of weights before the last layer, which need a pass through the network each
LARGEST = 4096  # inputs of the last layer up to which Kronecker factors are formed
WIDE = "covariance"  # the name of a covariance of all parameters
SPREAD = "spread:"  # names of standard deviations (`ClientHalf.spread`) among the parameters
FLOOR = 1e-3  # share of the mean variance of features that no feature's variance is below


class Seen(NamedTuple):
    """Sums over training samples about the last layer, float64; D' = D, or D + 1 with a bias."""

    number: Tensor  # of samples
    gram: Tensor  # Σ φφᵀ (D', D'); (0, 0) beyond LARGEST
    curvature: Tensor  # Σ H (C, C)
    diagonal: Tensor  # Σ φ² ⊗ diag H (C, D')
    classes: Tensor  # (K,) samples of each class
    sums: Tensor  # (K, D) Σ φ by class
    squares: Tensor  # (D,) Σ φ²


class Posterior(NamedTuple):
    """A distribution over the logits of a personal model, and where it comes from.

    kronecker   in (D', D'), inverse (D', C), out (C, C): variance of the logits along out's columns
    diagonal    std (C, D'): independent weights of the last layer
    dense       covariance (C D', C D') of the last layer's weights, row by row
    classes     means (K, D), variance (D,), prior (K,): Gaussians over features, another model
    sampled     std by parameter: weights anywhere in the network are drawn
    """

    kind: Literal["kronecker", "diagonal", "dense", "classes", "sampled"]
    tensors: Tensors
    origin: str


def see(logits: Tensor, inputs: Tensor, phi: Tensor, batch: Batch, num_classes: int) -> Seen:
    """Return what a batch adds: its logits, what the last layer got, without and with the bias's 1
    (`with_bias`). Padding adds nothing.
    """
    weight = batch.mask.double()
    features, phi, f = inputs.double(), phi.double(), logits.double()
    if f.shape[-1] == 1:
        p = torch.sigmoid(f)
        hessian = (p * (1 - p))[..., None]
    else:
        p = f.softmax(-1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    onehot = (batch.y[:, None] == torch.arange(num_classes, device=f.device)).double()
    onehot = onehot * weight[:, None]
    weighted = phi * weight[:, None]
    big = phi.shape[1] > LARGEST
    slope = hessian.diagonal(dim1=1, dim2=2) * weight[:, None]
    return Seen(
        weight.sum(),
        phi.new_zeros(0, 0) if big else weighted.T @ phi,
        (hessian * weight[:, None, None]).sum(0),
        slope.T @ phi.square(),
        onehot.sum(0),
        onehot.T @ features,
        (features.square() * weight[:, None]).sum(0),
    )


def see_task(task: Task, out: Tensor, phi: Tensor, batch: Batch) -> Seen:
    """Return what a batch adds for another likelihood: H is the expected second derivative of
    −log p(y|f) by the network's own outputs (the generalised Gauss–Newton matrix). There are no
    classes.
    """
    weight, phi = batch.mask.double(), phi.double()
    size = task.network
    hessian = task.curvature(out.double(), batch.y, weight)[..., :size, :size]
    weighted = phi * weight[:, None]
    slope = hessian.diagonal(dim1=1, dim2=2) * weight[:, None]
    return Seen(
        weight.sum(),
        phi.new_zeros(0, 0) if phi.shape[1] > LARGEST else weighted.T @ phi,
        (hessian * weight[:, None, None]).sum(0),
        slope.T @ phi.square(),
        phi.new_zeros(0),
        phi.new_zeros(0, phi.shape[1]),
        phi.new_zeros(phi.shape[1]),
    )


def with_bias(features: Tensor, params: Tensors, layer: str) -> Tensor:
    """Return the features with a 1 behind them if the layer has a bias."""
    if f"{layer}.bias" not in params:
        return features
    return torch.cat([features, torch.ones_like(features[..., :1])], -1)


def last_weights(params: Tensors, layer: str) -> Tensor:
    """Return the last layer's weights (C, D'), the bias as the last column."""
    weight = params[f"{layer}.weight"].double()
    if f"{layer}.bias" in params:
        weight = torch.cat([weight, params[f"{layer}.bias"].double()[:, None]], 1)
    return weight


def fitted(seen: Seen, weights: Tensor) -> Posterior:
    """Return the Laplace approximation of the last layer under the prior of the highest evidence;
    Kronecker factors, or the diagonal of a very wide layer.
    """
    if not seen.gram.shape[-1]:
        precision = best_prior(seen.diagonal, weights)
        std = (seen.diagonal + precision).rsqrt()
        return Posterior("diagonal", {"std": std}, "diagonal Laplace approximation, last layer")
    a, into = torch.linalg.eigh(finite(seen.gram / seen.number.clamp(min=1)))
    b, out = torch.linalg.eigh(finite(seen.curvature))
    known = a.clamp(min=0)[:, None] * b.clamp(min=0)[None]
    inverse = 1 / (known + best_prior(known, weights))
    return Posterior(
        "kronecker",
        {"in": into, "inverse": inverse, "out": out},
        "Laplace approximation of the last layer (Kronecker factors), prior of the highest "
        "evidence",
    )


def finite(matrix: Tensor) -> Tensor:
    """Return the matrix; zeros if it has numbers that are none. A client whose training diverged
    then has no known directions, and the others keep their posteriors.
    """
    return torch.where(matrix.isfinite().all(), matrix, torch.zeros_like(matrix))


def best_prior(known: Tensor, weights: Tensor) -> Tensor:
    """Return the prior precision λ of the highest evidence, for curvatures `known` of as many
    directions as there are weights.
    """
    priors = torch.logspace(-3, 6, 73, dtype=torch.float64, device=known.device)
    number, size = known.numel(), weights.square().sum()
    fit = torch.log(known.flatten()[None] + priors[:, None]).sum(1)
    evidence = 0.5 * number * priors.log() - 0.5 * priors * size - 0.5 * fit
    return priors[evidence.argmax()[None]][0]


def independent(std: Tensor, origin: str) -> Posterior:
    """Return independent Gaussians over the last layer's weights, std (C, D')."""
    return Posterior("diagonal", {"std": std.double()}, origin)


def of_parameters(params: Tensors, layer: str, origin: str) -> Posterior:
    """Return the last layer's part of a Gaussian over all parameters, which stands beside them:
    standard deviations by name, or one covariance in the order of their names.
    """
    wide = params.get(SPREAD + WIDE)
    if wide is None:
        std = {n.removeprefix(SPREAD): v for n, v in params.items() if n.startswith(SPREAD)}
        return independent(last_weights(std, layer), origin)
    places, start = {}, 0
    for name in sorted(params):
        if name != EXTRA and not name.startswith(SPREAD):
            shape = params[name].shape
            places[name] = (start + torch.arange(shape.numel())).reshape(shape)
            start += shape.numel()
    rows = last_weights(places, layer).long().reshape(-1).to(wide.device)
    found = wide.double().index_select(0, rows).index_select(1, rows)
    return Posterior("dense", {WIDE: found}, origin)


class Classes(NamedTuple):
    """Gaussians over features, one a class, with one variance a coordinate."""

    means: Tensor  # (K, D)
    variance: Tensor  # (D,)
    prior: Tensor  # (K,) log of the classes' shares
    known: Tensor  # (K,) 1 for a class with a mean
    dimension: Tensor  # how many independent coordinates the D correlated ones are worth


def class_gaussians(seen: Seen) -> Classes:
    """Return the Gaussians of a client's own training features."""
    known = (seen.classes > 0).double()
    means = seen.sums / seen.classes.clamp(min=1)[:, None]
    total = seen.number.clamp(min=1)
    within = (seen.squares - (means.square() * seen.classes[:, None]).sum(0)) / total
    within = within.clamp(min=0)
    variance = within + FLOOR * within.mean() + 1e-12
    classes = seen.classes.shape[0]
    prior = torch.log((seen.classes + 0.5) / (seen.number + 0.5 * classes))
    return Classes(means, variance, prior, known, worth(seen, means, variance))


def worth(seen: Seen, means: Tensor, variance: Tensor) -> Tensor:
    """Return D² / |R|² for the correlations R of features within classes: D if they are
    independent, 1 if they all say the same.
    """
    number = variance.numel()
    if not seen.gram.shape[-1]:
        return variance.new_ones(())
    gram = seen.gram[:number, :number]
    within = (gram - (means * seen.classes[:, None]).T @ means) / seen.number.clamp(min=1)
    root = variance.sqrt()
    return number**2 / (within / root / root[:, None]).square().sum().clamp(min=number)


def generative(found: Classes, origin: str) -> Posterior:
    """Return class Gaussians as another model of the classes; a class without a mean has the
    others' mean. Correlated coordinates count as few as they are worth.
    """
    known = found.known[:, None]
    middle = (found.means * known).sum(0) / known.sum().clamp(min=1)
    means = found.means * known + middle * (1 - known)
    wide = found.variance * found.variance.numel() / found.dimension.clamp(min=1)
    tensors = {"means": means, "variance": wide, "prior": found.prior}
    return Posterior("classes", tensors, origin)


def distance(features: Tensor, found: Classes) -> Tensor:
    """Return the squared distance (N,) of features to the nearest class, a coordinate, in units of
    its variance.
    """
    far = squared(features.double(), found.means, found.variance) / found.variance.numel()
    return far.masked_fill(found.known == 0, torch.inf).amin(-1)


def squared(features: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    """Return Σ_d (φ_d − m_kd)²/v_d of each sample and class (N, K)."""
    a, b = features / variance.sqrt(), means / variance.sqrt()
    cross = a @ b.T
    return (a.square().sum(-1)[:, None] - 2 * cross + b.square().sum(-1)[None]).clamp(min=0)


def offsets(
    kind: str,
    tensors: Tensors,
    logits: Tensor,
    features: Tensor | None,
    drawn: Tensor | None = None,
) -> Tensor:
    """Return the offsets (J, N, C) of the logits that a posterior gives; `features` are what the
    last layer gets with the bias's 1 (`with_bias`), `drawn` the logits of sampled weights.
    """
    if kind == "sampled":
        assert drawn is not None
        return drawn.double() - logits.double()
    assert features is not None
    phi = features.double()
    if kind == "classes":
        means = tensors["means"]
        other = tensors["prior"] - 0.5 * squared(
            phi[:, : means.shape[1]], means, tensors["variance"]
        )
        if logits.shape[-1] == 1:  # two classes as one logit
            other = other[:, 1:] - other[:, :1]
        # logits count up to a constant: the same mean as the point's
        f = logits.double()
        if f.shape[-1] > 1:
            other = other - other.mean(-1, keepdim=True) + f.mean(-1, keepdim=True)
        return (other - f)[None]
    noise = draws(logits.shape[-1]).to(phi.device)
    if kind == "diagonal":
        root = (phi.square() @ tensors["std"].square().T).clamp(min=0).sqrt()
        return root[None] * noise[:, None, :]
    if kind == "dense":
        factor = triangle(spread_of(tensors[WIDE], phi))
        return torch.einsum("ncp,jp->jnc", factor, noise)
    root = ((phi @ tensors["in"]).square() @ tensors["inverse"]).clamp(min=0).sqrt()
    return (root[None] * noise[:, None, :]) @ tensors["out"].T


def variances(kind: str, tensors: Tensors, phi: Tensor) -> Tensor:
    """Return the variance (N, C) of each output that a posterior of the last layer gives; `phi` is
    what the layer gets, with the bias's 1 (`with_bias`).
    """
    wide = phi.double()
    if kind == "diagonal":
        return wide.square() @ tensors["std"].double().square().mT
    if kind == "dense":
        return spread_of(tensors[WIDE], wide).diagonal(dim1=-2, dim2=-1)
    along = (wide @ tensors["in"].double()).square() @ tensors["inverse"].double()
    return along @ tensors["out"].double().square().mT


def inputs_of(kind: str, tensors: Tensors, outputs: int) -> int:
    """Return how many numbers of a sample a posterior reads, the bias's 1 included."""
    if kind == "dense":
        return tensors[WIDE].shape[1] // outputs
    return tensors[{"kronecker": "in", "diagonal": "std", "classes": "means"}[kind]].shape[1]


def spread_of(covariance: Tensor, phi: Tensor) -> Tensor:
    """Return the covariance (N, C, C) of the outputs."""
    size = phi.shape[-1]
    outputs = covariance.shape[-1] // size
    parts = covariance.double().reshape(outputs, size, outputs, size)
    return torch.einsum("nd,cdbe,ne->ncb", phi, parts, phi)


def triangle(matrix: Tensor) -> Tensor:
    """Return the lower root (N, C, C) of covariances, by columns: a program that is exported has no
    decomposition. A direction without variance has a column of zeros.
    """
    size, columns = matrix.shape[-1], []
    least = 1e-12 * matrix.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-300
    left = matrix
    for place in range(size):
        pivot = left[..., place, place]
        column = left[..., :, place] / pivot.maximum(least).sqrt()[..., None]
        kept = (torch.arange(size, device=matrix.device) >= place) & (pivot > least)[..., None]
        column = torch.where(kept, column, 0.0)
        columns.append(column)
        left = left - column[..., :, None] * column[..., None, :]
    return torch.stack(columns, -1)


@constant(maxsize=16)
def draws(number: int) -> Tensor:
    """Return the fixed standard normal draws (DRAWS, number), in pairs of opposite sign, each
    coordinate with variance 1.
    """
    half = np.random.default_rng(20).standard_normal((DRAWS // 2, number))
    both = torch.as_tensor(np.concatenate([half, -half]))
    return both / both.square().mean(0).sqrt()


@constant(maxsize=8)
def weight_draws(shape: tuple[int, ...], number: int) -> Tensor:
    """Return fixed standard normal draws (WEIGHT_DRAWS, *shape) in pairs of opposite sign; `number`
    tells parameters apart.
    """
    size = (WEIGHT_DRAWS // 2, math.prod(shape))
    half = np.random.default_rng([21, number]).standard_normal(size, dtype=np.float32)
    return torch.as_tensor(np.concatenate([half, -half])).reshape(WEIGHT_DRAWS, *shape)


def sampled_logits(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, std: Tensors
) -> Tensor:
    """Return the logits (J, N, C) for fixed draws of some weights, std by parameter."""
    found = []
    noise = {
        name: weight_draws(tuple(model.shapes[name]), number).to(value.device)
        for number, (name, value) in enumerate(sorted(std.items()))
    }
    for place in range(WEIGHT_DRAWS):
        drawn = {
            name: params[name] + value.to(params[name].dtype) * noise[name][place].to(params[name])
            for name, value in std.items()
        }
        found.append(model.forward({**params, **drawn}, buffers, x, train=False)[0])
    return torch.stack(found)
