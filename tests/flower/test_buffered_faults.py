"""Buffered steps when something goes wrong: replies that are invalid, lost, late, repeated or
hostile, and nodes that vanish.
"""

from __future__ import annotations

from collections import Counter

import pytest
from buffers import QUICK, SLOW, started
from smallruns import small_prepared

from bayflower.errors import BayflowerError
from bayflower.flower.loop import FIRST_NODE, InProcessGrid
from bayflower.rounds.clock import Clock


def faulty(prepared, fail, **more):
    """Return the strategy after a run whose grid answers a message with `fail(message, ask)`."""

    class Faulty(InProcessGrid):
        def __init__(self, app, nodes):
            super().__init__(app, nodes, lambda message: fail(message, self.ask))

    return started(prepared, Faulty, **more)


@pytest.mark.parametrize("clocked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_invalid_lost_and_missing_replies_are_named_and_change_nothing(clocked, monkeypatch):
    """Client 0 sends NaN once, client 1 fails once, client 2 is silent once; the others' replies
    make the steps, and the three are asked again.
    """
    monkeypatch.setattr("bayflower.flower.flow.POLL_SECONDS", 0.01)
    settings = {**QUICK, "aggregation": "buffered", "buffer": 2, "rounds": 6}
    prepared = small_prepared("fedavg", **settings, ask_again_seconds=0)
    done = set()

    def fail(message, ask):
        client = message.metadata.dst_node_id - FIRST_NODE
        if message.metadata.message_type != "train" or client in done or client > 2:
            return ask(message)
        done.add(client)
        if client == 2:
            return None
        if client == 1:
            message.content.array_records.clear()
            return ask(message)
        reply = ask(message)
        for record in reply.content.array_records.values():
            name = next(name for name in record if "weight" in name)
            array = record[name].numpy().copy()
            array[...] = float("nan")
            record[name] = type(record[name])(array)
        return reply

    clock = Clock({}, 0) if clocked else None
    strategy = faulty(prepared, fail, clock=clock, timeout=2.0)
    faults = " | ".join(strategy.faults)
    assert "client 0: reply not used" in faults
    assert "not finite" in faults
    assert "client 1: reply not used" in faults
    assert "client 2: no reply before the timeout" in faults
    assert len(strategy.faults) == 3
    trained = Counter(one for record in strategy.records for one in [record["num_clients"]])
    assert sum(key * number for key, number in trained.items()) >= 11
    assert set(strategy.roster.accepted) >= {0, 1, 3, 4}
    assert 2 in {*strategy.roster.accepted, *strategy.roster.unused}


def test_replies_that_are_too_old_are_dropped_and_their_clients_go_back():
    settings = {**SLOW, **QUICK, "rounds": 18, "most_stale": 5}
    strategy = started(small_prepared("fedper", **settings), clock=Clock({3: 10.0, 4: 10.0}, 0))
    assert [text for text in strategy.faults if "most_stale is 5; not used" in text]
    assert {3, 4} <= strategy.roster.unused
    assert not {3, 4} & set(strategy.roster.accepted)
    assert "excluded" not in " ".join(strategy.faults)
    assert max(record["staleness"] for record in strategy.records) <= 5


def test_an_old_reply_that_is_sent_again_is_refused():
    """A client that answers with its reply of an earlier step: named, and not used."""
    old = {}

    def fail(message, ask):
        reply = ask(message)
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == FIRST_NODE:
            if "content" in old:
                reply.__dict__["_content"] = old["content"]
            old.setdefault("content", reply.content)
        return reply

    settings = {**QUICK, "aggregation": "buffered", "buffer": 2, "rounds": 5}
    strategy = faulty(small_prepared("fedavg", **settings), fail, clock=Clock({}, 0))
    assert any("the reply is for round 1, not" in text for text in strategy.faults)


def test_no_reply_at_all_stops_the_run():
    settings = {**QUICK, "aggregation": "buffered", "rounds": 9}
    with pytest.raises(BayflowerError, match="no valid reply in 3 rounds in a row"):
        faulty(
            small_prepared("fedavg", **settings),
            lambda message, ask: None if message.metadata.message_type == "train" else ask(message),
            clock=Clock({}, 0),
        )


def test_a_node_that_is_gone_holds_nobody_up(monkeypatch):
    """A node vanishes in the middle of a step and comes back at another address: its client is
    asked there, and the others go on meanwhile.
    """
    monkeypatch.setattr("bayflower.flower.flow.POLL_SECONDS", 0.01)
    monkeypatch.setattr("bayflower.flower.exchange.LOOK_SECONDS", 0.05)
    settings = {**QUICK, "aggregation": "buffered", "buffer": 2, "rounds": 10}
    prepared = small_prepared("fedavg", **settings, rejoin_seconds=0.1)
    moved = {}

    class Moving(InProcessGrid):
        def pull_messages(self, message_ids):
            trained = self.__dict__.setdefault("trained", Counter())
            found = list(super().pull_messages(message_ids))
            for reply in found:
                trained[reply.metadata.message_type] += 1
            if trained["train"] == 3 and FIRST_NODE in self.contexts:
                moved[0] = self.contexts.pop(FIRST_NODE)
            if trained["train"] == 11 and 0 in moved and 2000 not in self.contexts:
                context = moved.pop(0)
                context.node_id = 2000
                self.contexts[2000] = context
            return found

    strategy = started(prepared, Moving)
    faults = " | ".join(strategy.faults)
    assert "client 0 has left: its node is gone" in faults
    assert strategy.roster.members[0].node == 2000
    assert strategy.roster.accepted[0] > 5
    assert [record["num_clients"] for record in strategy.records] == [2] * 10


@pytest.mark.slow
def test_one_attacker_is_limited_after_its_change_is_rebased():
    """A slow client that multiplies its change by a thousand: with robust=gate the model is near
    that of honest clients, without it is not.
    """
    common = {**QUICK, "num_clients": 8, "aggregation": "buffered", "buffer": 5, "rounds": 8}

    def worst(robust, evil):
        prepared = small_prepared("fedavg", **common, robust=robust)
        first = {f"params/{name}": value for name, value in prepared.halves.initial[0].items()}

        def fail(message, ask):
            reply = ask(message)
            if evil and is_train_of(message, 7):
                for record in reply.content.array_records.values():
                    for name in [one for one in record if one in first]:
                        start = first[name].numpy()
                        value = start + 1000 * (record[name].numpy() - start)
                        record[name] = type(record[name])(value.astype("float32"))
            return reply

        done = faulty(prepared, fail, clock=Clock({7: 3.0}, 0))
        return done.state.params, 7 in done.roster.accepted, done

    honest, _, _ = worst("off", False)
    hurt, used, _ = worst("off", True)
    assert used
    held, _, done = worst("gate", True)

    def far(model):
        return max(float((model[name] - honest[name]).norm()) for name in honest)

    assert far(hurt) > 20 * far(held)
    assert any("client 7" in text for text in done.faults)


def is_train_of(message, client):
    node = message.metadata.dst_node_id
    return message.metadata.message_type == "train" and node == FIRST_NODE + client
