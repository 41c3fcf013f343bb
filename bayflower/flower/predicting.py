"""What the clients of a user's own Flower app predict. The strategy says it: queries and requests
carry the settings of its task in their header. Without them targets are classes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from ..data.outcomes import kind_of, of_array
from ..errors import BayflowerError, ConfigError, WireError, in_one_line
from ..recipes import Training
from ..tasks import EXTRA, Task
from ..tree import Tensors
from ..wire.hello import ClientInfo
from . import records

TASK = "task"  # the key in a header
# the settings that say how many outputs a network has, and which parameters beside them
SHAPING = ("task", "likelihood", "noise", "intervals", "edges")


def told(training: Training) -> dict[str, Any]:
    """Return the task for a message's header; nothing for classes."""
    if training.task == "classification":
        return {}
    known = dataclasses.asdict(training)
    return {TASK: json.dumps({name: known[name] for name in SHAPING})}


def read(text: str) -> Training:
    """Return the settings in a header's text, as far as clients must know them before the first
    round; raise if they cannot be read.
    """
    if not text:
        return Training()
    try:
        said = json.loads(text)
        return Training(**{name: said[name] for name in SHAPING})
    except (TypeError, ValueError, KeyError, ConfigError) as error:
        raise WireError(f"the task cannot be read: {in_one_line(error)}") from None


def task_of(training: Training, y: Tensor, classes: int) -> Task:
    """Return the task for a client's targets; `classes` is what the app says of their number."""
    size = {"ordinal": classes, "labels": y.shape[-1] if y.ndim == 2 else 1}
    return training.make_task(size.get(training.task, 1))


def targets(task: str, y: Tensor, what: str, dtype: torch.dtype, classes: int = 0) -> Tensor:
    """Return targets in the form of a task: numbers and times in `dtype`, labels and ordered
    classes as whole numbers; raise if they cannot be its targets.
    """
    if task == "classification" or not len(y):
        return y
    if (kind := kind_of(task)) in ("times", "labels"):
        wide = y[:, None] if kind == "labels" and y.ndim == 1 else y
        found = torch.as_tensor(of_array(wide.cpu().numpy(), kind, what), device=y.device)
        return found.to(dtype) if kind == "times" else found
    if y.ndim != 1:
        raise ConfigError(
            f"y in {what} must be one number a sample for task={task}, got shape {tuple(y.shape)}"
        )
    if task == "ordinal":
        if classes < 2:
            raise ConfigError(
                "task=ordinal needs the number of classes, which is the same on all clients; give "
                "make_client_app classes=K"
            )
        if y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise ConfigError(f"y in {what} must be whole numbers in 0…{classes - 1}, the classes")
        return y
    found = y.to(dtype)
    if not bool(found.isfinite().all()):
        raise ConfigError(f"y in {what} must be finite numbers; leave missing ones out")
    if task == "counts" and bool(((found < 0) | (found != found.round())).any()):
        raise ConfigError(f"y in {what} must be whole numbers from 0 for task=counts")
    return found


def refuse_loss(training: Training) -> None:
    """Raise if an app has a loss of its own for what is no class."""
    if training.task != "classification":
        raise ConfigError(
            f"a loss of your own stands in for cross-entropy, but the strategy has task="
            f"{training.task}, whose loss is its likelihood; leave loss out"
        )


def completed(arrays: ArrayRecord, training: Training, common: ClientInfo) -> Tensors:
    """Return the initial arrays of a user's network with the parameters that the task adds (a
    noise, cut points), where the clients have them; raise if one is missing.
    """
    initial, anatomy = records.to_tensors(arrays), common.anatomy
    if EXTRA in anatomy.trainable and EXTRA not in initial:
        some = next(value for value in initial.values() if value.is_floating_point())
        initial[EXTRA] = some.new_tensor(training.make_task(common.num_classes).extra())
    for name in (*anatomy.trainable, *anatomy.buffers):
        if name not in initial:
            raise BayflowerError(
                f"initial_arrays lacks {name!r}, which the clients' model has; pass the same "
                "model's state_dict()"
            )
    return initial
