"""What a client adds to a private sum beside the change of its model: portions, vectors whose norms
are cut one by one, so that each has a sensitivity that is known.

    Δ        the change of a client's model, cut to the norm C
    x_p      its portion p, cut to the norm C
    w_p      share of the budget that portion p gets; the change gets w_0 = 1 − Σ_p w_p

    row = (√w_0 Δ, √w_1 x_1, √w_2 x_2, …),      ‖row‖² ≤ Σ_p w_p C² = C²                 [eq. 1]

So one client moves the sum of rows by at most C, whatever it sends. Noise zC on each number of that
sum is noise zC/√w_p on each number of Σ x_p                                            [eq. 2]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..tree import Tensors


class Portions:
    """Hooks of a server half whose private sums are not those of a mean of updates."""

    # by name the share w_p of each portion; {} = the change of the whole update is all there is
    portions: ClassVar[Mapping[str, float]] = {}
    replaced: ClassVar[tuple[str, ...]] = ()  # fields of an update for which portions stand

    def portion(self, state: Any, update: Any) -> Tensors:
        """Return a client's portions by name, each a vector; `state` may be the broadcast. Their
        sizes must be the same for all clients, and norms need no bound.
        """
        raise NotImplementedError

    def restored(self, state: Any, sums: Tensors, noise: Mapping[str, float]) -> Tensors:
        """Return what `finalise` needs, from the noisy sums of portions, by name; `noise` is the
        standard deviation of each sum's numbers. It must be defined for all real numbers.
        """
        raise NotImplementedError


def cut(vector: Tensor, norm: float) -> Tensor:
    """Return the vector, shortened to the norm if it is longer; NaN if it is not finite."""
    size = float(vector.square().sum().sqrt())
    return vector if size <= norm else vector * (norm / size if math.isfinite(size) else math.nan)


def joined(
    change: Tensor, parts: Mapping[str, Tensor], shares: Mapping[str, float], norm: float
) -> Tensor:
    """Return a client's row [eq. 1], portions in the order of names."""
    rest = math.sqrt(1 - sum(shares.values()))
    rows = [rest * cut(change, norm)]
    rows += [math.sqrt(shares[name]) * cut(parts[name].double(), norm) for name in sorted(shares)]
    return torch.cat(rows)


def parted(
    row: Tensor, sizes: Mapping[str, int], shares: Mapping[str, float]
) -> tuple[Tensor, Tensors]:
    """Return (the change, the portions by name) of a sum of rows, each in its own unit [eq. 2]."""
    found, at = {}, row.numel() - sum(sizes.values())
    change = row[:at] / math.sqrt(1 - sum(shares.values()))
    for name in sorted(shares):
        found[name] = row[at : at + sizes[name]] / math.sqrt(shares[name])
        at += sizes[name]
    return change, found
