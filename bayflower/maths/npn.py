"""Natural-parameter networks (Wang, Shi and Yeung 2016) with Gaussians: layers that map a mean and
a variance to a mean and a variance.

    paper        here           shape
    a_m, a_s     mean, var      (..., I)
    W_m, W_s     weight         (I, O)
    b_m, b_s     bias           (O,)
    ζ²           ZETA2          π/8
    θ_i          target         any: the weights that the network's Gaussian is compared with
    ε            epsilon        (): variance around θ_i

Variances of weights are parameters without a sign and enter through softplus. Everything runs under
`torch.func.vmap`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..tree import Tensors
from .tilted import ZETA2

SLOPE, OFFSET = 4 - 2 * math.sqrt(2), math.log(math.sqrt(2) - 1)  # σ² ≈ σ(SLOPE (x + OFFSET))
LAYERS = ("1", "2")


class Gauss(NamedTuple):
    """Independent Gaussians: mean and variance, of one shape."""

    mean: Tensor
    var: Tensor


def linear(x: Gauss, weight: Gauss, bias: Gauss) -> Gauss:
    """Return mean and variance of x W + b, all independent: o_s = a_s W_s + a_s W_m² + a_m² W_s +
    b_s.
    """
    var = x.var @ (weight.var + weight.mean.square()) + x.mean.square() @ weight.var + bias.var
    return Gauss(x.mean @ weight.mean + bias.mean, var)


def sigmoid(x: Gauss) -> Gauss:
    """Return approximate mean and variance of σ(x), by probits for σ and σ²; the variance has a
    floor of about 0.012 (E-N14).
    """
    mean = torch.sigmoid(x.mean * (1 + ZETA2 * x.var).rsqrt())
    square = torch.sigmoid(SLOPE * (x.mean + OFFSET) * (1 + ZETA2 * SLOPE**2 * x.var).rsqrt())
    return Gauss(mean, square - mean.square())


def forward(params: Tensors, x: Gauss) -> Gauss:
    """Return the output of the two-layer network: linear, sigmoid, linear."""
    hidden = sigmoid(linear(x, weight(params, "1", "weight"), weight(params, "1", "bias")))
    return linear(hidden, weight(params, "2", "weight"), weight(params, "2", "bias"))


def weight(params: Tensors, layer: str, kind: str) -> Gauss:
    """Return the Gaussian of a layer's weight or bias."""
    return Gauss(params[f"{layer}.{kind}.mean"], softplus(params[f"{layer}.{kind}.rho"]))


def initial(
    inputs: int,
    hidden: int,
    outputs: int,
    var: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensors:
    """Return parameters with which the output is near N(0, var): small last weights, and `var` as
    the variance of the last bias.
    """
    params: Tensors = {}
    for layer, (rows, columns), size in (
        ("1", (inputs, hidden), inputs**-0.5),
        ("2", (hidden, outputs), 0.01 * hidden**-0.5),
    ):
        last = layer == LAYERS[-1]
        params[f"{layer}.weight.mean"] = size * torch.randn(
            rows, columns, generator=generator, dtype=torch.float64
        )
        params[f"{layer}.weight.rho"] = torch.full(
            (rows, columns), unsoftplus(1e-3 * var), dtype=torch.float64
        )
        params[f"{layer}.bias.mean"] = torch.zeros(columns, dtype=torch.float64)
        params[f"{layer}.bias.rho"] = torch.full(
            (columns,), unsoftplus(var if last else 1e-3), dtype=torch.float64
        )
    return {name: value.to(dtype) for name, value in params.items()}


def centred(params: Tensors, mean: Tensor) -> Tensors:
    """Return the parameters with another last bias, such that the output's mean is `mean` (O,)
    where the input is N(0, 1).
    """
    inputs = params["1.weight.mean"].shape[0]
    zero = params["1.weight.mean"].new_zeros(inputs)
    now = forward(params, Gauss(zero, torch.ones_like(zero))).mean
    name = f"{LAYERS[-1]}.bias.mean"
    return {**params, name: params[name] + mean.to(now) - now}


def unsoftplus(value: float) -> float:
    """Return x with softplus(x) = value > 0."""
    return value + math.log(-math.expm1(-value))


def kl_theta(q: Gauss, target: Tensor, epsilon: float) -> Tensor:
    """Return KL_θ = Σ ½ (log(ε/s_i) + (s_i + (μ_i − θ_i)²)/ε − 1), from N(μ, s) to N(θ, ε) (E-N13:
    a sum, not a mean).
    """
    return (
        0.5
        * (
            math.log(epsilon) - q.var.log() + (q.var + (q.mean - target).square()) / epsilon - 1
        ).sum()
    )


def kl_z(mean: Tensor, var: Tensor) -> Tensor:
    """Return KL_z = Σ ½ (z_s + z_m² − 1 − log z_s), from the tilted Gaussian to N(0, 1)."""
    return 0.5 * (var + mean.square() - 1 - var.log()).sum()
