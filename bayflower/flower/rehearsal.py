"""A trial step of a method on a user's network, before training."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import methods
from ..config import Training
from ..contract import ClientHalf
from ..errors import BayflowerError, ConfigError, in_one_line
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.ownnoise import client_half
from ..stacked import chance
from ..tree import to
from .client import Site

FEW = 8  # samples of a trial step


def rehearse(
    row: methods.Method, site: Site, layer: str = "", training: Training | None = None
) -> None:
    """Try one step of a round on a few samples and discard the result; raise ConfigError if the
    method cannot train the network.
    """
    model, train = site.model, site.data.train
    names = {field.name for field in dataclasses.fields(row.config)}
    chosen = {**row.defaults, **({"dropout_layer": layer} if layer else {})}
    config = row.config(**{name: value for name, value in chosen.items() if name in names})
    training = training or Training()
    if row.client.needs_base and model.head_names == frozenset(model.shapes):
        raise ConfigError(
            f"the head {', '.join(model.head_layers)} is the whole network; {row.name} needs "
            "layers before it: name a smaller head"
        )
    few = Batch(*(tensor[:FEW] for tensor in train))
    initial = [
        {name: value.to(few.mask.device) for name, value in part.items()}
        for part in model.initial(0, few.mask.dtype)
    ]
    try:
        half = client_half(row.client, config, training, model)
        server = row.server(config, model.anatomy)
        sent = server.broadcast(server.init(initial[0], initial[1], (site.client,)), site.client)
        state = to(half.init(initial[0], initial[1]), few.mask.device)
        solo.differentiated(model, lambda: one_step(half, state, sent, few))
    except ConfigError:
        if "dropout_layer" in names and not layer:
            return  # the strategy may name another layer, which is checked later
        raise
    except BayflowerError:
        raise
    except Exception as error:
        reason = in_one_line(error, 200)
        raise ConfigError(
            f"{row.name} cannot train model {model.name}: {type(error).__name__}: {reason}"
        ) from error


def one_step(half: ClientHalf, state: Any, sent: Any, few: Batch) -> None:
    """Do one step of each phase of a round, and its end."""
    with solo.seeded(0, 0, 0), chance.step(0):
        work = half.begin(state, sent, few)
        for phase in half.phases("train"):
            work = solo.fresh_optimizer(phase, work)
            shapes = half.noise(phase.name, phase.batch_size).items()
            noise = {
                name: torch.zeros(shape, dtype=few.mask.dtype, device=few.mask.device)
                for name, shape in shapes
            }
            work, _ = half.step(phase, work, (few,) * phase.batches, noise)
        half.finish(state, solo.surveyed(half, work, few), few)
