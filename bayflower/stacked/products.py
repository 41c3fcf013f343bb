"""Gradients of linear layers that are never written: a step of plain gradient descent adds the
product they are made of to the weights.

    W ← W − rate · sᵀ x            b ← b − rate · Σ s

The gradient of a wide layer has as many numbers as the layer. To write it, to read it and to read
and write the weights takes twice as long as the last two alone. So a step of a stack opens a
`Products`, a linear layer whose weights are parameters of the step leaves its two factors there and
gives 0 as its gradient, and the step ends with `descend`. What else the loss gives as a gradient of
these weights is added as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..tree import Tensors
from .routes import has_kernels


class Product(NamedTuple):
    """What a linear layer's gradient is made of; each tensor has the clients' axis in front."""

    x: Tensor  # (A, B, K)
    g: Tensor  # (A, B, O)
    out: Tensor  # (A, B, O)
    weight: Tensor  # (A, O, K)
    bias: Tensor | None  # (A, O)
    slope: float
    low: bool


class Products:
    """The parameters of a step, and the products that were left for its end."""

    def __init__(self, params: Tensors) -> None:
        fine = [one for one in params.values() if one.ndim in (2, 3) and one.is_contiguous()]
        self.known = {one.data_ptr(): one.shape for one in fine if one.dtype == torch.float32}
        self.found: list[Product] = []

    def takes(self, one: Tensor) -> bool:
        """Return whether a tensor is a parameter of the step, and not something made of it."""
        return self.known.get(one.data_ptr()) == one.shape and one.is_contiguous()

    def left(self, product: Product) -> bool:
        """Keep a product for the end of the step; return whether that can be done."""
        weight, bias = product.weight, product.bias
        good = self.takes(weight) and (bias is None or self.takes(bias))
        if good:
            self.found.append(product)
        return good

    def others(self, grads: Tensors) -> Tensors:
        """Return the gradients that are more than products."""
        return {
            name: grad
            for name, grad in grads.items()
            if grad.data_ptr() != zero(grad.device, grad.dtype).data_ptr()
        }

    def descend(self, rate: float) -> None:
        """Take the step for every product."""
        for one in self.found:
            step(one, rate)


_steps: list[Products] = []  # the step that is taken; a step is one call


@contextmanager
def products(params: Tensors) -> Iterator[Products]:
    """Let linear layers leave products of a gradient with respect to `params`."""
    _steps.append(Products(params))
    try:
        yield _steps[-1]
    finally:
        _steps.pop()


def left(product: Product) -> bool:
    """Return whether the product was kept for the end of a step."""
    return bool(_steps) and _steps[-1].left(product)


def first_derivative() -> bool:
    """Return whether what is computed now is the gradient of a step, not one inside another."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    grad = torch._C._functorch.TransformType.Grad
    return bool(_steps) and sum(level.key() == grad for level in levels) == 1


@lru_cache(maxsize=8)
def zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a 0 that nobody writes to."""
    return torch.zeros((), device=device, dtype=dtype)


def step(one: Product, rate: float) -> None:
    """Take one step down a product, in place."""
    if has_kernels(one.x):
        from . import linearkernels

        linearkernels.descend(*one, rate)
        return
    bent = torch.where(one.out > 0, 1.0, one.slope).to(one.g.dtype) * one.g
    one.weight.baddbmm_(bent.mT, one.x, alpha=-rate)
    if one.bias is not None:
        one.bias.sub_(bent.sum(1), alpha=rate)
