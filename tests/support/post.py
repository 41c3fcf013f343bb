"""A grid of nodes that answer after set times, and a clock that makes waiting free."""

from __future__ import annotations

import time

from flwr.app import Message, RecordDict

from bayflower.flower.exchange import NodeHistory, stream
from bayflower.flower.loop import InProcessGrid


class Post:
    """A grid of nodes that answer when `plan` says: {node: seconds from each ask to its reply, None
    = never}.
    """

    def __init__(self, plan: dict[int, list], online=None) -> None:
        InProcessGrid(None, [])  # Flower wants to know who makes messages
        self.plan, self.online = plan, set(plan) if online is None else online
        self.sent: dict[str, tuple[Message, float]] = {}
        self.pushed: list[tuple[float, Message]] = []
        self.begun = time.monotonic()

    def get_node_ids(self):
        return list(self.online)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            delays = self.plan[node]
            times = sum(one.metadata.dst_node_id == node for _, one in self.pushed)
            self.pushed.append((time.monotonic() - self.begun, message))
            ids.append(f"{node}/{times}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            delay = delays[min(times, len(delays) - 1)]
            if delay is not None:
                self.sent[ids[-1]] = (message, time.monotonic() + delay)
        return ids

    def pull_messages(self, ids):
        found = [
            number
            for number in ids
            if number in self.sent and time.monotonic() >= self.sent[number][1]
        ]
        return [self.reply(self.sent.pop(number)[0]) for number in found]

    def reply(self, message):
        return Message(RecordDict(), reply_to=message)

    def times(self, node: int) -> list[float]:
        return [when for when, message in self.pushed if message.metadata.dst_node_id == node]


def talk(post: Post, timeout: float, line: NodeHistory, asked: dict | None = None) -> list[str]:
    """Return which messages were answered, in order."""

    def ask(nodes, ttl):
        return (
            Message(RecordDict(), dst_node_id=node, message_type="train", ttl=ttl) for node in nodes
        )

    return [
        reply.metadata.reply_to_message_id
        for reply in stream(post, sorted(post.plan), ask, timeout, line, asked)
    ]


class Clock:
    """A clock that only sleeping moves: what a test sees does not depend on the machine's load."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
