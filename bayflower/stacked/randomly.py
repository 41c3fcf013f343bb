"""Torch's random functions with the numbers of `chance.py` in place of a generator's.

A function returns `NotImplemented` where torch's own draws nothing (evaluation, rate 0) or where
the numbers come from a generator that the caller gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from . import chance
from .batched import front, has_kernels, on_stacks

SELU = 1.7580993408473766  # −lim selu(x) for x → −∞: what a dropped feature is set to, negative


def mask(x: Tensor, shape: tuple[int, ...], drop: float) -> Tensor:
    """Return 0 with probability `drop`, else 1 / (1 − drop), in the dtype of x."""
    scale = 1 / (1 - drop) if drop < 1 else 0.0
    return chance.kept(shape, drop, x.device).to(x.dtype) * scale


def given(x: Tensor, result: Tensor, inplace: bool) -> Tensor:
    """Return the result, written into x if the caller wants that."""
    return x.copy_(result) if inplace else result


def acts(p: float, training: bool) -> bool:
    """Return whether a layer with rate p does anything; torch reports a rate that is none."""
    return training and 0 < p <= 1


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return x with each number dropped by itself."""
    if not acts(p, training):
        return NotImplemented
    return given(x, dropped(x, p), inplace)


def dropped(x: Tensor, p: float) -> Tensor:
    """Return x with each number dropped by itself, by one kernel where there is one."""
    if has_kernels(x) and dropkernels().fits(x):
        key = chance.next_key()
        if isinstance(key, int):
            key = torch.full((), key, dtype=torch.int64, device=x.device)
        return Drop.apply(x, key, p)  # type: ignore[no-any-return]
    return x * mask(x, tuple(x.shape), p)


def dropkernels() -> Any:
    """Return the module with the kernel, which only a GPU can import."""
    from . import dropkernels

    return dropkernels


class Drop(Function):
    """Dropout by one kernel, with the numbers of a call's key. It is linear, and its own
    transpose.
    """

    @staticmethod
    def forward(x: Tensor, key: Tensor, p: float) -> Tensor:
        return dropkernels().drops(x[None], key[None], p)[0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.p = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return Drop.apply(g, ctx.saved_tensors[0], ctx.p), None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, key: Tensor, p: float
    ) -> tuple[Tensor, int]:
        some = (front(x, dims[0], info.batch_size), front(key, dims[1], info.batch_size))
        return on_stacks(dropkernels().drops, some, p), 0


def low_dropout(x: Tensor, p: float, train: bool) -> Any:
    """Return what torch.dropout does."""
    return dropout(x, p, train)


