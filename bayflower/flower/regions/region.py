"""A region's side: one request to its clients, their replies, and the exact sum of what they sent.

A region checks every reply as a server does, and adds the update to its sum. What goes up of a
single client is what a server's result shows of it: its loss, its number of samples, the test of
its model, or why its reply was not used. A region keeps nothing that it could not make again: a
client answers a request that it has answered before from its disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ... import methods
from ...config import Limits, convert_fields
from ...errors import BayflowerError, WireError
from ...maths.exact import Total
from ...rounds.suspects import Apart
from ...tree import Tensors, unflatten
from ...wire.continuity import Continuity
from ...wire.hello import ClientInfo, text_to_anatomy
from .. import continuing, records, replies
from ..collected import Arriving
from ..exchange import LOST, POLL_SECONDS, Member, NodeHistory, reason, registered, stream
from ..guard import told as settings_of
from ..wrapped import OwnForm
from . import partial as parts
from .bundles import Part, bundled, opened

log = logging.getLogger("bayflower")
TREE, ORDER = "tree", "order"  # keys of a header: what a region is asked, and its details
ROLL, RELAY, SEE, ADD = "roll", "relay", "see", "add"
STATE, LIMITS, SUM = "state", "limits", "sum"  # names of records
# codes of errors: the region has refused a client's reply; it got none; and, added to Flower's code
# of a lost client, it has tried again already
NOT_USED, NO_REPLY, TRIED = 1000, 1001, 2000
KEPT = ("update",)  # records of a client's reply that stay in its region
RETRIES = 2


class Region:
    """One region: its grid, and what it remembers of the request before."""

    def __init__(self, grid: Grid, expects: int = 0) -> None:
        self.grid, self.expects = grid, expects  # clients that the region has, 0 = unknown
        self.history, self.rejoin = NodeHistory(Limits().ask_again_seconds), 0.0
        self.held: tuple[str, dict[int, Any]] = ("", {})  # of the round with this token: replies

    def answer(self, content: RecordDict) -> RecordDict:
        """Return the answer to a request of the server."""
        record = content.get(records.HEADER)
        if not isinstance(record, ConfigRecord) or record.get("protocol") != records.PROTOCOL:
            raise WireError("the request of a tree has no header, or that of another version")
        head, order = dict(record), json.loads(str(record.get(ORDER, "{}")))
        if head.get(TREE) == ROLL:
            self.wait(float(order["seconds"]))
            return self.said(head, {})
        nodes = [int(node) for node in order["nodes"]]
        own = dict(zip(nodes, opened(content, order["index"], len(nodes)), strict=True))
        seconds, kind = float(order["seconds"]), str(order["kind"])
        self.history.again, self.history.most_mb = float(order["again"]), int(order["most_mb"])
        self.rejoin = float(order["rejoin"])
        if head[TREE] == RELAY:
            found = {node: reply for node, reply in self.replies(own, kind, seconds)}
            made, index = bundled([self.passed(found.get(node)) for node in nodes])
            return self.said(head, {"index": index}, made)
        return self.summed(content, head, order, own, seconds)

    def said(
        self, head: Mapping[str, Any], told: Mapping[str, Any], made: RecordDict | None = None
    ) -> RecordDict:
        """Return an answer with its header: which request it answers, and who is online."""
        made = RecordDict() if made is None else made
        online = sorted(str(node) for node in self.grid.get_node_ids())
        order = json.dumps({**told, "online": online, "expects": self.expects})
        keys = {name: head[name] for name in ("run", "round", "nonce") if name in head}
        made[records.HEADER] = records.make_header(**{TREE: head[TREE], ORDER: order}, **keys)
        return made

    def wait(self, seconds: float) -> None:
        """Wait until the clients of this region are online."""
        deadline = time.monotonic() + seconds
        while len(list(self.grid.get_node_ids())) < max(self.expects, 1):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    # -- messages ----------------------------------------------------------------------------------
    def replies(
        self, own: Mapping[int, Part], kind: str, seconds: float
    ) -> Iterator[tuple[int, Message]]:
        """Yield the node and the reply to each message. A client whose node or process was lost
        gets a retry once it is back.
        """
        deadline = time.monotonic() + seconds
        owners = registered(self.grid) if kind == MessageType.QUERY else {}

        def ask(nodes: list[int], ttl: float) -> Iterator[Message]:
            for node in nodes:
                content = own[node]
                assert isinstance(content, RecordDict)
                copy = records.copy_content(content)
                yield Message(copy, dst_node_id=node, message_type=kind, ttl=ttl)

        todo = list(own)
        for attempt in range(RETRIES + 1):
            lost: list[int] = []
            asked: dict[str, int] = {}
            left = max(deadline - time.monotonic(), 1.0)
            for reply in stream(self.grid, todo, ask, left, self.history, asked):
                node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
                gone = reply.has_error() and reply.error.code in LOST
                if gone and attempt < RETRIES and time.monotonic() < deadline:
                    log.warning("node %d: %s; retrying", node, reason(reply))
                    lost.append(node)
                elif node in own:
                    yield node, bound(reply, owners.get(node))
            if not lost:
                return
            self.find(lost, min(deadline, time.monotonic() + self.rejoin))
            todo = lost

    def find(self, lost: list[int], deadline: float) -> None:
        """Wait until lost nodes are online again."""
        while time.monotonic() < deadline and not set(lost) <= set(self.grid.get_node_ids()):
            time.sleep(POLL_SECONDS)

    def passed(self, reply: Message | None) -> Part:
        """Return what goes up of a reply that the server judges itself."""
        if reply is None:
            return lost()
        return reply.error if reply.has_error() else reply.content

    # -- sums --------------------------------------------------------------------------------------
    def summed(
        self,
        content: RecordDict,
        head: Mapping[str, Any],
        order: Mapping[str, Any],
        own: Mapping[int, Part],
        seconds: float,
    ) -> RecordDict:
        """Return the sum of a round of training, or what its limits need to know first."""
        work = Work(content, head, order, own)
        token, see = str(order["token"]), head[TREE] == SEE
        known = self.held[1] if self.held[0] == token else {}
        missing = {work.members[c].node: own[work.members[c].node] for c in work.members}
        for client in known.keys() & work.members.keys():
            missing.pop(work.members[client].node, None)
            work.took(client, known[client])
        for node, reply in self.replies(missing, MessageType.TRAIN, seconds) if missing else ():
            work.take(node, reply)
        self.held = (token, work.held) if see else ("", {})
        flat: Tensors = {}
        told = work.told(flat, see)
        made, told["index"] = bundled([work.parts.get(node) or lost() for node in own])
        made[SUM] = records.to_arrays(flat)
        return self.said(head, told, made)


class Held(NamedTuple):
    """A reply that waits for the limits of its round."""

    update: Any
    part: RecordDict
    counted: int


class Work:
    """One round of training in a region: what is expected of its clients, and their sum."""

    def __init__(
        self,
        content: RecordDict,
        head: Mapping[str, Any],
        order: Mapping[str, Any],
        own: Mapping[int, Part],
    ) -> None:
        row = methods.get(str(head["method"]))
        options, training = settings_of(row.name, str(head["instructions"]))
        anatomy = text_to_anatomy(order["anatomy"])
        self.half = row.server(options, anatomy)
        message = Message(content, dst_node_id=0, message_type=MessageType.TRAIN)
        self.state: Any = unflatten(self.half.state_type, records.arrays(message, STATE))
        classes, limits = int(order["num_classes"]), convert_fields(Limits, order["limits"])
        self.members = {}
        for node, (client, train, test) in zip(own, order["clients"], strict=True):
            facts = ClientInfo(anatomy, (), classes, int(train), int(test), {})
            self.members[int(client)] = Member(int(client), node, False, facts)
        self.at = {member.node: client for client, member in self.members.items()}
        caps = {int(client): int(most) for client, most in order["caps"].items()}
        known = (training.make_task(classes), limits, training, caps, OwnForm("", "", None))
        self.expected = replies.Expected(
            str(head["run"]), row.name, int(head["round"]), self.members, self.members, *known
        )
        self.continuity = Continuity()
        self.continuity.remember(order["continuity"])
        self.refuses = limits.continuity == "refuse"
        self.limiter = parts.limits_in(self.half, order["robust"], records.arrays(message, LIMITS))
        self.holds = head[TREE] == SEE
        self.total, self.apart = Total(), Apart()
        self.arriving = Arriving(self.half, self.state, self.limiter, False)
        self.arriving.holds, self.arriving.apart = False, self.apart
        self.held: dict[int, Held] = {}
        self.counted: dict[int, int] = {}
        self.parts: dict[int, Part] = {}  # by node: what goes up of its reply

    def take(self, node: int, reply: Message) -> None:
        """Take a reply, or note why it is not used."""
        if reply.has_error():
            code = reply.error.code
            self.parts[node] = Error(TRIED + code if code in LOST else code, reply.error.reason)
            return
        try:
            client = replies.sender(reply, self.expected)
            self.took(client, self.accepted(client, reply))
        except Exception as error:  # an invalid reply of one client must not stop the region
            known = isinstance(error, (BayflowerError, ValueError))
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self.parts[node] = Error(NOT_USED, " ".join(text.split()))

    def accepted(self, client: int, reply: Message) -> Held:
        """Return a valid reply; raise with the reason if it is invalid."""
        known = (self.half, self.state, self.counted)
        found = replies.accept(reply, client, self.expected, *known)
        if self.refuses:
            continuing.judged(reply, client, self.continuity, True)
        rest = {name: one for name, one in reply.content.items() if name not in KEPT}
        return Held(found.update, RecordDict(rest), int(found.update.num_examples))

    def took(self, client: int, held: Held) -> None:
        """Add a valid reply to the sum, or keep it until its limits are known."""
        if self.holds:
            self.held[client] = held
        else:
            self.arriving.add(self.total, client, held.update)
        self.counted[client] = held.counted
        self.parts[self.members[client].node] = held.part

    def told(self, flat: Tensors, see: bool) -> dict[str, Any]:
        """Return the sum, and what was seen of the clients; arrays go to `flat`."""
        if see:
            for client in sorted(self.held):
                self.limiter.sight(self.state, client, self.held[client].update)
        counted = {str(client): number for client, number in self.counted.items()}
        found: dict[str, Any] = {"counted": counted}
        if not see:
            found["total"] = parts.sum_out(self.total, flat, "total")
            found["apart"] = parts.apart_out(self.apart, flat)
        if self.limiter.on:
            found["seen"] = parts.seen_out(self.limiter, flat)
        return found


def bound(reply: Message, owner: int | None) -> Message:
    """Return a reply to a query; an error if its key is that of another client."""
    if owner is None or reply.has_error():
        return reply
    head = reply.content.get(records.HEADER)
    client = head.get("client") if isinstance(head, ConfigRecord) else None
    if client == owner:
        return reply
    text = f"its key is that of client {owner}, and it claims to be client {str(client)[:20]}"
    return Message(error=Error(NOT_USED, text), metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def lost() -> Error:
    """Return what goes up of a client that did not answer."""
    return Error(NO_REPLY, "no reply before the timeout")
