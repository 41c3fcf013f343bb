"""A trial step of a method on a user's network, before training."""

from __future__ import annotations

import dataclasses

from .. import methods
from ..config import Training
from ..errors import ConfigError
from ..rounds.ownnoise import client_half
from ..rounds.rehearsal import rehearsed
from .client import Site


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
    try:
        half = client_half(row.client, config, training, model)
        initial = model.initial(0, train.mask.dtype)
        rehearsed(row.name, half, row.server(config, model.anatomy), initial, train)
    except ConfigError:
        if "dropout_layer" in names and not layer:
            return  # the strategy may name another layer, which is checked later
        raise
