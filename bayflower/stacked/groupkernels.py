"""GPU kernels in Triton for groups of rows, the samples of one class at one client, of many clients
at once; `groups.py` has the formulas.

Only imported where a CUDA device and Triton are there. Sums are in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

F64 = torch.float64
ROWS, WIDTH = 32, 64  # samples and coordinates that a program holds at once
MANY, FEW = 128, 32  # the same for means: it looks at all samples for those of its class


@triton.jit
def _means(
    z, y, mask, counts, means, samples, classes, dim, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """counts[a, k] = the samples n of client a with y_n = k and a mask, means[a, k] their mean."""
    a, k = (tl.program_id(0) // classes).to(tl.int64), tl.program_id(0) % classes
    lanes, d = tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total, number = tl.zeros((WIDTH,), tl.float64), tl.zeros((ROWS,), tl.int64)
    for start in range(0, samples, ROWS):
        n = start + lanes
        there = n < samples
        label = tl.load(y + a * samples + n, mask=there, other=-1)
        own = (label == k) & (tl.load(mask + a * samples + n, mask=there, other=0) != 0)
        number += own.to(tl.int64)
        if tl.sum(own.to(tl.int32), 0) > 0:  # most clients have few of the classes
            place = (a * samples + n[:, None]) * dim + d[None, :]
            tile = tl.load(z + place, mask=own[:, None] & (d[None, :] < dim), other=0.0)
            total += tl.sum(tile.to(tl.float64), 0)
    count = tl.sum(number, 0)
    mean = total / tl.maximum(count, 1).to(tl.float64)
    row = a * classes + k
    tl.store(means + row * dim + d, mean.to(means.dtype.element_ty), mask=d < dim)
    if tl.program_id(1) == 0:
        tl.store(counts + row, count)


@triton.jit
def _centred(
    rows, index, out, bound, most, last, dim, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out[g, s] = (z_s − mean)/√number of the rows of group g, 0 where there is none (index =
    last); bound[g] = the largest |z| of the program's coordinates.
    """
    g = tl.program_id(0).to(tl.int64)
    lanes, d = tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total, number = tl.zeros((WIDTH,), tl.float64), tl.zeros((ROWS,), tl.float64)
    biggest = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, most, ROWS):
        s = start + lanes
        place = tl.load(index + g * most + s, mask=s < most, other=last)
        real = place < last
        inside = real[:, None] & (d[None, :] < dim)
        tile = tl.load(rows + place[:, None] * dim + d[None, :], mask=inside, other=0.0)
        tile = tile.to(tl.float64)
        total += tl.sum(tile, 0)
        biggest = tl.maximum(biggest, tl.max(tl.abs(tile), 0))
        number += real.to(tl.float64)
    count = tl.sum(number, 0)
    mean, root = total / count, tl.sqrt(count)
    for start in range(0, most, ROWS):
        s = start + lanes
        place = tl.load(index + g * most + s, mask=s < most, other=last)
        real = place < last
        inside = real[:, None] & (d[None, :] < dim)
        tile = tl.load(rows + place[:, None] * dim + d[None, :], mask=inside, other=0.0)
        away = tl.where(real[:, None], (tile.to(tl.float64) - mean[None, :]) / root, 0.0)
        where = (g * most + s[:, None]) * dim + d[None, :]
        tl.store(out + where, away, mask=(s < most)[:, None] & (d[None, :] < dim))
    tl.store(bound + g * blocks + tl.program_id(1), tl.max(biggest, 0))


