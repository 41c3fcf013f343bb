"""Gate and SuperLink as processes of their own, over TLS: what a stranger can cost, and how they
are spoken to.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleet import Client

from bayflower.deploy import folders, layout
from bayflower.deploy.local import Local
from bayflower.flower import processes

pytestmark = [
    pytest.mark.flower,
    pytest.mark.xdist_group("deploy"),
    # programs that outlive the command that starts them
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TRIALS = int(os.environ.get("BAYFLOWER_TRIALS", "300"))  # make hostile: 10,000
MEGABYTE = 1_000_000


class Server:
    """The SuperLink and the gate of a deployment, without clients."""

    def __init__(self, folder: Path) -> None:
        folders.init(folder, clients=1)
        self.folder, self.local = folder, Local(layout.read(folder))
        self.local.folder.mkdir()
        self.context = ssl.create_default_context(cafile=str(folder / "ca" / "ca.crt"))

    def start(self) -> None:
        for name in ("superlink", "gate"):
            self.local.facts[name] = processes.free_port()
        for name in ("superlink", "gate"):
            self.local.start(name)
            self.local.wait_for_health(name)

    def memory(self, name: str) -> int:
        """Return the bytes of memory a program has."""
        pid = self.local.facts["pids"][name]
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def dial(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        sock = socket.create_connection(("127.0.0.1", self.local.facts["gate"]), timeout=30)
        return (context or self.context).wrap_socket(sock, server_hostname="localhost")

    def healthy(self) -> None:
        for name in ("superlink", "gate"):
            assert self.local.alive(name), self.local.said(name)
            self.local.wait_for_health(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("gate") / "fed")
    try:
        made.start()
        yield made
    finally:
        made.local.down()


def head(call: str, size: int, *more: str) -> bytes:
    lines = [f"POST /v1/fleet/{call} HTTP/1.1", "host: x", "content-type: application/protobuf"]
    return "\r\n".join([*lines, *more, f"content-length: {size}", "", ""]).encode()


def test_what_a_stranger_sends_costs_no_memory(server):
    """A billion bytes of posts without a key, thirty at a time that never end: 526 million killed
    the gate, 992 million the SuperLink.
    """
    before = {name: server.memory(name) for name in ("gate", "superlink")}
    part, parts, peak, refused = bytes(MEGABYTE), 17, dict(before), 0
    for _ in range(2):
        lines = [server.dial() for _ in range(30)]
        for line in lines:
            line.sendall(head("push-object", parts * MEGABYTE + 1))
        for _ in range(parts):
            for line in lines:
                with contextlib.suppress(OSError):
                    line.sendall(part)
            for name in peak:
                peak[name] = max(peak[name], server.memory(name))
        for line in lines:
            line.settimeout(5)
            with contextlib.suppress(OSError):
                refused += line.recv(20).startswith(b"HTTP/1.1 401")
            line.close()
    server.healthy()
    grown = {name: peak[name] - before[name] for name in peak}
    assert grown["gate"] < 60 * MEGABYTE, grown
    assert grown["superlink"] < 10 * MEGABYTE, grown
    assert refused


def test_connections_that_say_nothing_cost_little(server):
    """Five hundred that never finish a handshake or a header; a client still gets through."""
    before, calls = server.memory("gate"), []
    try:
        for turn in range(500):
            sock = socket.create_connection(("127.0.0.1", server.local.facts["gate"]), timeout=30)
            calls.append(sock)
            if turn % 10 == 0:
                sock.sendall(b"\x16\x03\x01\x02")
        endless = server.dial()
        calls.append(endless)
        endless.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):
            for _ in range(200):
                endless.sendall(b"a" * 10_000)
        server.healthy()
        assert server.memory("gate") - before < 60 * MEGABYTE
    finally:
        for sock in calls:
            sock.close()


def test_only_ciphers_that_authenticate(server):
    """TLS 1.2 with CBC and SHA-1 is refused; what Flower's SuperNode speaks is not."""

    def spoken(version: ssl.TLSVersion, ciphers: str = "") -> str:
        context = ssl.create_default_context(cafile=str(server.folder / "ca" / "ca.crt"))
        context.minimum_version = context.maximum_version = version
        if ciphers:
            context.set_ciphers(ciphers)
        with server.dial(context) as line:
            return line.cipher()[0]

    assert spoken(ssl.TLSVersion.TLSv1_3).startswith("TLS_")
    assert "GCM" in spoken(ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES256-GCM-SHA384")
    for weak in ("ECDHE-ECDSA-AES256-SHA", "ECDHE-ECDSA-AES128-SHA256"):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            spoken(ssl.TLSVersion.TLSv1_2, weak)


def test_mutated_bytes_leave_gate_and_superlink_as_they_were(server, tmp_path):
    """Requests of the client with bytes changed anywhere, over TLS; memory is flat."""
    client = Client(tmp_path, 0)
    key = server.folder / "server" / "nodes" / "client-0.pub"
    key.write_bytes(client.file.read_bytes())  # the gate takes it for a client's
    time.sleep(1.2)
    chosen = random.Random(28)

    def mutated() -> tuple[bytearray, bool]:
        """Return a request, and whether its answer is read."""
        call = chosen.choice(("push-messages", "push-object", "pull-object", "activate-node"))
        body = chosen.randbytes(chosen.choice((0, 10, 1000, 10_000)))
        lines = [f"{k}: {v}" for k, v in client.headers().items() if k != "content-type"]
        whole = bytearray(head(call, len(body), *lines) + body)
        for _ in range(chosen.choice((0, 1, 5))):
            at = chosen.randrange(len(whole))
            whole[at : at + chosen.choice((0, 1, 9))] = chosen.randbytes(chosen.choice((0, 1, 9)))
        return whole, chosen.random() < 0.9

    def code_of(asked: tuple[bytearray, bool]) -> int:
        """Return the code of the answer; 0 without one: the gate waits for bytes that are gone."""
        said = b""
        with contextlib.suppress(OSError), server.dial() as line:
            line.settimeout(5)
            line.sendall(asked[0])
            if asked[1]:
                said = line.recv(64)
        return int(said.split()[1]) if said.startswith(b"HTTP") else 0

    codes: Counter[int] = Counter()
    held: list[dict[str, int]] = []
    with ThreadPoolExecutor(16) as pool:  # those that wait are not waited for one by one
        for _ in range(2):
            for _ in range(-(-TRIALS // 128)):  # few at a time: their signatures have a time
                codes.update(pool.map(code_of, [mutated() for _ in range(64)]))
            held.append({name: server.memory(name) for name in ("gate", "superlink")})
    server.healthy()
    assert codes[400] > TRIALS / 10, codes
    grown = {name: held[1][name] - held[0][name] for name in held[0]}
    assert max(grown.values()) < 20 * MEGABYTE, grown


def test_a_supernode_whose_clock_is_ahead_is_told_so(server, tmp_path):
    """Flower's own SuperNode, a minute ahead, prints why it cannot join."""
    ahead = (
        "import datetime, flwr.supercore.date as d\n"
        "import flwr.supernode.node_auth_http_interceptor as n\n"
        "n.now = lambda: d.now() + datetime.timedelta(seconds=60)\n"
        "from flwr.supernode.cli import flower_supernode\n"
        "import sys; sys.argv = ['flower-supernode', *sys.argv[1:]]\n"
        "flower_supernode()\n"
    )
    client = Client(tmp_path, 0)
    (server.folder / "server" / "nodes" / "client-0.pub").write_bytes(client.file.read_bytes())
    time.sleep(1.2)
    with (tmp_path / "said.txt").open("w+") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", ahead),
                *("--superlink", f"127.0.0.1:{server.local.facts['gate']}"),
                *("--root-certificates", str(server.folder / "ca" / "ca.crt")),
                *("--auth-supernode-private-key", str(tmp_path / "client-0" / "node.key")),
                *("--max-retries", "1", "--port", str(processes.free_port())),
            ],
            stdout=out,
            stderr=out,
            cwd="/",
            env=processes.environment("ahead", tmp_path / "home", "deployment"),
            start_new_session=True,
        )
        try:
            assert process.wait(300) != 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "s ahead of the server's" in (tmp_path / "said.txt").read_text()
