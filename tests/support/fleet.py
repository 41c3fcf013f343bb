"""Flower's own SuperLink and Bayflower's gate in this process, and clients that speak Flower's
Fleet API to them: honest ones with Flower's own code, hostile ones with bytes.
"""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization
from flwr.app import Message, RecordDict
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_connection import http_request_response

from bayflower.deploy import keys
from bayflower.deploy.callers import Callers
from bayflower.deploy.gate import Gate
from bayflower.flower.loop import InProcessGrid
from bayflower.flower.processes import free_port

HEADERS = {"content-type": "application/protobuf"}


@contextmanager
def served(app, **more) -> Iterator[str]:
    """Yield the address of an application that is served in a thread."""
    port = free_port()
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="error", ws="none", http="h11", **more
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Client:
    """A client's key in a folder of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        InProcessGrid(None, [])  # Flower wants to know who makes messages
        (folder / f"client-{number}").mkdir(parents=True)
        line = keys.make_node_key(folder / f"client-{number}", "test")
        self.number = number
        self.private = serialization.load_ssh_private_key(
            (folder / f"client-{number}" / "node.key").read_bytes(), None
        )
        self.public = public_key_to_bytes(self.private.public_key())
        self.file = folder / "nodes" / f"client-{number}.pub"
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_bytes(line)
        self.node = 0

    def headers(self, stamp: str = "") -> dict[str, str]:
        """Return the headers of a request of this client."""
        stamp = stamp or now().isoformat()
        return {
            **HEADERS,
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": b64encode(sign_message(self.private, stamp.encode())).decode(),
        }

    def asks(self, address: str, call: str, request, **more) -> httpx.Response:
        """Send a request, a protobuf message or bytes."""
        body = request if isinstance(request, bytes) else request.SerializeToString()
        return httpx.post(
            f"http://{address}/v1/fleet/{call}",
            content=body,
            headers=self.headers(**more),
            timeout=60,
        )

    def pushes(self, message: Message, tree=None, node: int | None = None):
        """Return the request that announces a message."""
        from flwr.common.serde import message_to_proto

        sent = message_to_proto(message)
        sent.ClearField("content")
        if message.has_content():
            sent.content.SetInParent()
        return fleet_pb2.PushMessagesRequest(
            node=Node(node_id=self.node if node is None else node),
            messages_list=[sent],
            message_object_trees=[tree or get_object_tree(message)],
            clientapp_runtime_list=[1.0],
        )

    def part(self, run: int, session: str, number: str, content: bytes):
        """Return the request that sends a part of a reply."""
        return message_pb2.PushObjectRequest(
            node=Node(node_id=self.node),
            run_id=run,
            object_id=number,
            object_content=content,
            session_id=session,
        )

    def connected(self, address: str):
        """Return Flower's own connection of a SuperNode."""
        return http_request_response(
            address, True, None, (self.private, self.private.public_key()), 3, 60
        )


@contextmanager
def superlink(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the address and the state of Flower's own SuperLink, served in this process."""
    from flwr.superlink.main import create_app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_DATABASE", str(folder / "superlink.db"))
        app = create_app()
    with served(app) as address:
        yield address, app.state.linkstate_factory.state()


class Federation:
    """A run of a SuperLink, with clients of its own and the gate before it."""

    def __init__(self, folder: Path, address: str, state: Any, clients: int = 2) -> None:
        self.address, self.state = address, state
        self.clients = [Client(folder, number) for number in range(clients)]
        for one in self.clients:
            one.node = self.state.create_node(
                NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, one.public, 0, name=f"client-{one.number}"
            )
        self.nodes = folder / "nodes"
        self.run = self.state.create_run(
            "a/b", "1", "0" * 64, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        task = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)

    @contextmanager
    def open(self, most_mb: int = 100) -> Iterator[tuple[str, str, Gate]]:
        """Yield the addresses of gate and SuperLink, and the gate."""
        gate = Gate(f"http://{self.address}", False, Callers(self.nodes), most_mb=most_mb)
        with served(gate.app()) as outer:
            yield outer, self.address, gate

    def joins(self, client: Client) -> None:
        """Let a client be online without a connection."""
        assert self.state.activate_node(client.node, 1000)

    def sends(self, client: Client, content: RecordDict) -> Message:
        """Return a message from the server to a client, stored in the SuperLink."""
        message = Message(content, dst_node_id=client.node, message_type="train", ttl=1000)
        facts = message.metadata.__dict__
        facts["_run_id"], facts["_src_node_id"] = self.run, 1
        facts["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        done, missing = self.state.store_message_and_object_tree(
            message, get_object_tree(message), session
        )
        assert done
        objects = get_all_nested_objects(message)
        for number in missing:
            assert self.state.store_object(self.run, session, number, objects[number].deflate())
        return message

    def has(self, number: str) -> bool:
        """Return whether the SuperLink has an object."""
        return bool(self.state.object_store.get(number))


def answer(message: Message, content: RecordDict) -> Message:
    """Return a client's reply."""
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def parts_of(message: Message) -> dict[str, bytes]:
    """Return the objects of a message."""
    return {number: one.deflate() for number, one in get_all_nested_objects(message).items()}
