"""The global model as Flower's users know it: one array for every entry of `initial_arrays`.

`evaluate_fn`, overridden hooks and `Result.arrays` get it, so that a network of the user's loads it
as it is. What a method keeps on the clients (a head, running statistics) has no global value: these
arrays keep their initial values, and a warning names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord

from ..contract import ServerHalf
from ..errors import ConfigError
from ..methods import Method
from ..tasks import EXTRA
from ..tree import Tensors
from ..wire.hello import ClientInfo
from . import records

MOST_NAMES = 4  # names of arrays in a warning


class Whole:
    """Makes the whole model of what a method shares."""

    def __init__(self, initial: ArrayRecord, info: ClientInfo) -> None:
        self.initial, self.info = initial, info
        self.known = {*info.anatomy.trainable, *info.anatomy.buffers}

    def arrays(self, shared: Tensors) -> ArrayRecord:
        """Return the arrays of `initial_arrays`, with the shared values where there are any. A tied
        weight has the value of the parameter it is tied to.
        """
        found = {}
        for name, array in self.initial.items():
            first = self.info.tied.get(name, name)
            found[name] = records.to_array(shared[first]) if first in shared else array
        return ArrayRecord(found)

    def remarks(self, title: str, shared: Tensors) -> list[str]:
        """Return what a person must know of arrays that keep their initial values."""
        first = [self.info.tied.get(name, name) for name in self.initial]
        own = [name for name in self.initial if name in self.known and name not in shared]
        fixed = [name for name, at in zip(self.initial, first, strict=True) if at not in self.known]
        found = []
        if own:
            found.append(
                f"{title} keeps {len(own)} of {len(self.initial)} arrays on the clients "
                f"({listed(own)}): evaluate_fn, hooks and Result.arrays have their initial values. "
                "Such a model is no client's; the tests of the clients' own models are in "
                "evaluate_metrics_clientapp"
            )
        if fixed:
            found.append(
                f"the clients do not train {len(fixed)} arrays of initial_arrays ({listed(fixed)}):"
                " they keep their initial values here, and on the clients those of the model's "
                "factory; load the same weights on both sides"
            )
        return found


def listed(names: Sequence[str]) -> str:
    """Return some of the names."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def refuse(row: Method) -> None:
    """Raise if a method has no global model that `evaluate_fn` could test."""
    if row.server.shares_nothing:
        raise ConfigError(
            f"{row.title} shares nothing, so there is no global model for evaluate_fn; leave it "
            "out: the clients' tests are in evaluate_metrics_clientapp"
        )


def adopted(half: ServerHalf, state: Any, arrays: ArrayRecord, where: str) -> Any:
    """Return the state with the global model in `arrays`, which `where` gave; the state itself if
    they are what it has. What a method keeps beside the model stays.
    """
    shared, given = half.shared(state), records.to_tensors(arrays)
    for name, value in shared.items():
        if name == EXTRA and name not in given:  # of the task, not of the user's network
            given[name] = value
        if name not in given:
            raise ConfigError(
                f"{where} lacks the array {name!r} of the global model; it needs all of them"
            )
        if given[name].shape != value.shape:
            raise ConfigError(
                f"{where} has the array {name!r} of shape {tuple(given[name].shape)}, expected "
                f"{tuple(value.shape)}"
            )
    cast = {name: given[name].to(value.dtype) for name, value in shared.items()}
    if all(same(cast[name], value) for name, value in shared.items()):
        return state
    parts = {
        field: {name: cast.get(name, value) for name, value in part.items()}
        for field, part in zip(state._fields, state, strict=True)
        if field in ("params", "buffers")
    }
    return state._replace(**parts)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal values; NaN equals NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