def of_channels(without: int | None) -> Callable[..., Any]:
    """Return the dropout of whole channels; an input of `without` dimensions has no batch."""

    def channels(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not acts(p, training) or x.ndim < 2:
            return NotImplemented
        lead = (1, x.shape[0]) if x.ndim == without else tuple(x.shape[:2])
        ones = (1,) * (x.ndim - (1 if x.ndim == without else 2))
        factors = mask(x, lead, p).reshape(*lead, *ones)
        return given(x, x * (factors[0] if x.ndim == without else factors), inplace)

    return channels


def alpha(x: Tensor, p: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
    """Return x with numbers set to SELU's lower limit, then moved and scaled to mean 0 and
    variance 1 (Klambauer et al. 2017).
    """
    if p == 1:
        return given(x, x * 0, inplace)
    scale = 1 / math.sqrt((SELU**2 * p + 1) * (1 - p))
    keep = chance.kept(shape, p, x.device).to(x.dtype)
    return given(x, x * (keep * scale) + ((keep - 1) * SELU + SELU * p) * scale, inplace)


def alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """Return x with each number dropped to SELU's lower limit."""
    return alpha(x, p, tuple(x.shape), inplace) if acts(p, training) else NotImplemented


def feature_alpha_dropout(
    x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Return x with whole channels dropped to SELU's lower limit."""
    if not acts(p, training) or x.ndim < 2:
        return NotImplemented
    return alpha(x, p, (*x.shape[:2], *(1,) * (x.ndim - 2)), inplace)


def rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Return x, below 0 times a slope drawn from [lower, upper)."""
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * chance.uniform(tuple(x.shape), x.device)
    return given(x, torch.where(x > 0, x, x * slope.to(x.dtype)), inplace)


# -- numbers themselves ----------------------------------------------------------------------------
Draw = Callable[[tuple[int, ...], torch.device], Tensor]


def made(draw: Draw) -> Callable[..., Any]:
    """Return torch.rand or torch.randn with the numbers of `draw`."""

    def new(
        *args: Any, size: Any = None, dtype: Any = None, device: Any = None, **rest: Any
    ) -> Any:
        if any(rest.values()):  # a generator, a layout: torch's own business
            return NotImplemented
        size = args if size is None else (size,)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        where = torch.device(device) if device is not None else torch.get_default_device()
        return draw(shape, where).to(dtype or torch.get_default_dtype())

    return new


def alike(draw: Draw) -> Callable[..., Any]:
    """Return torch.rand_like or torch.randn_like with the numbers of `draw`."""

    def like(x: Tensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
        if rest:
            return NotImplemented
        return draw(tuple(x.shape), torch.device(device or x.device)).to(dtype or x.dtype)

    return like


def bernoulli(x: Tensor, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    """Return 1 with the probabilities x (or p), else 0."""
    if generator is not None or out is not None:
        return NotImplemented
    return (chance.uniform(tuple(x.shape), x.device) < (x if p is None else p)).to(x.dtype)


def normal(
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    **rest: Any,
) -> Any:
    """Return normal numbers with these means and deviations, which may be tensors."""
    if any(value is not None and value is not False for value in rest.values()):
        return NotImplemented
    if size is not None:
        return mean + std * made(chance.normal)(size, dtype=dtype, device=device)
    tensors = [one for one in (mean, std) if isinstance(one, Tensor)]
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    return mean + std * chance.normal(tuple(shape), tensors[0].device).to(tensors[0].dtype)


def fill_bernoulli(x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Any:
    """Set x to 1 with probability p, else 0."""
    return NotImplemented if generator is not None else x.copy_(bernoulli(x, p))


def fill_uniform(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Any:
    """Set x to numbers in [low, high)."""
    if generator is not None:
        return NotImplemented
    return x.copy_(low + (high - low) * chance.uniform(tuple(x.shape), x.device))


def fill_normal(x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    """Set x to normal numbers."""
    if generator is not None:
        return NotImplemented
    return x.copy_(mean + std * chance.normal(tuple(x.shape), x.device))


def gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Return a draw from the relaxed classes of `logits`; `hard`: one class, with the slopes of
    the relaxed draw.
    """
    noise = -torch.log1p(-chance.uniform(tuple(logits.shape), logits.device))
    soft = ((logits - noise.log().to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    one = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one - soft.detach() + soft


def fill_exponential(x: Tensor, lambd: float = 1, *, generator: Any = None) -> Any:
    """Set x to exponential numbers of rate `lambd`."""
    if generator is not None:
        return NotImplemented
    return x.copy_(-torch.log1p(-chance.uniform(tuple(x.shape), x.device)) / lambd)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.dropout: dropout,
    functional.dropout1d: of_channels(2),
    functional.dropout2d: of_channels(None),
    functional.dropout3d: of_channels(4),
    functional.alpha_dropout: alpha_dropout,
    functional.feature_alpha_dropout: feature_alpha_dropout,
    functional.rrelu: rrelu,
    functional.gumbel_softmax: gumbel_softmax,
    torch.dropout: low_dropout,
    torch.rand: made(chance.uniform),
    torch.randn: made(chance.normal),
    torch.rand_like: alike(chance.uniform),
    torch.randn_like: alike(chance.normal),
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: fill_bernoulli,
    Tensor.uniform_: fill_uniform,
    Tensor.normal_: fill_normal,
    Tensor.exponential_: fill_exponential,
}


class Depth(nn.Module):
    """torchvision's StochasticDepth: drops the branch of a whole batch, or of a sample ("row")."""

    p: float
    mode: str

    def forward(self, x: Tensor) -> Tensor:
        if not acts(self.p, self.training):
            return x
        rows = x.shape[0] if self.mode == "row" else 1
        return x * mask(x, (rows,), self.p).reshape(-1, *(1,) * (x.ndim - 1))


def with_our_numbers(module: nn.Module) -> nn.Module:
    """Return the module, layers changed in place that fill a tensor of their own with random
    numbers: such a tensor has no place for the numbers of several clients.
    """
    for part in module.modules():
        kind = type(part)
        if (kind.__module__, kind.__name__) == (
            "torchvision.ops.stochastic_depth",
            "StochasticDepth",
        ):
            part.__class__ = Depth
    return module