@triton.jit
def _put(
    vectors,
    values,
    least,
    index,
    basis,
    weight,
    counted,
    number,
    most,
    last,
    dim,
    EIGEN: tl.constexpr,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write row j of group g to place index[g, j]. EIGEN: the vector of the j-th largest
    eigenvalue, if that is above least[g]; else root j, of values[g] that count.
    """
    g, j = (tl.program_id(0) // number).to(tl.int64), tl.program_id(0) % number
    place = tl.load(index + g * most + j)
    d = tl.arange(0, WIDTH)
    good = (d < dim) & (place < last)
    if EIGEN:
        row = g * number + (number - 1 - j)
        value = tl.load(values + row)
        keep = value > tl.load(least + g)
        safe = tl.where(keep, value, 1.0)
        by = tl.where(keep, 1.0 / tl.sqrt(safe) if SCALED else 1.0, 0.0)
        size = tl.where(keep, 1.0 / safe, 0.0)
    else:
        row = g * number + j
        rank = tl.load(values + g)
        keep = j < rank
        by = 1.0
        size = tl.where(rank > 0, 1.0, 0.0)
    vector = tl.load(vectors + row * dim + d, mask=good, other=0.0) * by
    tl.store(basis + place * dim + d, vector.to(basis.dtype.element_ty), mask=good)
    tl.store(weight + place, size.to(weight.dtype.element_ty), mask=place < last)
    tl.store(counted + place, keep.to(tl.uint8), mask=place < last)


@triton.jit
def _scaled(
    basis,
    weight,
    index,
    real,
    means,
    chosen,
    out,
    along,
    most,
    samples,
    classes,
    dim,
    WIDTH: tl.constexpr,
):
    """out[g, r] = √weight · vector at index[g, r], along[g, r] = its product with the mean of its
    client and class; 0 where there is none.
    """
    g, r = (tl.program_id(0) // most).to(tl.int64), tl.program_id(0) % most
    d = tl.arange(0, WIDTH)
    there = tl.load(real + g * most + r) != 0
    place = tl.load(index + g * most + r)
    good = (d < dim) & there
    root = tl.sqrt(tl.load(weight + place).to(tl.float64))
    vector = tl.load(basis + place * dim + d, mask=good, other=0.0).to(tl.float64) * root
    vector = tl.where(good, vector, 0.0)
    row = (place // samples) * classes + tl.load(chosen + g)
    mean = tl.load(means + row * dim + d, mask=good, other=0.0)
    tl.store(out + (g * most + r) * dim + d, vector, mask=d < dim)
    tl.store(along + g * most + r, tl.sum(vector * mean, 0))


def means(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return (counts (A, K) int64, means (A, K, D)) of z (A, N, D), y and mask (A, N)."""
    z, y, mask = z.contiguous(), y.contiguous(), mask.contiguous()
    clients, samples, dim = z.shape
    counts = torch.empty(clients, classes, dtype=torch.int64, device=z.device)
    found = z.new_empty(clients, classes, dim)
    if found.numel():
        _means[(clients * classes, triton.cdiv(dim, FEW))](
            *(z, y, mask, counts, found, samples, classes, dim), ROWS=MANY, WIDTH=FEW
        )
    return counts, found


def centred(rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the rows of groups about their mean, over √number (G, S, D), float64; the largest
    |z| of each group (G,)).
    """
    rows, index = rows.contiguous(), index.contiguous()
    (groups, most), (last, dim) = index.shape, rows.shape
    blocks = triton.cdiv(dim, WIDTH)
    out, bound = (
        rows.new_empty(shape, dtype=F64) for shape in ((groups, most, dim), (groups, blocks))
    )
    _centred[(groups, blocks)](
        *(rows, index, out, bound, most, last, dim, blocks), ROWS=ROWS, WIDTH=WIDTH
    )
    return out, bound.amax(1)


def put(
    vectors: Tensor,
    values: Tensor,
    least: Tensor | None,
    index: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    scaled: bool,
) -> None:
    """Write the rows of groups (G, R, D) to their places in `out`: basis, weight, counted."""
    basis, weight, counted = out
    groups, number, dim = vectors.shape
    vectors, values = vectors.contiguous(), values.contiguous()
    _put[(groups * number,)](
        *(vectors, values, values if least is None else least, index.contiguous()),
        *(basis, weight, counted.view(torch.uint8)),
        *(number, index.shape[1], len(basis), dim),
        EIGEN=least is not None,
        SCALED=scaled,
        WIDTH=triton.next_power_of_2(dim),
    )


def scaled(
    basis: Tensor, weight: Tensor, index: Tensor, real: Tensor, means: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (√weight · vectors (G, R, D), their products with the means (G, R)), float64, of basis
    (C, N, D), weight (C, N), index and real (G, R), means (C, K, D), float64, and classes (G,).
    """
    basis, weight, means = basis.contiguous(), weight.contiguous(), means.contiguous()
    (_, samples, dim), (groups, most) = basis.shape, index.shape
    out, along = (basis.new_empty(shape, dtype=F64) for shape in ((*index.shape, dim), index.shape))
    _scaled[(groups * most,)](
        *(basis, weight, index.contiguous(), real.contiguous(), means, chosen, out, along),
        *(most, samples, means.shape[1], dim),
        WIDTH=triton.next_power_of_2(dim),
    )
    return out, along
