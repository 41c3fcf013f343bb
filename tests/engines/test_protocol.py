"""Bytes computed from shapes against the real bytes of real messages."""

from __future__ import annotations

import pytest
import torch
from conftest import small_prepared, some
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from rig import Rig

from bayflower.engines import execute
from bayflower.flower import records
from bayflower.methods import METHODS
from bayflower.tree import shapes
from bayflower.wire import protocol


def real_bytes(content: RecordDict) -> int:
    """Return what Flower would send of a message's content: every object below it, each array
    counted.
    """
    total = len(content.deflate())
    for record in content.values():
        total += len(record.deflate())
        if isinstance(record, ArrayRecord):
            for array in record.values():
                total += len(array.deflate()) + sum(
                    len(chunk.deflate()) for _, chunk in array.slice_array()
                )
    return total


@pytest.mark.parametrize(
    "method", some(sorted(METHODS), {"fedavg", "fedmap", "fednp", "metavd", "pfedvmp", "snip"})
)
def test_every_message_of_a_run(method):
    """All messages of two rounds, tests included: computed bytes are Flower's own."""
    rig = Rig(method, model="mlp-bn", rounds=2, keep=0.1, local_epochs=1)
    rig.start(rounds=2)
    seen = [
        message
        for message in rig.seen
        if message.has_content() and message.metadata.message_type == "train"
    ]
    assert len(seen) == 20
    for message in seen:
        equal = [
            array
            for record in message.content.values()
            if isinstance(record, ArrayRecord)
            for array in record.values()
        ]
        # Flower names equal arrays once in a record's head
        doubles = len(equal) - len({array.object_id for array in equal})
        assert protocol_bytes(message.content) - real_bytes(message.content) <= 65 * doubles
        if not doubles:
            assert protocol_bytes(message.content) == real_bytes(message.content)
    assert any(records.TALLY in message.content for message in seen)


def protocol_bytes(content: RecordDict) -> int:
    return records.num_bytes(content)


@pytest.mark.slow  # test_engines compares these bytes too
@pytest.mark.parametrize("method", sorted(METHODS))
def test_fused_reports_the_bytes_of_the_loop(method):
    loop, fused = (
        execute(small_prepared(method, engine, new_clients=0, rounds=2, fraction_train=0.6))
        for engine in ("loop", "fused")
    )
    for one, two in zip(loop.rounds, fused.rounds, strict=True):
        assert (one["bytes_up"], one["bytes_down"]) == (two["bytes_up"], two["bytes_down"])


def test_values_of_every_kind_and_size():
    values = {
        "a": True,
        "b": 0,
        "c": -1,
        "d": 63,
        "e": 64,
        "f": 2**40,
        "g": -(2**62),
        "h": 1.5,
        "i": "",
        "j": "ü" * 200,
        "key" * 50: "x" * 20_000,
    }
    content = RecordDict(
        {"config": ConfigRecord(values), "more": MetricRecord({"n": 3, "x": 0.5, "big": 2**50})}
    )
    assert records.num_bytes(content) == real_bytes(content)


def test_arrays_of_many_kinds_and_of_more_than_one_chunk():
    assert protocol.CHUNK_BYTES == FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    tree = {
        "a": torch.randn(3),
        "b": torch.tensor(1),
        "c": torch.rand(2, 3, 4, dtype=torch.float64),
        "d": torch.zeros(0),
        "e": torch.tensor([True]),
        "f": torch.randn(protocol.CHUNK_BYTES // 4 + 1),
    }
    content = RecordDict({"arrays": records.to_arrays(tree)})
    assert records.num_bytes(content) == real_bytes(content)
    assert protocol.content_bytes({"arrays": shapes(tree)}, {}, {}) == real_bytes(content)


def test_values_that_users_add_to_a_message():
    """Bytes and lists, which Flower's records hold too."""
    values = {
        "a": b"12345",
        "b": [1.5, 2.5, 3.5],
        "c": [1, -200, 2**40],
        "d": ["x", "yy"],
        "e": [True, False],
        "f": [],
        "g": [b"z", b""],
    }
    content = RecordDict(
        {"config": ConfigRecord(values), "more": MetricRecord({"x": [0.5] * 200, "n": [1] * 3})}
    )
    assert records.num_bytes(content) == real_bytes(content)
