"""The gate over real connections: what a busy SuperLink says, and what Flower's own SuperNode makes
of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import uvicorn
from flwr.supercore.retry import make_simple_http_retry_invoker

from bayflower.deploy import gate
from bayflower.flower.processes import free_port


class Superlink(BaseHTTPRequestHandler):
    """Answers 500 as often as it is told to, as Flower does while its database is locked, then what
    it was sent.
    """

    busy = 0

    def do_POST(self) -> None:
        body = (
            self.rfile.read1()
            if "content-length" not in self.headers
            else self.rfile.read(int(self.headers["content-length"]))
        )
        kind = type(self)
        kind.busy, code = kind.busy - 1, 500 if kind.busy > 0 else 200
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a gate in front of such a SuperLink."""
    superlink = ThreadingHTTPServer(("127.0.0.1", 0), Superlink)
    threading.Thread(target=superlink.serve_forever, daemon=True).start()
    port = free_port()
    app = gate.make_app(f"http://127.0.0.1:{superlink.server_port}", False)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        superlink.shutdown()
        superlink.server_close()


def push(
    address: str, call: str = "push-messages", what: bytes = b"a reply", timeout: float = 30
) -> bytes:
    answer = httpx.post(f"{address}/v1/fleet/{call}", content=what, timeout=timeout)
    answer.raise_for_status()
    return answer.content


def test_a_reply_is_not_lost_while_the_database_is_busy():
    """What a SuperNode sends with Flower's own rules of trying again arrives in the end; without
    the gate, 500 is the end.
    """
    with served() as address:
        Superlink.busy = 2
        assert make_simple_http_retry_invoker().invoke(push, address) == b"a reply"
        assert Superlink.busy == -1
        Superlink.busy = 2
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            push(address)


def test_what_is_no_fault_of_the_moment_stays_as_it_is():
    with served() as address:
        Superlink.busy = 0
        assert httpx.post(f"{address}/v1/control/start-run", content=b"x").status_code == 404
        assert push(address) == b"a reply"


def test_a_part_of_a_reply_that_is_sent_twice_gets_the_first_answer(monkeypatch):
    """Flower's SuperLink takes a part once. A SuperNode that did not hear so, because its network
    failed, sends it again.
    """
    taken, lock = [], threading.Lock()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        with lock:
            known = body in taken
            taken.append(body)
        time.sleep(0.5)
        said = b"refused" if known else b"stored"
        self.send_response(500 if body == b"busy" and taken.count(body) == 1 else 200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    monkeypatch.setattr(Superlink, "do_POST", answer)
    with served() as address:
        # gone before the answer came; sent again while the first is being worked on
        with pytest.raises(httpx.ReadTimeout):
            push(address, "push-object", b"one", timeout=0.2)
        assert push(address, "push-object", b"one") == b"stored"
        assert push(address, "push-object", b"one") == b"stored"  # and after it
        assert push(address, "push-object", b"two") == b"stored"
        assert taken == [b"one", b"two"]
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            push(address, "push-object", b"busy")
        push(address, "push-object", b"busy")  # what was not answered well is asked anew
        assert taken == [b"one", b"two", b"busy", b"busy"]
        push(address)
        push(address)
        assert taken[4:] == [b"a reply", b"a reply"]  # everything else passes


def test_a_run_that_ends_does_not_leave_a_supernode_one_reply_behind(monkeypatch):
    """Flower takes 403 for the end of the run and leaves the middle of receiving a message, whose
    reply nobody then expects.
    """
    from flwr.supercore.run import RunNotRunningException

    def ended(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()

    monkeypatch.setattr(Superlink, "do_POST", ended)
    invoke = make_simple_http_retry_invoker().invoke
    with served() as address:
        assert invoke(push, address, "confirm-message-received") == b""
        with pytest.raises(httpx.HTTPStatusError, match="410"):
            invoke(push, address, "pull-object")
        for call in ("push-messages", "get-run"):  # where Flower expects it
            with pytest.raises(RunNotRunningException):
                invoke(push, address, call)


def test_the_superlink_waits_for_its_database(tmp_path, monkeypatch):
    """Flower's own connections, opened after our start, have our patience: a lock held for longer
    than theirs is no fault.
    """
    from flwr.supercore import sql_mixin
    from flwr.superlink import cli
    from sqlalchemy import create_engine, event, text

    from bayflower.deploy import superlink

    started = []
    monkeypatch.setattr(cli, "flower_superlink", lambda: started.append(True))
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    monkeypatch.setattr("sys.argv", ["superlink"])
    superlink.main()
    assert started
    engine = create_engine(f"sqlite:///{tmp_path / 'superlink.db'}")
    event.listen(engine, "connect", sql_mixin._set_sqlite_pragmas)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == int(superlink.PATIENCE)
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    engine.dispose()


def test_a_client_whose_clock_is_wrong_is_told_so():
    """Flower refuses a request that was signed in the future, and says nothing of clocks."""
    now = datetime.fromisoformat("2026-01-01T12:00:00+00:00").timestamp()
    assert gate.wrong_clock("2026-01-01T12:00:04+00:00", now) is None
    assert gate.wrong_clock("2026-01-01T11:56:00+00:00", now) is None
    assert "is 7 s ahead of the server's" in gate.wrong_clock("2026-01-01T12:00:07+00:00", now)
    assert "is 600 s behind the server's" in gate.wrong_clock("2026-01-01T11:50:00+00:00", now)
    assert gate.wrong_clock("[red]no time", now) is None
