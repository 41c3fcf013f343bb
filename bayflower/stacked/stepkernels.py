"""GPU kernels in Triton for what surrounds a recorded training step: its batches, gathered in one
kernel, and its losses, added up in one.

Where the step stands is a number on the device, so that a recording can be replayed. Only imported
where a CUDA device and Triton are there; `fused/phases.py` has the same with torch's functions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather(
    at,
    places,
    masks,
    x,
    y,
    to_x,
    to_y,
    to_mask,
    every,
    length,
    SIZE: tl.constexpr,
):
    """to_x[n] = x[places[at, n]], and so on, for one n; `every` is from a step to the next."""
    n = tl.program_id(0).to(tl.int64)
    spot = tl.load(at) * every + n
    place = tl.load(places + spot)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = k < length
    tl.store(to_x + n * length + k, tl.load(x + place * length + k, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(to_y + n, tl.load(y + place))
        tl.store(to_mask + n, tl.load(masks + spot))


@triton.jit
def _note(at, losses, loss, counts, clients, number, SIZE: tl.constexpr):
    """losses[a] += loss[a]·counts[at, a], then at += 1; a row of counts has `number` clients."""
    a = tl.arange(0, SIZE)
    good = a < clients
    now = tl.load(at)
    count = tl.load(counts + now * number + a, mask=good, other=0.0)
    value = tl.load(loss + a, mask=good, other=0.0).to(tl.float64)
    before = tl.load(losses + a, mask=good, other=0.0)
    tl.store(losses + a, before + value * count, mask=good)
    tl.debug_barrier()
    tl.store(at, now + 1)


def gather(
    at: Tensor, places: Tensor, masks: Tensor, x: Tensor, y: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (A, G, W, …), y and mask (A, G, W) of step `at` of the first `size` clients, from
    places and masks (steps, clients, G, W), x (S, …) and y (S,).
    """
    shape = (size, *places.shape[2:])
    batch = x.new_empty(*shape, *x.shape[1:])
    labels, real = y.new_empty(shape), masks.new_empty(shape)
    length = x[0].numel()
    wide = min(triton.next_power_of_2(max(length, 1)), BLOCK)
    _gather[(max(labels.numel(), 1), triton.cdiv(max(length, 1), wide))](
        *(at, places, masks, x, y, batch, labels, real, places[0].numel(), length),
        SIZE=wide,
        num_warps=4 if wide > 256 else 1,
    )
    return batch, labels, real


def note(at: Tensor, losses: Tensor, loss: Tensor, counts: Tensor) -> None:
    """Add each client's loss times the samples of step `at` to `losses`, and go to the next."""
    size = len(loss)
    known = loss.detach().contiguous()
    _note[(1,)](
        *(at, losses, known, counts, size, counts.shape[1]),
        SIZE=triton.next_power_of_2(max(size, 1)),
        num_warps=1,
    )
