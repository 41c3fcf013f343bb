"""Variational dropout of one linear layer: a Gaussian w ~ N(theta, alpha theta²) for every weight,
with log alpha as its parameter.

    paper      here          meaning
    alpha      exp(log_alpha)
    p          rate          dropout rate alpha / (1 + alpha)
    KL         kl            of the posterior to the best prior N(0, gamma), gamma = theta² (1 +
                             alpha): ½ log(1 + 1/alpha)

log alpha lives in ±LIMIT: a step of gradient descent on alpha itself could make it negative. Where
a message leaves entries out, `thin` and `fill` are its two ends; the mask travels as bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError, WireError
from ..networks.model import Anatomy
from ..shown import Heading, Mark, Picture, quantiles
from ..stacked import spreads
from ..stacked.routes import has_kernels
from ..tree import Tensors
from .bits import pack_bits, unpack_bits

LIMIT = 8.5  # of |log alpha|

SPARSITY = Heading(
    "Dropped weights",
    "share of the layer",
    "Weights that no longer travel, because their dropout rate is too high.",
)


def limited(log_alpha: Tensor) -> Tensor:
    """Return log alpha within ±LIMIT."""
    return log_alpha.clamp(-LIMIT, LIMIT)


def kl(log_alpha: Tensor) -> Tensor:
    """Return ½ log(1 + 1/alpha) of each weight; its slope in log alpha is −½/(1 + alpha)."""
    return functional.softplus(-log_alpha) / 2


def rate(log_alpha: Tensor) -> Tensor:
    """Return the dropout rate p = alpha / (1 + alpha)."""
    return torch.sigmoid(log_alpha)


def log_alpha_of(rate: float) -> float:
    """Return the log alpha at which the dropout rate is `rate`."""
    return math.log(rate / (1 - rate))


def ramp(done: Tensor, rounds: int) -> Tensor:
    """Return the share of the KL's weight after `done` rounds: along a sigmoid from nearly 0 to
    nearly 1 in `rounds`, then 1.
    """
    share = 1 / (1 + torch.exp(-10 * (done.double() / rounds - 0.5)))
    return torch.where(done < rounds, share, torch.ones_like(share))


def kl_and_variance(
    start: Tensor, step: Tensor, theta: Tensor, dropped: Tensor | None
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return (the mean KL (), what gives the variance alpha theta² (out, in)) of weights whose log
    alpha is start + step within its limits. `dropped` weights have no KL; their theta must be 0.

    On a CPU the variance is computed where it is used, on which the order of sums in second
    derivatives depends.
    """
    if has_kernels(theta):
        mean, variance = spreads.spread(start, step, theta, LIMIT, dropped)
        return mean, lambda: variance
    log_alpha = limited(start + step)
    each = kl(log_alpha)
    if dropped is not None:
        each = each.masked_fill(dropped, 0)
    return each.mean(), lambda: log_alpha.exp() * theta.square()


def output_variance(x: Tensor, variance: Tensor) -> Tensor:
    """Return the variance x² (alpha theta²)ᵀ of the layer's outputs (B, out), of inputs (B, in) and
    the weights' variance (out, in).
    """
    squares = spreads.square(x) if has_kernels(x) else x.square()
    return functional.linear(squares, variance)


def disturbed(output: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return a draw of the outputs, one Gaussian an activation (local reparameterisation)."""
    if has_kernels(output):
        return spreads.disturbed(output, variance, noise)
    some = variance > 0  # the root has no slope at 0, where there is no noise to speak of
    return (
        output
        + torch.where(
            some,
            torch.where(some, variance, torch.ones_like(variance)).sqrt(),
            torch.zeros_like(variance),
        )
        * noise
    )


def sampled(theta: Tensor, log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Return a draw of the weights, theta (1 + √alpha noise)."""
    return theta * (1 + (log_alpha / 2).exp() * noise)


def precision(theta: Tensor, log_alpha: Tensor, floor: float | None) -> Tensor:
    """Return 1 / (alpha theta² + floor) in float64: without a floor a client whose weight is 0
    would win every average. With None it is 1 / alpha.
    """
    if floor is None:
        return (-log_alpha.double()).exp()
    return 1 / (log_alpha.double().exp() * theta.double().square() + floor)


def find_layer(
    anatomy: Anatomy,
    params: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    chosen: str = "",
) -> str:
    """Return the name of the layer's weights: of the `chosen` layer, or of the last linear one
    before the head.
    """
    if chosen:
        name = f"{chosen}.weight"
        if name in params and len(shapes[name]) == 2:
            return name
        raise ConfigError(
            f"dropout_layer {chosen!r} is no linear layer of this network; its weights are "
            f"{', '.join(sorted(params))}"
        )
    found = [
        name
        for name in anatomy.trainable
        if name not in anatomy.head_names and name.endswith("weight") and len(shapes[name]) == 2
    ]
    if not found:
        raise ConfigError(
            "the network has no linear layer before its head; name one, e.g. dropout_layer=head"
        )
    return found[-1]


# -- messages without the dropped entries --------------------------------------------------------
def mask_of(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the bool tensor of `shape` that `pack_bits` made bytes of;
    raise if it cannot be one.
    """
    size = math.prod(shape)
    if packed.dtype != torch.uint8 or packed.shape != (-(-size // 8),):
        raise WireError(
            f"the mask must be {-(-size // 8)} bytes for {size} weights, got {packed.dtype} "
            f"{tuple(packed.shape)}"
        )
    return unpack_bits(packed, size).reshape(shape)


def thin(flat: Tensors, mask_name: str, names: tuple[str, ...]) -> Tensors:
    """Return the message with the mask as bits and of `names` only the entries that are not masked,
    as vectors.
    """
    mask = flat[mask_name]
    return {**flat, **{name: flat[name][~mask] for name in names}, mask_name: pack_bits(mask)}


def fill(flat: Tensors, mask_name: str, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensors:
    """Return the message that `thin` made smaller, 0 where entries were left out; raise if the
    parts do not fit each other.
    """
    for name in (mask_name, *names):
        if name not in flat:
            raise WireError(f"key {name!r} is missing")
    mask = mask_of(flat[mask_name], shape)
    whole = {**flat, mask_name: mask}
    for name in names:
        kept = int((~mask).sum())
        if flat[name].shape != (kept,) or not flat[name].is_floating_point():
            raise WireError(
                f"the mask leaves {kept} entries of {name!r}, got {flat[name].dtype} "
                f"{tuple(flat[name].shape)}"
            )
        whole[name] = flat[name].new_zeros(shape).masked_scatter(~mask, flat[name])
    return whole


def picture(rates: Mapping[int, Tensor]) -> tuple[Picture, ...]:
    """Return a box a client of the dropout rates of its weights; nothing without clients."""
    marks = []
    for client, rate in rates.items():
        values = sorted(rate.double().reshape(-1).tolist())
        low, first, middle, third, high = quantiles(values)
        marks.append(Mark(str(client), low, middle, high, (first, third)))
    words = (
        "α/(1+α) of the weights of the layer, as the hypernetwork makes them for each client. "
        "Box: the middle half, mark: the median."
    )
    title = "Dropout rates of each client"
    picture = Picture(title, words, "client", "dropout rate", tuple(marks), (0.0, 1.0))
    return (picture,) if marks else ()
