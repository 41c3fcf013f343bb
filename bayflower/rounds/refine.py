"""The step of a method at the server, on samples without labels: a client half, run there after
each round (`ClientHalf.refiner`). It is the same on every engine.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import methods
from ..config import Run, Training
from ..contract import ClientHalf, ServerHalf
from ..data.unlabelled import unlabelled
from ..errors import ConfigError
from ..networks.model import Batch
from ..tree import flatten, to
from . import solo
from .halves import Halves

SERVER = 2**32 - 1  # the client's number that its batches and noise are drawn with


class Refiner:
    """The server's samples, and the half that trains on them. A sample's label is its number."""

    def __init__(
        self, server: ServerHalf, half: ClientHalf, initial: Any, data: Batch, seed: int
    ) -> None:
        self.server, self.half, self.data, self.seed = server, half, data, seed
        self.state = half.init(*initial)

    def __call__(self, before: Any, state: Any, round: int) -> Any:
        """Return the state after a round, refined; the one before if nothing was added up."""
        if state is before:
            return state
        there = next(iter(flatten(state).values())).device
        broadcast = to(self.server.broadcast(state, SERVER), self.data.mask.device)
        with solo.one_thread():
            keys = {"seed": self.seed, "client": SERVER, "round": round}
            update = solo.train(self.half, self.state, broadcast, self.data, **keys).update
        return self.server.refined(state, to(update, there))


def refiner_of(
    run: Run, halves: Halves, shape: tuple[int, ...], input_scale: str | None = None
) -> Refiner | None:
    """Return the step at the server; None if the method has none, or the server has no samples.
    `shape` is that of an input; `input_scale` is given where the halves do not know it yet.
    """
    kind = halves.client.refiner
    if kind is None or not run.data.server_data:
        return None
    if kind.needs_classes and run.training.task != "classification":
        raise ConfigError(
            f"server_data: {run.method} distils classes, got task={run.training.task}; leave "
            "server_data out"
        )
    device, dtype = run.settings.torch_device(), run.settings.torch_dtype()
    scale = halves.client.training.input_scale if input_scale is None else input_scale
    x = unlabelled(run.data, run.settings.seed, shape, scale)
    data = Batch(
        solo.moved(x, device, dtype),
        torch.arange(len(x), device=device),
        torch.ones(len(x), dtype=dtype, device=device),
    )
    half = kind(run.options, Training(), halves.model)  # no recipe: labels are numbers of samples
    return Refiner(halves.server, half, to(halves.initial, device), data, run.settings.seed)


def missing(run: Run) -> str | None:
    """Return a line if the method has a step at the server, and the server has no samples."""
    row = methods.get(run.method)
    if row.client.refiner is None or run.data.server_data:
        return None
    return (
        f"the server has no samples without labels (server_data), so {row.title} leaves out its "
        "step on them"
    )
