"""A trial step of a method on a user's network, before training."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

from ..contract import ClientHalf, ServerHalf
from ..errors import BayflowerError, ConfigError, in_one_line
from ..networks.model import Batch, Model
from ..stacked import chance
from ..tree import Tensors, to
from . import solo

FEW = 8  # samples of a trial step


def rehearsed(
    name: str, half: ClientHalf, server: ServerHalf, initial: tuple[Tensors, Tensors], train: Batch
) -> None:
    """Try one step of a round on a few samples and discard the result; raise ConfigError if the
    method called so cannot train the network.
    """
    size = min([FEW, *(phase.batch_size for phase in half.phases("train"))])
    few = Batch(*(tensor[:size] for tensor in train))
    half = type(half)(half.config, half.training, apart(half.model))
    params, buffers = (to(part, few.mask.device) for part in initial)
    try:
        sent = server.broadcast(server.init(params, buffers, (0,)), 0)
        state = to(half.init(params, buffers), few.mask.device)
        solo.differentiated(half.model, lambda: one_step(half, state, sent, few))
    except BayflowerError:
        raise
    except Exception as error:
        reason = in_one_line(error, 200)
        raise ConfigError(
            f"{name} cannot train model {half.model.name}: {type(error).__name__}: {reason}"
        ) from error


def apart(model: Model) -> Model:
    """Return the model with modules of its own: layers may keep what they have made in a trial."""
    other = copy(model)
    other._train, other._eval = deepcopy(model._train), deepcopy(model._eval)
    return other


def one_step(half: ClientHalf, state: Any, sent: Any, few: Batch) -> None:
    """Do one step of each phase of a round, and its end."""
    with solo.seeded(0, 0, 0), chance.step(0):
        work = half.begin(state, sent, few)
        for phase in half.phases("train"):
            work = solo.fresh_optimizer(phase, work)
            shapes = half.noise(phase.name, phase.batch_size).items()
            noise = {name: few.mask.new_zeros(shape) for name, shape in shapes}
            work, _ = half.step(phase, work, (few,) * phase.batches, noise)
        half.finish(state, solo.surveyed(half, work, few), few)
