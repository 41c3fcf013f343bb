"""Rounds that do not wait (`aggregation=buffered`): FedBuff's steps against a slow oracle, equal
bits with a full buffer, records that replay, resuming, and faults.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from buffers import QUICK, SLOW, begun, same_outcome, started
from smallruns import small, small_prepared

from bayflower.config import parse
from bayflower.data import batches
from bayflower.engines import execute, prepare
from bayflower.errors import ConfigError
from bayflower.files import arrivals, checkpoint
from bayflower.files.store import DiskStore
from bayflower.flower.loop import FIRST_NODE, InProcessGrid
from bayflower.flower.records import to_arrays
from bayflower.methods import METHODS
from bayflower.recipes.aggregation import not_an_increment
from bayflower.rounds import solo
from bayflower.rounds.clock import Clock
from bayflower.rounds.rebased import rebased
from bayflower.strategies.fedavg import State, Update


def fedbuff(prepared, steps, size, seconds, weight):
    """Return FedBuff's model after some steps, and each step's (client, staleness): a loop over
    arrivals, every change kept, sums in float64.
    """
    half, seed = prepared.halves.client, prepared.run.settings.seed
    data = {one.client: solo.samples(one, torch.device("cpu"), torch.float64)
            for one in prepared.federation.clients}  # fmt: skip
    params, buffers = prepared.halves.initial
    states = {client: half.init(params, buffers) for client in data}
    model = {name: value.clone() for name, value in params.items()}
    queue, log = [], []

    def send(client, version, now):
        tie = float(batches.rng(seed, "clock", client, version + 1).random())
        heapq.heappush(queue, (now + seconds[client], tie, client, version, dict(model)))

    for client in data:
        send(client, 0, 0.0)
    for version in range(steps):
        changes, now = [], 0.0
        while len(changes) < size:
            now, _, client, began, start = heapq.heappop(queue)
            keys = {"round": began + 1, "seed": seed, "client": client}
            broadcast = State(start, buffers)
            done = solo.train(half, states[client], broadcast, data[client].train, **keys)
            states[client] = done.state
            late, count = version - began, int(done.update.num_examples)
            delta = {name: done.update.params[name] - start[name] for name in start}
            changes.append((client, late, count, delta))
        total = sum(count for _, _, count, _ in changes)
        for name in model:
            step = sum(count * weight(late) * delta[name] for _, late, count, delta in changes)
            model[name] = model[name] + step / total
        log.append(sorted((client, late) for client, late, _, _ in changes))
        for client, *_ in changes:
            send(client, version + 1, now)
    return model, log


@pytest.mark.parametrize(
    "how", ["root", *(pytest.param(one, marks=pytest.mark.slow) for one in ("linear", "none"))]
)
def test_steps_are_those_of_fedbuff(how, tmp_path):
    """A run with stale replies against a loop over arrivals; float64."""
    settings = {**SLOW, **QUICK, "rounds": 9, "staleness": how, "client_seconds": "3:2.5,4:4"}
    settings |= {"buffer_rate": 0.7} if how == "linear" else {}
    prepared = small_prepared("fedavg", dtype="float64", robust="off", **settings)
    found = execute(prepared, out=tmp_path)
    weights = {
        "root": lambda late: 1 / math.sqrt(1 + late),
        "linear": lambda late: 0.7 / (1 + late),
        "none": lambda late: 1.0,
    }
    seconds = {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.5, 4: 4.0}
    model, log = fedbuff(prepared, 9, 2, seconds, weights[how])
    assert max(late for step in log for _, late in step) >= 4
    for name, value in model.items():
        assert torch.allclose(found.server_state.params[name], value, rtol=0, atol=1e-13)
    _, steps = arrivals.read(tmp_path / arrivals.FILE)
    used = [sorted((client, step - asked) for client, asked in steps[step].used) for step in steps]
    assert used == log


def test_a_change_is_counted_from_the_present_model():
    """w' = now + s (w − then) [eq. 1]; counters are whole numbers, and the sample count stays."""
    then = State({"w": torch.tensor([1.0, 2.0])}, {"n": torch.tensor(10)})
    now = State({"w": torch.tensor([5.0, 5.0])}, {"n": torch.tensor(40)})
    update = Update(torch.tensor(7), {"w": torch.tensor([2.0, 0.0])}, {"n": torch.tensor(15)})
    found = rebased(then, now, update, 0.5)
    assert found.params["w"].tolist() == [5.5, 4.0]
    assert int(found.buffers["n"]) == 42  # 40 + 2.5, to even
    assert found.buffers["n"].dtype == torch.int64
    assert int(found.num_examples) == 7


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"model": "mlp-bn"}),
        ("fedper", {"fraction_train": 0.6}),
        pytest.param("reptile", {"server_momentum": 0.5}, marks=pytest.mark.slow),
        pytest.param("pfedbayes", {}, marks=pytest.mark.slow),
        pytest.param("ditto", {"fraction_train": 0.6}, marks=pytest.mark.slow),
    ],
)
def test_a_full_buffer_gives_the_bits_of_rounds(method, more):
    """Also where clients differ in speed, with robust=gate: nobody is stale."""
    settings = {"rounds": 3, "evaluate_every": 1, **more}
    want = execute(small_prepared(method, **settings))
    full = {"aggregation": "buffered", "buffer": 5, "client_seconds": "1:3,4:2"}
    same_outcome(want, execute(small_prepared(method, **settings, **full)))


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_or_refuses(method):
    if not_an_increment(METHODS[method]):
        with pytest.raises(ConfigError, match=f"aggregation=buffered is not for {method}: "):
            small(method, **SLOW, **QUICK)
        return
    found = execute(small_prepared(method, **SLOW, **QUICK, rounds=7))
    assert all(value.isfinite().all() for value in found.server_state.params.values())
    assert max(record["staleness"] for record in found.rounds) > 0


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fednp", "'change'"),
        ("scaffold", "'control_change'"),
        ("feddyn", "its server keeps 'drift'"),
        ("fedbe", "are sent 'variance'"),
        ("fedmap", "'belief'"),
        ("metavd", "depends on the client"),
        ("fedla", "'precision'"),
        ("local", "shares nothing"),
    ],
)
def test_methods_whose_updates_are_not_increments_refuse(method, why):
    with pytest.raises(ConfigError, match=f"not for {method}: .*{why}.*use aggregation=rounds$"):
        parse(method, {"aggregation": "buffered"})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"buffer": 3}, "buffer=3 needs aggregation=buffered"),
        ({"replay": "x"}, "replay=x needs aggregation=buffered"),
        ({"aggregation": "often"}, "must be one of rounds, buffered"),
        ({"aggregation": "buffered", "secure": "sum"}, "secure=sum"),
        ({"aggregation": "buffered", "dp": "client"}, "dp=client"),
        ({"aggregation": "buffered", "max_share": 0.4}, "max_share"),
        ({"buffer_rate": 0}, "buffer_rate must be in"),
        ({"client_seconds": "0-3"}, "client_seconds must be like"),
        ({"client_seconds": "5-3:1"}, "ascending order"),
        ({"client_seconds": "1:0"}, "seconds in"),
    ],
)
def test_impossible_settings_are_one_line(settings, why):
    with pytest.raises(ConfigError, match=why) as caught:
        parse("fedavg", settings)
    assert "\n" not in str(caught.value)


