"""Two decisions of the fused engine: how many clients fit into memory, which is measured, and
whether stacking is faster on a CPU.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ..contract import ClientHalf, Phase
from ..networks.model import Batch
from ..rounds import solo
from ..stacked import chance
from ..stacked.mapped import mapped
from ..tree import map_tree, take
from .bank import Bank
from .memory import peak
from .phases import StackedPhase, segments
from .stack import Stack

log = logging.getLogger("bayflower")
SHARE = 0.7  # share of free memory that a stack may use
SURE = 0.02  # if the upper bound is below this share of free memory, nothing is measured
CROWD = 3  # on a CPU, stack only if at least this many clients train in the average step
LARGE = 1e7  # multiplications of a step in convolutions, above which a CPU trains one by one
# upper bound: memory of one client in copies of the model (parameters, gradients, optimiser,
# messages); its data come on top
COPIES = 12


class Trainer(Protocol):
    """The parts of the engine that these decisions use: its clients, its halves, its device."""

    device: torch.device
    dtype: torch.dtype
    per_client: bool
    measured: bool
    stack: Stack
    bank: Bank
    half: ClientHalf
    unstacked: ClientHalf

    def hold(self, chosen: Sequence[int]) -> None:
        """Bring the samples of some clients to the device."""

    def phase_of(self, phase: Phase, purpose: str, number: int) -> StackedPhase:
        """Return a phase of `number` clients."""


def clients_that_fit(
    engine: Trainer, ordered: Sequence[int], sent: Callable[[list[int]], Any]
) -> int:
    """Return how many of the clients fit into memory at once; 0 = all.

    If memory could be short, it is measured: the peak memory of a step with one client and with
    two.
    """
    free = free_memory(engine.device)
    largest = max(int(engine.stack.sizes.max()), 1)
    sample = engine.stack.train.x[0].numel() * engine.stack.train.x.element_size()
    batch = max(
        (phase.batch_size * phase.batches for phase in engine.half.phases("train")), default=1
    )
    least = (
        engine.half.model.num_parameters * engine.stack.train.x.element_size() * COPIES
        + sample * (largest + 64 * batch)
    )
    if least * len(ordered) < SURE * free:
        return 0
    try:
        each = memory_of_one(engine, ordered[0], sent) + sample * largest * 2
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):
        return 0  # the network cannot be stacked; the first round reports why
    fits = max(1, int(SHARE * free / each))
    if fits < len(ordered):
        log.info(
            "training %d clients at a time: each needs about %.0f MB, %.0f MB are free",
            fits,
            each / 1e6,
            free / 1e6,
        )
    return 0 if fits >= len(ordered) else fits


def free_memory(device: torch.device) -> float:
    """Return the free memory of the device in bytes."""
    if device.type != "cuda":
        return (
            float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
            if "SC_AVPHYS_PAGES" in os.sysconf_names
            else 4e9
        )
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def memory_of_one(engine: Trainer, client: int, sent: Callable[[list[int]], Any]) -> float:
    """Return the bytes that one more client adds to the peak of a training step."""
    peaks = []
    engine.hold([client])
    for number in (1, 2):
        some = [client] * number
        states = engine.bank.take(some)
        # the lambda runs in this iteration
        peaks.append(peak(lambda: step(engine, states, sent(some), some)(), engine.device))  # noqa: B023
    states_and_copies = engine.half.model.num_parameters * engine.stack.train.x.element_size() * 4
    return max(peaks[1] - peaks[0], 0) + states_and_copies


def why_one_by_one(
    engine: Trainer, states: Any, broadcast: Any, chosen: Sequence[int], round: int
) -> str | None:
    """Return why training one by one is better on this CPU; None if stacking is better.

    Times are measured with `stacking=measured` only: the two ways round differently, so two runs
    with the same seed could give different results.
    """
    phases = engine.half.phases("train")
    if len(chosen) < 2 or not phases:
        return None
    stacked = engine.phase_of(phases[0], "train", len(chosen))
    lengths = (stacked.draw(chosen, round)[:, :, 0, 0] >= 0).sum(0)
    if engine.measured:
        return slower(engine, states, broadcast, chosen, lengths)
    if phases[0].batch_size * phases[0].batches * convolved(engine) > LARGE:
        return (
            "clients were trained one by one, which is usually faster for large convolutions on a "
            "CPU (stacking=measured compares both ways)"
        )
    if int(lengths.sum()) < CROWD * int(lengths.max()):
        return (
            f"clients were trained one by one, because fewer than {CROWD} train in the average "
            "step (stacking=measured compares both ways)"
        )
    return None


def convolved(engine: Trainer) -> float:
    """Return the multiplications of one sample's convolutions, forward; infinity if they cannot be
    counted.
    """
    model = engine.unstacked.model
    if all(len(shape) < 3 for shape in model.shapes.values()):
        return 0
    counter = FlopCounterMode(display=False)
    two = engine.stack.train.x[:2]  # some networks know no batch of one
    try:
        with torch.no_grad(), counter:
            model.forward(*model.initial(0, engine.dtype), two, False)
    except Exception:  # training says what is wrong
        log.debug("convolutions of %s could not be counted", model.name, exc_info=True)
        return float("inf")
    found = counter.get_flop_counts().get("Global", {})
    convolutions = sum(count for operation, count in found.items() if "conv" in str(operation))
    return convolutions / 2 / len(two)


def slower(
    engine: Trainer, states: Any, broadcast: Any, chosen: Sequence[int], lengths: np.ndarray
) -> str | None:
    """Return a note if stacking is slower than training one by one, from the time of a few steps;
    None if it is faster.
    """

    def sent(places: list[int]) -> Any:
        return take(broadcast, torch.tensor(places)) if engine.per_client else broadcast

    def stacked(number: int) -> float:
        places = list(range(number))
        return seconds(
            step(
                engine,
                map_tree(lambda leaf: leaf[:number], states),
                sent(places),
                list(chosen[:number]),
            )
        )

    many, one = stacked(len(chosen)), stacked(1)
    slope = (many - one) / (len(chosen) - 1)
    together = sum(
        times * (one + slope * (size - 1))
        for size, times in segments(lengths, range(1, len(chosen) + 1))
    )
    own = take(broadcast, 0) if engine.per_client else broadcast
    with solo.one_thread():
        apart = float(lengths.sum()) * seconds(single(engine, take(states, 0), own, chosen[0]))
    log.info("a round takes about %.2f s stacked and %.2f s one by one", together, apart)
    if together <= apart:
        return None
    return (
        f"clients were trained one by one, which is {together / apart:.1f} times faster than "
        "stacked on this CPU"
    )


def step(engine: Trainer, states: Any, broadcast: Any, chosen: list[int]) -> Callable[[], Any]:
    """Return a function that does one step of the first phase for the stack and discards it."""
    phase = engine.half.phases("train")[0]
    data = engine.stack.whole(chosen)
    axis = 0 if engine.per_client else None
    work = mapped(engine.half.begin, (0, axis, 0))(states, broadcast, data)
    work = solo.fresh_optimizer(phase, work, (len(chosen),))
    width = min(phase.batch_size, data.y.shape[1])
    groups = tuple(map_tree(lambda leaf: leaf[:, :width], data) for _ in range(phase.batches))
    noise = {
        name: torch.zeros(len(chosen), *shape, dtype=engine.dtype, device=engine.device)
        for name, shape in engine.half.noise(phase.name, phase.batch_size).items()
    }
    keys = torch.zeros(len(chosen), dtype=torch.int64, device=engine.device)
    once = chance.within(partial(engine.half.step, phase))
    return lambda: mapped(once)(keys, work, groups, noise)


def single(engine: Trainer, state: Any, broadcast: Any, client: int) -> Callable[[], Any]:
    """Return a function that does one step of the first phase for one client, without stacking, and
    discards it.
    """
    phase = engine.unstacked.phases("train")[0]
    data = engine.stack.alone(client)
    work = solo.fresh_optimizer(phase, engine.unstacked.begin(state, broadcast, data))
    batch = Batch(*(leaf[: phase.batch_size] for leaf in data))
    noise = {
        name: torch.zeros(*shape, dtype=engine.dtype)
        for name, shape in engine.unstacked.noise(phase.name, phase.batch_size).items()
    }
    once = chance.within(partial(engine.unstacked.step, phase))
    return lambda: once(0, work, (batch,) * phase.batches, noise)


def seconds(fn: Callable[[], Any], times: int = 3) -> float:
    """Return the shortest time of a few calls, after one warm-up call."""
    fn()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - begun)
    return min(taken)
