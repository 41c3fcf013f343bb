"""A phase of training of a stack of clients, and a pass over their data. Both can be recorded and
replayed.

Clients are ordered by their number of training samples, largest first. So at any step the clients
that still train come first in the stack, and finished clients are not computed. Within a step,
shorter batches are padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Survey, Work
from ..data import batches
from ..networks.model import Batch
from ..stacked import chance
from ..stacked.mapped import mapped
from ..stacked.products import products
from ..stacked.replay import Graphs, Replay
from ..stacked.routes import has_kernels
from ..tree import map_tree, upload
from ..work import is_unchanged
from .fixed import Fixed, copy, leaves
from .recipe import StackedRecipe
from .stack import Ragged, Stack

# Cap on recorded numbers of active clients. With more clients, a number is rounded up to a recorded
# one.
MOST_SIZES = 128


class StackedPhase:
    """One phase of training for `number` clients: its tensors, and a step that can be replayed."""

    def __init__(
        self,
        half: ClientHalf,
        phase: Phase,
        purpose: str,
        stack: Stack,
        number: int,
        seed: int,
        graphs: Graphs,
    ) -> None:
        self.half, self.phase, self.purpose, self.stack, self.seed = (
            half,
            phase,
            purpose,
            stack,
            seed,
        )
        self.coupled = half.model.coupled
        self.steps = batches.num_steps(int(stack.sizes.max()), phase, self.coupled)
        self.width = max(
            batches.largest_batch(int(size), phase, self.coupled)
            for size in set(stack.sizes.tolist())
        )
        device, shape = stack.device, (self.steps, number, phase.batches, self.width)
        # of every sample of every step
        self.places = torch.zeros(shape, dtype=torch.int64, device=device)
        self.masks = torch.zeros(shape, dtype=stack.dtype, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.float64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(number, dtype=torch.float64, device=device)
        self.shapes = half.noise(phase.name, phase.batch_size)
        self.keys = {
            name: torch.zeros(number, dtype=torch.int64, device=device) for name in self.shapes
        }
        self.layer_keys = torch.zeros(number, dtype=torch.int64, device=device)  # of random layers
        every = stack.train
        labels = (every.y, every.start, every.size, stack.moving)
        self.recipe = StackedRecipe(half, purpose, shape[:2], stack.dtype, *labels)
        self.sizes = allowed_sizes(number)
        # whether a step is the gradient of the loss times a rate, so that it may be left a product
        own = type(half).gradient
        unchanged = own is ClientHalf.gradient or is_unchanged(own, phase)
        self.plain = half.model.stacked and phase.optimizer.plain and unchanged
        self.work: Fixed | None = None
        self.replay = Replay(self._step, graphs)
        self.plan: tuple[Any, np.ndarray] | None = None
        self.layout: batches.Layout | None = None  # of the last plan
        # a round that is prepared: its clients and number, their steps and samples
        self.ready: tuple[Any, tuple[np.ndarray, np.ndarray]] | None = None

    def draw(self, chosen: Sequence[int], round: int) -> np.ndarray:
        """Return the batches of a round; they may have been drawn in advance."""
        key = (tuple(chosen), round)
        if self.plan is None or self.plan[0] != key:
            sizes = tuple(self.stack.size(client) for client in chosen)
            if self.layout is None or self.layout.sizes != sizes:
                lengths = {"steps": self.steps, "width": self.width}
                self.layout = batches.layout(sizes, self.phase, coupled=self.coupled, **lengths)
            own = partial(batches.table, seed=self.seed, round=round, purpose=self.purpose)
            self.plan = key, own(self.layout, chosen, self.phase.name)
        return self.plan[1]

    def keys_of(self, draw: Callable[..., Any], *known: Any, round: int) -> Any:
        """Return the keys of clients' noise."""
        return draw(self.seed, *known, round)

    def run(self, work: Work, chosen: Sequence[int], round: int) -> tuple[Work, Tensor, np.ndarray]:
        """Return (the stacked work after the phase, in the phase's own tensors; each client's
        summed loss; the samples each has seen).
        """
        lengths, seen = self.prepare(chosen, round)
        self.at.zero_()
        self.losses.zero_()
        if self.work is None:
            self.work = Fixed.of_work(work)
        else:
            self.work.load(work)
        self.ready = None
        parts = segments(lengths, self.sizes)
        self.replay.sequence([size for size, times in parts for _ in range(times)])
        return self.work.tree, self.losses, seen

    def prepare(self, chosen: Sequence[int], round: int) -> tuple[np.ndarray, np.ndarray]:
        """Bring to the device what the steps of a round need besides the work, and return how many
        steps each client takes and how many samples it sees. This may be done while the device is
        busy with the round before: it comes behind that in its queue.
        """
        key = (tuple(chosen), round)
        if self.ready is not None and self.ready[0] == key:
            return self.ready[1]
        plan = self.draw(chosen, round)
        there = plan >= 0
        lengths = there[:, :, 0, 0].sum(0)
        rows = upload(plan, self.stack.device)
        start = self.stack.train.start[self.stack.index(chosen)]
        self.places.copy_(rows.clamp(min=0) + start[:, None, None])
        self.masks.copy_(rows >= 0)
        self.counts.copy_((rows >= 0).sum((2, 3)))
        stage = f"{self.purpose}/{self.phase.name}"
        for name, keys in self.keys.items():
            drawn = self.keys_of(batches.noise_keys, stage, name, chosen, round=round)
            keys.copy_(upload(drawn, keys.device))
        if self.half.model.draws is not False:
            drawn = self.keys_of(batches.layers_keys, stage, chosen, round=round)
            self.layer_keys.copy_(upload(drawn, self.layer_keys.device))
        draw, augment = batches.layers_keys, f"augment/{stage}"
        own = partial(self.keys_of, draw, augment, chosen, round=round)
        self.recipe.load(self.stack.index(chosen), round, lengths, own)
        found = lengths, there.sum((0, 2, 3))
        self.ready = key, found
        return found

    def _step(self, size: int) -> None:
        """Take one step with the first `size` clients."""
        assert self.work is not None
        groups = self.recipe.groups(self.groups(size), self.at, size)
        noise = {
            name: batches.normal(keys[:size], self.at[0], self.shapes[name], self.stack.dtype)
            for name, keys in self.keys.items()
        }
        work = self.work.part(size)
        self.recipe.set_rate(work, self.at, size)
        exact = len(self.sizes) == len(self.losses)  # no client among these has finished
        if exact and type(self.half).step is ClientHalf.step:
            gradient, front = self.recipe.shaped(partial(self.half.gradient, self.phase), size)
            args = (self.step_keys(size), *front, work, groups, noise)
            with products(work.params if self.plain else {}) as left:
                grads, buffers, loss = mapped(chance.within(gradient))(*args)
            optimizer = self.phase.optimizer
            left.descend(optimizer.lr)
            optimizer.update_stack(work.params, left.others(grads), work.opt)
            settle(work.buffers, buffers, None)
        else:
            step, front = self.recipe.shaped(partial(self.half.step, self.phase), size)
            args = (self.step_keys(size), *front, work, groups, noise)
            after, info = mapped(chance.within(step))(*args)
            loss = info["loss"]
            if self.work.unlike(after):
                self.work.spread()
            counts = None if exact else self.counts.index_select(0, self.at)[0, :size]
            settle(self.work.part(size), after, None if counts is None else counts > 0)
        self._note(loss.detach())

    def groups(self, size: int) -> tuple[Batch, ...]:
        """Return the batches of the step at hand, of the first `size` clients."""
        data, groups = self.stack.train, range(self.phase.batches)
        if has_kernels(data.x) and data.y.ndim == 1 and data.x.is_contiguous():
            from ..stacked import stepkernels

            known = (self.at, self.places, self.masks, data.x, data.y, size)
            x, y, mask = stepkernels.gather(*known)
            return tuple(Batch(x[:, g], y[:, g], mask[:, g]) for g in groups)
        places, masks = (
            tensor.index_select(0, self.at)[0, :size] for tensor in (self.places, self.masks)
        )
        every = ((places[:, g], masks[:, g]) for g in groups)
        return tuple(Batch(data.x[place], data.y[place], mask) for place, mask in every)

    def _note(self, loss: Tensor) -> None:
        """Add up the losses (size,) of the step at hand, and go to the next."""
        if has_kernels(loss) and len(self.losses) <= MOST_SIZES:
            from ..stacked import stepkernels

            stepkernels.note(self.at, self.losses, loss, self.counts)
            return
        counts = self.counts.index_select(0, self.at)[0, : len(loss)]
        self.losses[: len(loss)].addcmul_(loss.double(), counts)
        self.at += 1

    def step_keys(self, size: int) -> Tensor:
        """Return the keys of the first clients' random layers in this step; nothing is computed for
        a network without such layers.
        """
        keys = self.layer_keys[:size]
        return keys if self.half.model.draws is False else chance.further(keys, self.at[0])


