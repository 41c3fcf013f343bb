"""GPU kernels in Triton that add the parts of long sums: few clients fill a device only if several
programs share a sum. Each part is added in a fixed order, so that two runs give the same bits.

    parts[a, s, o, r]   what program s has added up for client a, output o and place r, in float32

The second kernel also adds the bias, takes the largest of each 2×2 window and bends it, so that a
convolution whose sum is split needs no further kernel. Only imported where a CUDA device and Triton
are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _sum(
    parts,
    bias,
    out,
    last,
    splits,
    outputs,
    row,
    rate,
    DESCEND: tl.constexpr,
    BIAS: tl.constexpr,
    LAST: tl.constexpr,
    WAYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out[a, o, r] = Σ_s parts[a, s, o, r] + bias[a, o]; with LAST the last r is for last[a, o].
    With DESCEND these are parameters, which go down by `rate` times that.
    """
    a = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    s = tl.arange(0, WAYS)
    good = n < outputs * row
    every = tl.load(
        parts + (a * splits + s)[:, None] * outputs * row + n[None, :],
        mask=(s < splits)[:, None] & good[None, :],
        other=0.0,
    )
    total = tl.sum(every, 0)
    o, r = n // row, n % row
    if BIAS:
        total += tl.load(bias + a * outputs + o, mask=good, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    if LAST:
        place, most = out + (a * outputs + o) * (row - 1) + r, good & (r < row - 1)
        end, few = last + a * outputs + o, good & (r == row - 1)
        if DESCEND:
            before = tl.load(place, mask=most, other=0.0) + tl.load(end, mask=few, other=0.0)
            value = before - rate * value
        tl.store(place, value, mask=most)
        tl.store(end, value, mask=few)
    else:
        tl.store(out + a * outputs * row + n, value, mask=good)


@triton.jit
def _pool_sum(
    parts,
    bias,
    out,
    index,
    splits,
    outputs,
    samples,
    BIAS: tl.constexpr,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    WAYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out[a, b, o, p, q] = bent(max over a window of Σ_s parts[a, s, o, b, h, w] + bias[a, o]),
    index[a, o, b, p, q] = which it was.
    """
    a = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    q, p, b = n % WIDE, (n // WIDE) % HIGH, (n // (WIDE * HIGH)) % samples
    o = n // (WIDE * HIGH * samples)
    good = o < outputs
    s = tl.arange(0, WAYS)
    whole = outputs * samples * (ROWS * COLUMNS)
    spot = (o * samples + b) * (ROWS * COLUMNS) + 2 * p * COLUMNS + 2 * q
    base = parts + (a * splits + s)[:, None] * whole + spot[None, :]
    there = (s < splits)[:, None] & good[None, :]
    best = tl.sum(tl.load(base, mask=there, other=0.0), 0)
    where = tl.zeros((SIZE,), dtype=tl.int32)
    for t in tl.static_range(1, 4):
        step = (t // 2) * COLUMNS + t % 2
        value = tl.sum(tl.load(base + step, mask=there, other=0.0), 0)
        better = (value > best) | (value != value)
        best, where = tl.where(better, value, best), tl.where(better, t, where)
    if BIAS:
        best += tl.load(bias + a * outputs + o, mask=good, other=0.0).to(tl.float32)
    bent = tl.where(best > 0, best, best * SLOPE)
    where = tl.where(best > 0, where, where + 4)
    every = outputs * samples * (HIGH * WIDE)
    to = (b * outputs + o) * (HIGH * WIDE) + p * WIDE + q
    tl.store(out + a * every + to, bent.to(out.dtype.element_ty), mask=good)
    tl.store(index + a * every + n, where.to(tl.int8), mask=good)


def ways(splits: int) -> int:
    """Return the next power of two."""
    return triton.next_power_of_2(splits)


def added(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ_s of parts (A, S, O, R), plus bias (A, O)."""
    clients, splits, outputs, row = parts.shape
    out = parts.new_empty(clients, outputs, row, dtype=dtype)
    _sum[(triton.cdiv(outputs * row, BLOCK), clients)](
        *(parts, parts if bias is None else bias, out, out, splits, outputs, row, 0.0),
        DESCEND=False,
        BIAS=bias is not None,
        LAST=False,
        WAYS=ways(splits),
        SIZE=BLOCK,
        num_warps=2,
    )
    return out


def added_apart(parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return Σ_s of parts (A, S, O, R): all but the last entry of each row, and that one."""
    clients, _, outputs, row = parts.shape
    out = parts.new_empty(clients, outputs, row - 1, dtype=dtype)
    last = parts.new_empty(clients, outputs, dtype=dtype)
    apart(parts, out, last, None)
    return out, last


def descend(parts: Tensor, weight: Tensor, bias: Tensor, rate: float) -> None:
    """Subtract `rate` times Σ_s of parts (A, S, O, R + 1) from weight (A, O, …), of R numbers a
    row, and from bias (A, O), in place.
    """
    apart(parts, weight, bias, rate)


def apart(parts: Tensor, out: Tensor, last: Tensor, rate: float | None) -> None:
    """Write Σ_s of parts to `out` and `last`, or with a rate subtract it there."""
    clients, splits, outputs, row = parts.shape
    _sum[(triton.cdiv(outputs * row, BLOCK), clients)](
        *(parts, parts, out, last, splits, outputs, row, 0.0 if rate is None else rate),
        DESCEND=rate is not None,
        BIAS=False,
        LAST=True,
        WAYS=ways(splits),
        SIZE=BLOCK,
        num_warps=2,
    )


def pooled(
    parts: Tensor, bias: Tensor | None, dtype: torch.dtype, slope: float
) -> tuple[Tensor, Tensor]:
    """Return (A, B, O, P, Q) from parts (A, S, O, B, H, W), sample after sample in memory, and
    which element it was, channel after channel in memory.
    """
    clients, splits, outputs, samples, rows, columns = parts.shape
    high, wide = rows // 2, columns // 2
    out = parts.new_empty(clients, samples, outputs, high, wide, dtype=dtype)
    index = parts.new_empty(clients, outputs, samples, high, wide, dtype=torch.int8)
    _pool_sum[(triton.cdiv(outputs * samples * high * wide, BLOCK), clients)](
        *(parts, parts if bias is None else bias, out, index, splits, outputs, samples),
        BIAS=bias is not None,
        SLOPE=slope,
        ROWS=rows,
        COLUMNS=columns,
        HIGH=high,
        WIDE=wide,
        WAYS=ways(splits),
        SIZE=BLOCK,
        num_warps=4,
    )
    return out, index.transpose(1, 2)
