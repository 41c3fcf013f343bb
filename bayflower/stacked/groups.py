"""Groups of rows, the samples of one class at one client, for many clients at once: means, centred
rows, and where what is found of a group goes. On a GPU each is one kernel.

A group is a row of `index` (G, S): places among all samples, one beyond the last where there is
none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batched import has_kernels


def means(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return (counts (A, K) int64, means (A, K, D)) of z (A, N, D), y and mask (A, N); a class
    without samples has mean 0.
    """
    if has_kernels(z):
        from . import groupkernels

        return groupkernels.means(z, y, mask, classes)
    own = (y[..., None] == torch.arange(classes, device=y.device)) & (mask != 0)[..., None]
    counts = own.sum(1)
    found = (own.double().mT @ z.double()) / counts.clamp(min=1)[..., None]
    return counts, found.to(z.dtype)


def centred(rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the rows of groups about their mean, over √number (G, S, D), float64; the largest
    |z| of each group (G,)).
    """
    if has_kernels(rows):
        from . import groupkernels

        return groupkernels.centred(rows, index)
    real = (index < len(rows))[..., None]
    own = torch.where(real, rows[index.clamp(max=len(rows) - 1)].double(), 0.0)
    number = real.sum(1, keepdim=True, dtype=torch.float64)
    away = (own - own.sum(1, keepdim=True) / number) / number.sqrt()
    return torch.where(real, away, 0.0), own.abs().amax((1, 2))


def put(
    vectors: Tensor,
    values: Tensor,
    least: Tensor | None,
    index: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    scaled: bool = False,
) -> None:
    """Write the rows of groups (G, R, D) to their places in `out`: basis (N, D), weight (N,) and
    counted (N,).

    With `least` (G,), rows belong to eigenvalues `values` (G, R), ascending: the largest comes
    first, and counts if it is above `least`; its weight is its inverse, and `scaled` divides its
    row by its root. Without, `values` (G,) says how many rows count; all weights are 1, or 0 if
    none does.
    """
    if has_kernels(vectors):
        from . import groupkernels

        return groupkernels.put(vectors, values, least, index, out, scaled)
    if least is None:
        used = torch.arange(vectors.shape[1], device=values.device) < values[:, None]
        weight = (values > 0)[:, None].double().expand(used.shape)
        rows = vectors
    else:
        used = (values > least[:, None]).flip(1)
        safe = torch.where(used, values.flip(1), 1.0)
        weight = used / safe
        rows = vectors.flip(1) * (used / (safe.sqrt() if scaled else 1.0))[..., None]
    place = index[:, : vectors.shape[1]]
    there = place < len(out[0])
    for one, found in zip(out, (rows, weight, used), strict=True):
        one[place[there]] = found[there].to(one.dtype)


def summed(
    basis: Tensor, weight: Tensor, index: Tensor, real: Tensor, means: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (Σ_r weight_r v_r v_rᵀ (G, D, D), Σ_r weight_r v_r v_rᵀ m_r (G, D)) over the rows v of
    groups at index (G, R), where `real`, in float64.

    basis (C, N, D), weight (C, N), means (C, K, D); m_r is the mean of the row's client and of the
    group's class in `chosen` (G,).
    """
    samples = weight.shape[1]
    if has_kernels(basis):
        from . import groupkernels

        rows, along = groupkernels.scaled(basis, weight, index, real, means.double(), chosen)
        return rows.mT @ rows, (along[:, None] @ rows)[:, 0]
    vectors = basis.reshape(-1, basis.shape[2])[index].double()  # (G, R, D)
    own = weight.reshape(-1)[index].double() * real  # (G, R)
    precision = (vectors * own[..., None]).mT @ vectors
    along = own * (vectors * means[index // samples, chosen[:, None]].double()).sum(2)
    return precision, (along[:, None] @ vectors)[:, 0]
