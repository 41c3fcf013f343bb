"""Precision matrices by class, as low-rank factors that take no more room than the samples they
come from.

The pseudo-inverse of the covariance of Z samples in R^D has rank at most min(Z − 1, D). So the
factors of all classes of a client fit into the rows of its feature matrix: the rows of class k's
samples hold class k's orthonormal vectors, and no padding over classes exists anywhere.

    Σ_k = (1/Z_k) Σ_{i: y_i = k} (z_i − μ_k)(z_i − μ_k)ᵀ        Σ_k† = Σ_{i: y_i = k} weight_i ·
                                                                basis_iᵀ basis_i

Under `torch.func.vmap` over clients one call sees the whole stack. It sorts the rows by (client,
class), puts groups of similar size together, and decomposes each such batch at once: there is a
loop over a few sizes, none over clients or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from ..stacked import groups
from ..stacked.batched import front, has_kernels
from ..stacked.constants import constant
from .eigen import eigh
from .manyclasses import Piece, many_factors

T = TypeVar("T")
# groups of up to this many samples go together; then twice as many, and so on
SMALLEST = {"cpu": 4, "cuda": 32}
# numbers that are gathered at a time: a CPU's cache, a GPU's memory
PIECE = {"cpu": 2**18, "cuda": 2**27}


def class_factors(
    z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float = 0.0, min_count: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (basis (N, D), weight (N,), counted (N,)) of the classes' pseudo-inverse covariances,
    from z (N, D), y (N,) and mask (N,).

    An eigenvalue counts if it is larger than `cut` times its class's largest one (0: 1e-5 in
    float32, 1e-10 in float64) and larger than the rounding of z can produce.
    Elsewhere, where the mask is 0, and for classes of fewer than `min_count` samples all are 0.
    `counted` marks as many rows of a class as it has directions. For one client the rows are
    orthonormal and weight is 1/eigenvalue; for stacks on a GPU large classes come as other rows
    with the same sum. Values only: it has no derivative.
    """
    cut = cut or (1e-10 if z.dtype == torch.float64 else 1e-5)
    basis, weight, counted = _Factors.apply(z.detach(), y, mask, num_classes, cut, min_count)
    return basis, weight, counted


