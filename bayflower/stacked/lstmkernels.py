"""GPU kernels in Triton for LSTMs of many networks at once: one kernel a time step, which
multiplies the hidden state with the weights and goes through the gates.

A program has some hidden units of one client, with their four gates, and some samples. `lstm.py`
has the formulas and the names. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

UNITS, SAMPLES = 16, 16  # of a program


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """tanh(x), exact near 0 to the last bits of float32."""
    grown = tl.exp(2.0 * tl.abs(x))
    far = 1.0 - 2.0 / (grown + 1.0)
    near = tl.abs(x) * (1.0 - x * x * (0.33333334 - 0.13333334 * x * x))
    size = tl.where(tl.abs(x) < 0.03, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def _ahead(
    given,
    on,
    h,
    c,
    h_out,
    c_out,
    gates,
    batch,
    wide,
    hs_a,
    hs_b,
    cs_a,
    cs_b,
    UNITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """h, c and the gates after one time; the h and c before have steps of their own."""
    a = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    b = tl.program_id(2) * SAMPLES + tl.arange(0, SAMPLES)
    known, real = u < wide, b < batch
    good = real[:, None] & known[None, :]
    on += a * 4 * wide * wide
    row = (a * batch + b[:, None]) * 4 * wide + u[None, :]
    i = tl.load(given + row, mask=good, other=0.0).to(tl.float32)
    f = tl.load(given + row + wide, mask=good, other=0.0).to(tl.float32)
    g = tl.load(given + row + 2 * wide, mask=good, other=0.0).to(tl.float32)
    o = tl.load(given + row + 3 * wide, mask=good, other=0.0).to(tl.float32)
    old = tl.load(c + a * cs_a + b[:, None] * cs_b + u[None, :], mask=good, other=0.0)
    for start in range(0, wide, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < wide
        before = tl.load(
            h + a * hs_a + b[:, None] * hs_b + k[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        place = on + u[:, None] * wide + k[None, :]
        there = known[:, None] & inside[None, :]
        w = tl.load(place, mask=there, other=0.0)
        i = tl.dot(before, tl.trans(w), i, input_precision=PRECISION)
        w = tl.load(place + wide * wide, mask=there, other=0.0)
        f = tl.dot(before, tl.trans(w), f, input_precision=PRECISION)
        w = tl.load(place + 2 * wide * wide, mask=there, other=0.0)
        g = tl.dot(before, tl.trans(w), g, input_precision=PRECISION)
        w = tl.load(place + 3 * wide * wide, mask=there, other=0.0)
        o = tl.dot(before, tl.trans(w), o, input_precision=PRECISION)
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    new = f * old.to(tl.float32) + i * g
    kind = h_out.dtype.element_ty
    place = (a * batch + b[:, None]) * wide + u[None, :]
    tl.store(h_out + place, (o * _tanh(new)).to(kind), mask=good)
    tl.store(c_out + place, new.to(kind), mask=good)
    tl.store(gates + row, i.to(kind), mask=good)
    tl.store(gates + row + wide, f.to(kind), mask=good)
    tl.store(gates + row + 2 * wide, g.to(kind), mask=good)
    tl.store(gates + row + 3 * wide, o.to(kind), mask=good)


@triton.jit
def _back(
    later,
    turned,
    to_h,
    to_c,
    before,
    c,
    gates,
    found,
    to_before,
    batch,
    wide,
    th_a,
    th_b,
    cs_a,
    cs_b,
    LAST: tl.constexpr,
    UNITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """∂gates of one time, `found`, and ∂c of the time before; `later` are ∂gates of the time
    after, of which the last time has none. `turned` is W_hᵀ (H, 4H).
    """
    a = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    b = tl.program_id(2) * SAMPLES + tl.arange(0, SAMPLES)
    known, real = u < wide, b < batch
    good = real[:, None] & known[None, :]
    place = (a * batch + b[:, None]) * wide + u[None, :]
    row = (a * batch + b[:, None]) * 4 * wide + u[None, :]
    given = tl.load(to_h + a * th_a + b[:, None] * th_b + u[None, :], mask=good, other=0.0)
    i = tl.load(gates + row, mask=good, other=0.0).to(tl.float32)
    f = tl.load(gates + row + wide, mask=good, other=0.0).to(tl.float32)
    g = tl.load(gates + row + 2 * wide, mask=good, other=0.0).to(tl.float32)
    o = tl.load(gates + row + 3 * wide, mask=good, other=0.0).to(tl.float32)
    bent = _tanh(tl.load(c + place, mask=good, other=0.0).to(tl.float32))
    cell = tl.load(to_c + place, mask=good, other=0.0).to(tl.float32)
    old = tl.load(before + a * cs_a + b[:, None] * cs_b + u[None, :], mask=good, other=0.0)
    acc = tl.zeros((SAMPLES, UNITS), dtype=tl.float32)
    if not LAST:
        turned += a * 4 * wide * wide
        for start in range(0, 4 * wide, DEPTH):
            k = start + tl.arange(0, DEPTH)
            inside = k < 4 * wide
            slopes = tl.load(
                later + (a * batch + b[:, None]) * 4 * wide + k[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(
                turned + u[:, None] * 4 * wide + k[None, :],
                mask=known[:, None] & inside[None, :],
                other=0.0,
            )
            acc = tl.dot(slopes, tl.trans(w), acc, input_precision=PRECISION)
    slope = acc + given.to(tl.float32)
    cell += slope * o * (1.0 - bent * bent)
    kind = found.dtype.element_ty
    tl.store(found + row, (cell * g * i * (1.0 - i)).to(kind), mask=good)
    tl.store(found + row + wide, (cell * old.to(tl.float32) * f * (1.0 - f)).to(kind), mask=good)
    tl.store(found + row + 2 * wide, (cell * i * (1.0 - g * g)).to(kind), mask=good)
    tl.store(found + row + 3 * wide, (slope * bent * o * (1.0 - o)).to(kind), mask=good)
    tl.store(to_before + place, (cell * f).to(to_before.dtype.element_ty), mask=good)


def sizes(
    clients: int, batch: int, wide: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the grid and the sizes of a program; it asks for much at once, because it waits for
    memory most of its time.
    """
    exact = dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    grid = (triton.cdiv(wide, UNITS), clients, triton.cdiv(batch, SAMPLES))
    return grid, {
        "UNITS": UNITS,
        "SAMPLES": SAMPLES,
        "DEPTH": min(256, max(16, triton.next_power_of_2(wide))),
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


def ahead(given: Tensor, on: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Return (hs, gates, cs), each (T, A, B, ·), of given (T, A, B, 4H), W_h (A, 4H, H) and the
    states before (A, B, H).
    """
    times, clients, batch, four = given.shape
    wide = four // 4
    on, h, c = on.contiguous(), h.contiguous(), c.contiguous()
    hs, cs = (given.new_empty(times, clients, batch, wide) for _ in range(2))
    gates = torch.empty_like(given)
    grid, kind = sizes(clients, batch, wide, given.dtype)
    for t in range(times):
        before, cell = (h, c) if t == 0 else (hs[t - 1], cs[t - 1])
        steps = (*before.stride()[:2], *cell.stride()[:2])
        _ahead[grid](
            *(given[t], on, before, cell, hs[t], cs[t], gates[t], batch, wide, *steps), **kind
        )
    return hs, gates, cs


def back(
    to_hs: Tensor, to_c: Tensor, on: Tensor, c: Tensor, gates: Tensor, cs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (∂gates (T, A, B, 4H), ∂c before the first time (A, B, H)) of to_hs (T, A, B, H) in
    any order of clients and samples.
    """
    times, clients, batch, wide = cs.shape
    turned, c, to_c = on.mT.contiguous(), c.contiguous(), to_c.contiguous()
    found, other = torch.empty_like(gates), torch.empty_like(to_c)
    grid, kind = sizes(clients, batch, wide, gates.dtype)
    spare = torch.empty_like(to_c)
    for t in reversed(range(times)):
        last = t == times - 1
        before = cs[t - 1] if t else c
        target = other if (times - 1 - t) % 2 == 0 else spare
        steps = (*to_hs[t].stride()[:2], *before.stride()[:2])
        _back[grid](
            *(found[t if last else t + 1], turned, to_hs[t], to_c, before, cs[t], gates[t]),
            *(found[t], target, batch, wide, *steps),
            LAST=last,
            **kind,
        )
        to_c = target
    return found, to_c
