"""A layer of LSTMs of many networks in one GPU kernel for all times.

Some programs share a client: each keeps the weights of some of its hidden units, with their four
gates, from the first time to the last. After every time the programs of a client wait
for each other, because each needs what the others found. So all of them must run at once: the
launch is cooperative, and no more clients are taken at a time than the device has room for.

Forward, a program reads the whole h of the time before. Backward, it multiplies the slopes of its
own gates with its weights, which is a part of ∂h of every unit; after the wait it adds up the parts
of all programs for its own units, always in the same order.

`lstm.py` has the formulas and the names; `lstmkernels.py` has the kernels for one time.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .lstmkernels import _sigmoid, _tanh

SAMPLES = 16  # of a program
WIDEST = 256  # hidden units; the weights of more do not fit on the chip


def cooperative() -> bool:
    """Return whether Triton can promise that all programs run at once; older ones, and those for
    other makes, cannot.
    """
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return any(one.name == "launch_cooperative_grid" for one in fields(CUDAOptions))


COOPERATIVE = cooperative()


@triton.jit
def _wait(count, programs):
    """Wait until all programs of this client have raised `count`."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < programs:
        pass


@triton.jit
def _weights(on, u0, k0, wide, UNITS: tl.constexpr, DEPTH: tl.constexpr):
    """W_hᵀ (DEPTH, 4 UNITS) from hidden unit k0 on; the gates of a unit lie side by side."""
    n = tl.arange(0, 4 * UNITS)
    u, k = u0 + n // 4, k0 + tl.arange(0, DEPTH)
    row = (n % 4) * wide + u
    inside = (u < wide)[None, :] & (k < wide)[:, None]
    return tl.load(on + row[None, :] * wide + k[:, None], mask=inside, other=0.0)


