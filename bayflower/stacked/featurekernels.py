"""The GPU kernel in Triton that begins FedNP's regulariser with a batch's features: the f-layer's
mean (`meankernels.py`) and what is made of it first (`propagationkernels.py`) at once.

Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import meankernels
from .meankernels import _mean_of
from .propagationcalls import first_tile, room, whole_values
from .propagationkernels import _begin


@triton.jit
def _first(
    x,
    weight,
    bias,
    mask,
    pooled,
    shift,
    precision,
    w1m,
    w1r,
    b1m,
    b1r,
    moments,
    hidden,
    ended,
    samples,
    inputs,
    dim,
    wide,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """`_begin` for the f that `_mean_of` gives."""
    a = tl.program_id(0).to(tl.int64)
    given = _mean_of(a, x, weight, bias, mask, pooled, samples, inputs, dim, ROWS, WIDTH, D)
    _begin(
        a,
        given,
        shift,
        precision,
        w1m,
        w1r,
        b1m,
        b1r,
        moments,
        hidden,
        ended,
        dim,
        wide,
        NODES,
        WIDE,
        D,
        H,
    )


def values(
    layer: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    epsilon: float,
    strength: float,
    nodes: int,
) -> tuple[Tensor, ...]:
    """Return the regulariser (A,) of the mean of a layer: x (A, B, F), weight (A, F, D), bias (A,
    D), mask (A, B); the mean of x (A, F), and what `propagationcalls.values` returns besides.
    `inputs` are those of that function but for f.
    """
    x, weight, bias, mask = (one.contiguous() for one in layer)
    every = (bias, *(one.contiguous() for one in inputs))  # the bias has the shape of f
    (clients, samples, features), own = x.shape, room(every)
    pooled = x.new_empty(clients, features)
    own_tile = meankernels.sizes(samples, features, bias.shape[1], meankernels.most(bias.shape[1]))
    _first[(clients,)](
        *(x, weight, bias, mask, pooled, *every[1:7], *own, samples, features),
        **(own_tile | first_tile(every, nodes)),
    )
    found, *others = whole_values(every, own, epsilon, strength)
    return found, pooled, *others
