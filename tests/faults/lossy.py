"""A door before the gate that loses messages without a word, as a network does that fails at the
wrong moment.

    python tests/faults/lossy.py PORT GATE_PORT SERVER_FOLDER '{"reply": [1, 3], "ask": [5]}'

The first and third reply vanish before they are sent, the fifth message on its way to the client.
What passes and what does not is printed.
"""

from __future__ import annotations

import json
import ssl
import sys
from pathlib import Path

import uvicorn

from bayflower.deploy import gate
from bayflower.deploy.callers import Callers

EMPTY = 100  # bytes; an answer without a message has fewer


class Lossy:
    """The gate's own code, with losses."""

    def __init__(self, inner, lost: dict[str, list[int]]) -> None:
        self.inner, self.lost, self.seen = inner, lost, dict.fromkeys(lost, 0)

    def loses(self, what: str) -> bool:
        """Return whether this one is lost."""
        self.seen[what] += 1
        gone = self.seen[what] in self.lost[what]
        print(f"{what} {self.seen[what]} {'lost' if gone else 'passed'}", flush=True)
        return gone

    async def __call__(self, scope, receive, send) -> None:
        call, parts = scope.get("path", "").rsplit("/", 1)[-1], []

        async def hold(part) -> None:
            parts.append(part)

        if call == "push-messages" and self.loses("reply"):
            await refuse(send, 400)  # the SuperNode gives up and forgets the reply
        elif call == "pull-messages":
            await self.inner(scope, receive, hold)
            if any(len(part.get("body", b"")) > EMPTY for part in parts) and self.loses("ask"):
                # the SuperLink takes the message for delivered; the SuperNode tries again and finds
                # nothing
                await refuse(send, 503)
            else:
                for part in parts:
                    await send(part)
        else:
            await self.inner(scope, receive, send)


async def refuse(send, code: int) -> None:
    """Answer with a code alone."""
    await send({"type": "http.response.start", "status": code, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    port, behind, server = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    inner = gate.Gate(
        f"https://127.0.0.1:{behind}",
        ssl.create_default_context(cafile=str(server / "ca.crt")),
        Callers(server / "nodes"),
    )
    app = Lossy(inner.app(), json.loads(sys.argv[4]))
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        ssl_certfile=server / "server.crt",
        ssl_keyfile=server / "server.key",
        log_level="warning",
    )
