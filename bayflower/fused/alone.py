"""Steps of one client at a time, recorded on a GPU: for networks that cannot be stacked.

A step of a small network is some hundred kernels, and Python takes milliseconds to start them. All
clients take the same steps on other numbers, so one recording serves them all: what a step reads is
copied to where the recording reads it, and the work stays in the recording's tensors until the
client is done.

A network may do what a recording leaves out, such as to count its calls. So the first step with
each shape is a plain one, and the next two are taken twice, plainly and by the recording: if their
numbers differ, or a step cannot be recorded, steps stay plain.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..contract import Work
from ..networks.manner import Manner
from ..networks.model import Batch
from ..rounds.steps import Step, Steps
from ..stacked.replay import Graphs, recording
from ..tree import Tensors, flatten, map_tree
from .fixed import copy, leaves

log = logging.getLogger("bayflower")
MOST = 16  # shapes that are recorded: last batches of clients differ
CHECKS = 2  # steps of each shape that are taken twice
SHARE, ROUNDING = 0.05, 1e-6  # by how much of its move, and of itself, a tensor may differ
LOSS = 1e-2  # by how much of itself the loss may


class RecordedSteps(Steps):
    """Takes steps by recordings where there are some."""

    def __init__(self, manner: Manner, graphs: Graphs) -> None:
        self.manner, self.graphs = manner, graphs
        self.known: dict[Any, RecordedStep] = {}
        self.last: tuple[Any, Any] = (None, None)  # a work and its forms

    def take(self, name: Any, step: Step, work: Work, *args: Any) -> tuple[Work, Tensors]:
        """Return what `step` returns of the work and the other arguments."""
        if not self.graphs.on:
            return step(work, *args)
        groups, noise, _, weights = args
        shapes = self.last[1] if work is self.last[0] else forms(work)
        kind = name, shapes, *(forms(one) for one in (*groups, noise, weights))
        one = self.known.get(kind)
        if one is None and self.fine():
            one = self.known[kind] = RecordedStep(self.graphs)
        after, info = step(work, *args) if one is None else one.take(step, work, *args)
        # a recorded step keeps the forms of the work
        self.last = (after, shapes) if one is not None and one.graph is not None else (None, None)
        return after, info

    def done(self, work: Work) -> Work:
        """Return the work in memory of its own: the next client's comes to where it is now."""
        self.last = None, None
        if not self.known:
            return work
        own = {memory(leaf) for one in self.known.values() for leaf in one.here}
        return map_tree(lambda leaf: leaf.clone() if memory(leaf) in own else leaf, work)

    def fine(self) -> bool:
        """Return whether one more shape may be recorded: passes of the network are functions of
        their arguments alone.
        """
        odd = self.manner.strays or self.manner.changes or bool(self.manner.left)
        return not odd and len(self.known) < MOST


