"""The Flower side: bad replies, order, memory, identity, and what crosses the wire."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits
from flwr.app import ConfigRecord, Error, Message, MetricRecord
from rig import VICTIM, Rig, broken_array, drop_record, head, rewrite, set_loss, set_value

from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower import records
from bayflower.flower.loop import run_loop
from bayflower.strategies import FedMAP, FedProx
from bayflower.tree import flatten, unflatten

WEIGHT = "params/head.weight"
GARBAGE = {
    "nan": (set_value(WEIGHT, float("nan")), "not finite"),
    "inf": (set_value(WEIGHT, float("inf")), "not finite"),
    "shape": (rewrite(lambda flat: flat.update({WEIGHT: flat[WEIGHT][:, :-1]})), "has shape"),
    "dtype": (
        rewrite(lambda flat: flat.update({WEIGHT: flat[WEIGHT].double()})),
        "has dtype float64, expected float32",
    ),
    "missing key": (rewrite(lambda flat: flat.pop(WEIGHT)), "is missing"),
    "extra key": (
        rewrite(lambda flat: flat.update({"params/more": torch.zeros(1)})),
        "is not expected",
    ),
    "no samples": (set_value("num_examples", 0), "num_examples"),
    "weight nan": (set_value("log_weight", float("nan")), "not finite"),
    "weight absurd": (set_value("log_weight", 1e300), "log_weight"),
    "another round": (head(round=7), "round 7"),
    "another run": (head(run="else"), "run 'else'"),
    "another method": (head(method="fedavg"), "method 'fedavg'"),
    "unknown client": (head(client=99), "client 99 is unknown"),
    "client of another kind": (head(client="x"), "is unknown"),
    "another client": (head(client=1), "another node"),
    "protocol": (head(protocol=0), "protocol must be 3, got 0"),
    "no update": (drop_record(records.UPDATE), "ArrayRecord 'update' is missing"),
    "no header": (drop_record(records.HEADER), "ConfigRecord 'bayflower' is missing"),
    "loss nan": (set_loss(float("nan")), "train-loss must be a finite"),
    "loss missing": (set_loss(None), "train-loss must be a finite"),
    "huge count": (set_value("num_examples", 2**62), "num_examples"),
    "not npy": (broken_array, "cannot be read"),
    "error": (
        lambda message, reply: Message(Error(code=2, reason="disk on fire"), reply_to=message),
        "disk on fire",
    ),
}


@pytest.fixture(scope="module")
def without_victim():
    rig = Rig(members=[0, 1, 3, 4])
    rig.start()
    return rig.strategy.state


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_reported_and_the_state_is_as_without_that_client(kind, without_victim):
    tamper, words = GARBAGE[kind]
    rig = Rig(tamper=tamper)
    rig.start()
    assert_same_bits(rig.strategy.state, without_victim)
    (fault,) = rig.strategy.faults
    assert f"round 1, client {VICTIM}" in fault
    assert words in fault
    assert rig.strategy.records[0]["num_clients"] == 4


def tamper_tally(change):
    def tamper(message, reply):
        if records.TALLY in reply.content:
            flat = records.arrays(reply, records.TALLY)
            change(flat)
            reply.content[records.TALLY] = records.to_arrays(flat)
        return reply

    return tamper


LIES = {
    "nan": (lambda flat: flat["personal/nll"].fill_(float("nan")), "not finite"),
    "negative": (lambda flat: flat["personal/correct"].fill_(-1), "is inconsistent"),
    "sum": (lambda flat: flat["personal/num_examples"].fill_(10**6), "is inconsistent"),
    "missing": (lambda flat: flat.pop("personal/nll"), "is missing"),
    "shape": (
        lambda flat: flat.update({"personal/bin_count": torch.zeros(3, dtype=torch.int64)}),
        "has shape",
    ),
    "dtype": (
        lambda flat: flat.update({"personal/correct": flat["personal/correct"].double()}),
        "has dtype",
    ),
    "matrix": (
        lambda flat: flat.update({"personal/class_total": torch.zeros(2, 2, dtype=torch.int64)}),
        "has shape",
    ),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_test_result_that_cannot_be_is_refused(kind):
    change, words = LIES[kind]
    rig = Rig(tamper=tamper_tally(change), evaluate_every=1)
    rig.start(rounds=2)
    assert words in rig.strategy.faults[0]
    assert rig.strategy.faults[0].startswith(f"round 2, client {VICTIM}")
    assert rig.strategy.records[1]["num_clients"] == 4


def test_nodes_that_answer_nonsense_are_left_out():
    rig = Rig()
    honest = rig.grid.app

    def liar(message, context):
        reply = honest(message, context)
        if (
            message.metadata.message_type == "query"
            and context.node_config["partition-id"] == VICTIM
        ):
            reply.content[records.HEADER] = ConfigRecord(
                {**dict(reply.content[records.HEADER]), "client": "me", "anatomy": "{"}
            )
        return reply

    rig.grid.app = liar
    rig.start()
    assert "cannot be used" in rig.strategy.faults[0]
    assert rig.strategy.records[0]["num_clients"] == 4


def test_a_silent_client_is_reported_after_the_timeout(without_victim):
    rig = Rig(tamper=lambda message, reply: None)
    rig.start(timeout=3)
    assert_same_bits(rig.strategy.state, without_victim)
    assert rig.strategy.faults == [
        f"round 1, client {VICTIM}: no reply before the timeout; ignored in this round"
    ]


def test_no_valid_reply_leaves_the_state_and_says_so():
    rig = Rig(members=[VICTIM], tamper=GARBAGE["nan"][0])
    with pytest.raises(BayflowerError, match="no client could be trained in any round"):
        rig.start()
    want = rig.halves.server.init(*rig.halves.initial, ())
    assert_same_bits(rig.strategy.state, want)
    assert "no valid reply; the global state is unchanged" in rig.strategy.faults[-1]
    assert rig.strategy.records[0]["train_loss"] is None


def test_too_few_replies_stop_the_run():
    rig = Rig(tamper=GARBAGE["nan"][0], min_replies=5)
    with pytest.raises(BayflowerError, match="round 1: 4 valid replies, min_replies is 5"):
        rig.start()


def test_too_few_replies_in_a_later_round_leave_a_checkpoint_of_the_round_before():
    saved = []

    def only_in_round_2(message, reply):
        return (
            reply
            if dict(message.content[records.HEADER])["round"] == 1
            else GARBAGE["nan"][0](message, reply)
        )

    rig = Rig(tamper=only_in_round_2, min_replies=5)
    rig.strategy.after_round = lambda strategy, round, forced: saved.append(
        (round, forced, strategy.state)
    )
    with pytest.raises(BayflowerError, match="round 2: 4 valid replies, min_replies is 5"):
        rig.start(rounds=3)
    assert [(round, forced) for round, forced, _ in saved] == [(1, False), (1, True)]
    assert_same_bits(saved[0][2], saved[1][2])


def test_a_second_reply_is_not_counted():
    want = Rig()
    want.start()
    rig = Rig()
    pull = rig.grid.pull_messages

    def twice(message_ids):
        replies = list(pull(message_ids))
        return [
            Message(content=records.copy_content(one.content), metadata=one.metadata)
            for one in replies
            for _ in range(2)
        ]

    rig.grid.pull_messages = lambda ids: twice(ids) if rig.strategy.half else pull(ids)
    rig.start()
    assert_same_bits(rig.strategy.state, want.strategy.state)
    assert rig.strategy.records[0]["num_clients"] == 5
    assert sum("duplicate reply in the same round" in fault for fault in rig.strategy.faults) >= 4


def test_a_lost_client_is_asked_again_and_one_that_stays_lost_is_left_out(without_victim):
    """Flower's code 5 (node unavailable): once, and the round is complete; always, and the round
    goes on without it.
    """
    whole = Rig()
    whole.start()
    gone = []

    def once(message, reply):
        gone.append(message)
        return (
            Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
            if len(gone) == 1
            else reply
        )

    rig = Rig(tamper=once)
    rig.start()
    assert len(gone) == 2
    assert rig.strategy.faults == []
    assert_same_bits(rig.strategy.state, whole.strategy.state)
    rig = Rig(
        tamper=lambda message, reply: Message(
            Error(code=5, reason="Node Unavailable"), reply_to=message
        ),
        rejoin_seconds=0.5,
    )
    rig.start()
    assert_same_bits(rig.strategy.state, without_victim)
    assert "Node Unavailable" in rig.strategy.faults[0]


def test_a_client_that_raises_is_a_fault_with_client_round_and_stage():
    rig = Rig()
    bad = rig.grid.app
    rig.grid.app = lambda message, context: (
        (_ for _ in ()).throw(RuntimeError("boom"))
        if (
            message.metadata.message_type == "train"
            and context.node_config["partition-id"] == VICTIM
        )
        else bad(message, context)
    )
    rig.start()
    assert rig.strategy.faults == [
        f"round 1, client {VICTIM}: reply not used: the client failed: boom"
    ]


def test_a_node_with_anothers_number_is_left_out_and_named():
    """The run goes on without it; where the disputed ones are half of all, nothing starts."""
    rig = Rig()
    rig.grid.contexts[1004].node_config["partition-id"] = 0
    rig.start()
    assert rig.strategy.faults[0] == (
        "nodes 1000 and 1004 both claim client 0; give each node its own partition-id; the one "
        "that answered first takes part"
    )
    assert rig.strategy.roster.present() == [0, 1, 2, 3]
    rig = Rig(members=[0, 1])
    rig.grid.contexts[1001].node_config["partition-id"] = 0
    with pytest.raises(BayflowerError, match=r"nodes \d+ and \d+ both claim client 0"):
        rig.start()


def test_losses_out_of_all_proportion_stay_out_of_metrics():
    rig = Rig(tamper=set_loss(-1e30))
    rig.start()
    assert abs(rig.strategy.records[0]["train_loss"]) < 10
    assert f"client {VICTIM}: its training loss -1e+30 is out of" in rig.strategy.faults[0]


def test_too_many_arrays_are_refused_before_they_are_read(monkeypatch):
    read, plain = [], records.to_tensors
    tamper = rewrite(lambda flat: flat.update({f"x{i}": torch.zeros(1) for i in range(1000)}))
    rig = Rig(tamper=tamper)

    def counting(record, *more):
        read.append(len(record))
        return plain(record, *more)

    monkeypatch.setattr("bayflower.flower.wrapped.records.to_tensors", counting)
    rig.start()
    assert max(read) < 1000
    assert "arrays, more than" in rig.strategy.faults[0]


def test_a_repeated_message_is_answered_not_applied_twice():
    rig = Rig()
    rig.start()
    message = next(
        m for m in rig.seen if m.metadata.message_type == "train" and records.BROADCAST in m.content
    )
    again, once_more = (
        rig.grid.ask(
            Message(content=records.copy_content(message.content), metadata=message.metadata)
        )
        for _ in range(2)
    )
    first = next(
        m
        for m in rig.seen
        if records.UPDATE in m.content and m.metadata.src_node_id == message.metadata.dst_node_id
    )
    for reply in (again, once_more):
        assert {k: a.data for k, a in reply.content[records.UPDATE].items()} == {
            k: a.data for k, a in first.content[records.UPDATE].items()
        }


def test_clients_cannot_change_what_the_server_sent():
    rig = Rig()
    original = rig.grid.app

    def vandal(message, context):
        reply = original(message, context)
        if records.BROADCAST in message.content:
            message.content[records.BROADCAST].clear()
        return reply

    rig.grid.app = vandal
    rig.start()
    assert rig.strategy.faults == []


def test_result_and_outcome_agree_with_the_run():
    rig = Rig(rounds=2)
    result = rig.start(rounds=2)
    want = run_loop(rig.prepared.run, rig.prepared.federation, rig.halves)
    assert_same_bits(rig.strategy.outcome.server_state, want.server_state)
    arrays = records.to_tensors(result.arrays)
    assert_same_bits(arrays, rig.halves.server.shared(want.server_state))
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert isinstance(result.evaluate_metrics_clientapp[2], MetricRecord)
    assert unflatten(type(want.server_state), flatten(want.server_state)) is not None


def test_strategies_take_their_settings_by_name():
    assert FedMAP(sigma2=3, lr=0.1).options.sigma2 == 3
    assert FedProx(mu=0.5, fraction_train=0.5).options.mu == 0.5
    with pytest.raises(ConfigError, match="method 'fedmap' has no setting 'xi'"):
        FedMAP(xi=1)
    with pytest.raises(ConfigError, match="fraction_train must be in"):
        FedMAP(fraction_train=0)
    with pytest.raises(ConfigError, match="sigma2 must be positive"):
        FedMAP(sigma2=-1)
