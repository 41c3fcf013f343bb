"""Replies at the bytes of the network: Flower's own grid unpacks them, and no client's bytes end a
run or fill the memory.
"""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from bayflower.flower import exchange, pulling
from bayflower.flower.loop import InProcessGrid

HONEST, LIAR = 7, 8


class Wire(HttpGrid):
    """Flower's grid with the bytes of replies in place of a SuperLink; `spoil` changes the
    objects of the liar's.
    """

    def __init__(self, spoil) -> None:
        super().__init__(token="t")
        InProcessGrid(None, [])  # Flower wants to know who makes messages
        self.set_run(Run.create_empty(1))
        self.spoil, self.trees, self.objects, self.asked = spoil, {}, {}, []
        self._client = SimpleNamespace(
            PullMessages=self.messages,
            PullObject=self.object,
            ConfirmMessageReceived=lambda request: None,
        )

    def get_node_ids(self):
        return [HONEST, LIAR]

    def push_messages(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"m{node}"
            arrays = ArrayRecord({"w": Array(np.full(250_000, node, np.float32))})
            reply = Message(
                RecordDict({"update": arrays, "head": ConfigRecord({"client": node})}),
                reply_to=message,
            )
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = {n: one.deflate() for n, one in get_all_nested_objects(reply).items()}
            tree = get_object_tree(reply)
            if node == LIAR:
                tree = self.spoil(objects, tree) or tree
            self.trees[f"m{node}"] = (reply, tree)
            self.objects |= objects
        return list(self.trees)

    def messages(self, request):
        found = [self.trees.pop(n) for n in request.message_ids if n in self.trees]
        names = [
            SimpleNamespace(
                metadata=SimpleNamespace(
                    message_id=tree.object_id, reply_to_message_id=f"m{reply.metadata.src_node_id}"
                )
            )
            for reply, tree in found
        ]
        trees = [tree for _, tree in found]
        return SimpleNamespace(messages_list=names, message_object_trees=trees)

    def object(self, request):
        self.asked.append(request.object_id)
        content = self.objects.get(request.object_id, b"")
        return SimpleNamespace(
            object_found=bool(content), object_available=True, object_content=content
        )


def kinds(objects: dict[str, bytes]) -> dict[str, str]:
    return {content.split(b" ", 1)[0].decode(): number for number, content in objects.items()}


def with_body(content: bytes, body: bytes) -> bytes:
    kind, parts, _ = content.split(b"\x00", 1)[0].decode().split(" ")
    return f"{kind} {parts} {len(body)}".encode() + b"\x00" + body


def no_json(objects, tree):
    number = kinds(objects)["RecordDict"]
    objects[number] = with_body(objects[number], b"\xff not JSON")


def repeated(objects, tree):
    number = kinds(objects)["Array"]
    body = json.loads(objects[number].split(b"\x00", 1)[1])
    body["arraychunk_ids"] = [0] * 40
    objects[number] = with_body(objects[number], json.dumps(body).encode())


def many(objects, tree):
    more = [ObjectTree(object_id=f"{i:064x}") for i in range(50_000)]
    return ObjectTree(object_id=tree.object_id, children=[*tree.children, *more])


def wrong_kind(objects, tree):
    numbers = kinds(objects)
    objects[numbers["RecordDict"]] = objects[numbers["ConfigRecord"]]


def deep(objects, tree):
    number = kinds(objects)["ArrayRecord"]
    objects[number] = with_body(objects[number], b"[" * 200_000)


def other_sender(objects, tree):
    forged(objects, src_node_id=HONEST)


def other_question(objects, tree):
    forged(objects, reply_to_message_id=f"m{HONEST}")


def forged(objects, **facts) -> None:
    """Flower's SuperLink checks what a client announces; the server reads what is in the object."""
    number = kinds(objects)["Message"]
    said = ProtoMessage.FromString(objects[number].split(b"\x00", 1)[1])
    for name, value in facts.items():
        setattr(said.metadata, name, value)
    objects[number] = with_body(objects[number], said.SerializeToString())


SPOILED = {
    other_sender: "it claims to come from node 7",
    other_question: "it claims to answer another message",
    no_json: "codec can't decode",
    repeated: "would unpack to 40",
    many: "it has 500",
    wrong_kind: "it has a 'ConfigRecord' where RecordDict must be",
    deep: "recursion",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda one: one.__name__)
def test_a_reply_that_cannot_be_unpacked_is_its_clients_fault(spoil):
    """The other reply is there, the liar's is an error of its node, and memory stays flat."""
    grid = Wire(spoil)

    def ask(nodes, ttl):
        return [Message(RecordDict(), dst_node_id=n, message_type="train", ttl=ttl) for n in nodes]

    asked: dict[str, int] = {}
    history = exchange.NodeHistory(0.0, most_mb=5)
    tracemalloc.start()
    replies = list(exchange.stream(grid, [HONEST, LIAR], ask, 60.0, history, asked))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = {asked[reply.metadata.reply_to_message_id]: reply for reply in replies}
    assert set(found) == {HONEST, LIAR}
    assert found[HONEST].content["update"]["w"].numpy().mean() == HONEST
    assert found[LIAR].has_error()
    assert SPOILED[spoil] in exchange.reason(found[LIAR])
    assert peak < 32e6  # 40 MB unpacked; the parts of 50,000 are not asked for
    assert len(grid.asked) < 30


def test_a_network_that_fails_is_no_clients_fault():
    grid = Wire(no_json)
    grid._client.PullMessages = lambda request: (_ for _ in ()).throw(httpx.ConnectError("gone"))
    with pytest.raises(httpx.ConnectError):
        pulling.pull(grid, "m7", HONEST, 5)
    before = pulling.http_grid.pull_objects
    assert before.__module__ == "flwr.supercore.inflatable.inflatable_utils"


def test_the_size_of_an_honest_reply_is_that_of_its_arrays():
    """Oracle: the bytes of the arrays after unpacking."""
    grid = Wire(lambda objects, tree: None)
    grid.push_messages([Message(RecordDict(), dst_node_id=HONEST, message_type="train")])
    reply, tree = grid.trees[f"m{HONEST}"]
    numbers = {one.object_id for one in iterate_object_tree(tree)}
    size = pulling.unpacked_size(tree.object_id, {n: grid.objects[n] for n in numbers})
    data = len(reply.content["update"]["w"].data)
    assert data < size < data + 2000
