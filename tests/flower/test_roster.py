"""Clients that come late, go, come back or misbehave, on an in-process grid whose nodes appear and
vanish between rounds.
"""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import assert_same_bits, some
from flwr.app import ConfigRecord, Error, Message
from flwr.proto.node_pb2 import NodeInfo
from town import Town, silent

from bayflower.errors import BayflowerError
from bayflower.files import checkpoint
from bayflower.files.store import DiskStore
from bayflower.flower import records
from bayflower.flower.loop import FIRST_NODE, contexts, make_strategy
from bayflower.methods import METHODS
from bayflower.tree import flatten

# methods whose server or clients keep something from round to round, each in its own way
FEW = {"fednp", "metavd", "scaffold", "local"}


@functools.cache
def lively(method: str) -> Town:
    """Client 3 comes in round 2, client 1 is away in round 3, all are there in round 4."""
    return Town(method, {1: [0, 1, 2], 2: [0, 1, 2, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}).start()


@pytest.mark.parametrize("method", some(sorted(METHODS), FEW), scope="module")
def test_clients_come_late_go_and_come_back(method):
    """Each round has exactly those that are there."""
    town = lively(method)
    assert [sorted(town.asked[round]) for round in (1, 2, 3, 4)] == [
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]
    assert [town.trained(round) for round in (1, 2, 3, 4)] == [3, 4, 3, 4]
    assert town.strategy.faults == [
        "client 1 has left: its node is gone; it is dropped from the totals until it rejoins"
    ]
    assert [told.get("returned") for told in town.asked[4].values()] == [None, True, None, None]
    assert all("accepted" not in told for told in town.asked[4].values())
    assert sorted(town.strategy.outcome.views["personal"]) == [0, 1, 2, 3]
    for leaf in flatten(town.states[4]).values():
        assert not leaf.is_floating_point() or bool(leaf.isfinite().all())


@pytest.mark.parametrize("method", some(sorted(METHODS), FEW), scope="module")
def test_a_client_from_the_second_round_on_trains_as_one_from_the_first(method):
    """The state a late client gets is what the method's definition gives to one that trains for the
    first time.
    """
    late = lively(method)
    first = late.kept[2][3]
    assert [saved.round for saved in first] == [2]
    fresh = flatten(late.halves.client.init(*late.halves.initial))
    assert first[0].state.keys() == fresh.keys()
    assert not any("client 3" in fault for fault in late.strategy.faults)


def test_the_leavers_factor_is_not_in_fednps_total():
    """While client 2 is away, the ledger's total is the product over the others alone, and equals
    the sum of their own factors.
    """
    town = Town("fednp", {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1], 4: [0, 1]}).start()
    assert {name.split("/")[0] for name in town.states[2].ledger} == {"0", "1", "2"}
    state = town.states[4]
    assert {name.split("/")[0] for name in state.ledger} == {"0", "1"}
    own = [town.store.load(town.strategy.run, client)[0].state for client in (0, 1)]
    want = 1 + sum(one["factor/precision"] for one in own)
    torch.testing.assert_close(state.total.precision, want, rtol=1e-13, atol=0)
    assert float((town.states[2].total.precision - state.total.precision).abs().max()) > 0


@pytest.mark.slow
def test_fednps_total_is_that_of_a_federation_which_never_had_the_leaver():
    """With the global model held still, EP over those who stay ends in the same total, however long
    the leaver was there.
    """
    still = {"optimizer": "sgd", "lr": 1e-30, "damping": 0.9, "batch_size": 64}
    plan = {round: [0, 1, 2] for round in range(1, 6)} | {round: [0, 1] for round in range(6, 24)}
    left = Town("fednp", plan, **still).start().strategy.state
    never = Town("fednp", {round: [0, 1] for round in range(1, 24)}, **still).start().strategy.state
    for a, b in zip(left.total, never.total, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert int(left.epoch) == int(never.epoch) == 0


def test_a_client_that_comes_back_starts_its_factor_anew():
    """It says turns = 0 because the server told it that it was dropped; nothing is reset for the
    others.
    """
    town = Town("fednp", {1: [0, 1], 2: [0, 1], 3: [0], 4: [0, 1], 5: [0, 1]}).start()
    assert [int(town.states[round].ledger["1/turns"]) for round in (2, 4, 5)] == [2, 1, 2]
    assert int(town.states[5].ledger["0/turns"]) == 5
    assert int(town.states[5].epoch) == 0


def test_metavd_keeps_the_embedding_for_the_return():
    town = Town("metavd", {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2, 3]}).start()
    assert torch.equal(town.states[1].belief.embeddings["1"], town.states[2].belief.embeddings["1"])
    assert int(town.states[3].belief.seen["1"]) == 2
    assert int(town.states[3].belief.seen["3"]) == 1
    assert not torch.equal(
        town.states[3].belief.embeddings["1"], town.states[2].belief.embeddings["1"]
    )


