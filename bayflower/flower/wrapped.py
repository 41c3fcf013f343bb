"""A strategy inside another one, such as Flower's wrappers for differential privacy: plain arrays
in, plain arrays out.

A wrapper runs Flower's own loop. It changes replies before they are aggregated (clipping) and
arrays before they are sent (noise), and it takes a reply for one ArrayRecord with the arrays it
sent, in their order. So a message carries the arrays as they are, and one ConfigRecord with our
header in it. That is possible where the averaged model is all that a server keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord

from ..methods import Method
from ..tree import Tensors
from . import records


def refusal(row: Method) -> str | None:
    """Return why a method cannot run inside another strategy, or None."""
    half = row.server
    if half.averages_models:
        return None
    more = [name for name in half.state_type._fields if name not in ("params", "buffers")]  # type: ignore[attr-defined]
    what = (
        f"keeps more than an averaged model ({', '.join(more)})"
        if more
        else "does not average whole models by sample count"
    )
    return f"{row.title} {what}, and a wrapper's clipping and noise would cover the model alone"


def adopted(state: Any, arrays: ArrayRecord) -> Any:
    """Return the state with the arrays that the outer strategy wants to be sent."""
    given = records.to_tensors(arrays)
    return type(state)(
        *({name: given[name].to(old.dtype) for name, old in part.items()} for part in state)
    )


def counters(state: Any) -> list[str]:
    """Return the buffers that hold whole numbers: Flower's clipping cannot scale them."""
    return [name for name, value in state.buffers.items() if not value.is_floating_point()]


def to_flat(given: Tensors, state: Any, count: Any) -> Tensors:
    """Return an update's tensors by name from the plain arrays of a reply and the number of samples
    beside them.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 2**40:
        raise records.WireError(
            f"{records.NUM_EXAMPLES} must be a positive whole number, got {str(count)[:80]}"
        )
    groups = {
        **{name: "params" for name in state.params},
        **{name: "buffers" for name in state.buffers},
    }
    return {
        "num_examples": torch.tensor(count),
        **{
            f"{groups[name]}/{name}" if name in groups else name: value
            for name, value in given.items()
        },
    }


def ordered(tensors: Mapping[str, torch.Tensor], names: list[str]) -> ArrayRecord:
    """Return the tensors as arrays in this order, under their plain names."""
    return ArrayRecord({name: records.to_array(tensors[name]) for name in names})
