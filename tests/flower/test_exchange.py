"""Messages and replies that are lost without a word: nodes are asked again, in time and not too
often, and answer without working twice.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import post as post_office
import pytest
from conftest import assert_same_bits, small_prepared
from flwr.app import ConfigRecord, Error, Message
from post import Clock, Post, talk

from bayflower.files.store import DiskStore, MemoryStore
from bayflower.flower import exchange, records
from bayflower.flower.exchange import CLOCKS, NodeHistory
from bayflower.flower.loop import FIRST_NODE, InProcessGrid, contexts, federation_app, make_strategy
from bayflower.rounds import solo

FAST = {
    "new_clients": 1,
    "local_epochs": 1,
    "evaluate_every": 0,
    "keep": 0.15,
    "ask_again_seconds": 0.3,
}


class LossyGrid(InProcessGrid):
    """A grid that loses replies: `lose(message, how often this client was sent this kind of message
    in this round)`.
    """

    def __init__(self, lose, *more) -> None:
        super().__init__(*more, self.answer)
        self.lose, self.asked = lose, {}

    def answer(self, message: Message) -> Message | None:
        head = dict(message.content[records.HEADER])
        what = (
            message.metadata.message_type,
            head.get("round"),
            message.metadata.dst_node_id - FIRST_NODE,
        )
        self.asked[what] = self.asked.get(what, 0) + 1
        reply = self.ask(message)
        return None if self.lose(*what, self.asked[what]) else reply


def run(lose, store=None, **settings):
    """Return (strategy, grid, seconds) of two rounds of FedMAP with a timeout that nobody wants to
    wait for.
    """
    prepared = small_prepared("fedmap", **{**FAST, **settings})
    federation, halves = prepared.federation, prepared.halves
    app = federation_app(prepared.run, federation, halves, store or MemoryStore())
    grid = LossyGrid(
        lose, app, contexts(data.client for data in (*federation.clients, *federation.new_clients))
    )
    strategy = make_strategy(prepared.run)
    begun = time.monotonic()
    strategy.start(
        grid,
        records.to_arrays({**halves.initial[0], **halves.initial[1]}),
        num_rounds=2,
        timeout=40,
    )
    return strategy, grid, time.monotonic() - begun


@pytest.fixture(scope="module")
def undisturbed():
    return run(lambda *_: False)[0]


def same(one, other) -> None:
    """Server state, losses and tests have the same bits."""
    assert_same_bits(one.state, other.state)
    assert [record["train_loss"] for record in one.records] == [
        record["train_loss"] for record in other.records
    ]
    for name in ("views", "new_clients"):
        mine, wanted = (
            getattr(one.outcome, name)["personal"],
            getattr(other.outcome, name)["personal"],
        )
        assert mine.keys() == wanted.keys()
        for client in mine:
            assert_same_bits(mine[client], wanted[client])


def counted(monkeypatch, name: str) -> list[None]:
    """Return a list that grows with every call of a function of `solo`."""
    plain, calls = getattr(solo, name), []
    monkeypatch.setattr(
        solo, name, lambda *words, **keys: (calls.append(None), plain(*words, **keys))[1]
    )
    return calls


@pytest.mark.parametrize(
    "kind", [pytest.param("query", marks=pytest.mark.slow), "train", "evaluate"]
)
@pytest.mark.parametrize("disk", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_reply_that_is_lost_is_asked_for_again(kind, disk, undisturbed, tmp_path, monkeypatch):
    """Of every client, the new one included; nobody trains, adapts or tests twice; it is nobody's
    fault.
    """
    work = {name: counted(monkeypatch, name) for name in ("train", "adapt", "test")}
    store = DiskStore(tmp_path) if disk else None
    strategy, grid, seconds = run(
        lambda what, round, client, times: what == kind and times == 1, store
    )
    assert seconds < 20
    assert strategy.faults == []
    same(strategy, undisturbed)
    assert {times for (what, *_), times in grid.asked.items() if what == kind} == {2}
    assert {times for (what, *_), times in grid.asked.items() if what != kind} == {1}
    assert {name: len(calls) for name, calls in work.items()} == {
        "train": 10,
        "adapt": 6,
        "test": 6,
    }


@pytest.mark.slow
def test_without_asking_again_the_round_goes_on_without_the_client():
    """0 = never: the deadline decides, as it does for a client that never answers."""
    prepared = small_prepared("fedmap", **{**FAST, "ask_again_seconds": 0})
    app = federation_app(prepared.run, prepared.federation, prepared.halves, MemoryStore())
    grid = LossyGrid(
        lambda what, round, client, times: what == "train" and client == 1, app, contexts(range(5))
    )
    strategy = make_strategy(prepared.run)
    strategy.start(
        grid,
        records.to_arrays({**prepared.halves.initial[0], **prepared.halves.initial[1]}),
        num_rounds=1,
        timeout=2,
    )
    (fault,) = strategy.faults
    assert fault == "round 1, client 1: no reply before the timeout; ignored in this round"
    assert grid.asked["train", 1, 1] == 1


@pytest.fixture
def clock(monkeypatch):
    """Here, at the post and in the exchange, only sleeping takes time."""
    found = Clock()
    for module in (exchange, post_office, sys.modules[__name__]):
        monkeypatch.setattr(module, "time", found)


virtual = pytest.mark.usefixtures("clock")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(exchange, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(exchange, "BEHIND_SECONDS", 0.05)


@virtual
def test_the_wait_doubles_and_the_deadline_stays():
    post = Post({1: [0.0], 2: [None]})
    assert talk(post, 2.0, NodeHistory(0.2)) == ["1/0"]
    assert post.times(1) == pytest.approx([0.0], abs=0.1)
    assert post.times(2) == pytest.approx([0.0, 0.2, 0.6, 1.4], abs=0.15)
    assert 1.9 < time.monotonic() - post.begun < 2.5


@virtual
def test_while_replies_come_nobody_is_asked_again():
    """Silence is what counts: in a simulation or a large federation replies come one after another,
    and the last one is not late.
    """
    post = Post({node: [0.1 * node] for node in range(1, 9)})
    assert len(talk(post, 5.0, NodeHistory(0.3))) == 8
    assert len(post.pushed) == 8


@virtual
def test_a_slow_node_is_given_twice_its_time_from_then_on():
    line = NodeHistory(0.2)
    first = Post({1: [0.5], 2: [0.0]})
    assert sorted(talk(first, 5.0, line)) == ["1/0", "2/0"]
    assert len(first.times(1)) == 2
    second = Post({1: [0.7], 2: [None, 0.0]})
    assert sorted(talk(second, 5.0, line)) == ["1/0", "2/1"]
    assert len(second.times(1)) == 1  # known to be slow
    assert second.times(2) == pytest.approx([0.0, 0.2], abs=0.15)  # known to be fast


@virtual
def test_a_node_that_is_not_there_is_not_asked_again():
    post = Post({1: [None]}, online=set())
    assert talk(post, 1.0, NodeHistory(0.1)) == []
    assert len(post.pushed) == 1


@virtual
def test_two_replies_to_two_asks_are_one_reply():
    """The second is fetched later and thrown away, so that the SuperLink need not keep it."""
    line, asked = NodeHistory(0.2), {}
    post = Post({1: [0.3, 0.0]})
    assert talk(post, 5.0, line, asked) == ["1/1"]
    assert asked == {"1/0": 1, "1/1": 1}
    assert sorted(line.spare) == ["1/0"]
    time.sleep(0.3)
    after = Post({2: [0.0]})
    after.sent.update(post.sent)
    assert talk(after, 5.0, line) == ["2/0"]
    assert line.spare == {}
    assert after.sent == {}


@virtual
def test_both_replies_at_once_are_one_reply():
    post = Post({1: [0.5, 0.29]})  # the second ask comes after 0.2 s
    pull = post.pull_messages
    post.pull_messages = lambda ids: [] if time.monotonic() - post.begun < 0.8 else pull(ids)
    assert len(talk(post, 5.0, NodeHistory(0.2))) == 1


@virtual
def test_an_ask_that_flower_lost_does_not_end_the_wait_for_the_other():
    """Flower's code 3 for one of two messages to a node that works on the other; the last one's
    error is the node's.
    """
    post = Post({1: [0.5, 0.9]})
    plain = post.reply
    post.reply = lambda message: (
        Message(Error(code=3, reason="gone"), reply_to=message)
        if message.metadata.message_id == "1/0"
        else plain(message)
    )
    assert talk(post, 5.0, NodeHistory(0.4)) == ["1/1"]
    post = Post({1: [0.5, 0.9]})
    post.reply = lambda message: Message(Error(code=5, reason="gone"), reply_to=message)
    assert len(talk(post, 5.0, NodeHistory(0.4))) == 1


@virtual
def test_a_node_whose_message_was_lost_is_asked_again_at_once_if_it_is_there():
    """Not only when all others have answered; once, then the error is its reply."""
    post = Post({1: [0.1, 0.1], 2: [0.8]})
    plain = post.reply
    post.reply = lambda message: (
        Message(Error(code=3, reason="gone"), reply_to=message)
        if message.metadata.message_id == "1/0"
        else plain(message)
    )
    assert talk(post, 5.0, NodeHistory(3.0)) == ["1/1", "2/0"]
    assert post.times(1) == pytest.approx([0.0, 0.1], abs=0.1)
    post = Post({1: [0.1], 2: [0.8]})
    post.reply = lambda message: (
        Message(Error(code=3, reason="gone"), reply_to=message)
        if message.metadata.dst_node_id == 1
        else plain(message)
    )
    assert talk(post, 5.0, NodeHistory(3.0)) == ["1/1", "2/0"]
    post = Post({1: [0.1], 2: [0.3]}, online={2})
    post.reply = lambda message: (
        Message(Error(code=5, reason="gone"), reply_to=message)
        if message.metadata.dst_node_id == 1
        else plain(message)
    )
    assert talk(post, 5.0, NodeHistory(3.0)) == ["2/0", "1/0"]  # it never came back
    assert len(post.times(1)) == 1


@virtual
def test_a_node_that_is_one_reply_behind_is_asked_twice_at_once():
    """It sends a reply when the next message comes: after the first time nobody waits for that."""
    line = NodeHistory(0.3)
    post = Post({1: [None]})
    push = post.push_messages

    def late(messages):
        held = [message for _, message in post.pushed]
        numbers = push(messages)
        post.sent.update({message.metadata.message_id: (message, 0.0) for message in held})
        return numbers

    post.push_messages = late
    assert talk(post, 5.0, line) == ["1/0"]
    assert line.behind == {1}
    begun = time.monotonic()
    assert talk(post, 5.0, line) == ["1/2"]
    assert time.monotonic() - begun < 0.2
    assert len(post.pushed) == 4


def test_a_node_that_was_started_anew_is_asked_again_at_once():
    """Its SuperNode has forgotten the message, and Flower takes it for delivered."""
    post = Post({1: [None, 0.0], 2: [0.8]})
    begun = dict.fromkeys((1, 2), time.time() - 100)
    post.get_nodes = lambda: [
        SimpleNamespace(
            node_id=node, last_activated_at=datetime.fromtimestamp(when, UTC).isoformat()
        )
        for node, when in begun.items()
    ]
    threading.Timer(0.3, lambda: begun.update({1: time.time()})).start()
    assert talk(post, 5.0, NodeHistory(3.0)) == ["1/1", "2/0"]
    assert post.times(1) == pytest.approx([0.0, 0.3], abs=0.1)


def test_messages_expire_soon_after_the_deadline():
    post = Post({1: [None]})
    talk(post, 1.0, NodeHistory(0.3))
    alive = [when + message.metadata.ttl for when, message in post.pushed]
    assert len(alive) > 1
    assert alive == pytest.approx([1.0 + CLOCKS] * len(alive), abs=0.3)


def test_flowers_simulation_loses_nothing_and_is_not_asked_again():
    """There a message waits until a worker is free, and two for one client would be worked on side
    by side.
    """
    InMemoryGrid = type("InMemoryGrid", (Post,), {})
    post = InMemoryGrid({1: [0.5, 0.0]})
    assert talk(post, 5.0, NodeHistory(0.1)) == ["1/0"]
    assert len(post.pushed) == 1


def test_flowers_simulation_is_known_by_this_name():
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    assert InMemoryGrid.__name__ == exchange.SIMULATION


def test_a_test_is_answered_from_memory_for_the_same_question_only(monkeypatch):
    prepared = small_prepared("fedmap", **FAST)
    app = federation_app(prepared.run, prepared.federation, prepared.halves, MemoryStore())
    seen: list[Message] = []
    grid = InProcessGrid(
        app, contexts([0]), lambda message: (seen.append(message), grid.ask(message))[1]
    )
    make_strategy(prepared.run).start(
        grid,
        records.to_arrays({**prepared.halves.initial[0], **prepared.halves.initial[1]}),
        num_rounds=1,
    )
    (asked,) = (message for message in seen if message.metadata.message_type == "evaluate")
    tests = counted(monkeypatch, "test")

    def again(**changes) -> Message:
        content = records.copy_content(asked.content)
        content[records.HEADER] = ConfigRecord({**content[records.HEADER], **changes})
        return grid.ask(Message(content=content, metadata=asked.metadata))

    first, second = again(), again()
    assert tests == []
    assert {name: array.data for name, array in first.content[records.TALLY].items()} == {
        name: array.data for name, array in second.content[records.TALLY].items()
    }
    assert dict(first.content[records.METRICS]) == dict(second.content[records.METRICS])
    for changes in ({"seed": 5}, {"round": 0}, {"accepted": 0}, {"purpose": "new"}):
        before = len(tests)
        assert not again(**changes).has_error()
        assert len(tests) == before + 1, changes
