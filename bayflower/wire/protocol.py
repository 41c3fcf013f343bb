"""The content of a message and its size in bytes: names of records and keys, headers, and Flower's
layout of bytes. Nothing here imports Flower.

To a client ("train", "evaluate"):   broadcast   ArrayRecord   the method's Broadcast, one array a
                                                               leaf
                                     bayflower   ConfigRecord  protocol, method, run, round, seed,
                                                               evaluate, purpose, instructions;
                                                               accepted: the last round whose reply
                                                               was used (sent only if a later reply
                                                               of this client was not used);
                                                               returned: true if the client rejoins
                                                               after it was dropped from the totals;
                                                               calibration: the order to calibrate;
                                                               hold: which samples the clients of
                                                               a user's own app hold out (queries
                                                               have it too)
                                                               secure=sum: session, bounds of the
                                                               window (queries: secure, the request)
                                     calibration ArrayRecord   everyone's sums so far, with a
                                                               request to calibrate
                                                               (`flower/calibrating.py`)
From a client ("train"):             update      ArrayRecord   the method's Update; secure=sum:
                                                               masked, offer (`flower/masking.py`)
                                     tally       ArrayRecord   test results by view, if the request
                                                               asked for a test
                                     metrics     MetricRecord  num-examples, train-loss
                                     bayflower   ConfigRecord  protocol, method, run, round, client;
                                                               continuity: digests of its state and
                                                               data (`continuity.py`)
From a client ("query"):             bayflower   ConfigRecord  client, new, and its facts: anatomy,
                                                               input_shape, num_classes, train_size,
                                                               test_size, origin (texts are JSON;
                                                               `hello.py`)

A message's content is a tree of objects (chunks, arrays, records), each sent as a line "kind
children length", a zero byte and a body. The sizes below are those of that tree; the envelope (ids,
times) is Flower's own and not counted. A test compares them with real messages.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ..tree import Shapes

PROTOCOL = 3
BROADCAST, UPDATE, TALLY, METRICS, HEADER = "broadcast", "update", "tally", "metrics", "bayflower"
CALIBRATION = "calibration"
NUM_EXAMPLES, TRAIN_LOSS = "num-examples", "train-loss"
CHUNK_BYTES = 5_242_880  # Flower cuts an array's data into chunks of this size
ID_BYTES = 64  # an object is named by its SHA-256 in hexadecimal

Scalars = Mapping[str, bool | int | float | str]


def request_header(
    *, method: str, run: str, round: int, seed: int, evaluate: bool, purpose: str, instructions: str
) -> dict[str, Any]:
    """Return the header of a message to a client."""
    return {
        "protocol": PROTOCOL,
        "method": method,
        "run": run,
        "round": round,
        "seed": seed,
        "evaluate": evaluate,
        "purpose": purpose,
        "instructions": instructions,
    }


def reply_header(*, method: str, run: str, round: int, client: int) -> dict[str, Any]:
    """Return the header of a reply."""
    return {"protocol": PROTOCOL, "method": method, "run": run, "round": round, "client": client}


def reply_numbers(num_examples: int, loss: float) -> dict[str, float]:
    """Return the metrics of a reply."""
    return {NUM_EXAMPLES: num_examples, TRAIN_LOSS: loss}


def content_bytes(
    arrays: Mapping[str, Shapes], configs: Mapping[str, Scalars], metrics: Mapping[str, Scalars]
) -> int:
    """Return the bytes of a message's content with these records."""
    names = [*arrays, *configs, *metrics]
    body = len(json.dumps({name: "0" * ID_BYTES for name in names}))
    total = object_bytes("RecordDict", len(names), body)
    total += sum(array_record_bytes(record) for record in arrays.values())
    total += sum(
        object_bytes("ConfigRecord", 0, scalars_bytes(record)) for record in configs.values()
    )
    return total + sum(
        object_bytes("MetricRecord", 0, scalars_bytes(record)) for record in metrics.values()
    )


@lru_cache(maxsize=256)
def record_body(names: tuple[str, ...]) -> int:
    """Return the bytes of a record's list of arrays."""
    return len(json.dumps({name: "0" * ID_BYTES for name in names}))


def object_bytes(kind: str, children: int, body: int) -> int:
    """Return the bytes of one object: "kind children length", a zero byte, the body."""
    names = children * ID_BYTES + max(children - 1, 0)
    return len(kind) + 1 + names + 1 + len(str(body)) + 1 + body


@lru_cache(maxsize=256)
def array_record_bytes(record: Shapes) -> int:
    """Return the bytes of a record of arrays and everything below it, arrays of equal content
    counted each.
    """
    body = record_body(tuple(name for name, _, _ in record))
    return object_bytes("ArrayRecord", len(record), body) + sum(
        array_bytes(shape, dtype) for _, shape, dtype in record
    )


def array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array and its chunks: its data is one .npy block."""
    header, facts, width = header_bytes(tuple(len(str(length)) for length in shape), dtype)
    data = header + math.prod(shape) * width
    chunks = [min(CHUNK_BYTES, data - start) for start in range(0, data, CHUNK_BYTES)]
    facts += len(json.dumps(list(range(len(chunks))))) if len(chunks) > 1 else len("[0]")
    return object_bytes("Array", len(chunks), facts) + sum(
        object_bytes("ArrayChunk", 0, chunk) for chunk in chunks
    )


@lru_cache(maxsize=4096)
def header_bytes(digits: tuple[int, ...], dtype: str) -> tuple[int, int, int]:
    """Return (bytes of the .npy header, of the facts without the chunks, of one number); of the
    shape only the digits matter.
    """
    block, kind = io.BytesIO(), np.dtype(dtype)
    shape = tuple(10 ** (count - 1) if count > 1 else 1 for count in digits)
    np.lib.format.write_array_header_1_0(
        block, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    )
    facts = {"dtype": dtype, "shape": shape, "stype": "numpy.ndarray", "arraychunk_ids": ""}
    return block.tell(), len(json.dumps(facts)) - 2, kind.itemsize


def scalars_bytes(record: Scalars) -> int:
    """Return the bytes of a ConfigRecord's or MetricRecord's body: protobuf items of a key and a
    value.
    """
    total = 0
    for key, value in record.items():
        held = value_bytes(value)
        item = field_bytes(len(key.encode())) + field_bytes(held)
        total += field_bytes(item)
    return total


def value_bytes(value: Any) -> int:
    """Return the bytes of one value: a tag and a double, a zigzag varint, a bool, a text or bytes
    with their length, or a list of these.
    """
    if isinstance(value, bool):
        return 2
    if isinstance(value, bytes):
        return field_bytes(len(value))
    if isinstance(value, list):
        texts = sum(value_bytes(one) for one in value if isinstance(one, (str, bytes)))
        packed = sum(
            1 if isinstance(one, bool) else value_bytes(one) - 1
            for one in value
            if not isinstance(one, (str, bytes))
        )
        # fields of lists have tags of two bytes
        return 1 + field_bytes(texts + (field_bytes(packed) if packed else 0))
    if isinstance(value, int):
        return 1 + varint_bytes(2 * value if value >= 0 else -2 * value - 1)
    return 9 if isinstance(value, float) else field_bytes(len(value.encode()))


def field_bytes(length: int) -> int:
    """Return the bytes of a field with a length: tag, length, content."""
    return 1 + varint_bytes(length) + length


def varint_bytes(value: int) -> int:
    """Return the bytes of a number in groups of seven bits."""
    return max(1, -(-value.bit_length() // 7))
