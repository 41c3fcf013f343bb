"""What one client may ask, request by request, and how many may connect: no network."""

from __future__ import annotations

import json
import socket
import time
from hashlib import sha256

import numpy as np
import pytest
from fleet import Client, answer, parts_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto import fleet_pb2
from flwr.proto.message_pb2 import ObjectTree

from bayflower.deploy.door import Door
from bayflower.flower.fleet import CALLS, Desk
from bayflower.flower.trees import MOST_OBJECTS, RefusedError, digest


def order(client: Client) -> Message:
    """A message to the client that never was in a SuperLink."""
    message = Message(RecordDict(), dst_node_id=client.node, message_type="train", ttl=1000)
    message.metadata.__dict__.update(_src_node_id=1, _message_id="b" * 64)
    return message


def bomb(client: Client, names: int) -> tuple[Message, dict[str, bytes]]:
    """A reply whose only array names its chunk `names` times."""
    array = Array(np.zeros(600_000))
    reply = answer(order(client), RecordDict({"a": ArrayRecord({"w": array})}))
    objects = parts_of(reply)
    number = next(n for n, one in objects.items() if one.startswith(b"Array "))
    head, body = objects[number].split(b"\0", 1)
    facts = {**json.loads(body), "arraychunk_ids": [0] * names}
    body = json.dumps(facts).encode()
    head = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()])
    return reply, {**objects, number: head + b"\0" + body}


def test_a_reply_is_what_was_announced_and_no_larger(tmp_path):
    """Every part against the tree: hash, kind, children, size packed and unpacked."""
    client = Client(tmp_path, 0)
    client.node = 7

    def announce(reply: Message, most_mb: int = 100, change=lambda request: None) -> Desk:
        desk = Desk(most_mb)
        request = client.pushes(reply)
        change(request)
        asked = desk.ask("push-messages", request.SerializeToString())
        tree = desk.replies[reply.metadata.message_id].tree
        told = fleet_pb2.PushMessagesResponse(
            objects_to_push=[one.hex() for one in tree], session_id="s"
        )
        desk.announced(asked.request, told.SerializeToString())
        return desk

    def refused(desk: Desk, number: str, content: bytes, run: int = 0) -> str:
        part = client.part(run or desk_run, "s", number, content)
        with pytest.raises(RefusedError) as error:
            desk.ask("push-object", part.SerializeToString())
        return str(error.value)

    honest = answer(order(client), RecordDict({"a": ArrayRecord([np.arange(9.0)])}))
    desk_run, objects, desk = honest.metadata.run_id, parts_of(honest), announce(honest)
    some = next(iter(objects))
    assert "hash" in refused(desk, some, objects[some] + b"x")
    assert "not in the reply" in refused(desk, some, objects[some], run=desk_run + 1)
    assert "not in the reply" in refused(desk, sha256(b"x").hexdigest(), b"x")
    part = client.part(desk_run, "another", some, objects[some])
    with pytest.raises(RefusedError, match="did not announce"):
        desk.ask("push-object", part.SerializeToString())
    for number, content in objects.items():
        asked = desk.ask(
            "push-object", client.part(desk_run, "s", number, content).SerializeToString()
        )
        assert asked.answer is None
        desk.stored(asked.request)
    assert desk.replies == desk.sessions == {}

    large = answer(order(client), RecordDict({"a": ArrayRecord([np.arange(200_000.0)])}))
    number, content = max(parts_of(large).items(), key=lambda one: len(one[1]))
    assert "packed or unpacked" in refused(announce(large, most_mb=1), number, content)
    # an array that names one chunk again and again: 4.8 MB that unpack to 4.8 GB
    for names, most in ((1000, 2048), (15, 70)):
        reply, objects = bomb(client, names)
        number, content = next(
            (n, one) for n, one in objects.items() if sha256(one).hexdigest() != n
        )
        forged = sha256(content).hexdigest()

        def swap(request, old=number, new=forged) -> None:
            array = request.message_object_trees[0].children[0].children[0].children[0]
            assert array.object_id == old
            array.object_id = new

        desk = announce(reply, most_mb=most, change=swap)
        assert f"names {names} chunks and has 1" in refused(desk, forged, content)
    # children that the tree does not name, and an object of another kind
    leaf = ArrayRecord([np.arange(9.0)])

    def prune(request) -> None:
        del request.message_object_trees[0].children[0].children[:]

    desk = announce(honest, change=prune)
    number = next(n for n, one in parts_of(honest).items() if one.startswith(b"RecordDict"))
    assert "other parts" in refused(desk, number, parts_of(honest)[number])

    def plant(request) -> None:
        request.message_object_trees[0].children[0].object_id = leaf.object_id
        del request.message_object_trees[0].children[0].children[:]

    desk = announce(honest, change=plant)
    assert "'ArrayRecord' at depth 1" in refused(desk, leaf.object_id, leaf.deflate())