class StackedPass:
    """A function of (arguments, batch) applied to all samples of `number` clients in pieces: sums
    are added, rows concatenated.
    """

    def __init__(
        self,
        fn: Callable[..., Survey],
        data: Ragged,
        longest: int,
        number: int,
        piece: int,
        graphs: Graphs,
        adopt: bool,
    ) -> None:
        piece = max(1, min(piece, longest))  # a short pass needs no padding to a whole piece
        self.fn, self.data, self.piece, self.adopt = fn, data, piece, adopt
        self.length = -(-longest // piece) * piece
        device = data.x.device
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.part = data.of(torch.zeros(number, dtype=torch.int64, device=device))
        self.args: Fixed | None = None
        self.found: Survey | None = None
        self.replay = Replay(self._piece, graphs)

    def run(self, rows: Tensor, sizes: np.ndarray, *args: Any) -> Survey:
        """Return the sums (C, …) and the rows (C, N, …) of the clients at `rows`, with `sizes`
        samples. The results are the pass's own tensors.
        """
        own = self.data.of(rows)
        copy([self.part.start, self.part.size], [own.start, own.size])
        if self.args is None:
            self.args = Fixed(args, self.adopt)
        else:
            self.args.load(args)
        self.at.zero_()
        if self.found is not None:
            map_tree(Tensor.zero_, self.found.total)
        self.replay.sequence(active(sizes, self.piece))
        assert self.found is not None
        return self.found

    def _piece(self, size: int) -> None:
        """Do one piece with the first `size` clients."""
        assert self.args is not None
        places = self.at * self.piece + torch.arange(self.piece, device=self.at.device)
        batch = self.part.rows(places.expand(size, -1), places < self.part.size[:size, None])
        with torch.no_grad():
            total, each = mapped(self.fn)(*self.args.part(size), batch)
        if self.found is None:
            clients = len(self.part.size)
            self.found = Survey(
                map_tree(lambda leaf: leaf.new_zeros(clients, *leaf.shape[1:]), total),
                map_tree(lambda leaf: leaf.new_zeros(clients, self.length, *leaf.shape[2:]), each),
            )
        map_tree(lambda mine, new: mine[:size].add_(new), self.found.total, total)
        map_tree(lambda mine, new: mine[:size].index_copy_(1, places, new), self.found.each, each)
        self.at += 1


def settle(before: Any, after: Any, going: Tensor | None) -> None:
    """Copy `after` into `before` for the clients that are `going` (all if None), except unchanged
    leaves.
    """
    pairs = [
        (a, b.detach())
        for a, b in zip(leaves(before), leaves(after), strict=True)
        if a.data_ptr() != b.data_ptr()
    ]
    if going is not None:
        pairs = [(a, torch.where(going.reshape(-1, *(1,) * (a.ndim - 1)), b, a)) for a, b in pairs]
    copy([a for a, _ in pairs], [b for _, b in pairs])


def segments(lengths: np.ndarray, allowed: Sequence[int]) -> list[tuple[int, int]]:
    """Return (clients, steps) in order: how many clients take part in how many steps, for lengths
    that never rise.
    """
    found: list[tuple[int, int]] = []
    for step in range(int(lengths[0]) if len(lengths) else 0):
        count = int((lengths > step).sum())
        count = next((size for size in allowed if size >= count), count)
        if found and found[-1][0] == count:
            found[-1] = (count, found[-1][1] + 1)
        else:
            found.append((count, 1))
    return found


def allowed_sizes(most: int) -> list[int]:
    """Return the numbers of clients that are recorded: all, or about MOST_SIZES, denser among small
    numbers.
    """
    if most <= MOST_SIZES:
        return list(range(1, most + 1))
    return sorted({round(most ** (i / (MOST_SIZES - 1))) for i in range(MOST_SIZES)})


def active(sizes: np.ndarray, piece: int) -> list[int]:
    """Return, for each piece, how many leading clients hold all that have samples in it."""
    counts = []
    for start in range(0, max(int(sizes.max(initial=0)), 1), piece):
        having = np.flatnonzero(sizes > start)
        counts.append(int(having[-1]) + 1 if len(having) else 1)
    return counts
