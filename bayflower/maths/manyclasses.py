"""Precision factors of the classes of many clients on a GPU: what `classwise.py` says of one
client, in few kernels.

Groups of similar size are decomposed at once, each batch in a stream of its own: side by side the
long chains of small kernels fill the device. Small groups get eigenvectors. For large ones a GPU
has no fast way to find them, and other rows with the same sum are made by products alone: with C
the centred samples over √n and G = C Cᵀ, the pseudo-inverse covariance is Cᵀ G†² C, so the rows are
G† C.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ..stacked import groups
from ..stacked.recorded import recorded
from ..stacked.replay import Streams
from .eigen import eigh, pseudo_inverse

# places of samples (G, S), one beyond the last where there is none; which are real; the route
Piece = tuple[Tensor, Tensor, bool]
MIDDLE = 128  # samples of a class up to which a GPU finds eigenvectors fast


def many_factors(z: Tensor, pieces: Sequence[Piece], cut: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (basis (…, N, D), weight (…, N), counted (…, N)) of stacked clients, z (…, N, D)."""
    rows = z.reshape(-1, z.shape[-1])
    basis, weight = torch.zeros_like(rows), rows.new_zeros(len(rows))
    counted = torch.zeros(len(rows), dtype=torch.bool, device=z.device)
    with Streams(z.device) as streams:
        # the longest chains first; the shortest runs where the rest of the round does
        for place in reversed(range(len(pieces))):
            index, _, gram = pieces[place]
            with streams.next() if place else nullcontext():
                put_factors(rows, index, gram, cut, (basis, weight, counted))
    return basis.reshape(z.shape), weight.reshape(z.shape[:-1]), counted.reshape(z.shape[:-1])


def put_factors(
    rows: Tensor, index: Tensor, gram: bool, cut: float, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write the factors of groups of rows (N, D) to the places `index` (G, S) of their samples."""
    info = torch.finfo(rows.dtype)
    centred, biggest = groups.centred(rows, index)
    # the variance that rounding of z can produce
    noise = (rows.shape[1] * (4 * info.eps) ** 2 * biggest.square()).clamp(min=info.tiny)
    matrix = centred @ centred.mT if gram else centred.mT @ centred
    if gram and index.shape[1] > MIDDLE:
        inverse, rank = recorded(inverse_of, (matrix, noise), cut)
        groups.put(inverse @ centred, rank, None, index, out)
        return
    values, vectors = eigh(matrix, spoil=True)
    least = torch.maximum(cut * values[:, -1], noise)
    found = vectors.mT @ centred if gram else vectors.mT
    groups.put(found, values, least, index, out, scaled=gram)


def inverse_of(matrix: Tensor, floor: Tensor, cut: float) -> tuple[Tensor, Tensor]:
    """Return the pseudo-inverses of matrices and their ranks."""
    return pseudo_inverse(matrix, cut, floor)
