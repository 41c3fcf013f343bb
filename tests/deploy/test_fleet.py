"""Enrolled clients against Flower's own SuperLink, with the gate between: nobody speaks for
another, reads or deletes what is another's, or sends more than it may. Without the gate it works.
"""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from fleet import Client, Federation, answer, parts_of, superlink
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree

# Flower's own use of its web framework
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TRIALS = int(os.environ.get("BAYFLOWER_TRIALS", "300"))  # make hostile: 10,000
SECRET = RecordDict({"head": ConfigRecord({"train_size": 1234, "client": 1})})


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    with superlink(tmp_path_factory.mktemp("superlink")) as found:
        yield found


@pytest.fixture
def federation(tmp_path, flower) -> Federation:
    return Federation(tmp_path, *flower)


@pytest.mark.slow  # `make deployed` and CI's containers have whole federations
def test_flowers_own_supernode_passes(federation):
    """Messages and replies with Flower's own code, a zero array that names one chunk five times,
    parts that the SuperLink has already, and a second announcement of the same reply.
    """
    client = federation.clients[0]
    with federation.open() as (outer, _, gate), client.connected(outer) as connection:
        node, receive, send, _, _, pull, push, confirm = connection
        assert node == client.node
        big = RecordDict({"a": ArrayRecord([np.arange(2_000_000.0)])})
        message = federation.sends(client, big)
        got, _ = receive()
        assert {number: pull(federation.run, number) for number in parts_of(message)} == parts_of(
            message
        )
        confirm(federation.run, got.metadata.message_id)
        confirm(federation.run, got.metadata.message_id)
        content = RecordDict({**big, "b": ArrayRecord([np.zeros(3_000_000)]), **SECRET})
        reply = answer(got, content)
        federation.sends(client, RecordDict({"x": content["b"]}))  # somebody has these zeros too
        objects = parts_of(reply)
        wanted, session = send(reply, get_object_tree(reply), 1.0)
        assert wanted == set(objects)
        first, *others = sorted(objects)
        push(federation.run, session, first, objects[first])
        push(federation.run, session, first, objects[first])
        again, session = send(reply, get_object_tree(reply), 1.0)
        assert again == set(others)
        for number in others:
            push(federation.run, session, number, objects[number])
        assert all(federation.has(number) for number in objects)
        assert send(reply, get_object_tree(reply), 1.0)[0] == set()
        assert gate.desks["client-0"].replies == {}


def test_a_client_cannot_speak_for_the_server_or_another_client(federation):
    """Flower takes a message "from the server" of anyone enrolled, and gives it to the victim."""
    liar, victim = federation.clients
    federation.joins(liar)
    federation.joins(victim)
    asked = federation.sends(victim, SECRET)
    theirs = federation.sends(liar, SECRET)
    posing = answer(asked, SECRET)  # in the name of the victim
    inside = answer(theirs, SECRET)
    inside.metadata.__dict__["_src_node_id"] = victim.node  # only the object says so
    inside.metadata.__dict__["_message_id"] = inside.object_id
    objects = parts_of(inside)
    request = liar.pushes(inside)
    request.messages_list[0].metadata.src_node_id = liar.node
    with federation.open() as (outer, inner, _):
        command = liar.pushes(federation_command(federation, victim))
        before, answered = federation.state.num_message_ins(), federation.state.num_message_res()
        said = liar.asks(outer, "push-messages", command)
        assert said.status_code == 400, said.text
        assert "in the name of node 1" in said.text
        said = liar.asks(outer, "push-messages", liar.pushes(posing))
        assert said.status_code == 400
        assert f"in the name of node {victim.node}" in said.text
        assert federation.state.num_message_ins() == before
        assert federation.state.num_message_res() == answered
        # what it says of itself in the object, which the server reads
        told = fleet_pb2.PushMessagesResponse.FromString(
            liar.asks(outer, "push-messages", request).content
        )
        root = request.messages_list[0].metadata.message_id
        part = liar.part(federation.run, told.session_id, root, objects[root])
        said = liar.asks(outer, "push-object", part)
        assert "says something else than it announced" in said.text
        assert not federation.has(root)
        # without the gate, the victim is given what the liar wrote
        assert liar.asks(inner, "push-messages", command).status_code == 200
        assert federation.state.num_message_ins() == before + 1


