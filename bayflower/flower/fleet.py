"""What one client may ask of Flower's Fleet API, judged request by request.

Flower authenticates a node by a signed time stamp and compares the node id of a request with the
key. It takes everything else on trust: who a message is from, which object is pulled, which message
was received, what an object's children are. A `Desk` keeps what the server sent to one client and
what the client is sending back, and refuses the rest:

* a message must be a reply, from the node that sends it, and its object must say the same;
* an object can be pulled only if it is part of a message to this client, so no client can look up
  what others have sent, nor learn it from which parts the SuperLink still asks for;
* a part of a reply must be in the tree that was announced, have its hash, kind, children and size.

A desk does no input or output. What it keeps is bounded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from .trees import (
    DEPTHS,
    LONGEST_ARRAY,
    LONGEST_BODY,
    MEGABYTE,
    MOST_OBJECTS,
    RefusedError,
    Tree,
    digest,
    scanned,
)

SMALL = 16 * 1024  # bytes of a request that carries no data
LARGEST = 20 * MEGABYTE  # bytes of one part; Flower sends arrays in chunks of 5 MiB
LONGEST_CHUNK = 5 * 2**20  # Flower's own
LONGEST_NAME = 256
MOST_KEPT = 3 * MOST_OBJECTS  # ids of objects kept for one client, in each direction
MOST_FINISHED = 64  # sessions whose parts have all arrived
LONGEST_RUNTIME = 1e7  # seconds
# the requests of a SuperNode by name, and the bytes that each may have. A path copied from a
# request could lead elsewhere ("/v1/fleet/../control").
CALLS: dict[str, tuple[Any, int]] = {
    "activate-node": (fleet_pb2.ActivateNodeRequest, SMALL),
    "deactivate-node": (fleet_pb2.DeactivateNodeRequest, SMALL),
    "send-node-heartbeat": (heartbeat_pb2.SendNodeHeartbeatRequest, SMALL),
    "pull-messages": (fleet_pb2.PullMessagesRequest, SMALL),
    "push-messages": (fleet_pb2.PushMessagesRequest, 100 * MOST_OBJECTS),
    "get-run": (run_pb2.GetRunRequest, SMALL),
    "get-fab": (fab_pb2.GetFabRequest, SMALL),
    "push-object": (message_pb2.PushObjectRequest, LARGEST),
    "pull-object": (message_pb2.PullObjectRequest, SMALL),
    "confirm-message-received": (message_pb2.ConfirmMessageReceivedRequest, SMALL),
}
STORED = message_pb2.PushObjectResponse(stored=True).SerializeToString()
NOT_FOUND = message_pb2.PullObjectResponse().SerializeToString()


class Asked(NamedTuple):
    """A request that may pass: its bytes for the SuperLink, or the answer if the SuperLink is not
    asked.
    """

    request: Any
    body: bytes
    answer: bytes | None = None


class Reply:
    """A reply that a client is sending: what it announced, and which parts have arrived."""

    def __init__(self, message: Any, tree: Tree) -> None:
        self.message, self.tree = message, tree
        self.missing: set[bytes] = set()  # parts that the SuperLink asked for
        self.done: set[bytes] = set()
        self.sizes: dict[bytes, int] = {}  # of parts on their way to the SuperLink
        self.size = 0  # bytes that arrived, and those that repeated chunks unpack to


class Desk:
    """The requests of one client."""

    def __init__(self, most_mb: int = 2048) -> None:
        self.most = most_mb * MEGABYTE  # bytes of one reply
        self.sent: OrderedDict[str, set[bytes]] = OrderedDict()  # objects of messages to the client
        self.replies: OrderedDict[str, Reply] = OrderedDict()  # by message id
        self.sessions: dict[str, Reply] = {}
        self.finished: OrderedDict[str, None] = OrderedDict()  # sessions and messages

    def ask(self, call: str, body: bytes) -> Asked:
        """Return what may pass of a request; raise if nothing may."""
        if call == "push-messages":
            tree = scanned(body)
        kind, _ = CALLS[call]
        request = kind()
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise RefusedError(f"its {call} is not a request of Flower") from None
        request.DiscardUnknownFields()
        if call == "push-messages":
            check_envelope(request)
            self.check_root(request, tree)
        elif call == "pull-messages":
            del request.message_ids[:]
        elif call == "pull-object":
            if not self.was_sent(request.object_id):
                return Asked(request, b"", NOT_FOUND)
        elif call == "confirm-message-received":
            if request.message_object_id not in self.sent:
                return Asked(request, b"", b"")
        elif call == "push-object" and self.has_part(request):
            return Asked(request, b"", STORED)
        return Asked(request, request.SerializeToString(deterministic=True))

    # -- to the client ----------------------------------------------------------------------------
    def was_sent(self, number: str) -> bool:
        """Return whether an object is part of a message to this client."""
        return len(number) == 64 and any(digest(number) in known for known in self.sent.values())

    def receives(self, answer: bytes) -> None:
        """Remember the messages in an answer to `pull-messages`."""
        told = fleet_pb2.PullMessagesResponse.FromString(answer)
        for message, tree in zip(told.messages_list, told.message_object_trees, strict=True):
            self.sent[message.metadata.message_id] = {digest(one) for one in ids(tree)}
        shorten(self.sent, len)

    def received(self, request: Any) -> None:
        """Forget a message that the client has received."""
        self.sent.pop(request.message_object_id, None)

    # -- from the client --------------------------------------------------------------------------
    def check_root(self, request: Any, tree: Tree) -> None:
        """Raise if the announced tree is not that of the message; remember it."""
        message = request.messages_list[0]
        number = message.metadata.message_id
        if digest(number) != next(iter(tree)):
            raise RefusedError("the tree of its reply is that of another message")
        known = self.replies.get(number)
        if known is not None and known.tree != tree:
            raise RefusedError("its reply changed after it was announced")
        if known is None and number not in self.finished:
            self.replies[number] = Reply(message, tree)
            for gone in shorten(self.replies, lambda reply: len(reply.tree)):
                self.sessions = {s: one for s, one in self.sessions.items() if one is not gone}

    def announced(self, request: Any, answer: bytes) -> bytes:
        """Return the answer to `push-messages` as the client sees it: it is asked for every part
        that it has not sent, also for those that the SuperLink has from others.
        """
        told = fleet_pb2.PushMessagesResponse.FromString(answer)
        number = request.messages_list[0].metadata.message_id
        reply = self.replies.get(number)
        listed = {digest(one) for one in told.objects_to_push}
        del told.objects_to_push[:]
        if reply is None:  # all its parts have arrived
            self.finish(told.session_id)
        elif digest(number) in listed | reply.done:
            reply.missing |= listed
            told.objects_to_push.extend(one.hex() for one in reply.tree if one not in reply.done)
            self.sessions[told.session_id] = reply
        else:  # the SuperLink refused it
            del self.replies[number]
        return told.SerializeToString()

    def has_part(self, request: Any) -> bool:
        """Return whether the SuperLink needs no part of a reply; raise if it is not what was
        announced.
        """
        reply = self.sessions.get(request.session_id)
        if reply is None:
            if request.session_id in self.finished:
                return True
            raise RefusedError("it sends a part of a reply that it did not announce")
        part = digest(request.object_id)
        if part not in reply.tree or request.run_id != reply.message.metadata.run_id:
            raise RefusedError("it sends a part that is not in the reply it announced")
        if part in reply.done:
            return True
        content = request.object_content
        size = len(content) + check_part(content, part, reply, self.most)
        if reply.size + size > self.most:
            raise RefusedError(
                f"its reply has more than {self.most} bytes, packed or unpacked; --most-mb sets "
                "the limit"
            )
        reply.sizes[part] = size
        if part in reply.missing:
            return False
        self.stored(request)
        return True

    def stored(self, request: Any) -> None:
        """Count a part that has arrived."""
        reply = self.sessions.get(request.session_id)
        part = digest(request.object_id)
        if reply is None or part in reply.done:
            return
        reply.size += reply.sizes.pop(part, 0)
        reply.done.add(part)
        if len(reply.done) == len(reply.tree):
            number = reply.message.metadata.message_id
            self.replies.pop(number, None)
            for session in [s for s, one in self.sessions.items() if one is reply]:
                del self.sessions[session]
                self.finish(session)
            self.finish(number)

    def finish(self, name: str) -> None:
        """Remember a session, or a message, whose parts have all arrived."""
        self.finished[name] = None
        if len(self.finished) > MOST_FINISHED:
            self.finished.popitem(last=False)


def shorten(kept: OrderedDict[str, Any], size: Any) -> list[Any]:
    """Drop the oldest entries until the rest is small enough; return them. The newest stays."""
    gone, total = [], sum(size(one) for one in kept.values())
    while total > MOST_KEPT and len(kept) > 1:
        _, one = kept.popitem(last=False)
        gone.append(one)
        total -= size(one)
    return gone


def ids(tree: Any) -> Iterator[str]:
    """Yield the ids of the objects in a tree."""
    todo = [tree]
    while todo:
        one = todo.pop()
        yield one.object_id
        todo.extend(one.children)


def check_envelope(request: Any) -> None:
    """Raise if a pushed message is not a reply from the node that pushes it."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise RefusedError("it sends other than one message and one tree")
    message = request.messages_list[0]
    facts = message.metadata
    if facts.src_node_id != request.node.node_id or not request.node.node_id:
        raise RefusedError(
            f"node {request.node.node_id} sends a message in the name of node {facts.src_node_id}"
        )
    if not facts.reply_to_message_id or facts.dst_node_id != SUPERLINK_NODE_ID:
        raise RefusedError("it sends a message that is no reply to the server")
    names = (facts.reply_to_message_id, facts.message_id, facts.message_type, facts.group_id)
    if max(map(len, names)) > LONGEST_NAME:
        raise RefusedError(f"a name in its reply has more than {LONGEST_NAME} letters")
    times = (facts.ttl, facts.created_at, *request.clientapp_runtime_list)
    if not all(math.isfinite(one) for one in times):
        raise RefusedError("a time in its reply is not a number")
    if any(not 0 <= one <= LONGEST_RUNTIME for one in request.clientapp_runtime_list):
        raise RefusedError("its computing time is impossible")
    if message.content.items:
        raise RefusedError("its reply has content outside its objects")
    if len(request.clientapp_runtime_list) > 1:
        raise RefusedError("it tells several computing times")


