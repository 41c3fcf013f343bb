"""Hooks of Flower's Strategy that a subclass overrides: each is called, and what it changes is what
happens.
"""

from __future__ import annotations

import time

import pytest
import torch
from conftest import assert_same_bits, some
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam as FlowersFedAdam
from flwr.serverapp.strategy import Result, Strategy
from smallapp import CLIENTS, app, grid, initial, make

from bayflower import strategies
from bayflower.errors import ConfigError
from bayflower.flower import records

FIRST = 1000  # node of client 0


def started(strategy, where, rounds: int = 2, **more):
    """Return the strategy's result after some rounds."""
    return strategy.start(where, initial(), num_rounds=rounds, timeout=60, **more)


def usual(method: str, tmp_path, kind=None, rounds: int = 2, **more):
    """Return (strategy, result) of a method on the small app."""
    strategy = make(kind or getattr(strategies, method), run="same", **more)
    where = grid(app(method.lower(), tmp_path))
    return strategy, started(strategy, where, rounds)


@pytest.mark.parametrize("method", some(["FedMAP", "PFedVMP"], ["PFedVMP"]))
def test_hooks_that_only_look_change_no_bit(method, tmp_path):
    """All hooks are called in Flower's order with Flower's arguments; a run with hooks that pass
    everything on has the bits of a run without them.
    """
    calls: list[tuple[str, int]] = []

    class Looking(getattr(strategies, method)):
        def configure_train(self, server_round, arrays, config, grid):
            assert set(arrays) == {"base.weight", "base.bias", "head.weight", "head.bias"}
            calls.append(("configure_train", server_round))
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            assert isinstance(replies, list)
            calls.append(("aggregate_train", len(replies)))
            return super().aggregate_train(server_round, replies)

        def configure_evaluate(self, server_round, arrays, config, grid):
            calls.append(("configure_evaluate", server_round))
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round, replies):
            calls.append(("aggregate_evaluate", len(list(replies))))
            return super().aggregate_evaluate(server_round, replies)

        def summary(self):
            calls.append(("summary", 0))

        def start(self, *args, **named):
            calls.append(("start", 0))
            return super().start(*args, **named)

    plain, want = usual(method, tmp_path / "plain")
    mine, got = usual(method, tmp_path / "mine", Looking)
    rounds = [
        [
            ("configure_train", n),
            ("aggregate_train", CLIENTS),
            ("configure_evaluate", n),
            ("aggregate_evaluate", CLIENTS),
        ]
        for n in (1, 2)
    ]
    assert calls == [("start", 0), ("summary", 0), *rounds[0], *rounds[1]]
    assert_same_bits(plain.state, mine.state)
    assert mine.faults == []
    assert sorted(got.evaluate_metrics_clientapp) == [1, 2]
    assert dict(got.evaluate_metrics_clientapp[2]) == dict(want.evaluate_metrics_clientapp[2])


def test_configure_train_may_send_fewer_messages_and_further_records(tmp_path):
    seen: list[tuple[int, dict]] = []

    class Half(strategies.FedMAP):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 3:
                return []  # nobody trains
            found = []
            for message in super().configure_train(server_round, arrays, config, grid):
                message.content["mine"] = ConfigRecord({"round": server_round})
                if message.metadata.dst_node_id < FIRST + 2:
                    found.append(message)
            return found

    where = grid(app("fedmap", tmp_path))

    def spy(message):
        if message.metadata.message_type == "train":
            seen.append((message.metadata.dst_node_id, dict(message.content["mine"])))
        return where.ask(message)

    where.fail = spy
    strategy = make(Half)
    started(strategy, where, 3)
    assert sorted(seen, key=lambda one: (one[1]["round"], one[0])) == [
        (FIRST + client, {"round": n}) for n in (1, 2) for client in (0, 1)
    ]
    assert [record["num_clients"] for record in strategy.records] == [2, 2, 0]
    assert strategy.faults == []
    assert set(strategy.outcome.views["personal"]) == set(range(CLIENTS))


