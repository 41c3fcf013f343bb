"""The files between the two programs of a region: whole or absent, and every answer belongs to one
request.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from groves import Grove
from test_regions import assert_equal, ran, ready

from bayflower.errors import BayflowerError
from bayflower.flower import records
from bayflower.flower.client import client_app
from bayflower.flower.guard import digest
from bayflower.flower.loop import InProcessGrid
from bayflower.flower.regions.region import Region
from bayflower.flower.regions.serving import answer_one
from bayflower.flower.regions.spool import Spool


def content(round: int = 1) -> RecordDict:
    arrays = {
        "0-d": torch.tensor(3),
        "float": torch.tensor([0.1, -0.0, float("inf")]).double(),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(4, dtype=torch.int8),
        "truth": torch.tensor([True, False]),
    }
    made = RecordDict({"arrays": ArrayRecord(), "none": ArrayRecord()})
    for name, value in arrays.items():
        made["arrays"][name] = records.to_array(value)
    made["bayflower"] = ConfigRecord({"protocol": 3, "round": round, "x": 0.1, "y": True, "z": "ä"})
    made["metrics"] = MetricRecord({"loss": 1 / 3, "number": 7, "many": [1, 2]})
    return made


class Spooled(Grove):
    """Requests and answers go through files, and every region is made anew before each request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def answered(self, region: Region, content: RecordDict) -> RecordDict:
        place = self.regions.index(region)
        spool = Spool(self.folder / str(place))
        number = spool.request(content, {"method": "x", "out": ""})
        again = spool.request(content, {"method": "y"})
        assert (again, spool.waiting(), spool.config()) == (number, [number], {"method": "x"})
        answer_one(Region(self.grids[place], region.expects), spool, number)
        first = spool.take(number, time.time())
        assert spool.request(content, {}) == number  # it comes again: nothing is to be done
        assert spool.waiting() == []
        assert digest(spool.take(number, time.time())) == digest(first)
        return first


def test_a_tree_whose_requests_are_files_has_the_bits_of_a_flat_federation(tmp_path):
    prepared = ready("fedmap", rounds=2, evaluate_every=1)
    assert_equal(prepared, ran(prepared), ran(prepared, made=Spooled(tmp_path)))
    assert len(list((tmp_path / "0" / "answers").iterdir())) == 4  # older ones are removed


def test_records_come_back_to_the_bit(tmp_path):
    spool, asked = Spool(tmp_path), content()
    number = spool.request(asked, {})
    there = spool.read(number)
    assert digest(there) == digest(asked) == number
    assert list(there) == list(asked)
    spool.answer(number, asked)
    assert digest(spool.take(number, time.time() + 1)) == number


def test_a_request_under_the_name_of_another_is_not_answered(tmp_path):
    spool = Spool(tmp_path)
    one, two = spool.request(content(1), {}), spool.request(content(2), {})
    folder = tmp_path / "requests"
    (folder / f"{one}.safetensors").replace(folder / f"{two}.safetensors")
    assert spool.waiting() == [two]
    with pytest.raises(BayflowerError, match="is not what its name says"):
        spool.read(two)


def test_a_damaged_answer_is_an_error_and_a_failed_one_is_tried_again(tmp_path):
    spool = Spool(tmp_path)
    number = spool.request(content(), {})
    spool.answer(number, None, "no space left")
    with pytest.raises(BayflowerError, match="no space left"):
        spool.take(number, time.time() + 1)
    assert spool.request(content(), {}) == number
    assert spool.waiting() == [number]
    spool.answer(number, content())
    path = tmp_path / "answers" / f"{number}.safetensors"
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(bytes(text))
    with pytest.raises(BayflowerError, match="damaged"):
        spool.take(number, time.time() + 1)
    with pytest.raises(BayflowerError, match="did not answer in time"):
        spool.take("0" * 64, time.time() + 0.2)


def test_an_answer_that_was_written_before_a_death_is_the_answer(tmp_path):
    """The predecessor died between its answer and the removal of the request."""
    spool = Spool(tmp_path)
    number = spool.request(content(), {})
    kept = (tmp_path / "requests" / f"{number}.safetensors").read_bytes()
    spool.answer(number, content(9))
    (tmp_path / "requests" / f"{number}.safetensors").write_bytes(kept)
    answer_one(None, spool, number)  # type: ignore[arg-type]  # it asks nobody
    assert spool.waiting() == []
    assert digest(spool.take(number, time.time() + 1)) == digest(content(9))


def test_the_client_app_of_a_region_hands_messages_on(tmp_path):
    """At a node with a spool no data are read; at any other nothing changes."""

    def site_of(context: Context) -> Any:
        raise AssertionError("it reads data")

    app = client_app(site_of)
    InProcessGrid(app, [])  # sets Flower's identity
    message = Message(content(), dst_node_id=7, message_type="train")
    spool = Spool(tmp_path / str(message.metadata.run_id))

    def answer() -> None:
        while not spool.waiting():
            time.sleep(0.01)
        spool.answer(spool.waiting()[0], content(5))

    helper = threading.Thread(target=answer)
    helper.start()
    config = {"spool": str(tmp_path)}
    reply = app(message, Context(1, 7, config, RecordDict(), {"method": "fedmap", "set": ""}))
    helper.join()
    assert digest(reply.content) == digest(content(5))
    assert spool.config() == {"method": "fedmap"}
    with pytest.raises(AssertionError, match="it reads data"):
        app(message, Context(1, 7, {}, RecordDict(), {}))
