"""Which entries of a model rank highest, by one threshold or one a tensor; and scores of entries in
a private sum.

    v          a client's scores of all entries (FedBPS: variances), m and d their mean and standard
               deviation over the entries
    x          (v − m)/d: what a client adds; it ranks the entries as v does              [eq. 1]
    s          standard deviation of the noise on each number of Σ x
    now        Σ x + 2 s on entries that rank highest now: noise alone rarely swaps two   [eq. 2]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..tree import Tensors


def standardised(scores: Tensors) -> Tensor:
    """Return one client's scores of all entries in its own units [eq. 1], 0 if all are equal."""
    every = flat(scores).double()
    every = every - every.mean()
    spread = every.square().mean().sqrt()
    return torch.where(spread > 0, every / spread.clamp(min=1e-300), torch.zeros_like(every))


def steadied(noisy: Tensor, noise: float, highest: Tensors) -> Tensors:
    """Return scores by name from a noisy sum [eq. 2], none of them negative; `highest` are the
    entries that rank highest now.
    """
    names = sorted(highest)
    every = noisy + 2 * noise * flat(highest).to(noisy)
    parts = (every - every.min()).split([highest[name].numel() for name in names])
    shaped = zip(names, parts, strict=True)
    return {name: part.reshape(highest[name].shape) for name, part in shaped}


def top(scores: Tensor, share: float) -> Tensor:
    """Return true on the ⌊share · size + ½⌋ largest of a vector, of equals the lower index first
    (E-B6).
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).index_fill(
        0, order[: math.floor(share * scores.numel() + 0.5)], True
    )


def drawn(scores: Tensors) -> Tensors:
    """Return uniform random numbers of the same shapes by name, the same in every round."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(scores[name].shape, generator=generator, dtype=torch.float64).to(
            scores[name].device
        )
        for name in sorted(scores)
    }


def divided(term: Tensors, median: Tensor) -> Tensors:
    """Return the term over its median; as it is where the median is 0, because most entries do not
    differ at all.
    """
    scale = torch.where(median > 0, median, torch.ones_like(median))
    return {name: value / scale for name, value in term.items()}


def flat(tensors: Tensors) -> Tensor:
    """Return all entries as one vector, in the order of names."""
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])
