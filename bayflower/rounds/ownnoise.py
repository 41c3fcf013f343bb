"""A method whose clients each have the extra parameters of the task to themselves (noise=client).

They are no parameters of the model: a client computes them from the predictions that its own
training samples get (`Task.own_extra`), at the beginning of a round for the loss of that round, and
before a test for the predictions. They are kept in its state, go through training beside the
buffers, and are in no update. This holds for every method, whose half does not see them.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Survey, Work
from ..networks.model import Batch, Model
from ..tasks import EXTRA
from ..tree import Tensors
from .persample import sample_private

CHUNK = 1024  # samples of one pass
LOOK = "look"  # a phase of one step in which nothing moves, where a method has no adaptation


def client_half(kind: type[ClientHalf], config: Any, training: Any, model: Model) -> ClientHalf:
    """Return the client half of a method for the model's task."""
    if training.sample_noise:
        kind = sample_private(type(kind(config, training, model)))
    half = kind(config, training, model)
    # a method may choose a half of its own by its settings
    return with_own(type(half))(config, training, model) if model.task.extra_stays else half


@lru_cache(maxsize=64)
def with_own(kind: type[ClientHalf]) -> type[ClientHalf]:
    """Return the half whose clients have the task's extra parameters to themselves. Functions that
    the method itself calls with its own state go to the method.
    """
    state_type = state_beside(kind.state_type)

    class Own(kind):  # type: ignore[valid-type, misc]
        def judged(self, state: Any, broadcast: Any, data: Batch) -> Tensor:
            """Return the extra parameters from predictions of the training samples."""
            parts = [self.predict("personal", state, broadcast, x, {}) for x in data.x.split(CHUNK)]
            found = self.model.task.own_extra(torch.cat(parts), data.y, data.mask)
            return found.detach().to(state.extra.dtype)

        def init(self, params: Tensors, buffers: Tensors) -> Any:
            some = next(iter(params.values()))
            return state_type(
                super().init(params, buffers), some.new_tensor(self.model.task.extra())
            )

        def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
            if not isinstance(state, state_type):
                return super().begin(state, broadcast, data)
            extra = self.judged(state, broadcast, data)
            return beside(super().begin(state.inner, broadcast, data), extra)

        def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
            if not isinstance(state, state_type):
                return super().finish(state, work, data)
            after, update = super().finish(state.inner, work, data)
            return state_type(without(after), work.buffers[EXTRA]), without(update)

        def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
            found = super().phases(purpose)
            if found or purpose == "train":
                return found
            return (self.training.phase(LOOK, epochs=1, trainable=())._replace(epochs=0, steps=1),)

        def gradient(
            self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
        ) -> tuple[Tensors, Tensors, Tensor]:
            if phase.name != LOOK:
                return super().gradient(phase, work, batches, noise)
            return {}, work.buffers, 0.0 * batches[0].mask.sum()

        def adapt(self, state: Any, broadcast: Any, data: Batch, purpose: Purpose) -> Work:
            if not isinstance(state, state_type):
                return super().adapt(state, broadcast, data, purpose)
            moves = bool(super().phases(purpose))
            extra = self.judged(state, broadcast, data) if moves else state.extra
            work = beside(super().adapt(state.inner, broadcast, data, purpose), extra)
            # adapting makes no survey: its place holds the broadcast for `finish_adapting`
            return work._replace(survey=Survey({}, broadcast))

        def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
            if not isinstance(state, state_type):
                return super().finish_adapting(state, work, data, purpose)
            after = state.inner
            if super().phases(purpose):
                after = without(super().finish_adapting(after, work, data, purpose))
            found = state_type(after, work.buffers[EXTRA])
            return found._replace(extra=self.judged(found, work.survey.each, data))

        def predict(
            self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors
        ) -> Tensor:
            if not isinstance(state, state_type):
                return super().predict(view, state, broadcast, x, noise)
            other = copy(self)  # halves are shared between threads
            other.model = self.model.with_own(state.extra)
            return super(Own, other).predict(view, state.inner, broadcast, x, noise)

        def rejoined(self, state: Any) -> Any:
            return state._replace(inner=super().rejoined(state.inner))

        def lost(self, state: Any) -> Any:
            return state._replace(inner=super().lost(state.inner))

        def spread(self, state: Any, broadcast: Any) -> Tensors:
            return super().spread(state.inner, broadcast)

        def extra_of(self, state: Any) -> Tensors:
            return {EXTRA: state.extra}

    Own.state_type, Own.private = state_type, ("extra",)
    Own.__name__ = Own.__qualname__ = kind.__name__
    Own.__module__ = kind.__module__
    return Own


def state_beside(inner: type) -> Any:
    """Return the type of a state that holds a method's own and the extra parameters."""
    made: Any = NamedTuple  # mypy knows only types whose fields are written down
    return made("OwnExtra", [("inner", inner), ("extra", Tensor)])


def beside(work: Work, extra: Tensor) -> Work:
    """Return the work with extra parameters beside its buffers."""
    return work._replace(buffers={**work.buffers, EXTRA: extra})


def without(tree: Any) -> Any:
    """Return a tree without extra parameters."""
    if isinstance(tree, dict):
        return {name: without(value) for name, value in tree.items() if name != EXTRA}
    if isinstance(tree, tuple):
        parts = [without(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree
