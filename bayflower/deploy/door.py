"""The gate's listening socket: it bounds how many connections there are, and for how long one may
stay without a client's key.

A connection costs memory from the first byte of its TLS handshake (asyncio's buffers have 256 KiB),
and neither asyncio nor uvicorn limits how many there are or how long a header may take. So the
socket counts what it accepts. A connection is a stranger's until a request on it was signed by a
client. When strangers fill the door, the oldest of the address that has most is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections import Counter
from typing import Any

STRANGERS = 64  # connections without a key
STRANGER_SECONDS = 20.0  # how long one may stay
EACH = 12  # connections of one client; Flower's SuperNode has about four
SWEEP_SECONDS = 1.0
# Closed connections after which garbage is collected. asyncio's are cyclic, so that their buffers
# stay until then; Python itself would wait for more than a thousand.
COLLECT = 64


class Visit(socket.socket):
    """An accepted connection, which tells the door when it ends."""

    door: Door | None = None
    address: Any = None
    began = 0.0
    name = ""  # the client, once it is known

    def close(self) -> None:
        """Close the connection."""
        if self.door is not None:
            self.door.leaves(self)
            self.door.ended += 1
            self.door = None
        super().close()

    def send_off(self) -> None:
        """End the connection at once; asyncio then closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket with few places."""

    def __init__(
        self,
        family: int = socket.AF_INET,
        *,
        strangers: int = STRANGERS,
        seconds: float = STRANGER_SECONDS,
        each: int = EACH,
    ) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.most, self.seconds, self.each = strangers, seconds, each
        self.strangers: dict[Any, Visit] = {}  # by address and port, the oldest first
        self.clients: dict[Any, Visit] = {}
        self.leaving: set[Visit] = set()  # sent off, and not closed yet
        self.ended = 0  # closed since the last look for garbage

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection. If there are too many, send one off and let the next wait
        until that is closed: asyncio would accept thousands before it closes one.
        """
        if len(self.strangers) + len(self.leaving) >= self.most:
            if len(self.strangers) >= self.most:
                self.dismiss(self.crowding())
            raise BlockingIOError
        if self.ended >= COLLECT:
            self.ended = 0
            gc.collect()
        number, address = self._accept()  # type: ignore[attr-defined]
        visit = Visit(self.family, self.type, self.proto, fileno=number)
        visit.door, visit.address, visit.began = self, address, time.monotonic()
        self.strangers[address] = visit
        return visit, address

    def crowding(self) -> Visit:
        """Return the oldest stranger of the address that has most."""
        host = Counter(address[0] for address in self.strangers).most_common(1)[0][0]
        return next(visit for address, visit in self.strangers.items() if address[0] == host)

    def dismiss(self, visit: Visit) -> None:
        """End a connection."""
        self.leaves(visit)
        self.leaving.add(visit)
        visit.send_off()

    def leaves(self, visit: Visit) -> None:
        """Forget a connection that has ended."""
        self.leaving.discard(visit)
        for known in (self.strangers, self.clients):
            if known.get(visit.address) is visit:
                del known[visit.address]

    def knows(self, address: Any, name: str) -> None:
        """A client has signed a request on the connection from `address`; end the oldest of its
        connections if it has too many.
        """
        key = next((one for one in self.strangers if one[:2] == tuple(address)), None)
        if key is None:
            return
        visit = self.strangers.pop(key)
        visit.name = name
        own = [one for one in self.clients.values() if one.name == name]
        self.clients[key] = visit
        if len(own) >= self.each:
            self.dismiss(own[0])

    def sweep(self) -> None:
        """End the connections of strangers that have stayed too long."""
        old = time.monotonic() - self.seconds
        for visit in [one for one in self.strangers.values() if one.began < old]:
            self.dismiss(visit)

    async def guard(self) -> None:
        """Sweep again and again."""
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)