def test_aggregate_train_may_leave_replies_out_change_the_model_and_undo_a_round(tmp_path):
    """Without client 3 the model is that of a run that never asked it; arrays that are returned are
    what clients are sent next; None leaves the model as it was.
    """
    kept: dict[int, ArrayRecord] = {}
    sent: dict[int, torch.Tensor] = {}

    class Choosing(strategies.FedAvg):
        def aggregate_train(self, server_round, replies):
            chosen = [r for r in replies if r.metadata.src_node_id != FIRST + 3]
            arrays, _ = super().aggregate_train(server_round, chosen)
            if server_round == 2:
                doubled = {k: 2 * v for k, v in arrays.to_torch_state_dict().items()}
                arrays = ArrayRecord(doubled)
            if server_round == 3:
                arrays = None
            kept[server_round] = arrays
            return arrays, MetricRecord({"mine": server_round})

    class Without(strategies.FedAvg):
        def configure_train(self, *args):
            messages = super().configure_train(*args)
            return [one for one in messages if one.metadata.dst_node_id != FIRST + 3]

    where = grid(app("fedavg", tmp_path / "a"))

    def spy(message):
        if message.metadata.message_type == "train":
            head = dict(message.content[records.HEADER])
            sent[head["round"]] = records.to_tensors(message.content["broadcast"])
        return where.ask(message)

    where.fail = spy
    strategy = make(Choosing, leave_after=1)
    result = started(strategy, where, 4)
    other = make(Without)
    started(other, grid(app("fedavg", tmp_path / "b")), 1)
    assert_same_bits(
        records.to_tensors(kept[1]), {name: other.state.params[name] for name in kept[1]}
    )
    assert_same_bits(
        {name: sent[3][f"params/{name}"] for name in kept[2]}, records.to_tensors(kept[2])
    )
    assert_same_bits(sent[4], sent[3])  # round 3 was undone
    assert dict(result.train_metrics_clientapp[2]) == {"mine": 2}
    assert strategy.faults == []
    assert strategy.roster.left == set()  # a client that is left out is not silent


def test_configure_evaluate_may_test_some_clients_in_some_rounds(tmp_path):
    class Rarely(strategies.FedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid):
            if server_round == 1:
                return []
            messages = super().configure_evaluate(server_round, arrays, config, grid)
            return [one for one in messages if one.metadata.dst_node_id == FIRST + 1]

    strategy, result = usual("FedAvg", tmp_path, Rarely, 3)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 3]
    assert set(strategy.outcome.views["personal"]) == {1}
    assert saved(tmp_path) == set(range(CLIENTS))


class Own:
    """A `start` of the user's own: Flower's loop with a stop."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, evaluate_fn=None):
        result, arrays = Result(), initial_arrays
        for number in range(1, num_rounds + 1):
            replies = grid.send_and_receive(
                messages=self.configure_train(number, arrays, ConfigRecord(), grid)
            )
            found, metrics = self.aggregate_train(number, replies)
            arrays = found if found is not None else arrays
            result.arrays, result.train_metrics_clientapp[number] = arrays, metrics
            replies = grid.send_and_receive(
                messages=self.configure_evaluate(number, arrays, ConfigRecord(), grid)
            )
            result.evaluate_metrics_clientapp[number] = self.aggregate_evaluate(number, replies)
        return result


@pytest.mark.parametrize("method", some(["FedMAP", "PFedVMP", "FedPer"], ["PFedVMP"]))
@pytest.mark.parametrize("loop", [pytest.param("own", marks=pytest.mark.slow), "Flower's"])
def test_a_start_of_ones_own_runs_every_method(method, loop, tmp_path):
    base = getattr(strategies, method)

    class Mine(Own, base):
        pass

    class Theirs(base):
        def start(self, *args, **named):
            return Strategy.start(self, *args, **named)

    plain, want = usual(method, tmp_path / "plain")
    mine, got = usual(method, tmp_path / "mine", Mine if loop == "own" else Theirs)
    assert_same_bits(plain.state, mine.state)
    assert_same_bits(records.to_tensors(want.arrays), records.to_tensors(got.arrays))
    assert dict(got.evaluate_metrics_clientapp[2]) == dict(want.evaluate_metrics_clientapp[2])
    assert saved(tmp_path / "mine") == set(range(CLIENTS))
    assert all(record["seconds"] > 0 for record in mine.records)


def test_hooks_on_the_object_count_too(tmp_path):
    strategy = make(strategies.FedMAP)
    configure = strategy.configure_train
    strategy.configure_train = lambda *args: list(configure(*args))[:1]
    started(strategy, grid(app("fedmap", tmp_path)), 1)
    assert strategy.records[0]["num_clients"] == 1


# -- what is refused ---------------------------------------------------------------------------
def test_what_is_never_called_is_refused_by_name_at_construction():
    class Private(strategies.FedMAP):
        def _construct_messages(self, record, node_ids, message_type):
            return []

    class Both(strategies.FedMAP, FlowersFedAdam):
        pass

    with pytest.raises(ConfigError, match="Private overrides _construct_messages, which Bayflower"):
        make(Private)
    with pytest.raises(ConfigError, match="Both is a subclass of Flower's FedAdam too"):
        make(Both)


def own_messages(self, server_round, arrays, config, grid):
    record = RecordDict({"arrays": arrays})
    return [Message(record, dst_node_id=FIRST, message_type="train")]


def stripped(self, *args):
    messages = list(strategies.FedMAP.configure_train(self, *args))
    for message in messages:
        del message.content[records.HEADER]
    return messages


def twice(self, *args):
    return 2 * list(strategies.FedMAP.configure_train(self, *args))


def strange(self, *args):
    message, *_ = strategies.FedMAP.configure_train(self, *args)
    return [Message(message.content, dst_node_id=7, message_type="train")]


def few(self, server_round, replies):
    arrays, metrics = strategies.FedMAP.aggregate_train(self, server_round, replies)
    del arrays["base.bias"]
    return ArrayRecord(dict(arrays)), metrics


WRONG = {
    "own messages": ("configure_train", own_messages, "without a call of super"),
    "no header": ("configure_train", stripped, "lacks what FedMAP sends"),
    "twice": ("configure_train", twice, "returned two messages to node"),
    "nobody": ("configure_train", strange, "node 7, where no client is"),
    "no super": ("aggregate_train", lambda *_: (None, None), r"did not call super\(\)"),
    "not a pair": ("aggregate_train", lambda *_: None, r"must return \(arrays, metrics\), got"),
    "few arrays": ("aggregate_train", few, "lacks the array 'base.bias'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_override_must_not_do_is_said_with_its_name(case, tmp_path):
    name, hook, text = WRONG[case]
    wrong = type("Wrong", (strategies.FedMAP,), {name: hook})
    with pytest.raises(ConfigError, match=text) as error:
        started(make(wrong), grid(app("fedmap", tmp_path)), 1)
    assert name in str(error.value)


# -- personal models ---------------------------------------------------------------------------
def saved(folder) -> set[int]:
    """Return the clients with a personal model in a folder of states."""
    return {
        int(path.parent.parent.name.split("-")[-1])
        for path in folder.rglob("personal/model.safetensors")
    }


@pytest.mark.parametrize("fraction", some([1.0, 0.5, 0.0], [0.5]))
def test_all_clients_save_their_personal_models_whatever_share_is_tested(fraction, tmp_path):
    strategy, result = usual("FedMAP", tmp_path, fraction_evaluate=fraction, min_evaluate_nodes=1)
    assert saved(tmp_path) == set(range(CLIENTS))
    assert len(strategy.outcome.views.get("personal", {})) == fraction * CLIENTS
    assert bool(result.evaluate_metrics_clientapp) == (fraction > 0)
    assert strategy.faults == []


@pytest.mark.slow
def test_clients_can_be_spared_the_last_message(tmp_path):
    usual("FedMAP", tmp_path, fraction_evaluate=0.5, min_evaluate_nodes=1, keep_personal=False)
    assert len(saved(tmp_path)) == 2


def test_a_test_in_the_middle_saves_no_model(tmp_path):
    """Only the last of a run's tests is followed by the work of saving."""
    times: list[float] = []

    class Every(strategies.FedMAP):
        def aggregate_evaluate(self, server_round, replies):
            times.append(time.perf_counter())
            assert (saved(tmp_path) == set()) == (server_round < 2)
            return super().aggregate_evaluate(server_round, replies)

    usual("FedMAP", tmp_path, Every)
    assert len(times) == 2
