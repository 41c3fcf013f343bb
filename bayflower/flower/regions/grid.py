"""The server's side of a tree: the clients of all regions as the nodes of one grid.

A strategy sends to clients and gets their replies, as in a flat federation. On the way, the
messages to the clients of one region are one message to its node, and so are the replies. A node
that is no region is left out.

A request to a region is made once, and sent again as it is: the region answers it once. `nonce`
tells requests apart that are otherwise equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun

from ...config import Limits
from ...errors import WireError
from ...files.journal import one_line
from .. import records
from ..exchange import Ask, NodeHistory, Routed, reason, stream
from .bundles import bundled, opened
from .region import NO_REPLY, ORDER, RELAY, ROLL, TREE

log = logging.getLogger("bayflower")
ROLL_SECONDS = 120.0  # for a region to say who is there; it waits for its clients meanwhile
ASK_SECONDS = 10.0  # between two such questions to a region some of whose clients are missing
MOST_NODES = 100_000  # of a region
COPIED = ("method", "run", "round", "instructions", "evaluate", "calibration")  # keys of headers


class Answer(NamedTuple):
    """What a region said to one request, beside the replies of its clients."""

    region: int
    nodes: tuple[int, ...]  # the clients' nodes
    head: dict[str, Any]
    order: dict[str, Any]
    content: RecordDict


class Site:
    """A region as the server knows it."""

    def __init__(self) -> None:
        self.below: dict[int, int] = {}  # by node of a client, as the server knows it: its own
        self.online: set[int] = set()  # of these
        self.expects, self.asked = 0, -ASK_SECONDS

    @property
    def complete(self) -> bool:
        """Return whether all clients that are known, or should be there, are online."""
        return self.online == set(self.below) and len(self.online) >= self.expects


class Tree(Routed):
    """A grid of regions."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sites: dict[int, Site] = {}
        self.others: set[int] = set()  # nodes that are no regions
        self.home: dict[int, int] = {}  # by node of a client: its region
        self.history = NodeHistory(0)
        # what a request to train asks of a region, if it is to add up: (kind, order, records)
        self.sums: tuple[str, dict[str, Any], dict[str, Any]] | None = None
        self.answers: dict[str, Answer] = {}  # by message to a client
        self.up = self.down = 0  # bytes of bundles since someone set them to 0
        self.rejoin = Limits().rejoin_seconds  # for which regions wait for a lost client

    # -- Flower's interface ------------------------------------------------------------------------
    def set_run(self, run: FlowerRun) -> None:
        """Set the run this grid belongs to."""
        self.grid.set_run(run)

    @property
    def run(self) -> FlowerRun:
        """Return the run this grid belongs to."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Raise: a tree sends bundles, which `stream` makes."""
        raise NotImplementedError("a tree of aggregators sends no single messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return no replies: `stream` pulls those of regions."""
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Raise, as `push_messages`."""
        raise NotImplementedError("a tree of aggregators sends no single messages")

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of the clients of all regions that are online."""
        there = set(self.grid.get_node_ids())
        self.meet(there)
        regions = sorted(there & self.sites.keys())
        return [node for region in regions for node in sorted(self.sites[region].online)]

    # -- who is there ------------------------------------------------------------------------------
    def meet(self, there: set[int]) -> None:
        """Ask nodes that are not known, and regions some of whose clients are missing."""
        now = time.monotonic()
        new = there - self.others - self.sites.keys()
        late = {
            region
            for region in there & self.sites.keys()
            if not self.sites[region].complete and now - self.sites[region].asked > ASK_SECONDS
        }
        if not new | late:
            return

        def ask(nodes: list[int], ttl: float) -> Iterator[Message]:
            for node in nodes:
                # those that are known are asked between rounds, and do not wait
                seconds = ROLL_SECONDS / 2 if node in new else 0.0
                head = {TREE: ROLL, ORDER: json.dumps({"seconds": seconds}), "nonce": nonce}
                content = RecordDict({records.HEADER: records.make_header(**head)})
                kind = MessageType.QUERY
                yield Message(content, dst_node_id=node, message_type=kind, ttl=ttl)

        nonce, asked = uuid.uuid4().hex, dict[str, int]()
        for node in late:
            self.sites[node].asked = now
        for reply in stream(self.grid, sorted(new | late), ask, ROLL_SECONDS, self.history, asked):
            node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if reply.has_error():
                continue
            head = reply.content.get(records.HEADER)
            if isinstance(head, ConfigRecord) and head.get(TREE) == ROLL:
                self.note(node, json.loads(str(head.get(ORDER))))
            else:
                self.others.add(node)
                log.warning("node %d is no region; in a tree, clients connect to theirs", node)

    def note(self, region: int, order: Mapping[str, Any]) -> None:
        """Note which of a region's clients are online."""
        site = self.sites.setdefault(region, Site())
        below = [int(node) for node in order["online"][:MOST_NODES]]
        seen = {number(region, node): node for node in below}
        site.below |= seen
        site.online, site.expects = set(seen), int(order["expects"])
        site.asked = time.monotonic()
        self.home |= dict.fromkeys(seen, region)

    # -- messages ----------------------------------------------------------------------------------
    def stream(
        self,
        nodes: Iterable[int],
        ask: Ask,
        timeout: float,
        history: NodeHistory,
        asked: dict[str, int],
    ) -> Iterator[Message]:
        """Yield one reply of each node. A region's clients reply together."""
        share: dict[int, list[int]] = {}
        for node in nodes:
            share.setdefault(self.home[node], []).append(node)
        sent: dict[int, Sent] = {}
        inner: dict[str, int] = {}

        def push(those: list[int], ttl: float) -> Iterator[Message]:
            for node in those:
                if node not in sent:
                    messages = list(ask(share[node], ttl))
                    sent[node] = self.bundle(node, messages, timeout, history)
                content, kind = records.copy_content(sent[node].content), sent[node].kind
                self.down += records.num_bytes(content)
                yield Message(content, dst_node_id=node, message_type=kind, ttl=ttl)

        for reply in stream(self.grid, list(share), push, timeout, history, inner):
            node = inner.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if node in sent:
                yield from self.opened(node, reply, sent[node], history.most_mb, asked)

    def bundle(
        self, region: int, messages: list[Message], timeout: float, history: NodeHistory
    ) -> Sent:
        """Return one request to a region in place of those to its clients."""
        clients = [message.metadata.dst_node_id for message in messages]
        kind = messages[0].metadata.message_type
        content, index = bundled([message.content for message in messages])
        below, seconds = self.sites[region].below, timeout - max(10.0, 0.05 * timeout)
        order: dict[str, Any] = {"nodes": [str(below[node]) for node in clients]}
        order |= {"index": index, "kind": kind, "seconds": max(seconds, 0.5 * timeout)}
        order |= {"again": history.again, "most_mb": history.most_mb, "rejoin": self.rejoin}
        first: dict[str, Any] = dict(messages[0].content.get(records.HEADER) or {})  # type: ignore[arg-type]
        head = {name: first[name] for name in COPIED if name in first}
        head |= {TREE: RELAY, "nonce": uuid.uuid4().hex}
        if kind == MessageType.TRAIN and self.sums is not None:
            head[TREE], more, shared = self.sums
            order |= {name: one(clients) if callable(one) else one for name, one in more.items()}
            for name, one in shared.items():
                content[name] = one(clients) if callable(one) else one
        content[records.HEADER] = records.make_header(**head, **{ORDER: json.dumps(order)})
        return Sent(tuple(clients), content, kind, head)

    def opened(
        self, region: int, reply: Message, sent: Sent, most_mb: int, asked: dict[str, int]
    ) -> Iterator[Message]:
        """Yield the replies of a region's clients; its own error is that of each of them."""
        answer = None
        try:
            if reply.has_error():
                raise RegionError(reply.error.code, f"its region failed: {reason(reply)}")
            answer = self.read(region, reply, sent, most_mb)
            found = opened(reply.content, answer.order["index"], len(sent.nodes))
            self.note(region, answer.order)
        except RegionError as error:
            found = [Error(error.code, str(error))] * len(sent.nodes)
        except Exception as error:  # whatever a region says must not stop the run
            text = f"the answer of its region cannot be used: {error or type(error).__name__}"
            found = [Error(0, one_line(text))] * len(sent.nodes)
        for node, part in zip(sent.nodes, found, strict=True):
            if isinstance(part, Error) and part.code == NO_REPLY:
                continue
            request = Message(RecordDict(), dst_node_id=node, message_type=sent.kind)
            request.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            asked[request.metadata.message_id] = node
            if answer is not None:
                self.answers[request.metadata.message_id] = answer
            yield Message(part, reply_to=request)

    def read(self, region: int, reply: Message, sent: Sent, most_mb: int) -> Answer:
        """Return a region's answer; raise if it is none to this request."""
        records.weigh(reply.content, most_mb)
        self.up += records.num_bytes(reply.content)
        head = records.header(reply, (TREE, ORDER, "nonce"))
        for name in (TREE, "nonce", "run", "round"):
            if head.get(name) != sent.head.get(name):
                raise WireError(f"it answers another request ({name} differs)")
        order = json.loads(str(head[ORDER]))
        return Answer(region, sent.nodes, head, order, reply.content)


class Sent(NamedTuple):
    """A request to a region."""

    nodes: tuple[int, ...]
    content: RecordDict
    kind: str
    head: dict[str, Any]


class RegionError(Exception):
    """A region could not be reached, or failed; with Flower's code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def number(region: int, node: int) -> int:
    """Return the number by which the server knows a node of a region."""
    seal = hashlib.sha256(f"{region}/{node}".encode()).digest()
    return int.from_bytes(seal[:8], "big") >> 1
