"""The GPU kernel in Triton for FedNP's new factors of many clients at once, in float64;
`maths/tilted.py` has the formulas.

Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .propagationkernels import MOST_SPREAD, _averages


@triton.jit
def _finite(x):
    """Whether numbers are neither infinite nor none."""
    return tl.abs(x) < float("inf")


@triton.jit
def _factor(
    f,
    precision,
    shift,
    own_precision,
    own_shift,
    change_precision,
    change_shift,
    new_precision,
    new_shift,
    dim,
    RATE: tl.constexpr,
    NODES: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
):
    """The change of a client's factor, and the factor after it: from its own towards the site's, by
    RATE; no change where that is not finite.
    """
    d = tl.arange(0, D)
    there = d < dim
    place = tl.program_id(0).to(tl.int64) * dim + d
    cavity = tl.load(precision + place, mask=there, other=1.0)
    mean = tl.load(shift + place, mask=there, other=0.0) / cavity
    var = 1.0 / cavity
    given = tl.load(f + place, mask=there, other=0.0)
    most = tl.sqrt(MOST_SPREAD / var)
    bound = tl.where(given > most, most, tl.where(given < -most, -most, given))
    _, _, _, _, _, _, g1, g2 = _averages(mean, var, bound, NODES, WIDE)
    spread = bound * bound * var
    low = -1.0 / (4.0 + spread)
    g2 = tl.where(g2 < low, low, tl.where(g2 > 0, 0.0, g2))
    left = 1.0 + spread * g2
    site_precision = -bound * bound * g2 / left
    site_shift = (bound * g1 - bound * bound * g2 * mean) / left
    p = tl.load(own_precision + place, mask=there, other=0.0)
    s = tl.load(own_shift + place, mask=there, other=0.0)
    if RATE != 1.0:
        rate = tl.full((D,), RATE, tl.float64)
        site_precision = p + rate * (site_precision - p)
        site_shift = s + rate * (site_shift - s)
    good = _finite(site_precision) & _finite(site_shift)
    more_precision = tl.where(good, site_precision - p, 0.0)
    more_shift = tl.where(good, site_shift - s, 0.0)
    tl.store(change_precision + place, more_precision, mask=there)
    tl.store(change_shift + place, more_shift, mask=there)
    tl.store(new_precision + place, p + more_precision, mask=there)
    tl.store(new_shift + place, s + more_shift, mask=there)


def factors(inputs: tuple[Tensor, ...], nodes: int, rate: float) -> tuple[Tensor, ...]:
    """Return the change of each client's factor and the factor after it, each as precision and
    shift (A, D), of f, the cavity and the factor before, all in float64.
    """
    inputs = tuple(one.contiguous() for one in inputs)
    found = tuple(torch.empty_like(one) for one in inputs[1:])
    clients, dim = inputs[0].shape
    _factor[(clients,)](
        *inputs,
        *found,
        dim,
        RATE=rate,
        NODES=nodes,
        WIDE=triton.next_power_of_2(nodes),
        D=triton.next_power_of_2(dim),
        num_warps=8,
    )
    return found
