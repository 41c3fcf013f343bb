"""The training loss with class weights, label smoothing and mixed labels.

With K classes, t_n the shares of the classes in sample n (1 at its label where samples are not
mixed), k_n 1 for a sample and 0 for padding, w the class weights and ε the smoothing:

    s_n = (1 − ε) t_n + ε/K
    loss = Σ_n k_n Σ_c w_c s_nc (−log p_nc)  /  Σ_n k_n Σ_c w_c t_nc

With labels this is torch's cross_entropy(weight=w, label_smoothing=ε). w and ε hold for the passes
inside `shaping`, so a client half need not know of them; a test is never inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import ConfigError

T = TypeVar("T")


class Shape(NamedTuple):
    """What makes the loss of a step other than the mean of −log p(y|x)."""

    smoothing: float = 0.0
    weights: Tensor | None = None  # (K,)
    # a loss of the user's own: (logits, y) to one number a sample, or to their mean
    own: Callable[[Tensor, Tensor], Tensor] | None = None


PLAIN = Shape()
_shape: ContextVar[Shape] = ContextVar("shape", default=PLAIN)


def shape() -> Shape:
    """Return the shape that holds here."""
    return _shape.get()


@contextmanager
def shaping(smoothing: float, weights: Tensor | None) -> Iterator[None]:
    """Give the losses inside this smoothing and these weights."""
    token = _shape.set(Shape(smoothing, weights, _shape.get().own))
    try:
        yield
    finally:
        _shape.reset(token)


@contextmanager
def losing(own: Callable[[Tensor, Tensor], Tensor] | None) -> Iterator[None]:
    """Put a loss of the user's own in place of −log p(y|x) inside; None leaves it as it is."""
    token = _shape.set(_shape.get() if own is None else Shape(own=own))
    try:
        yield
    finally:
        _shape.reset(token)


def own_mean(losses: Tensor, mask: Tensor, in_stack: bool) -> Tensor:
    """Return the mean over the samples that the mask marks of what a user's loss returned. Outside
    of stacks no batch is padded, so there it may be the mean already.
    """
    if losses.ndim == 0 and not in_stack:
        return losses
    if losses.shape != mask.shape:
        raise ConfigError(
            f"the loss returned shape {tuple(losses.shape)} for {len(mask)} samples; it must "
            "return one number a sample, e.g. CrossEntropyLoss(reduction='none')"
        )
    count = mask.sum()
    return (losses * mask).sum() / torch.where(count > 0, count, 1.0)


def weighted(fn: Callable[..., T], smoothing: float) -> Callable[..., T]:
    """Return fn with one more argument in front, the class weights; its losses are smoothed too."""

    def shaped(weights: Tensor, *args: Any) -> T:
        with shaping(smoothing, weights):
            return fn(*args)

    return shaped


def smoothed(fn: Callable[..., T], smoothing: float) -> Callable[..., T]:
    """Return fn with smoothed losses, all classes alike."""

    def shaped(*args: Any) -> T:
        with shaping(smoothing, None):
            return fn(*args)

    return shaped


def is_mixed(y: Tensor) -> bool:
    """Return whether y (B, K) has shares of classes; labels are (B,)."""
    return y.ndim > 1


def shares(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return the shares of the classes (B, K) in samples with labels or shares y."""
    if is_mixed(y):
        return y.to(dtype)
    return (y[:, None] == torch.arange(classes, device=y.device)).to(dtype)


def shaped_mean(logits: Tensor, y: Tensor, mask: Tensor, form: Shape) -> Tensor:
    """Return the loss of samples with logits (B, K), or (B, 1) for two classes; 0 without any."""
    if logits.shape[-1] == 1:
        logp = torch.cat([logsigmoid(-logits), logsigmoid(logits)], -1)
    else:
        logp = torch.log_softmax(logits, -1)
    classes = logp.shape[-1]
    t = shares(y, classes, logp.dtype)
    s = (1 - form.smoothing) * t + form.smoothing / classes if form.smoothing else t
    counted = mask
    if form.weights is not None:
        w = form.weights.to(logp.dtype)
        s, counted = s * w, mask * (t * w).sum(-1)
    total = counted.sum()
    return -((s * logp).sum(-1) * mask).sum() / torch.where(total > 0, total, 1.0)
