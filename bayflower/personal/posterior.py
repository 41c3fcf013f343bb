"""How uncertain a personal model's weights are: standard deviations by parameter, as each method
defines them.

    method                  kind     where the deviations come from
    metavd, vd, ensemblevd  sampled  its own dropout posterior N(theta, alpha theta²) of one layer
    fednp                   sampled  the Gaussian its natural-parameter network gives the
                                     classifier's weights
    fedbps                  linear   its own Laplace approximation: 1 / (h + delta) [eq. 2 of
                                     FedBPS]
    fedla                   linear   its own diagonal posterior, for as many samples as the client
                                     has
    fedmap                  linear   a Laplace approximation at the MAP estimate under its prior: 1
                                     / (h + n / sigma²)
    pfedvmp, pfedvmp-avg    linear   a Laplace approximation of the head, prior N(0, 1) (its own
                                     Gaussians are over features)

h is the diagonal Fisher information summed over the client's training data. "sampled": weights are
drawn. "linear": the network is taken as linear in its weights around their mean, which keeps a
diagonal approximation from ruining the predictions (Immer et al. 2021, AISTATS). Every other method
ends with a point.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ..contract import ClientHalf
from ..maths import npn
from ..maths.curvature import diagonal
from ..methods import METHODS
from ..networks.model import Batch
from ..tree import Tensors

Kind = Literal["sampled", "linear"]
CHUNK = 8  # samples of one pass for curvature


class Posterior(NamedTuple):
    """Standard deviations of some parameters, how to use them, and where they come from."""

    kind: Kind
    std: Tensors
    origin: str


def posterior(
    method: str, half: ClientHalf, params: Tensors, buffers: Tensors, broadcast: Any, train: Batch
) -> Posterior | None:
    """Return the posterior of a personal model with these numbers; None for a method that ends with
    a point.
    """
    stem, number = METHODS[method].stem, len(train.y)
    if stem == "metavd":
        half_any: Any = half
        std = (broadcast.log_alpha / 2).exp() * params[half_any.weight].abs()
        return Posterior("sampled", {half_any.weight: std}, "the dropout posterior of one layer")
    if stem == "fednp":
        return Posterior(
            "sampled",
            classifier(half, params, broadcast),
            "the natural-parameter network's Gaussian over the classifier",
        )
    if stem == "fedla":
        std = {name: (number * value).rsqrt() for name, value in broadcast.precision.items()}
        return Posterior(
            "linear", std, f"the diagonal posterior of the last round, for {number} samples"
        )
    if stem == "fedmap":
        prior = torch.as_tensor(number / half.config.sigma2, dtype=train.mask.dtype)
        return Posterior(
            "linear",
            laplace(half, params, buffers, train, prior, "fisher"),
            "Laplace approximation under FedMAP's prior",
        )
    if stem == "fedbps":
        own: Any = half
        prior = own.precision(train.mask.sum())
        std = laplace(half, params, buffers, train, prior, half.config.curvature)
        return Posterior("linear", std, "FedBPS's Laplace approximation")
    if stem == "pfedvmp":
        every = laplace(
            half, params, buffers, train, torch.ones((), dtype=train.mask.dtype), "fisher"
        )
        head = {name: value for name, value in every.items() if name in half.model.head_names}
        return Posterior(
            "linear",
            head,
            "Laplace approximation of the head (the method's own Gaussians are over features)",
        )
    return None


def laplace(
    half: ClientHalf,
    params: Tensors,
    buffers: Tensors,
    train: Batch,
    prior: torch.Tensor,
    kind: Any,
) -> Tensors:
    """Return 1/√(h + prior) by parameter."""
    total: Tensors = {}
    with torch.no_grad():
        for start in range(0, len(train.y), CHUNK):
            part = Batch(*(tensor[start : start + CHUNK] for tensor in train))
            found = diagonal(half.model, params, buffers, part, kind)
            total = {name: value + total[name] if total else value for name, value in found.items()}
    return {name: (value + prior).rsqrt() for name, value in total.items()}


def classifier(half: Any, params: Tensors, broadcast: Any) -> Tensors:
    """Return FedNP's deviations of the classifier's weights, from the Gaussian over z that all
    clients agreed on.
    """
    from ..strategies.fednp import EXTRA
    from ..strategies.fednp import classifier as name_of

    layers = {
        name.removeprefix(EXTRA + "npn."): value
        for name, value in broadcast.extra.items()
        if name.startswith(EXTRA + "npn.")
    }
    dtype = next(iter(layers.values())).dtype
    z = npn.Gauss(
        (broadcast.total.shift / broadcast.total.precision).to(dtype),
        (1 / broadcast.total.precision).to(dtype),
    )
    name = name_of(params, half.model.head_names)
    with torch.no_grad():
        return {name: npn.forward(layers, z).var.sqrt().reshape(params[name].shape)}
