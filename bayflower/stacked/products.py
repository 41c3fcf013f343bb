"""Gradients that are never written: a step of plain gradient descent adds the products, or the
parts of sums, that they are made of to the weights.

    W ← W − rate · sᵀ x            b ← b − rate · Σ s

The gradient of a wide layer has as many numbers as the layer. To write it, to read it and to read
and write the weights takes twice as long as the last two alone. So a step of a stack opens a
`Products`, a linear layer whose weights are parameters of the step leaves its two factors there and
gives 0 as its gradient, and the step ends with `descend`. A convolution leaves the parts of its
sum. What else the loss gives as a gradient of these weights is added as always.

What is left is needed by nobody before the step ends. So on a GPU the parts are computed in streams
of their own (`aside`), beside the gradients of the layers before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tree import Tensors
from .constants import constant
from .replay import SIDE, side_stream
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


class Parts(NamedTuple):
    """The parts of the sums that a convolution's gradients are: Σ_s of parts (A, S, O, R + 1) is
    that of a row of the weight (A, O, R numbers), and last that of the bias (A, O).
    """

    parts: Tensor
    weight: Tensor
    bias: Tensor


class Turned(NamedTuple):
    """A gradient in another type or memory order than its weight."""

    g: Tensor
    weight: Tensor
    bias: None = None


class Own(NamedTuple):
    """A step down the gradient of some weights that has a kernel of its own, which reads them."""

    take: Callable[[float], None]
    weights: tuple[Tensor, ...]

    @property
    def weight(self) -> Tensor:
        """Return the largest of them."""
        return max(self.weights, key=Tensor.numel)


Left = Product | Parts | Turned | Own


class Products:
    """The parameters of a step, and what was left for its end."""

    def __init__(self, params: Tensors) -> None:
        fine = [one for one in params.values() if one.is_contiguous()]
        self.known = {one.data_ptr(): one.numel() for one in fine if one.dtype == torch.float32}
        self.found: list[tuple[Left, Any]] = []  # with the side stream that makes it
        self.busy: list[Any] = []  # side streams
        self.read: list[tuple[Tensor, ...]] = []  # what they read, kept until they are done

    def takes(self, one: Tensor) -> bool:
        """Return whether a tensor is a parameter of the step, perhaps in another shape, and not
        something made of it.
        """
        return self.known.get(one.data_ptr()) == one.numel() and one.is_contiguous()

    def both(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether a layer's weight and bias are parameters of the step."""
        return self.takes(weight) and (bias is None or self.takes(bias))

    def others(self, grads: Tensors) -> Tensors:
        """Return the gradients that are more than products."""
        return {
            name: grad
            for name, grad in grads.items()
            if grad.data_ptr() != zero(grad.device, grad.dtype).data_ptr()
        }

    def fork(self, device: torch.device) -> Any:
        """Return a side stream that goes on from here."""
        stream = side_stream(device, len(self.busy) % SIDE)
        stream.wait_stream(torch.cuda.current_stream(device))
        self.busy.append(stream)
        return stream

    def parts(self, make: Callable[[], Tensor], weight: Tensor, bias: Tensor) -> Parts:
        """Leave the parts that `make` returns, on a GPU beside what follows."""
        stream = self.fork(weight.device) if weight.is_cuda else None
        with torch.cuda.stream(stream):  # None: where we are
            one = Parts(make(), weight, bias)
        self.found.append((one, stream))
        return one

    def descend(self, rate: float) -> None:
        """Take the step for all that was left: on a GPU at once, but for shared weights. It comes
        before any other change of the weights.
        """
        alone = [one for one, stream in self.found if stream is None]
        here = max(alone, key=lambda one: one.weight.numel(), default=None)
        last: dict[int, Any] = {}  # by weight: the stream that steps there
        # first those that read the weights as they were
        order = sorted(self.found, key=lambda pair: (type(pair[0]) is not Own, pair[0] is here))
        for one, stream in order:
            device = one.weight.device
            if not one.weight.is_cuda:
                step(one, rate)
                continue
            now = torch.cuda.current_stream(device)
            if stream is not None:
                stream.wait_stream(now)
            else:
                stream = now if one is here else self.fork(device)
            for weight in touched(one):
                if (before := last.get(weight.data_ptr(), stream)) != stream:
                    stream.wait_stream(before)
                last[weight.data_ptr()] = stream
            with torch.cuda.stream(stream):
                step(one, rate)
        self.join()

    def join(self) -> None:
        """Go on when the side streams have done their work."""
        for stream in self.busy:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.busy.clear()
        self.read.clear()