@triton.jit
def _states(h, steps_b, k0, batch, wide, first, SAMPLES: tl.constexpr, DEPTH: tl.constexpr):
    """h (SAMPLES, DEPTH) from hidden unit k0 on, as the other programs wrote it."""
    b, k = first + tl.arange(0, SAMPLES), k0 + tl.arange(0, DEPTH)
    inside = (b < batch)[:, None] & (k < wide)[None, :]
    place = h + b[:, None] * steps_b + k[None, :]
    return tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _ahead(
    given,
    on,
    h,
    c,
    hs,
    cs,
    gates,
    counts,
    begin,
    times,
    step,
    batch,
    wide,
    PROGRAMS: tl.constexpr,
    UNITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """h, c and the gates of all times, of the clients from `begin` on; `step` is from a time to the
    next in hs.
    """
    a = (begin + tl.program_id(1)).to(tl.int64)
    u0, first = tl.program_id(0) * UNITS, tl.program_id(2) * SAMPLES
    u, b = u0 + tl.arange(0, UNITS), first + tl.arange(0, SAMPLES)
    good = (b < batch)[:, None] & (u < wide)[None, :]
    on += a * 4 * wide * wide
    w0 = _weights(on, u0, 0, wide, UNITS, DEPTH)
    w1, w2, w3 = w0, w0, w0
    if CHUNKS > 1:
        w1 = _weights(on, u0, DEPTH, wide, UNITS, DEPTH)
    if CHUNKS > 2:
        w2 = _weights(on, u0, 2 * DEPTH, wide, UNITS, DEPTH)
        w3 = _weights(on, u0, 3 * DEPTH, wide, UNITS, DEPTH)
    kind = hs.dtype.element_ty
    # row t of (times, clients, batch, ·)
    row = a * batch * 4 * wide + b[:, None] * 4 * wide + u[None, :]
    given += row
    gates += row
    place = a * batch * wide + b[:, None] * wide + u[None, :]
    counts += (a * tl.num_programs(2) + tl.program_id(2)) * times
    before = h + a * batch * wide
    cell = tl.load(c + place, mask=good, other=0.0).to(tl.float32)
    x_i = tl.load(given, mask=good, other=0.0).to(tl.float32)
    x_f = tl.load(given + wide, mask=good, other=0.0).to(tl.float32)
    x_g = tl.load(given + 2 * wide, mask=good, other=0.0).to(tl.float32)
    x_o = tl.load(given + 3 * wide, mask=good, other=0.0).to(tl.float32)
    for t in range(times):
        part = _states(before, wide, 0, batch, wide, first, SAMPLES, DEPTH)
        acc = tl.dot(part, w0, input_precision=PRECISION)
        if CHUNKS > 1:
            part = _states(before, wide, DEPTH, batch, wide, first, SAMPLES, DEPTH)
            acc = tl.dot(part, w1, acc, input_precision=PRECISION)
        if CHUNKS > 2:
            part = _states(before, wide, 2 * DEPTH, batch, wide, first, SAMPLES, DEPTH)
            acc = tl.dot(part, w2, acc, input_precision=PRECISION)
            part = _states(before, wide, 3 * DEPTH, batch, wide, first, SAMPLES, DEPTH)
            acc = tl.dot(part, w3, acc, input_precision=PRECISION)
        even, odd = tl.split(tl.reshape(acc, (SAMPLES, UNITS, 2, 2)))
        i, g = tl.split(even)
        f, o = tl.split(odd)
        i, f, g, o = _sigmoid(i + x_i), _sigmoid(f + x_f), _tanh(g + x_g), _sigmoid(o + x_o)
        cell = f * cell + i * g
        tl.store(hs + place, (o * _tanh(cell)).to(kind), mask=good)
        tl.debug_barrier()
        tl.atomic_add(counts + t, 1, sem="release", scope="gpu")
        # what no other program waits for comes behind the sign
        tl.store(cs + place, cell.to(kind), mask=good)
        tl.store(gates, i.to(kind), mask=good)
        tl.store(gates + wide, f.to(kind), mask=good)
        tl.store(gates + 2 * wide, g.to(kind), mask=good)
        tl.store(gates + 3 * wide, o.to(kind), mask=good)
        given += 4 * step
        more = good & (t + 1 < times)
        x_i = tl.load(given, mask=more, other=0.0).to(tl.float32)
        x_f = tl.load(given + wide, mask=more, other=0.0).to(tl.float32)
        x_g = tl.load(given + 2 * wide, mask=more, other=0.0).to(tl.float32)
        x_o = tl.load(given + 3 * wide, mask=more, other=0.0).to(tl.float32)
        before = hs + a * batch * wide
        hs += step
        cs += step
        gates += 4 * step
        if t + 1 < times:
            _wait(counts + t, PROGRAMS)


@triton.jit
def _back(
    to_hs,
    to_c,
    on,
    c,
    gates,
    cs,
    found,
    to_begin,
    parts,
    counts,
    begin,
    times,
    step,
    batch,
    wide,
    th_t,
    th_a,
    th_b,
    PROGRAMS: tl.constexpr,
    UNITS: tl.constexpr,
    SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """∂gates of all times, `found`, and ∂c before the first, of the clients from `begin` on."""
    a = (begin + tl.program_id(1)).to(tl.int64)
    mine, block = tl.program_id(0), tl.program_id(2)
    u = mine * UNITS + tl.arange(0, UNITS)
    b = block * SAMPLES + tl.arange(0, SAMPLES)
    rows, k = tl.arange(0, SAMPLES), tl.arange(0, HIDDEN)
    real = b < batch
    good = real[:, None] & (u < wide)[None, :]
    full = real[:, None] & (k < wide)[None, :]
    on += a * 4 * wide * wide + u[:, None] * wide + k[None, :]
    there = (u < wide)[:, None] & (k < wide)[None, :]
    w_i = tl.load(on, mask=there, other=0.0)
    w_f = tl.load(on + wide * wide, mask=there, other=0.0)
    w_g = tl.load(on + 2 * wide * wide, mask=there, other=0.0)
    w_o = tl.load(on + 3 * wide * wide, mask=there, other=0.0)
    kind = found.dtype.element_ty
    place = a * batch * wide + b[:, None] * wide + u[None, :]
    row = a * batch * 4 * wide + b[:, None] * 4 * wide + u[None, :]
    pair = a * tl.num_programs(2) + block
    counts += pair * times
    # two rooms, in turn: one is read while the other is written
    parts += pair * 2 * PROGRAMS * SAMPLES * HIDDEN
    room = PROGRAMS * SAMPLES * HIDDEN
    cell = tl.load(to_c + place, mask=good, other=0.0).to(tl.float32)
    slope = tl.zeros((SAMPLES, UNITS), dtype=tl.float32)
    for back in range(times):
        t = (times - 1 - back).to(tl.int64)
        now = t * step
        given = tl.load(
            to_hs + t * th_t + a * th_a + b[:, None] * th_b + u[None, :], mask=good, other=0.0
        )
        i = tl.load(gates + 4 * now + row, mask=good, other=0.0).to(tl.float32)
        f = tl.load(gates + 4 * now + row + wide, mask=good, other=0.0).to(tl.float32)
        g = tl.load(gates + 4 * now + row + 2 * wide, mask=good, other=0.0).to(tl.float32)
        o = tl.load(gates + 4 * now + row + 3 * wide, mask=good, other=0.0).to(tl.float32)
        bent = _tanh(tl.load(cs + now + place, mask=good, other=0.0).to(tl.float32))
        earlier = tl.load(cs + now - step + place, mask=good & (t > 0), other=0.0)
        start = tl.load(c + place, mask=good & (t == 0), other=0.0)
        old = earlier.to(tl.float32) + start.to(tl.float32)
        if back > 0:
            _wait(counts + back - 1, PROGRAMS)
            slope = tl.zeros((SAMPLES, UNITS), dtype=tl.float32)
            others = parts + ((back - 1) % 2) * room + rows[:, None] * HIDDEN + u[None, :]
            for _ in tl.static_range(PROGRAMS):
                slope += tl.load(others, mask=good, other=0.0, cache_modifier=".cg")
                others += SAMPLES * HIDDEN
        slope += given.to(tl.float32)
        cell += slope * o * (1.0 - bent * bent)
        to_i = (cell * g * i * (1.0 - i)).to(kind)
        to_f = (cell * old * f * (1.0 - f)).to(kind)
        to_g = (cell * i * (1.0 - g * g)).to(kind)
        to_o = (slope * bent * o * (1.0 - o)).to(kind)
        cell *= f
        if t > 0:
            acc = tl.dot(to_i, w_i, input_precision=PRECISION)
            acc = tl.dot(to_f, w_f, acc, input_precision=PRECISION)
            acc = tl.dot(to_g, w_g, acc, input_precision=PRECISION)
            acc = tl.dot(to_o, w_o, acc, input_precision=PRECISION)
            own = parts + (back % 2) * room + mine * SAMPLES * HIDDEN
            tl.store(own + rows[:, None] * HIDDEN + k[None, :], acc, mask=full)
            tl.debug_barrier()
            tl.atomic_add(counts + back, 1, sem="release", scope="gpu")
        tl.store(found + 4 * now + row, to_i, mask=good)
        tl.store(found + 4 * now + row + wide, to_f, mask=good)
        tl.store(found + 4 * now + row + 2 * wide, to_g, mask=good)
        tl.store(found + 4 * now + row + 3 * wide, to_o, mask=good)
    tl.store(to_begin + place, cell.to(to_begin.dtype.element_ty), mask=good)


class Shape(NamedTuple):
    """How a layer of one size is shared out."""

    programs: int  # of a client and a block of samples
    blocks: int  # of samples
    units: int  # hidden units of a program
    hidden: int  # hidden units, up to a power of two
    precision: str
    grids: tuple[tuple[int, tuple[int, int, int]], ...]  # (first client, grid) of each launch

    def options(self) -> dict[str, Any]:
        """Return what both kernels are told beside their tensors and lengths."""
        return {
            "PROGRAMS": self.programs,
            "UNITS": self.units,
            "SAMPLES": SAMPLES,
            "PRECISION": self.precision,
            "num_warps": 8,
            "launch_cooperative_grid": True,
        }


def shape_of(states: Tensor) -> Shape | None:
    """Return how a layer with the states (A, B, H) is shared out on their device; None if one
    kernel a time is to be taken instead. float32 without TF32 is three products in TF32, which have
    its accuracy.
    """
    clients, batch, wide = states.shape
    if wide > WIDEST or not COOPERATIVE:
        return None
    exact = states.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    units = 16 if exact else 32
    seen = driver.active.utils.get_device_properties(states.device.index)
    hidden = max(16, triton.next_power_of_2(wide))
    # the weights, twice in three products, and what is on its way to the tensor cores
    needed = (8 if exact else 4) * units * hidden * states.element_size() + 20_000
    if needed > seen["max_shared_mem"]:
        return None
    programs, blocks = triton.cdiv(wide, units), triton.cdiv(batch, SAMPLES)
    room = seen["multiprocessor_count"] // (programs * blocks)
    if not room:
        return None
    some = triton.cdiv(clients, triton.cdiv(clients, room))
    grids = tuple(
        (first, (programs, min(some, clients - first), blocks)) for first in range(0, clients, some)
    )
    return Shape(programs, blocks, units, hidden, "tf32x3" if exact else "tf32", grids)


def ahead(given: Tensor, on: Tensor, h: Tensor, c: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """Return (hs, gates, cs), each (T, A, B, ·), of given (T, A, B, 4H), W_h (A, 4H, H) and the
    states before (A, B, H).
    """
    times, clients, batch, four = given.shape
    wide = four // 4
    on, h, c = (one.to(given.dtype).contiguous() for one in (on, h, c))
    hs, cs = (given.new_empty(times, clients, batch, wide) for _ in range(2))
    gates = torch.empty_like(given)
    counts = torch.zeros(clients, shape.blocks, times, dtype=torch.int32, device=given.device)
    chunks = min(4, shape.hidden // 16)
    for first, grid in shape.grids:
        _ahead[grid](
            *(given, on, h, c, hs, cs, gates, counts),
            *(first, times, clients * batch * wide, batch, wide),
            DEPTH=shape.hidden // chunks,
            CHUNKS=chunks,
            **shape.options(),
        )
    return hs, gates, cs


def back(
    to_hs: Tensor, to_c: Tensor, on: Tensor, c: Tensor, gates: Tensor, cs: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Return (∂gates (T, A, B, 4H), ∂c before the first time (A, B, H)) of to_hs (T, A, B, H) in
    any order of times, clients and samples.
    """
    times, clients, batch, wide = cs.shape
    on, c, to_c = on.to(gates.dtype).contiguous(), c.contiguous(), to_c.contiguous()
    found, to_begin = torch.empty_like(gates), torch.empty_like(to_c)
    counts = torch.zeros(clients, shape.blocks, times, dtype=torch.int32, device=gates.device)
    rooms = (clients, shape.blocks, 2, shape.programs, SAMPLES, shape.hidden)
    parts = torch.empty(rooms, dtype=torch.float32, device=gates.device)
    for first, grid in shape.grids:
        _back[grid](
            *(to_hs, to_c, on, c, gates, cs, found, to_begin, parts, counts),
            *(first, times, clients * batch * wide, batch, wide, *to_hs.stride()[:3]),
            HIDDEN=shape.hidden,
            **shape.options(),
        )
    return found, to_begin
