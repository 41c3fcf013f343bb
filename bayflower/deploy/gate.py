"""The only server that clients can reach: a proxy that forwards Flower's Fleet API to the SuperLink
and nothing else.

Flower serves three APIs on one port. The API that starts runs and registers node keys has no
authentication: anybody who can reach it can run code on every node. This gate lets clients reach
only the API made for clients.

    python -m bayflower.deploy.gate --port 9092 --superlink superlink:9091 \\
        --certificate server.crt --key server.key --authority ca.crt
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

# The allowed requests of a SuperNode, by name. A path copied from a request could lead elsewhere
# ("/v1/fleet/../control").
CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
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
# The upload of a part of a reply. The SuperLink rejects duplicates, so a SuperNode that missed the
# answer and retries would drop the reply.
ONCE = "push-object"
REMEMBERED = 4096  # cached answers to such requests
LARGEST = 64 * 2**20  # cap on the bytes of one request; Flower sends arrays in chunks of 5 MiB


AHEAD, LATE = 5.0, 305.0  # seconds a client's clock may be ahead or behind; Flower refuses more
STAMP, WHO = "flwr-timestamp", "flwr-public-key"  # headers of a SuperNode's requests
MOST_TOLD = 100  # clients that are told of their clock


class TooLargeError(Exception):
    """A request above the limit."""


def make_app(superlink: str, verify: ssl.SSLContext | bool, largest: int = LARGEST) -> Starlette:
    """Return the gate in front of the SuperLink at the URL `superlink`."""
    client = httpx.AsyncClient(base_url=superlink, verify=verify, timeout=PATIENCE)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    answers: dict[bytes, Response] = {}  # by the request's checksum
    working: dict[bytes, asyncio.Task[Response]] = {}
    told: set[str] = set()  # keys of clients whose clock was reported

    def ask(
        request: Request, path: str, body: AsyncIterator[bytes] | bytes | None
    ) -> httpx.Request:
        headers = [(key, value) for key, value in request.headers.items() if key not in HOP]
        return client.build_request(request.method, path, headers=headers, content=body)

    async def whole(request: httpx.Request) -> Response:
        answer = await client.send(request)
        kept = {key: value for key, value in answer.headers.items() if key not in HOP | DECODED}
        return Response(answer.content, AGAIN.get(answer.status_code, answer.status_code), kept)

    async def once(request: Request, path: str) -> Response:
        """Return the answer to a request; a duplicate gets the answer to the first one, even while
        that is being processed.
        """
        body = b"".join([part async for part in limited(request.stream(), largest)])
        seal = hashlib.sha256(body).digest()
        if seal in answers:
            return answers[seal]
        if seal not in working:
            working[seal] = asyncio.create_task(whole(ask(request, path, body)))
        try:
            answer = await asyncio.shield(working[seal])
        finally:
            working.pop(seal, None)
        if answer.status_code == 200:
            answers[seal] = answer
        if len(answers) > REMEMBERED:
            del answers[next(iter(answers))]
        return answer

    async def forward(request: Request, path: str) -> Response:
        who, why = request.headers.get(WHO, ""), None
        if who not in told and len(told) < MOST_TOLD:
            why = wrong_clock(request.headers.get(STAMP, ""), time.time())
        if why:
            told.add(who)
            host = request.client.host if request.client else "a client"
            print(f"{host}: {why}", file=sys.stderr, flush=True)
        size = request.headers.get("content-length", "0")
        if not size.isdigit() or int(size) > largest:
            return PlainTextResponse(f"a request may have {largest} bytes at most\n", 413)
        try:
            if path.endswith(ONCE):
                return await once(request, path)
            body = limited(request.stream(), largest) if request.method == "POST" else None
            answer = await client.send(ask(request, path, body), stream=True)
        except TooLargeError:
            return PlainTextResponse(f"a request may have {largest} bytes at most\n", 413)
        except httpx.HTTPError as error:
            return PlainTextResponse(
                f"the SuperLink does not answer: {type(error).__name__}\n", 503
            )
        kept = {key: value for key, value in answer.headers.items() if key not in HOP}
        code = AGAIN.get(answer.status_code, answer.status_code)
        call = path.rsplit("/", 1)[-1]
        if code == 403 and call in ENDED:
            await answer.aclose()
            return Response(
                b"",
                ENDED[call],
                {"content-type": request.headers.get("content-type", "application/x-protobuf")},
            )
        return StreamingResponse(
            answer.aiter_raw(), code, kept, background=BackgroundTask(answer.aclose)
        )

    def route(path: str, *ways: str) -> Route:
        async def to(request: Request) -> Response:
            return await forward(request, path)

        return Route(path, to, methods=list(ways))

    return Starlette(
        routes=[
            route("/health", "GET", "HEAD"),
            *(route(f"/v1/fleet/{call}", "POST") for call in CALLS),
        ],
        lifespan=lifespan,
    )


def wrong_clock(stamp: str, now: float) -> str | None:
    """Return why Flower refuses a request signed at `stamp`, if the client's clock is why."""
    try:
        ahead = datetime.fromisoformat(stamp).timestamp() - now
    except (ValueError, OverflowError):
        return None
    if -LATE < ahead < AHEAD:
        return None
    where = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
    return (
        f"this client's clock is {where} the server's, so Flower refuses it (at most {AHEAD:.0f} s "
        f"ahead, {LATE:.0f} s behind); set the clock of either machine, for instance with NTP"
    )


async def limited(parts: AsyncIterator[bytes], largest: int) -> AsyncIterator[bytes]:
    """Yield the chunks of a body; raise above the cap, whatever length the header declared."""
    total = 0
    async for part in parts:
        total += len(part)
        if total > largest:
            raise TooLargeError
        yield part


def main(words: list[str] | None = None, serve: Callable[..., Any] = uvicorn.run) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m bayflower.deploy.gate",
        description="Passes Flower's Fleet API on, and nothing else.",
    )
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink", required=True, help="host:port of the SuperLink")
    parser.add_argument("--certificate", required=True, help="what the gate shows to clients")
    parser.add_argument("--key", required=True)
    parser.add_argument("--authority", required=True, help="who vouches for the SuperLink")
    parser.add_argument(
        "--largest", type=int, default=LARGEST, help=f"bytes of one request [{LARGEST}]"
    )
    given = parser.parse_args(words)
    app = make_app(
        f"https://{given.superlink}",
        ssl.create_default_context(cafile=given.authority),
        given.largest,
    )
    serve(
        app,
        host=given.host,
        port=given.port,
        ssl_certfile=given.certificate,
        ssl_keyfile=given.key,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
