"""Records ↔ states: what a Flower message carries, and every check of what arrives. The names are in `protocol.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from .metrics import Tally, zero
from .protocol import (
    BROADCAST,
    HEADER,
    METRICS,
    NUM_EXAMPLES,
    PROTOCOL,
    TALLY,
    TRAIN_LOSS,
    UPDATE,
    Shapes,
    WireError,
    content_bytes,
    matching,
)
from .tree import flatten
from .types import Tensors

__all__ = ["BROADCAST", "HEADER", "METRICS", "NUM_EXAMPLES", "PROTOCOL", "TALLY", "TRAIN_LOSS", "UPDATE", "WireError", "matching"]


def to_arrays(tree: Any) -> ArrayRecord:
    """Return the leaves as an ArrayRecord."""
    return ArrayRecord({name: Array.from_torch_tensor(leaf.contiguous()) for name, leaf in flatten(tree).items()})


def to_tensors(record: ArrayRecord, consume: bool = False) -> Tensors:
    """Return the arrays by name; with `consume` each is taken out of the record as it is read, so that it is never held twice."""
    tensors = {}
    for name in list(record):
        array = record.pop(name) if consume else record[name]
        try:
            tensors[name] = torch.from_numpy(array.numpy()).clone()  # torch's own alignment: it decides how sums are split, hence bits
        except (ValueError, TypeError, EOFError) as error:
            raise WireError(f"array {name!r} cannot be read ({error})") from None
    return tensors


def arrays(message: Message, key: str, consume: bool = False) -> Tensors:
    """Return the arrays of the record called `key`."""
    record = message.content.get(key)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"the ArrayRecord {key!r} is missing")
    return to_tensors(record, consume)


def header(message: Message, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the message's header, which must have `names` and speak our protocol."""
    record = message.content.get(HEADER)
    if not isinstance(record, ConfigRecord):
        raise WireError(f"the ConfigRecord {HEADER!r} is missing; the other side does not run Bayflower")
    if record.get("protocol") != PROTOCOL:
        raise WireError(f"protocol {record.get('protocol')!r} is not {PROTOCOL}; both sides need the same version of Bayflower")
    if missing := [name for name in names if name not in record]:
        raise WireError(f"header key {missing[0]!r} is missing")
    return dict(record)


def make_header(**values: Any) -> ConfigRecord:
    """Return a header."""
    return ConfigRecord({"protocol": PROTOCOL, **values})


def tallies_to_arrays(views: Mapping[str, Tally]) -> ArrayRecord:
    """Return the tallies of all views as one record."""
    return to_arrays({view: dict(zip(tally._fields, tally, strict=True)) for view, tally in views.items()})


def arrays_to_tallies(flat: Mapping[str, Tensor]) -> dict[str, Tally]:
    """Return the tallies by view, which must be what a test can give."""
    views = sorted({name.split("/", 1)[0] for name in flat})
    result = {}
    for view in views:
        own = {name.split("/", 1)[1]: value for name, value in flat.items() if name.startswith(view + "/")}
        classes = own["class_total"].numel() if "class_total" in own else 0
        tally = matching(own, zero(max(classes, 1)))
        if any(bool((leaf < 0).any()) for leaf in tally) or int(tally.class_total.sum()) != int(tally.num_examples):
            raise WireError(f"the test result {view!r} contradicts itself: counts are negative or do not add up")
        result[view] = tally
    return result


def copy_content(content: RecordDict) -> RecordDict:
    """Return the records in new containers, the immutable arrays shared: what a receiver changes is not the sender's."""
    return RecordDict({name: type(record)(dict(record)) for name, record in content.items()})  # type: ignore[arg-type]


def num_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's content, from names, shapes and scalars alone."""
    arrays: dict[str, Shapes] = {}
    configs: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays[name] = tuple((key, tuple(array.shape), array.dtype) for key, array in record.items())
        elif isinstance(record, ConfigRecord):
            configs[name] = dict(record)
        else:
            metrics[name] = dict(record)
    return content_bytes(arrays, configs, metrics)
