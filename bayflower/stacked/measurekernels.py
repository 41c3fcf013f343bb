"""GPU kernels in Triton that measure how far clients' tensors are from what was sent: one pass over
them, in which nothing of their size is written.

The tensors of a client form one row. Tensor k has columns [begin_k, begin_k + length_k) of it.
Column i of the row counts with signs[i] at place i mod SIZE of the client's sketch.

    squares[a, s]        Σ change², in float64, over the columns of program s
    sketches[a, s, p]    Σ signs·change over its columns of place p, in the tensors' type

Programs take turns by blocks of SIZE columns. Their parts are added in a fixed order, so that two
runs give the same bits. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8  # tensors of one launch
WAYS = 16  # parts that are added at once
PLACES = 64  # places of a sketch that a program adds


@triton.jit
def _walk(
    total,
    square,
    leaf,
    sent,
    signs,
    begin,
    length,
    groups,
    MOVED: tl.constexpr,
    SKETCH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return `total` and `square` with this program's blocks of one tensor added."""
    a, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, SIZE)
    first = begin // SIZE
    start = first + (group + groups - first % groups) % groups
    for block in range(start, (begin + length + SIZE - 1) // SIZE, groups):
        column = block * SIZE + lanes
        place = column - begin
        good = (place >= 0) & (place < length)
        step = tl.load(leaf + a * length + place, mask=good, other=0.0)
        if MOVED:
            step -= tl.load(sent + place, mask=good, other=0.0).to(step.dtype)
        wide = step.to(tl.float64)
        square += wide * wide
        if SKETCH:
            total += step * tl.load(signs + column, mask=good, other=0).to(step.dtype)
    return total, square


@triton.jit(do_not_specialize=["groups", "slot", "slots"])
def _measure(
    signs,
    sketches,
    squares,
    begin,
    groups,
    slot,
    slots,
    leaf0,
    sent0,
    length0,
    leaf1,
    sent1,
    length1,
    leaf2,
    sent2,
    length2,
    leaf3,
    sent3,
    length3,
    leaf4,
    sent4,
    length4,
    leaf5,
    sent5,
    length5,
    leaf6,
    sent6,
    length6,
    leaf7,
    sent7,
    length7,
    COUNT: tl.constexpr,
    MOVED: tl.constexpr,
    SKETCH: tl.constexpr,
    ALONE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write part `slot` + group of a client: its squares and its sketch over COUNT tensors, the
    first of which begins at column `begin`. ALONE: it is the only part; write the norm.
    """
    total = tl.zeros((SIZE,), leaf0.dtype.element_ty)
    square = tl.zeros((SIZE,), tl.float64)
    total, square = _walk(
        total, square, leaf0, sent0, signs, begin, length0, groups, MOVED, SKETCH, SIZE
    )
    if COUNT > 1:
        begin += length0
        total, square = _walk(
            total, square, leaf1, sent1, signs, begin, length1, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 2:
        begin += length1
        total, square = _walk(
            total, square, leaf2, sent2, signs, begin, length2, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 3:
        begin += length2
        total, square = _walk(
            total, square, leaf3, sent3, signs, begin, length3, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 4:
        begin += length3
        total, square = _walk(
            total, square, leaf4, sent4, signs, begin, length4, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 5:
        begin += length4
        total, square = _walk(
            total, square, leaf5, sent5, signs, begin, length5, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 6:
        begin += length5
        total, square = _walk(
            total, square, leaf6, sent6, signs, begin, length6, groups, MOVED, SKETCH, SIZE
        )
    if COUNT > 7:
        begin += length6
        total, square = _walk(
            total, square, leaf7, sent7, signs, begin, length7, groups, MOVED, SKETCH, SIZE
        )
    row = tl.program_id(0).to(tl.int64) * slots + slot + tl.program_id(1)
    if SKETCH:
        tl.store(sketches + row * SIZE + tl.arange(0, SIZE), total)
    found = tl.sum(square, 0)
    if ALONE:
        found = tl.sqrt(found)
    tl.store(squares + row, found)


@triton.jit(do_not_specialize=["slots"])
def _add(
    squares,
    sketches,
    norms,
    found,
    slots,
    SKETCH: tl.constexpr,
    SIZE: tl.constexpr,
    WAYS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """norms[a] = √Σ_s squares[a, s], found[a, p] = Σ_s sketches[a, s, p]."""
    a = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    s = tl.arange(0, WAYS)
    square = tl.zeros((WAYS,), tl.float64)
    total = tl.zeros((PLACES,), found.dtype.element_ty)
    for begin in range(0, slots, WAYS):
        row = a * slots + begin + s
        good = begin + s < slots
        square += tl.load(squares + row, mask=good, other=0.0)
        if SKETCH:
            spot = row[:, None] * SIZE + p[None, :]
            total += tl.sum(tl.load(sketches + spot, mask=good[:, None], other=0.0), 0)
    if SKETCH:
        tl.store(found + a * SIZE + p, total)
    if tl.program_id(1) == 0:
        tl.store(norms + a, tl.sqrt(tl.sum(square, 0)))


def measured(
    leaves: Sequence[Tensor],
    sent: Sequence[Tensor],
    signs: Tensor | None,
    launches: Sequence[tuple[int, int, int, int]],
    size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of each client's change (A,) and, with signs (columns,), its sketch (A,
    `size`), from contiguous leaves (A, …) of one type; `sent` is without that row, or missing.

    A launch is (its first tensor, how many, their first column, programs a client).
    """
    one, clients = leaves[0], len(leaves[0])
    slots = sum(groups for _, _, _, groups in launches)
    squares = one.new_empty(clients, slots, dtype=torch.float64)
    sketches = squares if signs is None else one.new_empty(clients, slots, size)
    slot = 0
    for first, count, begin, groups in launches:
        tensors = []
        for at in range(first, first + MOST):
            leaf = leaves[at if at < first + count else first]
            start = sent[at if at < first + count else first] if sent else leaf
            tensors += [leaf, start, leaf.numel() // clients]
        _measure[(clients, groups)](
            *(squares if signs is None else signs, sketches, squares, begin, groups, slot, slots),
            *tensors,
            COUNT=count,
            MOVED=bool(sent),
            SKETCH=signs is not None,
            ALONE=slots == 1,
            SIZE=size,
            num_warps=4,
        )
        slot += groups
    if slots == 1:
        return squares.view(clients), None if signs is None else sketches.view(clients, size)
    norms = one.new_empty(clients, dtype=torch.float64)
    found = norms if signs is None else one.new_empty(clients, size)
    _add[(clients, 1 if signs is None else size // PLACES)](
        *(squares, sketches, norms, found, slots),
        SKETCH=signs is not None,
        SIZE=size,
        WAYS=WAYS,
        PLACES=PLACES,
        num_warps=4,
    )
    return norms, None if signs is None else found