def federation_command(federation: Federation, victim: Client) -> Message:
    """Return a message to the victim as the server would send it."""
    message = Message(SECRET, dst_node_id=victim.node, message_type="train", ttl=1000)
    message.metadata.__dict__.update(_run_id=federation.run, _src_node_id=1)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def test_a_client_sees_and_deletes_only_its_own(federation):
    """What another client has said can be guessed and confirmed by its hash, unless nobody is told
    whether the SuperLink has it.
    """
    thief, victim = federation.clients
    federation.joins(thief)
    federation.joins(victim)
    asked, mine = federation.sends(victim, SECRET), federation.sends(thief, RecordDict())
    secret = next(number for number, one in parts_of(asked).items() if b"train_size" in one)
    nodes = Node(node_id=thief.node)

    def pull(address: str, number: str) -> message_pb2.PullObjectResponse:
        request = message_pb2.PullObjectRequest(node=nodes, run_id=federation.run, object_id=number)
        said = thief.asks(address, "pull-object", request)
        assert said.status_code == 200
        return message_pb2.PullObjectResponse.FromString(said.content)

    with federation.open() as (outer, inner, _):
        assert thief.asks(outer, "pull-messages", fleet_pb2.PullMessagesRequest(node=nodes))
        assert pull(outer, mine.metadata.message_id).object_found
        assert pull(outer, secret) == pull(outer, "0" * 64) == message_pb2.PullObjectResponse()
        assert pull(inner, secret).object_content == parts_of(asked)[secret]
        # whether the SuperLink has an object that a reply names
        for guess in (SECRET, RecordDict({"head": ConfigRecord({"train_size": 1235})})):
            reply = answer(mine, guess)
            told = thief.asks(outer, "push-messages", thief.pushes(reply))
            wanted = fleet_pb2.PushMessagesResponse.FromString(told.content).objects_to_push
            assert (guess is SECRET and set(wanted) == set(parts_of(reply))) or not wanted
            if guess is SECRET:
                told = thief.asks(inner, "push-messages", thief.pushes(reply))
                wanted = fleet_pb2.PushMessagesResponse.FromString(told.content).objects_to_push
                assert secret not in wanted
        gone = message_pb2.ConfirmMessageReceivedRequest(
            node=nodes, run_id=federation.run, message_object_id=asked.metadata.message_id
        )
        assert thief.asks(outer, "confirm-message-received", gone).status_code == 200
        assert federation.has(asked.metadata.message_id)
        assert thief.asks(inner, "confirm-message-received", gone).status_code == 200
        assert not federation.has(asked.metadata.message_id)


def test_a_body_is_read_only_from_a_key_in_the_folder(federation):
    """The answer comes before the body does; a key that is taken from the folder is refused."""
    client, stranger = federation.clients
    stranger.file.unlink()

    def head(caller: Client | None, *lines: str, size: int = 50_000_000) -> tuple[bytes, bytes]:
        """Return the answer to headers without a body, and what follows it."""
        told = [] if caller is None else [f"{k}: {v}" for k, v in caller.headers().items()]
        sent = ["POST /v1/fleet/push-object HTTP/1.1", "host: x", *told, *lines]
        sent += [f"content-length: {size}"] if size else []
        with socket.create_connection(outer.split(":"), timeout=20) as sock:
            sock.sendall("\r\n".join([*sent, "", ""]).encode())
            said = sock.recv(4096)
            return said.split(b"\r\n")[0], said if caller is client else sock.recv(4096)

    with federation.open() as (outer, _, gate):
        assert head(None) == (b"HTTP/1.1 401 Unauthorized", b"")  # and closed
        assert head(stranger)[0] == b"HTTP/1.1 401 Unauthorized"
        forged = Client(federation.nodes.parent / "forged", 0)
        forged.public = client.public
        assert head(forged)[0] == b"HTTP/1.1 401 Unauthorized"
        assert b"413" in head(client)[0]
        assert b"411" in head(client, "transfer-encoding: chunked", size=0)[0]
        call = "pull-messages"
        body = fleet_pb2.PullMessagesRequest(node=Node(node_id=client.node))
        assert client.asks(outer, call, body).status_code == 200
        assert client.asks(outer, call, b"\0" * 20_000).status_code == 413
        lying = fleet_pb2.PullMessagesRequest(node=Node(node_id=stranger.node))
        assert client.asks(outer, call, lying).status_code == 401  # Flower's own
        client.file.unlink()
        time.sleep(1.1)
        assert client.asks(outer, call, body).status_code == 401
        assert set(gate.desks) == {"client-0"}


