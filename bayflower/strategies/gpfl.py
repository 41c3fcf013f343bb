"""GPFL, server half (Zhang et al. 2023, ICCV): FedAvg of a base, class embeddings and a conditional
layer ("valve"); heads stay on the clients.

    paper          here                         shape
    base           state.params                 by name
    E              state.params["gpfl:E"]       (K, D): class embeddings
    CoV            state.params["gpfl:…"]       the valve's two layers, for scale and shift:
                                                weight (D, D), bias (D,), norm and norm bias (D,)
    head_i         (none)                       heads are never sent

Departs: embeddings and valve are no part of the user's network: they are made here, seeded by the
initial network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, check_choices
from ..networks.model import Anatomy
from ..settings import setting
from ..tree import Tensors, digest
from . import fedavg

Norm = Literal["frobenius", "mean"]
EXTRA = "gpfl:"  # what the names of embeddings and valve begin with
EMBEDDINGS = EXTRA + "E"


@dataclass(frozen=True)
class Config:
    """What the user sets for GPFL."""

    gpfl_weight: float = setting(
        0.01, "weight of the distance of features to the embeddings of the last round"
    )
    gpfl_decay: float = setting(0.1, "weight decay of embeddings and valve")
    gpfl_norm: Norm = setting(
        "frobenius",
        "that distance: frobenius = of the whole batch, which grows with the batch; mean = of a "
        "sample, on average",
    )

    def __post_init__(self) -> None:
        for name in ("gpfl_weight", "gpfl_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        check_choices(self)


class Server(fedavg.Server):
    """Averages base, embeddings and valve, weighted by sample count."""

    averages_models = False

    def is_shared(self, name: str) -> bool:
        """Return whether `name` lies outside the head."""
        return name not in self.anatomy.head_names

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> fedavg.State:
        """Return the initial base, and embeddings and valve made for its features."""
        classes, dim = head_size(params, self.anatomy)
        like = next(iter(params.values()))
        draw = seeded(params)
        base = super().init(params, buffers, clients)
        extra = {EMBEDDINGS: torch.randn(classes, dim, generator=draw)}
        for layer in ("scale", "shift"):
            for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
                extra[f"{EXTRA}{layer}.{part}"] = even(shape, dim, draw)
            extra[f"{EXTRA}{layer}.norm"] = torch.ones(dim)
            extra[f"{EXTRA}{layer}.normbias"] = torch.zeros(dim)
        made = {name: value.to(like) for name, value in extra.items()}
        return fedavg.State({**base.params, **made}, base.buffers)


def head_size(params: Tensors, anatomy: Anatomy) -> tuple[int, int]:
    """Return (classes, features) of the head's matrix; one logit tells two classes apart."""
    found = [
        params[n] for n in anatomy.trainable if n in anatomy.head_names and params[n].ndim == 2
    ]
    if len(found) != 1:
        raise ConfigError(
            f"the head must be one Linear layer, got {len(found)} weight matrices; name such a "
            "layer as head"
        )
    return max(found[0].shape[0], 2), found[0].shape[1]


def seeded(params: Tensors) -> torch.Generator:
    """Return a generator seeded by the initial network."""
    known = digest({name: value.float() for name, value in params.items()})
    return torch.Generator().manual_seed(int(known[:15], 16))


def even(shape: tuple[int, ...], inputs: int, draw: torch.Generator) -> Tensor:
    """Return numbers as torch starts a Linear layer: uniform within 1/√inputs."""
    return (2 * torch.rand(shape, generator=draw) - 1) / inputs**0.5
