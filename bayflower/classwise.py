"""Precision matrices by class, as low-rank factors that take no more room than the samples they come from.

The pseudo-inverse of the covariance of Z samples in R^D has rank at most min(Z − 1, D). So the factors of all classes of a client fit
into the rows of its feature matrix: the rows of class k's samples hold class k's orthonormal vectors, and no padding over classes
exists anywhere.

    Σ_k = (1/Z_k) Σ_{i: y_i = k} (z_i − μ_k)(z_i − μ_k)ᵀ        Σ_k† = Σ_{i: y_i = k} weight_i · basis_iᵀ basis_i

Under `torch.func.vmap` over clients one call sees the whole stack. It sorts the rows by (client, class), puts groups of similar size
together, and decomposes each such batch at once: there is a loop over a few sizes, none over clients or classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .eigen import eigh_many

SMALLEST = 4  # groups of up to this many samples go together; then twice as many, and so on
PIECE = {"cpu": 2**18, "cuda": 2**27}  # numbers that are gathered at a time: a CPU's cache, a GPU's memory


def class_factors(z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (basis (N, D), weight (N,)) of the classes' pseudo-inverse covariances, from z (N, D), y (N,) and mask (N,).

    As in `gaussian.LowRank.from_samples` an eigenvalue counts if it is larger than `cut` times its class's largest one (0: 1e-5 in
    float32, 1e-10 in float64) and larger than the rounding of z can produce. Elsewhere, and where the mask is 0, both are 0. Values only:
    it has no derivative.
    """
    cut = cut or (1e-10 if z.dtype == torch.float64 else 1e-5)
    basis, weight = _Factors.apply(z.detach(), y, mask, num_classes, cut)
    return basis, weight


