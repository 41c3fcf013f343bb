"""Conversion between Flower's records and states, with a check of everything received. The names of
records and keys are in `wire/protocol.py`.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from ..errors import WireError
from ..tasks import Task
from ..tree import Shapes, Tensors, flatten, matching
from ..wire.protocol import (
    BROADCAST,
    CALIBRATION,
    HEADER,
    METRICS,
    NUM_EXAMPLES,
    PROTOCOL,
    TALLY,
    TRAIN_LOSS,
    UPDATE,
    content_bytes,
)

MOST_VIEWS = 8  # cap on the models that a client tests
MOST_ENTRIES = 20_000  # cap on the arrays and numbers of a message
MOST_AXES = 16  # cap on the axes of an array
__all__ = [
    "BROADCAST",
    "CALIBRATION",
    "HEADER",
    "METRICS",
    "NUM_EXAMPLES",
    "PROTOCOL",
    "TALLY",
    "TRAIN_LOSS",
    "UPDATE",
    "WireError",
    "matching",
]


def to_arrays(tree: Any) -> ArrayRecord:
    """Return the leaves as an ArrayRecord."""
    record = ArrayRecord()
    for name, leaf in flatten(tree).items():  # a dict given to ArrayRecord would be copied
        record[name] = to_array(leaf)
    return record


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as a Flower Array, with the bytes of `Array.from_torch_tensor`."""
    numbers = tensor.detach().cpu().contiguous().numpy()
    data = b"".join((written_header(numbers.dtype.str, numbers.shape), numbers.data))
    return Array(str(numbers.dtype), numbers.shape, "numpy.ndarray", data)


@functools.lru_cache(256)  # the arrays of one model come again in every message
def written_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of the .npy format for an array in the order of C."""
    file = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def to_tensors(record: ArrayRecord, consume: bool = False) -> Tensors:
    """Return the arrays by name. With `consume`, each array is removed from the record as it is
    read, so memory never holds two copies of all.
    """
    tensors = {}
    for name in list(record):
        array = record.pop(name) if consume else record[name]
        try:
            # cloned for torch's alignment, which affects how sums are split and thus their bits
            tensors[name] = torch.from_numpy(block(array)).clone()
        except (ValueError, TypeError, EOFError, SyntaxError) as error:
            raise WireError(f"array {name!r} cannot be read ({str(error)[:200]})") from None
    return tensors


def block(array: Array) -> np.ndarray:
    """Return a copy of an array's numbers; the header is checked before memory is allocated."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is serialised as {array.stype[:80]!r}, expected numpy.ndarray")
    # the length of the header stands in two bytes, or in four from version 2 on
    size = 2 if array.data[6:7] == b"\x01" else 4
    start = 8 + size + int.from_bytes(array.data[8 : 8 + size], "little")
    shape, fortran, dtype = read_header(bytes(array.data[:start]))
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, not numbers")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or size != len(array.data) - start:
        raise ValueError(
            f"its header announces {size} bytes of numbers, but it has {len(array.data) - start}"
        )
    return (
        np.frombuffer(array.data, dtype, offset=start)
        .reshape(shape, order="F" if fortran else "C")
        .copy()
    )


@functools.lru_cache(256)
def read_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return (shape, whether in the order of Fortran, dtype) from a header of the .npy format."""
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the .npy format is not supported")
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def only_arrays(message: Message) -> ArrayRecord:
    """Return the message's only ArrayRecord, whatever its name, beside sums of calibration."""
    found = [
        record for name, record in message.content.array_records.items() if name != CALIBRATION
    ]
    if len(found) != 1:
        raise WireError(f"the message must have one ArrayRecord, got {len(found)}")
    return found[0]


def arrays(message: Message, key: str, consume: bool = False) -> Tensors:
    """Return the arrays of the record called `key`."""
    record = message.content.get(key)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"the ArrayRecord {key!r} is missing")
    return to_tensors(record, consume)


def few(message: Message, key: str, most: int) -> None:
    """Raise if the record called `key` has more than `most` arrays, before any of them is read."""
    record = message.content.get(key)
    if isinstance(record, ArrayRecord) and len(record) > most:
        raise WireError(f"the ArrayRecord {key!r} has {len(record)} arrays, more than {most}")


def header(message: Message, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the message's header; raise if a key of `names` is missing or the protocol differs."""
    record = message.content.get(HEADER)
    if not isinstance(record, ConfigRecord):
        raise WireError(
            f"the ConfigRecord {HEADER!r} is missing; server and clients must all run Bayflower"
        )
    if record.get("protocol") != PROTOCOL:
        raise WireError(
            f"protocol must be {PROTOCOL}, got {record.get('protocol')!r}; install the same "
            "version of Bayflower on server and clients"
        )
    if missing := [name for name in names if name not in record]:
        raise WireError(f"header key {missing[0]!r} is missing")
    return dict(record)


def asks(message: Message, name: str) -> bool:
    """Return whether a header, if there is one, has `name`, and it is not 0."""
    record = message.content.get(HEADER)
    return isinstance(record, ConfigRecord) and bool(record.get(name))


def make_header(**values: Any) -> ConfigRecord:
    """Return a header."""
    return ConfigRecord({"protocol": PROTOCOL, **values})


def arrays_to_tallies(flat: Mapping[str, Tensor], task: Task) -> dict[str, Any]:
    """Return the tallies by view; raise if a test of this task cannot give them."""
    views = sorted({name.split("/", 1)[0] for name in flat})
    if len(views) > MOST_VIEWS or not all(
        re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", view) for view in views
    ):
        raise WireError(
            f"test results must be for at most {MOST_VIEWS} models, named by lower-case letters, "
            f"digits, - and _, got {str(views)[:80]}"
        )
    result = {}
    for view in views:
        own = {
            name.split("/", 1)[1]: value
            for name, value in flat.items()
            if name.startswith(view + "/")
        }
        tally = matching(own, task.zero())
        if not task.possible(tally):
            raise WireError(
                f"the test result {view!r} is inconsistent: counts are negative or do not add up"
            )
        result[view] = tally
    return result


def weigh(content: RecordDict, most: int) -> None:
    """Raise if a message has more than `most` million bytes, or an array declares more than it
    holds.
    """
    total = 0
    if (number := sum(len(record) for record in content.values())) > MOST_ENTRIES:
        raise WireError(f"the message has {number} entries, more than {MOST_ENTRIES}")
    for record in content.values():
        for name, value in record.items():
            total += len(name)
            if isinstance(value, Array):
                total += len(value.data)
                if len(value.shape) > MOST_AXES or math.prod(value.shape) * np.dtype(
                    value.dtype
                ).itemsize > len(value.data):
                    raise WireError(
                        f"array {name[:80]!r} declares shape {str(value.shape)[:80]}, but has "
                        f"only {len(value.data)} bytes"
                    )
            else:
                total += (
                    len(value)
                    if isinstance(value, (str, bytes))
                    else 8 * len(value)
                    if isinstance(value, list)
                    else 8
                )
    if total > most * 1_000_000:
        raise WireError(f"the message has {total} bytes; max_message_mb = {most} allows fewer")


def copy_content(content: RecordDict) -> RecordDict:
    """Return the records in new containers that share the immutable arrays, so that changes by the
    receiver do not affect the sender.
    """
    return RecordDict({name: type(record)(dict(record)) for name, record in content.items()})  # type: ignore[arg-type]


def num_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's content, from names, shapes and scalars alone."""
    arrays: dict[str, Shapes] = {}
    configs: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays[name] = tuple(
                (key, tuple(array.shape), array.dtype) for key, array in record.items()
            )
        elif isinstance(record, ConfigRecord):
            configs[name] = dict(record)
        else:
            metrics[name] = dict(record)
    return content_bytes(arrays, configs, metrics)


def metric(reply: Message, name: str) -> Any:
    """Return the metric called `name` of a reply, None if it has none."""
    numbers = reply.content.get(METRICS)
    return numbers.get(name) if isinstance(numbers, MetricRecord) else None
