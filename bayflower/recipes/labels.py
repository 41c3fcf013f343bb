"""Class weights: given, or balanced by how often each class occurs.

    balanced: w_c = n / (k n_c)     n samples, n_c of class c, k classes that occur

so that every class that occurs has the same weight in total, and the mean weight of a sample is 1.
A class that does not occur has weight 1. `client` counts a client's own training samples.
`federation` counts those of all training clients: counts add up, and no sample leaves a client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError

NONE, CLIENT, FEDERATION = "none", "client", "federation"


def given(text: str) -> tuple[float, ...]:
    """Return the weights that a setting lists; () where it names a rule."""
    if text in (NONE, CLIENT, FEDERATION):
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    good = all(math.isfinite(weight) and weight >= 0 for weight in found) and any(found)
    if not found or not good:
        raise ConfigError(
            "class_weights must be none, client, federation, or one number a class that is not "
            f"negative, as 1,2,0.5, got {text!r}"
        )
    return found


def balanced(counts: Tensor) -> Tensor:
    """Return the balanced weights (…, K) of counts (…, K), in float64."""
    counts = counts.double()
    occur = counts > 0
    number, classes = counts.sum(-1, keepdim=True), occur.sum(-1, keepdim=True)
    return torch.where(occur, number / (classes * counts.clamp(min=1)), 1.0)


def counted(y: Tensor, classes: int) -> Tensor:
    """Return how often each class occurs among labels (N,)."""
    return torch.bincount(y, minlength=classes)[:classes]


def together(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of the clients' counts."""
    return [sum(column) for column in zip(*counts, strict=True)]
