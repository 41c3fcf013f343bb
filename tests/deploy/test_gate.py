"""The gate over real connections: what a busy SuperLink says, and what Flower's own SuperNode makes
of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fleet import Client, answer, parts_of, served
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto import fleet_pb2, message_pb2, run_pb2
from flwr.supercore.error import FlowerError
from flwr.supercore.retry import make_simple_http_retry_invoker

from bayflower.deploy.callers import Callers, wrong_clock
from bayflower.deploy.gate import Gate
from bayflower.flower.fleet import Desk
from bayflower.flower.trees import digest

ANY = run_pb2.GetRunRequest(run_id=5)


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


@pytest.fixture
def gated(tmp_path) -> Iterator[tuple[str, Gate, Client]]:
    """The address of a gate in front of such a SuperLink, the gate, and a client it knows."""
    superlink = ThreadingHTTPServer(("127.0.0.1", 0), Superlink)
    threading.Thread(target=superlink.serve_forever, daemon=True).start()
    client = Client(tmp_path, 0)
    client.node = 7
    gate = Gate(f"http://127.0.0.1:{superlink.server_port}", False, Callers(tmp_path / "nodes"))
    try:
        with served(gate.app()) as address:
            yield address, gate, client
    finally:
        superlink.shutdown()
        superlink.server_close()


def ask(
    address: str, client: Client, call: str = "get-run", what: Any = ANY, timeout: float = 30
) -> bytes:
    answer = httpx.post(
        f"http://{address}/v1/fleet/{call}",
        content=what.SerializeToString(),
        headers=client.headers(),
        timeout=timeout,
    )
    answer.raise_for_status()
    return answer.content


def test_a_reply_is_not_lost_while_the_database_is_busy(gated):
    """What a SuperNode sends with Flower's own rules of trying again arrives in the end; without
    the gate, 500 is the end.
    """
    address, _, client = gated
    Superlink.busy = 2
    invoke = make_simple_http_retry_invoker().invoke
    assert invoke(ask, address, client) == ANY.SerializeToString()
    assert Superlink.busy == -1
    Superlink.busy = 2
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        ask(address, client)


def test_what_is_no_fault_of_the_moment_stays_as_it_is(gated):
    address, _, client = gated
    Superlink.busy = 0
    for call in ("v1/control/start-run", "v1/fleet/register-node", "v1/fleet/unregister-node"):
        answer = httpx.post(f"http://{address}/{call}", content=b"x", headers=client.headers())
        assert answer.status_code == 404, call
    assert ask(address, client) == ANY.SerializeToString()


@pytest.mark.parametrize("name", [b"flwr-other", b"accept"])
def test_a_header_that_cannot_be_passed_on_is_the_callers_fault(gated, name):
    """A byte beyond ASCII: found by mutation as an error 500 of the gate's own."""
    address, _, client = gated
    Superlink.busy = 0
    sent = {key.encode(): value.encode() for key, value in client.headers().items()}
    for value, code in ((b"\xa0", 400), (b"x", 200)):
        answer = httpx.post(
            f"http://{address}/v1/fleet/get-run",
            content=ANY.SerializeToString(),
            headers={**sent, name: value},
        )
        assert answer.status_code == code


def test_a_part_of_a_reply_that_is_sent_twice_gets_the_first_answer(gated, monkeypatch):
    """Flower's SuperLink takes a part once. A SuperNode that did not hear so, because its network
    failed, sends it again.
    """
    address, gate, client = gated
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    message.metadata.__dict__.update(_run_id=9, _src_node_id=1, _message_id="b" * 64)
    names = ("a", "b", "busy")
    reply = answer(message, RecordDict({name: ConfigRecord({name: 1}) for name in names}))
    objects = parts_of(reply)
    leaves = [number for number, one in objects.items() if one.startswith(b"ConfigRecord")]
    desk = gate.desks["client-0"] = Desk()
    asked = desk.ask("push-messages", client.pushes(reply).SerializeToString())
    told = fleet_pb2.PushMessagesResponse(objects_to_push=list(objects), session_id="s")
    desk.announced(asked.request, told.SerializeToString())
    taken, tried, lock = [], [], threading.Lock()

    def take(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        number = message_pb2.PushObjectRequest.FromString(body).object_id
        with lock:
            busy = number == leaves[2] and number not in tried
            known = number in taken
            tried.append(number)
            taken.extend([] if busy else [number])
        time.sleep(0.5)
        said = message_pb2.PushObjectResponse(stored=not known).SerializeToString()
        self.send_response(500 if busy else 200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def push(number: str, timeout: float = 30) -> bool:
        part = client.part(9, "s", number, objects[number])
        said = ask(address, client, "push-object", part, timeout)
        return message_pb2.PushObjectResponse.FromString(said).stored

    monkeypatch.setattr(Superlink, "do_POST", take)
    # gone before the answer came; sent again while the first is being worked on
    with pytest.raises(httpx.ReadTimeout):
        push(leaves[0], timeout=0.3)
    assert push(leaves[0])
    assert push(leaves[0])  # and after it
    assert push(leaves[1])
    assert taken == leaves[:2]
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        push(leaves[2])
    assert push(leaves[2])  # what was not answered well is asked anew
    assert all(push(number) for number in objects)
    assert desk.replies == {}  # it is complete
    assert push(leaves[2])  # and a late duplicate is still no fault
    assert sorted(taken) == sorted(objects)


def test_a_run_that_ends_does_not_leave_a_supernode_one_reply_behind(gated, monkeypatch):
    """Flower takes 403 for the end of the run and leaves the middle of receiving a message, whose
    reply nobody then expects.
    """
    from flwr.supercore.run import RunNotRunningException

    def ended(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()

    address, gate, client = gated
    gate.desks["client-0"] = Desk()
    gate.desks["client-0"].sent["a" * 64] = {digest("a" * 64)}
    monkeypatch.setattr(Superlink, "do_POST", ended)
    invoke = make_simple_http_retry_invoker().invoke
    pulls = message_pb2.PullObjectRequest(object_id="a" * 64)
    with pytest.raises(httpx.HTTPStatusError, match="410"):
        invoke(ask, address, client, "pull-object", pulls)
    done = message_pb2.ConfirmMessageReceivedRequest(message_object_id="a" * 64)
    assert invoke(ask, address, client, "confirm-message-received", done) == b""
    with pytest.raises(RunNotRunningException):  # where Flower expects it
        invoke(ask, address, client)


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


def test_a_client_whose_clock_is_wrong_is_told_so(gated, capsys):
    """Flower refuses a request that was signed in the future, and says nothing of clocks. Its
    SuperNode prints what the gate says when it joins.
    """
    now = datetime.fromisoformat("2026-01-01T12:00:00+00:00").timestamp()
    assert wrong_clock("2026-01-01T12:00:04+00:00", now) is None
    assert wrong_clock("2026-01-01T11:56:00+00:00", now) is None
    assert "is 7 s ahead of the server's" in wrong_clock("2026-01-01T12:00:07+00:00", now)
    assert "is 600 s behind the server's" in wrong_clock("2026-01-01T11:50:00+00:00", now)
    assert "does not say when" in wrong_clock("[red]no time", now)
    address, _, client = gated
    stamp = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    joins = fleet_pb2.ActivateNodeRequest(public_key=client.public, heartbeat_interval=30)
    said = client.asks(address, "activate-node", joins, stamp=stamp)
    assert said.status_code == 400  # on 401 it would stop without a word
    told = FlowerError.from_json(said.text)
    assert told is not None
    assert "s ahead of the server's" in told.message
    assert "client-0: this client's clock is " in capsys.readouterr().err