def class_means(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return (counts (K,) int64, means (K, D)) of the rows of z; the mean of a class without
    samples is 0.
    """
    if has_kernels(z):
        counts, means = _Means.apply(z.detach(), y, mask, num_classes)
        return counts, means
    member = members(y, mask, num_classes)
    counts = member.sum(0)
    means = (member.mT @ z.double()) / counts.clamp(min=1)[:, None]
    return counts.to(torch.int64), means.to(z.dtype)


def class_variances(z: Tensor, y: Tensor, mask: Tensor, means: Tensor) -> Tensor:
    """Return the variances (K, D) of the rows of z around their class's mean; 0 for a class without
    samples.
    """
    member = members(y, mask, means.shape[0])
    deviation = z.double() - means.double()[y.clamp(0, means.shape[0] - 1)]
    return ((member.mT @ deviation.square()) / member.sum(0).clamp(min=1)[:, None]).to(z.dtype)


def members(y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return (N, K) float64: 1 where sample i has class k and is not padding."""
    return (
        (y[:, None] == torch.arange(num_classes, device=y.device)) & (mask != 0)[:, None]
    ).double()


def class_labels(y: Tensor, mask: Tensor, num_classes: int, min_count: int = 1) -> Tensor:
    """Return y where a sample's class has factors, else `num_classes`: for padding and for classes
    of fewer than `min_count` samples.
    """
    return _Labels.apply(y, mask, num_classes, min_count)  # type: ignore[no-any-return]


class _Factors(Function):
    """`class_factors` on any number of leading axes; vmap adds one."""

    @staticmethod
    def forward(
        z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float, min_count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return stacked_factors(z, y, mask, num_classes, cut, min_count)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, tuple[int, int, int]]:
        stacks = [
            front(x, dim, info.batch_size) for x, dim in zip(inputs[:3], in_dims[:3], strict=True)
        ]
        return _Factors.apply(*stacks, *inputs[3:]), (0, 0, 0)


class _Means(Function):
    """`class_means` on any number of leading axes; vmap adds one."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        rows, width = y.shape[-1], z.shape[-1]
        flat = (z.reshape(-1, rows, width), y.reshape(-1, rows), mask.reshape(-1, rows))
        counts, means = groups.means(*flat, num_classes)
        ahead = (*y.shape[:-1], num_classes)
        return counts.reshape(ahead), means.reshape(*ahead, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, tuple[int, int]]:
        stacks = [
            front(x, dim, info.batch_size) for x, dim in zip(inputs[:3], in_dims[:3], strict=True)
        ]
        return _Means.apply(*stacks, *inputs[3:]), (0, 0)


class _Labels(Function):
    """`class_labels` on any number of leading axes; vmap adds one."""

    @staticmethod
    def forward(y: Tensor, mask: Tensor, num_classes: int, min_count: int) -> Tensor:
        return remembered(
            "labels",
            (y, mask),
            (num_classes, min_count),
            lambda: make_labels(y, mask, num_classes, min_count),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        y, mask = (
            front(x, dim, info.batch_size) for x, dim in zip(inputs[:2], in_dims[:2], strict=True)
        )
        return _Labels.apply(y, mask, *inputs[2:]), 0


def stacked_factors(
    z: Tensor, y: Tensor, mask: Tensor, num_classes: int, cut: float, min_count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (basis (…, N, D), weight (…, N), counted (…, N)) for any number of stacked clients."""
    dim = z.shape[-1]
    pieces = plan(y, mask, num_classes, dim, min_count)
    if is_many(z, y):
        return many_factors(z, pieces, cut)
    rows = z.reshape(-1, dim)
    # the last row is where nothing belongs
    basis, weight = rows.new_zeros(len(rows) + 1, dim), rows.new_zeros(len(rows) + 1)
    counted = torch.zeros(len(rows) + 1, dtype=torch.bool, device=z.device)
    for index, real, gram in pieces:
        parts = centre(rows[index.clamp(max=len(rows) - 1)], real)
        vectors, precision = factors(*parts, cut, gram, torch.finfo(z.dtype).tiny)
        place = index[:, : vectors.shape[1]]
        width = place.shape[1]
        basis[place] = vectors[:, :width].to(z.dtype)
        weight[place] = precision[:, :width].to(z.dtype)
        counted[place] = precision[:, :width] != 0
    weight, counted = weight[:-1], counted[:-1]
    return basis[:-1].reshape(z.shape), weight.reshape(y.shape), counted.reshape(y.shape)


def is_many(z: Tensor, y: Tensor) -> bool:
    """Return whether these are stacked clients on a GPU."""
    return z.is_cuda and y.numel() > y.shape[-1]


# what follows from labels, with the tensors it was made from
_known: list[tuple[Any, Any, Any]] = []
KNOWN = 8


def remembered(
    kind: str, tensors: tuple[Tensor, ...], facts: tuple[Any, ...], make: Callable[[], T]
) -> T:
    """Return what `make` makes of tensors that stay from round to round. On a GPU it is kept: to
    look at it would be to wait.
    """
    if not tensors[0].is_cuda:
        return make()
    key = (
        kind,
        facts,
        *((x.data_ptr(), x.shape, x.stride(), x._version, x.dtype, x.device) for x in tensors),
    )
    for known, value, _ in _known:
        if known == key:
            return value  # type: ignore[no-any-return]
    value = make()
    # the tensors are kept too, so that their addresses cannot come to mean something else
    _known.insert(0, (key, value, tensors))
    del _known[KNOWN:]
    return value


def make_labels(y: Tensor, mask: Tensor, num_classes: int, min_count: int) -> Tensor:
    """Return y where a sample's class has factors, else `num_classes`."""
    real = (mask != 0) & (y >= 0) & (y < num_classes)
    label = torch.where(real, y, num_classes)
    sizes = torch.zeros(
        *y.shape[:-1], num_classes + 1, dtype=torch.int64, device=y.device
    ).scatter_add_(-1, label, torch.ones_like(label))
    return torch.where(sizes.gather(-1, label) >= min_count, label, num_classes)


def plan(y: Tensor, mask: Tensor, num_classes: int, dim: int, min_count: int) -> list[Piece]:
    """Return which samples form the groups (client, class) of similar size."""
    return remembered(
        "plan",
        (y, mask),
        (num_classes, dim, min_count),
        lambda: make_plan(y, mask, num_classes, dim, min_count),
    )


def make_plan(y: Tensor, mask: Tensor, num_classes: int, dim: int, min_count: int) -> list[Piece]:
    """Return which samples form the groups (client, class) of similar size."""
    samples = y.shape[-1]
    label, used = y.reshape(-1), mask.reshape(-1) != 0
    client = torch.arange(label.numel(), device=y.device) // samples
    used = used & (label >= 0) & (label < num_classes)
    groups = (label.numel() // max(samples, 1)) * num_classes
    # the last group is what belongs to no class
    group = torch.where(used, client * num_classes + label, groups)
    order = group.argsort(stable=True)
    sizes = torch.bincount(group, minlength=groups + 1)[:groups]
    starts = sizes.cumsum(0) - sizes
    pieces = []
    for least, most, chosen in buckets(torch.where(sizes >= min_count, sizes, 0), dim):
        for part in chosen.split(max(1, PIECE.get(y.device.type, 2**18) // (most * dim))):
            place = torch.arange(most, device=y.device)
            real = place < sizes[part, None]  # (G, S)
            index = order[(starts[part, None] + place).clamp(max=len(order) - 1)]
            pieces.append((torch.where(real, index, len(order)), real, least <= dim))
    return pieces


def buckets(sizes: Tensor, dim: int) -> list[tuple[int, int, Tensor]]:
    """Return (least, most, which groups) of groups of similar size: up to 4, 8, … (a GPU:
    32, 64, …), `dim`, and on; those of one sample have rank 0.
    """
    known = sizes.cpu()
    largest = int(known.max()) if known.numel() else 0
    start = SMALLEST.get(sizes.device.type, 4)
    limits = sorted({start * 2**i for i in range(max(largest, start).bit_length())} | {dim})
    found = []
    for below, limit in zip([1, *limits], limits, strict=False):
        chosen = ((known > below) & (known <= limit)).nonzero()[:, 0]
        if len(chosen):
            found.append((below + 1, min(limit, int(known[chosen].max())), chosen.to(sizes.device)))
    return found


def centre(z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the centred samples (G, S, D), how many count (G, 1), the variance that rounding of z
    can produce (G,)), in float64.

    In float64, because an eigenvalue near the cut would otherwise have lost all but two of
    float32's digits.
    """
    member = real[..., None]
    count = real.sum(1, dtype=torch.float64)[:, None]
    centred = z.to(torch.float64, copy=True).mul_(member)
    low, high = centred.flatten(1).aminmax(dim=1)
    noise = z.shape[2] * (4 * torch.finfo(z.dtype).eps * torch.maximum(high, -low)) ** 2
    return centred.sub_(centred.sum(1, keepdim=True) / count[..., None]).mul_(member), count, noise


def factors(
    centred: Tensor, count: Tensor, noise: Tensor, cut: float, gram: bool, tiny: float
) -> tuple[Tensor, Tensor]:
    """Return (orthonormal vectors (G, r, D), their precisions (G, r)), largest variance first, of
    centred samples (G, S, D).
    """
    values, vectors = eigh(
        (centred @ centred.mT if gram else centred.mT @ centred) / count[..., None]
    )
    least = torch.maximum(cut * values[:, -1], noise).clamp(min=tiny)
    keep = (values > least[:, None]).flip(1)
    safe = torch.where(keep, values.flip(1), 1.0)
    rows = vectors.mT.flip(1)
    rows = (
        (rows * (keep / (count * safe).sqrt())[..., None]) @ centred
        if gram
        else rows * keep[..., None]
    )
    return rows, keep / safe


# -- sums over clients ---------------------------------------------------------------------------
def class_sums(
    *,
    basis: Tensor,
    weight: Tensor,
    label: Tensor,
    counted: Tensor,
    means: Tensor,
    sent: Tensor,
    alpha: float,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (k, Σ_n Λ_n as a packed triangle, Σ_n Λ_n μ_n) of each class k that was sent, over
    stacked clients, in float64.

    basis (C, N, D), weight and label (C, N), means (C, K, D), sent (C, K); Λ_n = V diag(weight) Vᵀ
    + alpha·I where the class was sent.
    """
    num_classes, dim = sent.shape[1], basis.shape[2]
    number, mass = (
        sent.sum(0, dtype=torch.float64),
        (means * sent[..., None]).sum(0, dtype=torch.float64),
    )
    for classes, chosen, index, real in remembered(
        "rows", (label,), (num_classes, dim), lambda: rows_of(label, num_classes, dim)
    ):
        precision, along = groups.summed(basis, weight, index, real, means, chosen)
        precision.diagonal(dim1=1, dim2=2).add_(alpha * number[chosen, None])
        shift = alpha * mass[chosen] + along
        yield from zip(classes, to_triangle(precision), shift, strict=True)


def rows_of(
    label: Tensor, num_classes: int, dim: int
) -> list[tuple[list[int], Tensor, Tensor, Tensor]]:
    """Return (classes, the same on the device (G,), their rows (G, R), which are real) of all
    classes with rows, some at a time.
    """
    flat = label.reshape(-1)
    parts = flat.argsort(stable=True).split(
        torch.bincount(flat, minlength=num_classes + 1).tolist()
    )
    present = [k for k in range(num_classes) if len(parts[k])]
    most = max((len(parts[k]) for k in present), default=1)
    some = max(1, PIECE.get(label.device.type, 2**18) // (most * dim))
    found = []
    for start in range(0, len(present), some):
        classes = present[start : start + some]
        index, real = (
            torch.zeros(len(classes), most, dtype=kind, device=label.device)
            for kind in (torch.int64, torch.bool)
        )
        for place, k in enumerate(classes):
            index[place, : len(parts[k])], real[place, : len(parts[k])] = parts[k], True
        found.append((classes, torch.tensor(classes, device=label.device), index, real))
    return found


@constant(maxsize=8)
def corners(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle of a (D, D) matrix, diagonal included."""
    row, column = torch.triu_indices(dim, dim, device=device)
    return row, column


def to_triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangles of matrices (…, D, D) as vectors of D(D+1)/2."""
    row, column = corners(matrix.shape[-1], matrix.device)
    return matrix[..., row, column]


def from_triangle(packed: Tensor, dim: int) -> Tensor:
    """Return the symmetric matrices (G, D, D) with the upper triangles `packed`, (G, D(D+1)/2)."""
    row, column = corners(dim, packed.device)
    matrix = packed.new_empty(len(packed), dim, dim)
    matrix[:, row, column] = packed
    matrix[:, column, row] = packed
    return matrix
