"""From settings to the two halves of a method, on the model for the data."""

from __future__ import annotations

from typing import NamedTuple

from .. import methods
from ..config import Run
from ..contract import ClientHalf, ServerHalf
from ..networks.model import Model
from ..networks.papers import build
from ..tree import Tensors


class Halves(NamedTuple):
    """Both halves of a method on one model, and the seeded initialisation that server and clients
    start from.
    """

    server: ServerHalf
    client: ClientHalf
    model: Model
    initial: tuple[Tensors, Tensors]


def make_halves(
    run: Run, input_shape: tuple[int, ...], num_classes: int, model: Model | None = None
) -> Halves:
    """Return the halves of `run.method` on `model`; without it, on the one named in the
    settings.
    """
    row = methods.get(run.method)
    if model is None:
        model = build(run.settings.model, input_shape, num_classes, run.settings.features)
    model.bf16 = run.settings.bf16
    server = row.server(run.options, model.anatomy)
    client = row.client(run.options, run.training, model)
    return Halves(
        server, client, model, model.initial(run.settings.seed, run.settings.torch_dtype())
    )