@pytest.mark.parametrize(("method", "field"), [("scaffold", "control"), ("feddyn", "drift")])
def test_a_mean_over_all_clients_counts_the_late_one(method, field):
    """c and h are means over all clients that ever trained: with one more, whose part is 0, they
    shrink by N / (N + 1).
    """
    town = Town(method, {1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2]})
    half, state = town.halves.server, None
    state = half.init(*town.halves.initial, (0, 1))
    state = state._replace(
        **{field: {name: torch.ones_like(value) for name, value in state.params.items()}}
    )
    more = half.admit(state, 2)
    assert int(more.num_clients) == 3
    for value in getattr(more, field).values():
        torch.testing.assert_close(value, torch.full_like(value, 2 / 3))
    town.start()
    assert [int(town.states[round].num_clients) for round in (1, 2, 3)] == [2, 3, 3]


def test_a_late_client_that_never_trains_is_tested_as_new():
    town = Town("fedavg", {1: [0, 1], 2: [0, 1, 5]}, new_clients=1)
    town.start()
    assert town.trained(2) == 2
    assert sorted(town.strategy.outcome.new_clients["personal"]) == [5]


@pytest.mark.slow
def test_a_silent_client_counts_as_gone_and_is_not_asked_again():
    plan = {round: [0, 1, 2] for round in range(1, 6)}
    town = Town("fedavg", plan, tamper=silent(1, {2, 3, 4, 5}), leave_after=2)
    town.strategy.start(
        town.grid, records.to_arrays({**town.halves.initial[0]}), num_rounds=5, timeout=2
    )
    assert [sorted(town.asked[round]) for round in range(1, 6)] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2],
        [0, 2],
        [0, 2],
    ]
    assert (
        "client 1 has left: no reply in 2 rounds in a row; it is dropped from the totals until it "
        "rejoins" in town.strategy.faults
    )


@pytest.mark.parametrize(
    "method",
    some(["fednp", "scaffold", "fedper", "feddyn", "fedavg"], ["fednp"]),
)
def test_a_reply_that_was_not_used_never_happened(method, tmp_path):
    """Client 1's reply of round 2 is lost after it kept its state: in round 3 it goes on from round
    1, as if it had not been drawn.
    """

    def run(tamper, store):
        town = Town(method, {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2]}, store=store, tamper=tamper)
        town.strategy.start(
            town.grid,
            records.to_arrays({**town.halves.initial[0], **town.halves.initial[1]}),
            num_rounds=3,
            timeout=2,
        )
        return town

    def garbage(message, reply, told):
        if message.metadata.dst_node_id == FIRST_NODE + 1 and told["round"] == 2:
            reply.content[records.HEADER] = ConfigRecord(
                {**dict(reply.content[records.HEADER]), "round": 7}
            )
        return reply

    def early(message, reply, told):  # raised before anything was kept
        if message.metadata.dst_node_id == FIRST_NODE + 1 and told["round"] == 2:
            return Message(Error(code=2, reason="out of memory"), reply_to=message)
        return reply

    class Forgetful(DiskStore):
        def save(self, run, client, saved):
            if not (client == 1 and saved.round == 2):
                super().save(run, client, saved)

    lost = run(garbage, DiskStore(tmp_path / "lost"))
    never = run(early, Forgetful(tmp_path / "never"))
    assert lost.asked[3][1]["accepted"] == 1
    assert_same_bits(lost.strategy.state, never.strategy.state)
    a, b = (town.store.load(town.strategy.run, 1)[0] for town in (lost, never))
    assert a.round == b.round == 3
    assert_same_bits(a.state, b.state)
    assert [saved.round for saved in lost.store.load(lost.strategy.run, 1)] == [3, 1]


def test_a_client_whose_state_was_lost_says_so():
    """FedNP: the file is gone; the client sends turns = 0 and the ledger's line is replaced, not
    added to.
    """
    town = Town("fednp", {round: [0, 1] for round in range(1, 5)})
    before = town.strategy.after_round

    def lose(strategy, round, forced):
        before(strategy, round, forced)
        if round == 2:
            del town.store.kept[strategy.run, 1]

    town.strategy.after_round = lose
    town.start()
    assert [int(town.states[round].ledger["1/turns"]) for round in (2, 3, 4)] == [2, 1, 2]
    own = town.store.load(town.strategy.run, 1)[0].state
    assert torch.equal(town.states[4].ledger["1/precision"], own["factor/precision"])
    assert int(town.states[4].epoch) == 0


def test_a_node_that_says_it_is_somebody_else_is_left_out():
    """A second node with the number of a client that is there gets nothing; once that client's node
    is gone it takes its place.
    """
    town = Town("fedavg", {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2], 4: [0, 1, 2]})
    (twin,) = contexts([9])
    twin.node_config["partition-id"] = 1
    connect = town.connect

    def more(clients):
        connect([client for client in clients if not (client == 1 and len(town.states) >= 3)])
        if town.states:
            town.grid.contexts[twin.node_id] = twin

    town.connect = more
    town.start()
    claims = [
        fault
        for fault in town.strategy.faults
        if "claims client 1, already held by node 1001" in fault
    ]
    assert len(claims) == 1
    assert [town.trained(round) for round in (1, 2, 3, 4)] == [3, 3, 3, 3]
    assert sorted(town.asked[3]) == [0, 1, 2]
    assert sorted(town.asked[4]) == [0, 2, 9]  # client 1, now on the other node


