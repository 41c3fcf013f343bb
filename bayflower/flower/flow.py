"""Messages of several rounds that are out at the same time, and their replies in order of arrival.

A client has at most one message out. Replies come as the grid has them, as a simulated clock says,
or as the record of an earlier run says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from ..errors import BayflowerError
from ..files.arrivals import Pair
from ..rounds.clock import Clock
from .exchange import AT_ONCE, CLOCKS, LOST, POLL_SECONDS, Exchange, pulled
from .round import Round

NOWHERE = -1  # the node of a message that is still to be sent again


class Sent(NamedTuple):
    """A message that waits for a reply."""

    asked: Round
    node: int
    when: float


class Flow:
    """The clients that train at the moment."""

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self.out: dict[int, Sent] = {}
        self.silent: list[Pair] = []  # given up since the last step, with the message's round
        self.came: deque[Message] = deque()  # pulled, and not yet looked at
        self.gone: dict[int, float] = {}  # by client: since when its node has been lost
        self.talk: Exchange | None = None
        self.timeout = 0.0

    def open(self, asked: Round, grid: Grid, timeout: float) -> None:
        """Send the messages of a round, and again those whose client has moved to another node."""
        roster, self.timeout = asked.facts.roster, timeout
        if self.talk is None or self.talk.grid is not grid:
            self.talk = Exchange(grid, self._messages, 0.0, roster.history, {})
        moved = [one for one, sent in self.out.items() if roster.members[one].node != sent.node]
        for client in moved:
            self._forget(client)
        self.send({client: self.out[client].asked for client in moved})
        self.add(asked, asked.request.clients)

    def add(self, asked: Round, clients: list[int]) -> None:
        """Send some clients the message of a round, of which they have not had one."""
        asks = {"kind": asked.request.kind, "method": asked.facts.row.name}
        asked.facts.journal.write("asked", clients=clients, **asks)
        self.send(dict.fromkeys(clients, asked))
        if self.clock is not None:
            self.clock.begin(clients, asked.number)

    def send(self, rounds: dict[int, Round]) -> None:
        """Send clients the message of a round each."""
        talk = self._talk()
        for client, asked in rounds.items():
            node = asked.facts.roster.members[client].node
            self.out[client] = Sent(asked, node, time.monotonic())
            asked.asked = talk.asked
        nodes = [self.out[client].node for client in rounds]
        talk.deadline = time.monotonic() + self.timeout
        talk.push(nodes)
        talk.push([node for node in nodes if node in talk.history.behind])

    # -- replies -----------------------------------------------------------------------------------
    def live(self) -> Iterator[tuple[int | None, Message]]:
        """Yield (client, reply) as they arrive, until nobody trains any more. A client whose
        message is older than the timeout, or whose node stays lost, is given up.
        """
        talk = self._talk()
        while self.out:
            numbers, found = talk.nodes(), bool(self.came)
            known = list(numbers)
            for start in range(0, len(known) or 1, AT_ONCE):
                while self.came:  # also those that an earlier step left
                    found = True
                    yield self._taken(self.came.popleft())
                some = {number: numbers[number] for number in known[start : start + AT_ONCE]}
                for reply in pulled(talk.grid, some, talk.history.most_mb, talk.sent):
                    if talk.takes(reply):
                        self.came.append(reply)
            talk.look()  # silence counts from a client's own message: others reply all the time
            yield from self._given_up()
            if not found and not self.came and self.out:
                time.sleep(POLL_SECONDS)

    def timed(self) -> Iterator[tuple[int | None, Message]]:
        """Yield (client, reply) in the order of the simulated clock."""
        assert self.clock is not None
        while (client := self.clock.first()) is not None:
            reply = self.fetch(client, 0.0)
            if reply is None:
                self._give_up(client)
            else:
                yield self._taken(reply)

    def recorded(self, pairs: Iterable[Pair]) -> Iterator[tuple[int | None, Message]]:
        """Yield (client, reply) as a record says; raise if one does not come."""
        for client, round in pairs:
            sent = self.out.get(client)
            if sent is None or sent.asked.number != round:
                raise BayflowerError(
                    f"replay: the record has a reply of client {client} to round {round}, to which "
                    "it was not asked; the record is damaged"
                )
            reply = self.fetch(client, self.timeout)
            if reply is None:
                raise BayflowerError(
                    f"replay: client {client} did not answer the message of round {round}, as it "
                    "did in the recorded run"
                )
            yield self._taken(reply)

    def fetch(self, client: int, wait: float) -> Message | None:
        """Return the reply of one client, for which to wait so many seconds; None if there is
        none.
        """
        talk, node, until = self._talk(), self.out[client].node, time.monotonic() + wait
        while True:
            for number in [one for one, (to, _) in talk.sent.items() if to == node]:
                for reply in pulled(talk.grid, {number: node}, talk.history.most_mb, talk.sent):
                    if talk.takes(reply):
                        return reply
            if node in talk.lost:
                talk.revive()
                if node in talk.lost:
                    return talk.lost.pop(node)
            elif time.monotonic() >= until:
                return None
            else:
                talk.look()
                time.sleep(POLL_SECONDS)

    def drop(self, client: int) -> None:
        """Wait no longer for a client."""
        self._forget(client)
        self.out.pop(client, None)
        if self.clock is not None:
            self.clock.due.pop(client, None)

    def end(self) -> list[int]:
        """Return the clients that were still training; their replies are not used. Those that
        train at this moment are waited for: they can do nothing else before.
        """
        left = sorted(self.out)
        if self.clock is None and self.out:
            for client, _ in self.live():
                if client is not None:
                    del self.out[client]
        for client in list(self.out):
            self.drop(client)
        return left

    # -- inside ------------------------------------------------------------------------------------
    def _talk(self) -> Exchange:
        if self.talk is None:
            raise BayflowerError("no round is open; call start() first")
        return self.talk

    def _messages(self, nodes: list[int], ttl: float) -> Iterator[Message]:
        """Yield the messages to some nodes: each the one of the round its client was asked in."""
        those = set(nodes)
        rounds = {id(sent.asked): sent.asked for sent in self.out.values() if sent.node in those}
        for asked in rounds.values():
            mine = {sent.node for sent in self.out.values() if sent.asked is asked}
            yield from asked.messages(asked.request, those & mine, ttl)

    def _taken(self, reply: Message) -> tuple[int | None, Message]:
        """Return (client, reply) of a message that waits no longer."""
        number = reply.metadata.reply_to_message_id
        node = self._talk().asked.pop(number, reply.metadata.src_node_id)
        client = next((one for one, sent in self.out.items() if sent.node == node), None)
        if client is not None:
            self.gone.pop(client, None)
            self._talk().revived.discard(node)
        return client, reply

    def _forget(self, client: int) -> None:
        """Take a client's messages back: late replies are pulled, and not used."""
        talk, node = self._talk(), self.out[client].node
        for number in [one for one, (to, _) in talk.sent.items() if to == node]:
            del talk.sent[number]
            talk.asked.pop(number, None)
            if self.clock is None:
                talk.history.spare[number] = time.monotonic() + self.timeout + CLOCKS
        talk.lost.pop(node, None)
        talk.revived.discard(node)
        self.gone.pop(client, None)

    def _given_up(self) -> Iterator[tuple[int | None, Message]]:
        """Yield the errors of clients whose nodes stay lost; note those that are silent."""
        talk, now = self._talk(), time.monotonic()
        if self.came:
            return
        waiting = {node for node, _ in talk.sent.values()}
        for client, (asked, node, when) in list(self.out.items()):
            if node in talk.lost:
                since = self.gone.setdefault(client, now)
                if now - since >= asked.facts.limits.rejoin_seconds:
                    yield client, talk.lost.pop(node)
            elif now - when >= self.timeout or node not in waiting:
                self._give_up(client)

    def _give_up(self, client: int) -> None:
        self._forget(client)
        self.silent.append((client, self.out.pop(client).asked.number))


def lost(reply: Message) -> bool:
    """Return whether a reply says that its message, node or process was lost."""
    return bool(reply.has_error() and reply.error.code in LOST)