_steps: list[Products] = []  # the step that is taken; a step is one call


@contextmanager
def products(params: Tensors) -> Iterator[Products]:
    """Let linear layers leave products of a gradient with respect to `params`."""
    own = Products(params)
    _steps.append(own)
    try:
        yield own
    except BaseException:
        own.join()
        raise
    finally:
        _steps.pop()


def may_leave(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer may leave its gradient to the end of a step."""
    return bool(_steps) and _steps[-1].both(weight, bias)


def left(one: Product | Turned) -> tuple[Tensor, Tensor]:
    """Leave a gradient to the end of the step. Return zeros in its place, for weight and bias."""
    _steps[-1].found.append((one, None))
    return zeros_of(one.weight, one.bias)


def left_parts(
    make: Callable[[], Tensor], read: tuple[Tensor, ...], weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Leave the parts that `make` returns, which it makes of what it has `read`. Return zeros in
    their place.
    """
    _steps[-1].read.append(read)
    _steps[-1].parts(make, weight, bias)
    return zeros_of(weight, bias)


def left_own(
    take: Callable[[float], None], read: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> list[Tensor]:
    """Leave a step that `take` takes with what it has `read`. Return zeros in place of the
    gradients of the weights.
    """
    _steps[-1].read.append(read)
    _steps[-1].found.append((Own(take, weights), None))
    return [zeros_of(one, None)[0] for one in weights]


def all_may_leave(weights: tuple[Tensor, ...]) -> bool:
    """Return whether all of these may leave their gradients to the end of a step."""
    return bool(_steps) and all(map(_steps[-1].takes, weights))


def touched(one: Left) -> tuple[Tensor, ...]:
    """Return the weights that a step changes."""
    if isinstance(one, Own):
        return one.weights
    bias = one.bias
    return (one.weight,) if bias is None else (one.weight, bias)


def zeros_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return zeros for a weight and a bias that nobody writes to."""
    nothing = zero(weight.device, weight.dtype)
    empty = nothing.expand(len(weight), 0)
    return nothing.expand(weight.shape), empty if bias is None else nothing.expand(bias.shape)


def first_derivative() -> bool:
    """Return whether what is computed now is the gradient of a step, not one inside another."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    grad = torch._C._functorch.TransformType.Grad
    return bool(_steps) and sum(level.key() == grad for level in levels) == 1


@constant(maxsize=8)
def zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a 0 that nobody writes to."""
    return torch.zeros((), device=device, dtype=dtype)


def slopes(out: Tensor, slope: float) -> Tensor:
    """Return 1 where the output is above 0, else `slope`."""
    return torch.full_like(out, slope).masked_fill(out > 0, 1.0)


def step(one: Left, rate: float) -> None:
    """Take one step, in place."""
    if isinstance(one, Own):
        one.take(rate)
        return
    if isinstance(one, Parts):
        step_by_parts(one, rate)
        return
    if isinstance(one, Turned):
        one.weight.sub_(one.g, alpha=rate)
        return
    if has_kernels(one.x):
        from . import linearkernels

        linearkernels.descend(*one, rate)
        return
    bent = slopes(one.out, one.slope).to(one.g.dtype) * one.g
    one.weight.baddbmm_(bent.mT, one.x, alpha=-rate)
    if one.bias is not None:
        one.bias.sub_(bent.sum(1), alpha=rate)


def step_by_parts(one: Parts, rate: float) -> None:
    """Take one step of a convolution, in place."""
    if has_kernels(one.parts):
        from . import partkernels

        partkernels.descend(*one, rate)
        return
    total = one.parts.sum(1)
    one.weight.sub_(total[..., :-1].reshape(one.weight.shape), alpha=rate)
    one.bias.sub_(total[..., -1], alpha=rate)