def test_engines_that_cannot_do_it_say_which_can(tmp_path):
    with pytest.raises(ConfigError, match=r"--engine loop \(simulated times\), ray or deployment"):
        prepare(small("fedavg", **SLOW), "fused")
    with pytest.raises(ConfigError, match="client_seconds is for simulated times, got engine ray"):
        prepare(small("fedavg", client_seconds="1:2"), "ray")
    with pytest.raises(ConfigError, match="min_replies is 3, but a step has 2 replies"):
        execute(small_prepared("fedavg", **SLOW, **QUICK, min_replies=3))
    wrong = small_prepared("fedavg", aggregation="buffered", replay=str(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match="does not exist"):
        execute(wrong)


def test_rounds_can_have_simulated_seconds_too():
    """A round takes as long as its slowest client; the result is that of any other run."""
    timed = execute(small_prepared("fedavg", **QUICK, client_seconds="3:4,4:7.5"))
    assert [record["simulated_seconds"] for record in timed.rounds] == [7.5, 7.5]
    same_outcome(timed, execute(small_prepared("fedavg", **QUICK)))


def test_stragglers_do_not_hold_the_others_up():
    """Two of five are ten times slower: steps of two replies take the fast clients' second, and the
    slow ones count as well. Five rounds would have taken 50 seconds.
    """
    found = execute(small_prepared("fedavg", **SLOW, **QUICK, rounds=13))
    seconds = [record["simulated_seconds"] for record in found.rounds]
    assert max(seconds) == 1.0
    assert sum(seconds) < 13.0
    assert max(record["staleness"] for record in found.rounds) > 3
    assert {record["num_clients"] for record in found.rounds} == {2}


def test_a_part_of_the_clients_trains_at_any_time(tmp_path):
    """Four of eight train at a time, two replies a step: idle clients take the place of those that
    replied to an older model at once, of the others with the next step, and all take part.
    """
    settings = {**QUICK, "num_clients": 8, "fraction_train": 0.5, "rounds": 12, "buffer": 2}
    settings |= {"aggregation": "buffered", "client_seconds": "0-2:1,3-5:1.7,6-7:4"}
    execute(small_prepared("fedavg", **settings), out=tmp_path)
    _, steps = arrivals.read(tmp_path / arrivals.FILE)
    out, trained, early = set(), set(), 0
    for step, asked, used, left in steps.values():
        assert not out & set(asked)  # nobody is asked twice
        before, fresh = len(out), sum(round == step for _, round in used)
        out |= set(asked)
        early += before + len(asked) > 4
        assert 4 <= len(out) <= 4 + 2 - fresh
        out -= {client for client, _ in used}
        trained |= {client for client, _ in used}
        assert len(used) == 2
        assert not left
    assert early > 2
    assert trained == set(range(8))


class Threaded(InProcessGrid):
    """Clients that train at the same time, each after a random time."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes)
        self.pool, self.done, self.lock = ThreadPoolExecutor(5), {}, threading.Lock()
        self.chance = random.Random(time.time())

    def push_messages(self, messages):
        known = list(messages)
        for message in known:
            records = message.content.config_records.values()
            trains = any("round" in record for record in records)
            message.__dict__["wait"] = self.chance.random() * 0.2 if trains else 0.0
        numbers = list(super().push_messages(known))
        for number in numbers:
            self.done[number] = self.pool.submit(self._work, self.inbox.pop(number))
        return numbers

    def _work(self, message):
        time.sleep(message.__dict__["wait"])
        with self.lock:
            return self._answer(message)

    def pull_messages(self, message_ids):
        for number in set(message_ids) & self.done.keys():
            if self.done[number].done():
                return [self.done.pop(number).result()]
        return []


def test_a_run_with_real_delays_is_replayed_to_the_same_bits(tmp_path, monkeypatch):
    """Five threads with random delays, a client that fails and personal heads; then the record on
    the loop engine, and once more from the loop's own record.
    """
    monkeypatch.setattr("bayflower.flower.flow.POLL_SECONDS", 0.01)
    settings = {**QUICK, "aggregation": "buffered", "buffer": 2, "rounds": 8, "evaluate_every": 1}
    prepared = small_prepared("fedper", **settings)
    failed = Counter()

    class Failing(Threaded):
        def ask(self, message):
            node = message.metadata.dst_node_id
            failed[node] += 1
            if node == FIRST_NODE + 1 and failed[node] == 3:
                raise_to = super().ask
                message.content.array_records.clear()
                return raise_to(message)
            return super().ask(message)

    real = started(prepared, Failing, DiskStore(tmp_path / "state"), folder=tmp_path)
    record = tmp_path / arrivals.FILE
    _, steps = arrivals.read(record)
    assert len(steps) == 8
    assert any(step - asked for step in steps for _, asked in steps[step].used)
    again = {**settings, "replay": str(record)}
    replayed = execute(small_prepared("fedper", **again), out=tmp_path / "again")
    same_outcome(real.outcome, replayed)
    assert arrivals.read(tmp_path / "again" / arrivals.FILE)[1] == steps
    with pytest.raises(ConfigError, match=r"has seed=0, this run seed=1"):
        execute(small_prepared("fedper", **again, seed=1))
    with pytest.raises(ConfigError, match="has no step 9; set rounds=8"):
        execute(small_prepared("fedper", **{**again, "rounds": 9}))


def test_a_resumed_run_has_the_same_bits_and_record(tmp_path):
    """Stopped with two clients in the middle of their training, from an old model."""
    settings = {**SLOW, **QUICK, "checkpoint_every": 1}
    whole = execute(small_prepared("fedper", **settings, rounds=9), out=tmp_path / "whole")
    half, there = small_prepared("fedper", **settings, rounds=5), tmp_path / "half"
    execute(half, out=there)
    resume = checkpoint.to_resume(there, half.run)
    assert sorted(resume.roster["buffered"]["out"].values()) == [1, 1, 5]
    assert sorted(resume.sent) == [1, 5]
    with (there / arrivals.FILE).open("a") as file:  # a step after the last checkpoint, and a crash
        file.write('{"step": 6, "asked": [], "used": [], "left_out": []}\n{"step": 7, "ask')
    rest = small_prepared("fedper", **settings, rounds=9)
    resumed = execute(rest, out=there, resume=checkpoint.to_resume(there, rest.run))
    same_outcome(whole, resumed)
    records = [arrivals.read(tmp_path / name / arrivals.FILE)[1] for name in ("whole", "half")]
    assert records[0] == records[1]
    times = [[one["simulated_seconds"] for one in run.rounds] for run in (whole, resumed)]
    assert times[0] == times[1]


def test_only_models_that_someone_trains_from_are_kept():
    prepared = small_prepared("fedavg", **SLOW, **QUICK, rounds=8)
    seen = []

    def look(strategy, round, forced):
        seen.append((sorted(strategy.kept()), len(strategy.buffering.flow.talk.asked)))

    started(prepared, clock=Clock({3: 10.0, 4: 10.0}, 0), after_round=look)
    assert [kept[0] for kept, _ in seen] == [1] * 8  # of the two slow clients
    assert max(len(kept) for kept, _ in seen) <= 3
    assert {asked for _, asked in seen} == {3}


def test_a_strategy_of_ones_own_takes_the_settings_and_refuses_hooks():
    from bayflower.strategies import FedAvg

    class Hooked(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    hooked = Hooked(aggregation="buffered", buffer=2)
    prepared = small_prepared("fedavg", **QUICK)
    _, grid = begun(prepared)
    params, buffers = prepared.halves.initial
    with pytest.raises(ConfigError, match="remove the overridden configure_train"):
        hooked.start(grid, to_arrays({**params, **buffers}), num_rounds=1)
    plain = FedAvg(aggregation="buffered", buffer=2, min_available_nodes=5)
    plain.start(grid, to_arrays({**params, **buffers}), num_rounds=3)
    assert [record["num_clients"] for record in plain.records] == [2, 2, 2]


def test_the_record_is_one_line_a_step_and_says_whose_it_is(tmp_path):
    execute(small_prepared("fedavg", **SLOW, **QUICK, rounds=3), out=tmp_path)
    first, *rest = (tmp_path / arrivals.FILE).read_text().splitlines()
    facts = json.loads(first)
    assert (facts["format"], facts["method"], facts["seed"]) == (arrivals.FORMAT, "fedavg", 0)
    assert [json.loads(line)["step"] for line in rest] == [1, 2, 3]
    (tmp_path / "other.jsonl").write_text("no record\n")
    with pytest.raises(ConfigError, match="is not a record of arrivals"):
        arrivals.read(tmp_path / "other.jsonl")