def test_trees_are_counted_before_they_are_built(tmp_path):
    client = Client(tmp_path, 0)
    client.node = 7
    reply = answer(order(client), RecordDict())

    def announce(change) -> str:
        request = client.pushes(reply)
        change(request)
        with pytest.raises(RefusedError) as error:
            Desk().ask("push-messages", request.SerializeToString())
        return str(error.value)

    def many(request) -> None:
        request.message_object_trees[0].children.extend([ObjectTree()] * (MOST_OBJECTS + 9))

    def deep(request) -> None:
        tree = request.message_object_trees[0]
        for number in range(9):
            tree = tree.children.add(object_id=sha256(bytes([number])).hexdigest())

    def twice(request) -> None:
        request.messages_list.append(request.messages_list[0])

    def twins(request) -> None:
        request.message_object_trees[0].children.extend([ObjectTree(object_id="a" * 64)] * 2)

    def content(request) -> None:
        request.messages_list[0].content.items.add()

    def other(request) -> None:
        request.messages_list[0].metadata.message_id = "c" * 64

    def order_(request) -> None:
        request.messages_list[0].metadata.reply_to_message_id = ""

    def late(request) -> None:
        request.clientapp_runtime_list[0] = float("nan")

    for change, why in (
        (many, "more than 20000 parts"),
        (deep, "too deep"),
        (twice, "one message and one tree"),
        (twins, "contradicts itself"),
        (content, "content outside"),
        (other, "another message"),
        (order_, "no reply to the server"),
        (late, "not a number"),
    ):
        assert why in announce(change), change
    begun = time.process_time()
    for body in (b"\x1a\x00" * 10**6, b"\x12\xff\xff\xff\xff\x0f", b"\x80" * 100, b"\x1b"):
        with pytest.raises(RefusedError):
            Desk().ask("push-messages", body)
    assert time.process_time() - begun < 2


def test_what_a_desk_keeps_is_bounded(tmp_path, monkeypatch):
    """A client that announces replies and never sends them."""
    monkeypatch.setattr("bayflower.flower.fleet.MOST_KEPT", 600)
    client = Client(tmp_path, 0)
    client.node = 7
    desk = Desk()
    for number in range(12):
        reply = answer(order(client), RecordDict({"a": ConfigRecord({"a": number})}))
        request = client.pushes(reply)
        leaves = [
            ObjectTree(object_id=sha256(f"{number} {leaf}".encode()).hexdigest())
            for leaf in range(90)
        ]
        request.message_object_trees[0].children[0].children.extend(leaves)
        asked = desk.ask("push-messages", request.SerializeToString())
        told = fleet_pb2.PushMessagesResponse(
            objects_to_push=[reply.metadata.message_id], session_id=f"s{number}"
        )
        desk.announced(asked.request, told.SerializeToString())
    assert len(desk.replies) == len(desk.sessions) == 6
    assert "s11" in desk.sessions


def test_the_door_has_few_places_and_no_patience():
    door = Door(strangers=8, seconds=0.3, each=3)
    door.bind(("127.0.0.1", 0))
    door.listen(50)
    calls, visits = [], []
    for turn in range(20):
        calls.append(socket.create_connection(door.getsockname()))
        if turn >= 8:  # one is sent off, and the next waits until that is closed
            for _ in range(2):
                with pytest.raises(BlockingIOError):
                    door.accept()
            assert len(door.strangers) == 7
            visits[turn - 8].close()
        visits.append(door.accept()[0])
    assert len(door.strangers) == 8
    assert calls[0].recv(1) == b""
    for address in list(door.strangers)[:5]:
        door.knows(address, "client-0")
    assert len(door.clients) == 3
    time.sleep(0.4)
    door.sweep()
    assert door.strangers == {}
    assert calls[-1].recv(1) == b""
    for one in (*visits, *calls):
        one.close()
    assert door.clients == {}
    door.close()


def test_the_calls_are_those_of_flowers_supernode():
    """A new Flower may add one."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    fleet = {
        path.removeprefix("/v1/fleet/"): kind
        for (_, path), kind in PROTOBUF_REQUEST_TYPES.items()
        if path.startswith("/v1/fleet/")
    }
    assert fleet.keys() - CALLS.keys() == {"register-node", "unregister-node"}
    for call, (kind, _) in CALLS.items():
        assert fleet[call] is kind
    assert digest("ab" * 32) == b"\xab" * 32