def check_part(content: bytes, part: bytes, reply: Reply, most: int) -> int:
    """Raise if a part of a reply is not the announced object; return the bytes that it unpacks to
    beyond its own.
    """
    if hashlib.sha256(content).digest() != part:
        raise RefusedError("a part of its reply does not have the hash it is announced by")
    end = content.find(b"\0")
    words = content[: max(end, 0)].split(b" ")
    if len(words) != 3 or words[2] != str(len(content) - end - 1).encode():
        raise RefusedError("a part of its reply has no head of Flower's")
    kind = words[0].decode("ascii", "replace")[:40]
    depth, children = reply.tree[part]
    if DEPTHS.get(kind) != depth:
        raise RefusedError(f"its reply has a {kind!r} at depth {depth}")
    named = {one.hex().encode() for one in children}
    given = words[1].split(b",") if words[1] else []
    if len(given) != len(named) or set(given) != named:
        raise RefusedError(f"its {kind} has other parts than it announced")
    size, longest = len(content) - end - 1, LONGEST_BODY
    longest = {"Array": LONGEST_ARRAY, "ArrayChunk": LONGEST_CHUNK}.get(kind, longest)
    if size > longest:
        raise RefusedError(f"its {kind} has {size} bytes, more than {longest}")
    if kind == "Message":
        check_message(content[end + 1 :], reply.message)
    return repeated(content[end + 1 :], len(given), most) if kind == "Array" else 0


def check_message(body: bytes, announced: Any) -> None:
    """Raise if the object of a message says something else than the message did: the server reads
    the object.
    """
    found = message_pb2.Message()
    try:
        found.ParseFromString(body)
    except DecodeError:
        raise RefusedError("its message is not one of Flower's") from None
    wanted = message_pb2.Metadata()
    wanted.CopyFrom(announced.metadata)
    wanted.message_id = ""
    if found.metadata != wanted or found.HasField("content"):
        raise RefusedError("its message says something else than it announced")
    if found.HasField("error") != announced.HasField("error") or found.error != announced.error:
        raise RefusedError("its message has another error than it announced")


def repeated(body: bytes, chunks: int, most: int) -> int:
    """Return the bytes that the chunks an array names again may unpack to."""
    try:
        places = json.loads(body)["arraychunk_ids"]
        again = len(places) - len(set(places))
        wrong = any(type(one) is not int or not 0 <= one < chunks for one in places)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RefusedError("an array of its reply cannot be read") from None
    if wrong or again * LONGEST_CHUNK > most:
        raise RefusedError(f"an array of its reply names {len(places)} chunks and has {chunks}")
    return again * LONGEST_CHUNK
