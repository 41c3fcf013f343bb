"""From settings to the two halves of a method, on the model for the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import methods
from ..config import Run
from ..contract import ClientHalf, ServerHalf
from ..data import Federation
from ..data.moments import sums_of
from ..errors import ConfigError
from ..networks.model import Model
from ..networks.papers import build
from ..recipes.check import checked, resolved, scaled, standardised
from ..recipes.labels import FEDERATION, counted, together
from ..tasks.choice import target_sums
from ..tree import Tensors
from .ownnoise import client_half

LEADING = re.compile(r"\s*[-+]?\d+")  # the number that a class's name begins with


class Halves(NamedTuple):
    """Both halves of a method on one model, and the seeded initialisation that server and clients
    start from.
    """

    server: ServerHalf
    client: ClientHalf
    model: Model
    initial: tuple[Tensors, Tensors]


def halves_for(run: Run, federation: Federation) -> Halves:
    """Return the halves of `run.method` on the federation's data, all of which are here."""
    counts, classes = None, federation.num_classes
    if run.training.class_weights == FEDERATION:
        labels = [torch.as_tensor(data.y_train) for data in federation.clients]
        counts = together([counted(y, classes).tolist() for y in labels])
    sums = None
    if run.training.standardises:
        # of the targets as clients have them, on every engine
        kind = np.float64 if run.settings.dtype == "float64" else np.float32
        sums = [
            target_sums(run.training.task, data.y_train.astype(kind)) for data in federation.clients
        ]
    check_targets(run.training.task, federation)
    return make_halves(
        run,
        federation.input_shape,
        classes,
        label_counts=counts,
        sums=sums,
        input_sums=sums_of(federation),
    )


def check_targets(task: str, federation: Federation) -> None:
    """Raise if targets cannot be those of the task."""
    if task == "ordinal":
        check_order(federation.names.classes)
    if task != "counts":
        return
    for data in (*federation.clients, *federation.new_clients):
        for y in (data.y_train, data.y_test):
            if bool(((y < 0) | (y != y.round())).any()):
                wrong = y[(y < 0) | (y != y.round())][0]
                raise ConfigError(
                    f"task=counts needs whole numbers from 0, client {data.client} has {wrong:g}; "
                    "set task=regression, or name another column with --target"
                )


def check_order(classes: Sequence[str]) -> None:
    """Raise if the names of three classes or more do not say their order: words are numbered by the
    alphabet.
    """
    numbers = [match and int(match[0]) for match in (LEADING.match(name) for name in classes)]
    known = [number for number in numbers if number is not None]
    if len(classes) > 2 and (len(known) < len(numbers) or known != sorted(set(known))):
        raise ConfigError(
            f"task=ordinal would order the classes as {', '.join(classes)}, which is the alphabet; "
            "number them in the data (1, 2, 3, or 1 mild, 2 severe)"
        )


def make_halves(
    run: Run,
    input_shape: tuple[int, ...],
    num_classes: int,
    model: Model | None = None,
    label_counts: Sequence[int] | None = None,
    sums: Sequence[Sequence[float]] | None = None,
    input_sums: Sequence[Sequence[float]] | None = None,
) -> Halves:
    """Return the halves of `run.method` on `model`; without it, on the one named in the settings.
    `label_counts`, `sums` (of targets) and `input_sums` are those of the training clients, where
    they are here; elsewhere clients are told what they need.
    """
    row = methods.get(run.method)
    training = checked(run.training, input_shape, num_classes)
    if label_counts is not None:
        training = resolved(training, label_counts)
    if sums is not None:
        training = standardised(training, sums)
    if input_sums is not None:
        training = scaled(training, input_sums)
    task = training.make_task(num_classes)
    if model is None:
        model = build(
            run.settings.model,
            input_shape,
            num_classes,
            run.settings.features,
            run.settings.head,
            task,
        )
    model.task = task
    model.bf16 = run.settings.bf16
    server = row.server(run.options, model.anatomy)
    client = client_half(row.client, run.options, training, model)
    return Halves(
        server, client, model, model.initial(run.settings.seed, run.settings.torch_dtype())
    )