def class_means(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return (counts (K,) int64, means (K, D)) of the rows of z; the mean of a class without samples is 0."""
    member = members(y, mask, num_classes)
    counts = member.sum(0)
    means = (member.mT @ z.double()) / counts.clamp(min=1)[:, None]
    return counts.to(torch.int64), means.to(z.dtype)


def class_variances(z: Tensor, y: Tensor, mask: Tensor, means: Tensor) -> Tensor:
    """Return the variances (K, D) of the rows of z around their class's mean; 0 for a class without samples."""
    member = members(y, mask, means.shape[0])
    deviation = z.double() - means.double()[y.clamp(0, means.shape[0] - 1)]
    return ((member.mT @ deviation.square()) / member.sum(0).clamp(min=1)[:, None]).to(z.dtype)


def members(y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return (N, K) float64: 1 where sample i has class k and is not padding."""
    return ((y[:, None] == torch.arange(num_classes, device=y.device)) & (mask != 0)[:, None]).double()


class _Factors(Function):
    """`class_factors` on any number of leading axes; vmap adds one."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float) -> tuple[Tensor, Tensor]:
        return stacked_factors(z, y, mask, num_classes, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, tuple[int, int]]:
        stacks = [
            x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip(inputs[:3], in_dims[:3], strict=True)
        ]
        return _Factors.apply(*stacks, *inputs[3:]), (0, 0)


def stacked_factors(z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float) -> tuple[Tensor, Tensor]:
    """Return (basis (…, N, D), weight (…, N)) for any number of stacked clients."""
    samples, dim = z.shape[-2:]
    rows, label, used = z.reshape(-1, dim), y.reshape(-1), mask.reshape(-1) != 0
    client = torch.arange(label.numel(), device=z.device) // samples
    used = used & (label >= 0) & (label < num_classes)
    groups = (label.numel() // max(samples, 1)) * num_classes
    group = torch.where(used, client * num_classes + label, groups)  # the last group is what belongs to no class
    order = group.argsort(stable=True)
    sizes = torch.bincount(group, minlength=groups + 1)[:groups]
    starts = sizes.cumsum(0) - sizes
    basis, weight = torch.zeros_like(rows), rows.new_zeros(len(rows))
    pieces = []
    for least, most, chosen in buckets(sizes, dim):
        for part in chosen.split(max(1, PIECE.get(z.device.type, 2**18) // (most * dim))):
            place = torch.arange(most, device=z.device)
            real = place < sizes[part, None]  # (G, S)
            pieces.append((order[(starts[part, None] + place).clamp(max=len(order) - 1)], real, least <= dim))
    for some in [pieces] if z.is_cuda else [[piece] for piece in pieces]:  # a CPU does them one by one, in its cache
        centred = [centre(rows[index], real) for index, real, _ in some]
        found = eigh_many([products(*parts, gram) for parts, (_, _, gram) in zip(centred, some, strict=True)])
        for (index, real, gram), parts, pairs in zip(some, centred, found, strict=True):
            vectors, precision = factors(*parts, *pairs, cut, gram, torch.finfo(z.dtype).tiny)
            used = real[:, : vectors.shape[1]]
            index = index[:, : vectors.shape[1]][used]
            basis[index] = vectors[:, : used.shape[1]][used].to(z.dtype)
            weight[index] = precision[:, : used.shape[1]][used].to(z.dtype)
    return basis.reshape(z.shape), weight.reshape(y.shape)


def buckets(sizes: Tensor, dim: int) -> list[tuple[int, int, Tensor]]:
    """Return (least, most, which groups) of groups of similar size: up to 4, 8, …, `dim`, and on; those of one sample have rank 0."""
    known = sizes.cpu()
    largest = int(known.max()) if known.numel() else 0
    limits = sorted({SMALLEST * 2**i for i in range(max(largest, SMALLEST).bit_length())} | {dim})
    found = []
    for below, limit in zip([1, *limits], limits, strict=False):
        chosen = ((known > below) & (known <= limit)).nonzero()[:, 0]
        if len(chosen):
            found.append((below + 1, min(limit, int(known[chosen].max())), chosen.to(sizes.device)))
    return found


def centre(z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the centred samples (G, S, D), how many count (G, 1), the variance that rounding of z can produce (G,)), in float64.

    In float64, because an eigenvalue near the cut would otherwise have lost all but two of float32's digits.
    """
    member = real[..., None]
    count = real.sum(1, dtype=torch.float64)[:, None]
    centred = z.to(torch.float64, copy=True).mul_(member)
    low, high = centred.flatten(1).aminmax(dim=1)
    noise = z.shape[2] * (4 * torch.finfo(z.dtype).eps * torch.maximum(high, -low)) ** 2
    return centred.sub_(centred.sum(1, keepdim=True) / count[..., None]).mul_(member), count, noise


def products(centred: Tensor, count: Tensor, noise: Tensor, gram: bool) -> Tensor:
    """Return the matrices to decompose: C Cᵀ/n (G, S, S) if `gram`, else CᵀC/n (G, D, D)."""
    return (centred @ centred.mT if gram else centred.mT @ centred) / count[..., None]


def factors(
    centred: Tensor, count: Tensor, noise: Tensor, values: Tensor, vectors: Tensor, cut: float, gram: bool, tiny: float
) -> tuple[Tensor, Tensor]:
    """Return (orthonormal vectors (G, r, D), their precisions (G, r)), largest variance first, from a decomposition of `products`."""
    least = torch.maximum(cut * values[:, -1], noise).clamp(min=tiny)
    keep = (values > least[:, None]).flip(1)
    safe = torch.where(keep, values.flip(1), 1.0)
    rows = vectors.mT.flip(1)
    rows = (rows * (keep / (count * safe).sqrt())[..., None]) @ centred if gram else rows * keep[..., None]
    return rows, keep / safe


# -- sums over clients -------------------------------------------------------------------------------------------------
def class_sums(
    *, basis: Tensor, weight: Tensor, label: Tensor, means: Tensor, sent: Tensor, alpha: float, present: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (Σ_n Λ_n as a packed triangle, Σ_n Λ_n μ_n) of each class in `present`, over stacked clients, in float64.

    basis (C, N, D), weight and label (C, N), means (C, K, D), sent (C, K); Λ_n = V diag(weight) Vᵀ + alpha·I where the class was sent.
    """
    samples, num_classes = label.shape[1], sent.shape[1]
    rows, scale = basis.reshape(-1, basis.shape[2]), weight.reshape(-1)
    group = torch.where(scale != 0, label.reshape(-1), num_classes)
    order = group.argsort(stable=True)
    ends = torch.bincount(group, minlength=num_classes + 1).cumsum(0).tolist()
    for k in present:
        index = order[ends[k - 1] if k else 0 : ends[k]]
        vectors, own = rows[index].double(), scale[index].double()
        precision = (vectors * own[:, None]).mT @ vectors
        precision.diagonal().add_(alpha * sent[:, k].sum(dtype=torch.float64))
        along = own * (vectors * means[index // samples, k].double()).sum(1)
        shift = alpha * (means[:, k] * sent[:, k, None]).sum(0, dtype=torch.float64) + along @ vectors
        yield to_triangle(precision), shift


@lru_cache(maxsize=8)
def corners(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle of a (D, D) matrix, diagonal included."""
    row, column = torch.triu_indices(dim, dim, device=device)
    return row, column


def to_triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix (D, D) as a vector of D(D+1)/2."""
    return matrix[corners(matrix.shape[-1], matrix.device)]


def from_triangle(packed: Tensor, dim: int) -> Tensor:
    """Return the symmetric matrices (G, D, D) with the upper triangles `packed`, (G, D(D+1)/2)."""
    row, column = corners(dim, packed.device)
    matrix = packed.new_empty(len(packed), dim, dim)
    matrix[:, row, column] = packed
    matrix[:, column, row] = packed
    return matrix
