"""The only server that clients can reach: it forwards to the SuperLink what a registered client may
ask of Flower's Fleet API, and nothing else.

Flower serves three APIs on one port. The API that starts runs and registers node keys has no
authentication: anybody who can reach it can run code on every node. This gate lets clients reach
only the API made for clients. A request passes these checks in this order:

1. its headers are signed by a key of the server's folder `nodes` (`callers.py`);
2. it declares its length, and the length is one that this call may have;
3. the client has a place: few requests at once, few bytes at once (`Places`). Only now is the body
   read;
4. the body is what this client may ask (`flower/fleet.py`).

    python -m bayflower.deploy.gate --port 9092 --superlink superlink:9091 --nodes nodes \\
        --certificate gate.crt --key gate.key --authority ca.crt
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..flower.fleet import CALLS, LARGEST, STORED, Asked, Desk
from ..flower.trees import RefusedError
from .callers import Caller, Callers, StrangerError
from .door import Door

PROTOBUF = "application/protobuf"
# a SuperNode's headers that are forwarded, besides those that begin with "flwr-"
KEPT = ("content-type", "accept")
# headers that are not forwarded: they concern one connection only
HOP = {"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade", "host"}
# headers that describe the encoded body, not the decoded one
DECODED = {"content-encoding", "content-length"}
# A SuperLink with a busy database answers 500, and the SuperNode would drop the client's reply. On
# 503 it retries.
AGAIN = {500: 503}
# If a run ends while a SuperNode receives one of its messages, that SuperNode stays one reply
# behind: from then on it sends a reply only when the next message arrives. This happens if the
# SuperLink answers these calls with 403 (run ended). With 410 instead, the SuperNode drops the
# message; with 200, it processes the message and learns of the end when it sends the reply.
ENDED = {"pull-object": 410, "confirm-message-received": 200}
PATIENCE = 90.0  # timeout for an answer: longer than the SuperLink waits for its database
MOST_MB = 2048  # cap on one reply, in millions of bytes
# bytes of requests held at once, of all clients; the SuperLink has several copies of each
HELD = 100_000_000
REQUESTS = 12  # of one client at once
READ_SECONDS, SLOWEST = 30.0, 20_000  # a body may take so long, and a second more for so many bytes
MOST_TOLD = 100  # reasons of refusals that are printed for one client
HEALTH_SECONDS = 1.0  # how old the SuperLink's last sign of health may be
LONGEST_HEADER = 16 * 1024
# of TLS 1.2; those of 1.3 are fixed. Only ciphers that authenticate what they encrypt
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class Places:
    """How many requests and bytes are held at once. A client has a share, so none can take all."""

    def __init__(self, most: int = HELD, each: int = 2 * LARGEST) -> None:
        self.most, self.each = most, each
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.changed = asyncio.Condition()

    def free(self, name: str, size: int) -> bool:
        """Return whether a request of this size fits now."""
        own = self.bytes[name] + size <= self.each
        return own and self.bytes.total() + size <= self.most

    @asynccontextmanager
    async def hold(self, name: str, size: int) -> AsyncIterator[None]:
        """Hold a place as long as this lasts; wait for it if the bytes of others fill the gate."""
        if self.requests[name] >= REQUESTS:
            raise BusyError
        self.requests[name] += 1
        try:
            async with asyncio.timeout(PATIENCE), self.changed:
                await self.changed.wait_for(lambda: self.free(name, size))
                self.bytes[name] += size
            try:
                yield
            finally:
                self.bytes[name] -= size
                async with self.changed:
                    self.changed.notify_all()
        finally:
            self.requests[name] -= 1


class BusyError(Exception):
    """A client that asks too much at once."""


class Gate:
    """The gate in front of the SuperLink at the URL `superlink`."""

    def __init__(
        self,
        superlink: str,
        verify: ssl.SSLContext | bool,
        callers: Callers,
        largest: int = LARGEST,
        most_mb: int = MOST_MB,
        door: Door | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=32)
        self.client = httpx.AsyncClient(
            base_url=superlink, verify=verify, timeout=PATIENCE, limits=limits
        )
        self.callers, self.largest, self.most_mb, self.door = callers, largest, most_mb, door
        self.places = Places(each=2 * largest)
        self.desks: dict[str, Desk] = {}
        self.working: dict[tuple[str, str, str], asyncio.Task[Response]] = {}
        self.told: Counter[str] = Counter()
        self.health, self.looked = 503, -HEALTH_SECONDS
        self.looking = asyncio.Lock()

    # -- one request ------------------------------------------------------------------------------
    async def answer(self, request: Request, call: str) -> Response:
        """Return the answer to a request of the Fleet API."""
        try:
            caller = self.callers.who(request.headers, time.time())
        except StrangerError as error:
            return self.stranger(request, call, error)
        if self.door is not None and request.client is not None:
            self.door.knows(request.client, caller.name)
        most = min(CALLS[call][1], self.largest)
        size = request.headers.get("content-length", "")
        if not (size.isascii() and size.isdigit() and len(size) < 20):
            return said(411, "a request must declare its length")
        if int(size) > most:
            return said(413, f"{call} may have {most} bytes at most")
        if request.headers.get("content-type", "").partition(";")[0].strip() != PROTOBUF:
            return said(415, f"a request must have the content type {PROTOBUF}")
        if not all(name.isascii() and value.isascii() for name, value in passed_on(request)):
            return said(400, "a header must be ASCII")
        try:
            async with self.places.hold(caller.name, int(size)):
                return await self.judged(request, call, caller, int(size))
        except RefusedError as error:
            self.tell(caller.name, str(error))
            return said(400, f"refused: {error}")
        except (BusyError, TimeoutError):
            return said(503, "too many requests at once, or too slow a body; try again")
        except ClientDisconnect:
            return said(400, "the body was cut short")
        except httpx.HTTPError as error:
            return said(503, f"the SuperLink does not answer: {type(error).__name__}")

    async def judged(self, request: Request, call: str, caller: Caller, size: int) -> Response:
        """Read a body, judge it and forward it."""
        async with asyncio.timeout(READ_SECONDS + size / SLOWEST):
            body = await request.body()
        desk = self.desks.setdefault(caller.name, Desk(self.most_mb))
        asked = desk.ask(call, body)
        if asked.answer is not None:
            return Response(asked.answer, media_type=PROTOBUF)
        sent = self.sends(request, call, asked)
        if call == "push-object":
            return await self.once(caller, desk, asked, sent)
        if call == "pull-object":
            return await self.streamed(call, sent)
        answer = await self.whole(call, sent)
        if answer.status_code == 200:
            if call == "pull-messages":
                desk.receives(bytes(answer.body))
            elif call == "push-messages":
                return Response(
                    desk.announced(asked.request, bytes(answer.body)), media_type=PROTOBUF
                )
            elif call == "confirm-message-received":
                desk.received(asked.request)
        return answer

    async def once(self, caller: Caller, desk: Desk, asked: Asked, sent: httpx.Request) -> Response:
        """Forward a part of a reply. The SuperLink rejects duplicates, so a SuperNode that missed
        the answer and retries would drop the reply: a duplicate waits for the first.
        """
        part = (caller.name, asked.request.session_id, asked.request.object_id)
        task = self.working.get(part)
        if task is None:
            task = self.working[part] = asyncio.create_task(self.whole("push-object", sent))
            task.add_done_callback(lambda _: self.working.pop(part, None))
        answer = await asyncio.shield(task)
        if answer.status_code == 200 and answer.body == STORED:
            desk.stored(asked.request)
        return answer

    # -- the SuperLink ----------------------------------------------------------------------------
    def sends(self, request: Request, call: str, asked: Asked) -> httpx.Request:
        """Return the request for the SuperLink: one header of each name, and a body that was
        written anew.
        """
        return self.client.build_request(
            "POST", f"/v1/fleet/{call}", headers=dict(passed_on(request)), content=asked.body
        )

    async def whole(self, call: str, sent: httpx.Request) -> Response:
        """Return the SuperLink's answer."""
        answer = await self.client.send(sent)
        if answer.status_code == 403 and call in ENDED:
            return Response(b"", ENDED[call], media_type=PROTOBUF)
        kept = {key: value for key, value in answer.headers.items() if key not in HOP | DECODED}
        return Response(answer.content, AGAIN.get(answer.status_code, answer.status_code), kept)

    async def streamed(self, call: str, sent: httpx.Request) -> Response:
        """Return the SuperLink's answer, passed on as it comes."""
        answer = await self.client.send(sent, stream=True)
        if answer.status_code == 403 and call in ENDED:
            await answer.aclose()
            return Response(b"", ENDED[call], media_type=PROTOBUF)
        kept = {key: value for key, value in answer.headers.items() if key not in HOP}
        code = AGAIN.get(answer.status_code, answer.status_code)
        return StreamingResponse(
            answer.aiter_raw(), code, kept, background=BackgroundTask(answer.aclose)
        )

    async def healthy(self, _: Request) -> Response:
        """Return whether the SuperLink answers; it is asked at most once a second."""
        async with self.looking:
            if time.monotonic() - self.looked >= HEALTH_SECONDS:
                try:
                    self.health = (await self.client.get("/health", timeout=5)).status_code
                except httpx.HTTPError:
                    self.health = 503
                self.looked = time.monotonic()
        return Response(b"", self.health, {"connection": "close"})

    # -- strangers --------------------------------------------------------------------------------
    def stranger(self, request: Request, call: str, error: StrangerError) -> Response:
        """Refuse a request without reading its body, and close the connection. A SuperNode stops on
        401 without a word and prints the reason of 400, so it is told when it joins.
        """
        host = request.client.host if request.client else "a client"
        self.tell(error.name or host, str(error))
        return said(400 if call == "activate-node" else 401, str(error))

    def tell(self, who: str, why: str) -> None:
        """Print why a client is refused, but not without end."""
        if who not in self.told and len(self.told) >= MOST_TOLD:
            return
        self.told[who] += 1
        if self.told[who] <= MOST_TOLD:
            print(f"{who}: {why}", file=sys.stderr, flush=True)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Sweep the door, and keep the connections to the SuperLink, as long as this lasts."""
        guard = asyncio.create_task(self.door.guard()) if self.door is not None else None
        async with self.client:
            yield
        if guard is not None:
            guard.cancel()

    def app(self) -> Starlette:
        """Return the gate as an ASGI application."""

        def route(call: str) -> Route:
            async def to(request: Request) -> Response:
                return await self.answer(request, call)

            return Route(f"/v1/fleet/{call}", to, methods=["POST"])

        return Starlette(
            routes=[
                Route("/health", self.healthy, methods=["GET"]),
                *(route(call) for call in CALLS),
            ],
            lifespan=self.lifespan,
        )


def passed_on(request: Request) -> list[tuple[str, str]]:
    """Return the headers that the SuperLink gets: one of each name."""
    names = {*KEPT, *(name for name in request.headers if name.startswith("flwr-"))}
    return [(name, request.headers[name]) for name in names if name in request.headers]


def said(code: int, text: str) -> Response:
    """Return a refusal in the form that Flower's SuperNode prints. The connection is closed, so a
    body that was not read never is.
    """
    content = json.dumps({"code": code, "detail": text}) + "\n"
    return Response(content, code, {"connection": "close"}, media_type="application/json")


def serve(app: Starlette, door: Door, certificate: str, key: str) -> None:
    """Serve until stopped."""
    config = uvicorn.Config(
        app,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ssl_ciphers=CIPHERS,
        log_level="error",  # a warning for each damaged request would fill the disk
        http="h11",  # it bounds the header
        h11_max_incomplete_event_size=LONGEST_HEADER,
        loop="asyncio",  # it accepts through the door
        ws="none",
        timeout_keep_alive=30,
        server_header=False,
    )
    gc.collect()
    gc.freeze()  # what was loaded is no garbage; the door collects often
    uvicorn.Server(config).run(sockets=[door])


def main(words: list[str] | None = None, serve: Callable[..., Any] = serve) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m bayflower.deploy.gate",
        description="Passes on what registered clients may ask of Flower's Fleet API.",
    )
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink", required=True, help="host:port of the SuperLink")
    parser.add_argument("--nodes", required=True, help="the folder of the clients' public keys")
    parser.add_argument("--certificate", required=True, help="what the gate shows to clients")
    parser.add_argument("--key", required=True)
    parser.add_argument("--authority", required=True, help="who vouches for the SuperLink")
    parser.add_argument(
        "--largest", type=int, default=LARGEST, help=f"bytes of one request [{LARGEST}]"
    )
    parser.add_argument(
        "--most-mb", type=int, default=MOST_MB, help=f"million bytes of one reply [{MOST_MB}]"
    )
    given = parser.parse_args(words)
    door = Door(socket.AF_INET6 if ":" in given.host else socket.AF_INET)
    door.bind((given.host, given.port))
    gate = Gate(
        f"https://{given.superlink}",
        ssl.create_default_context(cafile=given.authority),
        Callers(Path(given.nodes)),
        given.largest,
        given.most_mb,
        door,
    )
    serve(gate.app(), door, given.certificate, given.key)


if __name__ == "__main__":
    main()