def mutated(chosen: random.Random, body: bytes) -> bytes:
    """Return the bytes with some of them changed, lost, repeated or added."""
    some = bytearray(body)
    for _ in range(chosen.randint(1, 6)):
        at, length = chosen.randrange(len(some) + 1), chosen.choice((1, 1, 2, 8, 64))
        kind = chosen.randrange(4)
        if kind == 0:
            some[at : at + length] = chosen.randbytes(length)
        elif kind == 1:
            del some[at : at + length]
        elif kind == 2:
            some[at:at] = some[at : at + length] * chosen.choice((1, 2, 1000))
        elif at < len(some):
            some[at] ^= 1 << chosen.randrange(8)
    return bytes(some)


def resident() -> int:
    """Return the bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_mutated_requests_change_nothing_and_cost_nothing(federation):
    """Bytes of the network: honest requests of an enrolled client with bytes changed, in the head
    and in the body. Gate and SuperLink serve on, what others have stays, memory is flat.
    """
    liar, victim = federation.clients
    federation.joins(liar)
    federation.joins(victim)
    theirs, mine = federation.sends(victim, SECRET), federation.sends(liar, SECRET)
    kept, before = parts_of(theirs), federation.state.num_message_ins()
    chosen = random.Random(28)
    reply = answer(mine, RecordDict({"a": ArrayRecord([np.arange(50_000.0)])}))
    node = Node(node_id=liar.node)
    honest = [
        ("push-messages", liar.pushes(reply)),
        *(
            ("push-object", liar.part(federation.run, "s", number, content))
            for number, content in parts_of(reply).items()
        ),
        ("pull-messages", fleet_pb2.PullMessagesRequest(node=node)),
        ("pull-object", message_pb2.PullObjectRequest(node=node, object_id="a" * 64)),
        ("confirm-message-received", message_pb2.ConfirmMessageReceivedRequest(node=node)),
    ]
    codes: dict[int, int] = {}
    with federation.open() as (outer, _, _), httpx.Client(timeout=60) as line:

        def send(call: str, body: bytes, headers: dict[str, str]) -> int:
            said = line.post(f"http://{outer}/v1/fleet/{call}", content=body, headers=headers)
            return said.status_code

        def raw(call: str, body: bytes) -> int:
            """A whole request, its head too, with bytes changed; 0 if nothing is answered."""
            lines = [f"{k}: {v}" for k, v in liar.headers().items()]
            first = [f"POST /v1/fleet/{call} HTTP/1.1", "host: x", *lines]
            head = "\r\n".join([*first, f"content-length: {len(body)}", "", ""]).encode()
            with socket.create_connection(outer.split(":"), timeout=20) as sock:
                try:
                    sock.sendall(mutated(chosen, head) + body)
                    sock.shutdown(socket.SHUT_WR)
                    said = sock.recv(64)
                except OSError:
                    return 0
            return int(said.split()[1]) if said.startswith(b"HTTP") else 0

        half = 0
        for trial in range(TRIALS):
            call, request = honest[trial % len(honest)]
            body = request.SerializeToString()
            if trial % 3:
                code = send(call, mutated(chosen, body), liar.headers())
            else:
                code = raw(call, body)
            codes[code] = codes.get(code, 0) + 1
            if trial == TRIALS // 2:
                half = resident()
        grown = resident() - half
        assert send("pull-messages", b"", victim.headers()) == 401  # it has no node; Flower's own
    assert all(federation.has(number) for number in kept)
    assert federation.state.num_message_ins() == before
    assert set(codes) <= {0, 200, 400, 401, 404, 405, 411, 413, 415, 503}, codes
    assert codes[400] > TRIALS / 4, codes
    assert grown < 20e6, (grown, codes)