def test_a_node_is_only_the_client_whose_key_it_has():
    """While client 1 is away, another enrolled node claims its number. The server registered both
    keys under their clients' names, so nobody else gets what is client 1's, and it can come back.
    """
    town = Town("fedavg", {1: [0, 1, 2], 2: [0, 2], 3: [0, 2], 4: [0, 1, 2]})
    (thief,) = contexts([9])
    thief.node_config["partition-id"] = 1
    connect = town.connect

    def more(clients):
        connect(clients)
        town.grid.contexts[thief.node_id] = thief

    town.connect = more
    more([0, 1, 2])
    town.grid.get_nodes = lambda: [
        NodeInfo(node_id=node, name=f"client-{node - FIRST_NODE}") for node in town.grid.contexts
    ]
    town.start()
    assert [sorted(town.asked[round]) for round in (1, 2, 3, 4)] == [
        [0, 1, 2],
        [0, 2],
        [0, 2],
        [0, 1, 2],
    ]
    why = "node 1009 cannot be used: its key is that of client 9, and it claims to be client 1"
    assert why in town.strategy.faults


def test_a_client_that_is_back_on_its_own_node_is_not_queried():
    """A query is a process of its own on the client: many of them, asked in vain, kept a slow
    machine from its work for minutes.
    """
    town = Town("fedavg", {1: [0, 1, 2]}).start()
    roster, push, pushed = town.strategy.roster, town.grid.push_messages, []
    town.grid.push_messages = lambda messages: push(
        [pushed.append(message) or message for message in messages]
    )
    roster.find(town.grid, [1], 5.0)
    assert pushed == []
    (moved,) = contexts([9])
    moved.node_config["partition-id"] = 1
    town.connect([0, 2])
    town.grid.contexts[moved.node_id] = moved
    roster.find(town.grid, [1], 5.0)
    assert [message.metadata.dst_node_id for message in pushed] == [moved.node_id]
    assert roster.members[1].node == moved.node_id


def test_a_late_client_with_another_network_is_left_out():
    town = Town("fedavg", {1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2]})
    honest = town.grid.app

    def other(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == 2:
            reply.content[records.HEADER] = ConfigRecord(
                {**dict(reply.content[records.HEADER]), "num_classes": 3}
            )
        return reply

    town.grid.app = other
    town.start()
    assert [town.trained(round) for round in (1, 2, 3)] == [2, 2, 2]
    assert (
        "client 2: it has other numbers of classes than the other clients"
        in town.strategy.faults[0]
    )


def test_a_client_that_fails_again_and_again_is_excluded():
    def bad(message, reply, told):
        if message.metadata.dst_node_id == FIRST_NODE + 1:
            return Message(Error(code=2, reason="broken disk"), reply_to=message)
        return reply

    town = Town(
        "fednp", {round: [0, 1, 2] for round in range(1, 6)}, tamper=bad, max_faults=2
    ).start()
    assert [sorted(town.asked[round]) for round in range(1, 6)] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 2],
        [0, 2],
        [0, 2],
    ]
    assert (
        "client 1: 2 invalid replies in a row; excluded from the run (max_faults is 2)"
        in town.strategy.faults
    )


def test_nobody_left_stops_the_run():
    plan = {1: [0, 1], 2: [], 3: [], 4: []}
    with pytest.raises(BayflowerError, match="no valid reply in 3 rounds in a row"):
        Town("fedavg", plan).start()


@pytest.mark.parametrize("method", some(["fednp", "metavd", "scaffold"], ["fednp"]))
def test_a_resumed_run_knows_who_was_there(method, tmp_path):
    """Client 3 joined before the checkpoint, client 2 left before it, client 4 comes with the
    resumed server, client 1 does not.
    """
    town = Town(method, {1: [0, 1, 2], 2: [0, 1, 3]}, store=DiskStore(tmp_path / "state")).start()
    s = town.strategy
    checkpoint.write(
        tmp_path,
        checkpoint.make(
            town.prepared.run, s.run, 2, s.state, {}, s.records, s.faults, s.roster.memory()
        ),
    )
    again = Town(method, {1: [0, 2, 3, 4], 3: [0, 2, 3, 4]}, store=DiskStore(tmp_path / "state"))
    again.strategy = make_strategy(
        again.prepared.run, after_round=again.after, resume=checkpoint.read(tmp_path)
    )
    again.start()
    assert sorted(again.asked[3]) == [0, 2, 3, 4]
    assert [told.get("returned") for told in again.asked[3].values()] == [None, True, None, None]
    assert "client 1 has left: it was absent when the run was resumed" in again.strategy.faults[-1]
    state = again.strategy.state
    if method == "fednp":
        assert {name.split("/")[0] for name in state.ledger} == {"0", "2", "3", "4"}
        assert [int(state.ledger[f"{client}/turns"]) for client in (0, 2, 3, 4)] == [3, 1, 2, 1]
    if method == "metavd":
        assert sorted(state.belief.seen) == ["0", "1", "2", "3", "4"]
    if method == "scaffold":
        assert int(state.num_clients) == 5