class RecordedStep:
    """A step with arguments of certain shapes."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.graph, self.calls = graphs, None, 0
        self.refused = False
        self.args: tuple[Work, tuple[Batch, ...], Tensors, Tensor, Tensor | None] | None = None
        self.loss: Tensor | None = None
        self.here: list[Tensor] = []  # what the recording reads, the work first
        self.moving = 0  # tensors of the work

    def take(
        self,
        step: Step,
        work: Work,
        groups: tuple[Batch, ...],
        noise: Tensors,
        key: int | Tensor,
        weights: Tensor | None,
    ) -> tuple[Work, Tensors]:
        """Return what the step returns."""
        self.calls += 1
        if not isinstance(key, Tensor):  # with a number in its place a recording would keep that
            key = torch.full((), key, dtype=torch.int64, device=groups[0].x.device)
        given = (work, groups, noise, key, weights)
        if self.calls == 1 or self.refused or not (self.graph or self.record(step, given)):
            return step(*given)
        if self.calls <= 1 + CHECKS:
            return self.check(step, given)
        return self.replay(given)

    def record(self, step: Step, given: Any) -> bool:
        """Record the step, which does no work yet; return whether that could be done."""
        work, groups, noise, key, weights = given
        fixed = map_tree(own, work), tuple(map_tree(own, one) for one in groups)
        self.args = (
            *fixed,
            map_tree(own, noise),
            own(key),
            None if weights is None else own(weights),
        )
        self.here, self.moving = arguments(self.args), len(leaves(self.args[0]))
        self.loss = torch.zeros((), dtype=torch.float64, device=key.device)
        graph = self.new_graph()
        try:
            with self.recording(graph):
                self.body(step)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            log.debug("steps of one client are not recorded: %s", error)
            self.refuse()
            return False
        self.graph = graph
        return True

    def new_graph(self) -> Any:
        """Return what a step is recorded in."""
        return torch.cuda.CUDAGraph()

    def recording(self, graph: Any) -> Any:
        """Return where the step is recorded."""
        return recording(graph, self.graphs.pool)

    def body(self, step: Step) -> None:
        """Take the step from the own arguments to the own work and loss."""
        assert self.args is not None
        assert self.loss is not None
        after, info = step(*self.args)
        here, there = self.here[: self.moving], leaves(after)
        if forms(after) != forms(self.args[0]):
            raise RuntimeError("a step changes the shapes of the work")
        mine = {memory(leaf) for leaf in here}
        pairs = [
            # what was in one place of the work and is in another now must not be overwritten first
            (a, b.detach().clone() if memory(b) in mine else b.detach())
            for a, b in zip(here, there, strict=True)
            if a.data_ptr() != b.data_ptr()
        ]
        copy([a for a, _ in pairs], [b for _, b in pairs])
        self.loss.copy_(info["loss"].detach())

    def replay(self, given: Any) -> tuple[Work, Tensors]:
        """Take the recorded step; its results are the recording's own tensors."""
        assert self.args is not None
        assert self.loss is not None
        assert self.graph is not None
        begin = self.moving if given[0] is self.args[0] else 0  # the work may be there
        pairs = [
            (a, b)
            for a, b in zip(self.here[begin:], arguments(given, begin == 0), strict=True)
            if a.data_ptr() != b.data_ptr() and a.numel()
        ]
        copy([a for a, _ in pairs], [b for _, b in pairs])
        self.graph.replay()
        return self.args[0], {"loss": self.loss}

    def check(self, step: Step, given: Any) -> tuple[Work, Tensors]:
        """Return what the plain step returns; steps stay plain if the recorded one differs."""
        before = [leaf.clone() for leaf in leaves(given[0])]
        begin = random_state(given[3])
        want, info = step(*given)
        end = random_state(given[3], begin)
        got, found = self.replay(given)
        random_state(given[3], end)
        moved = zip(leaves(got), leaves(want), before, strict=True)
        if not (near_loss(found["loss"], info["loss"]) and all(near(*one) for one in moved)):
            log.info("a recorded step of one client has other numbers than a plain one: not used")
            self.refuse()
        return want, info

    def refuse(self) -> None:
        """Take plain steps from now on."""
        self.refused, self.graph, self.args, self.here = True, None, None, []


def own(leaf: Tensor) -> Tensor:
    """Return a copy in memory of its own."""
    return leaf.detach().clone(memory_format=torch.contiguous_format)


def memory(leaf: Tensor) -> int:
    """Return where the memory is that a tensor is in."""
    return leaf.untyped_storage().data_ptr()


def arguments(given: Any, with_work: bool = True) -> list[Tensor]:
    """Return the tensors of a step's arguments, those of the work first."""
    work, groups, noise, *last = given
    others = [*leaves(groups), *leaves(noise), *(one for one in last if one is not None)]
    return [*leaves(work), *others] if with_work else others


def forms(tree: Any) -> Any:
    """Return names, shapes and types of a tree's tensors."""
    named = {} if tree is None else {"": tree} if isinstance(tree, Tensor) else flatten(tree)
    return tuple((name, leaf.shape, leaf.dtype) for name, leaf in named.items())


def random_state(like: Tensor, new: Tensor | None = None) -> Tensor | None:
    """Return the state of torch's generator of a GPU, and set `new` in its place if it is given."""
    if not like.is_cuda:
        return None
    generator = torch.cuda.default_generators[like.device.index or 0]
    before = generator.get_state()
    if new is not None:
        generator.set_state(new)
    return before


def near(got: Tensor, want: Tensor, before: Tensor) -> bool:
    """Return whether a tensor that moved is where it should be."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    off, moved = (got - want).norm(), (want - before).norm()
    return bool(off <= SHARE * moved + ROUNDING * want.norm())


def near_loss(got: Tensor, want: Tensor) -> bool:
    """Return whether a loss is what it should be."""
    return bool((got - want).abs() <= LOSS * want.abs() + ROUNDING)
