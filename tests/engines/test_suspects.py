"""Who is left out of a round, and which entries count: never a majority, never what did not travel.
Oracles are numpy, one client after another, and what is packed for the wire.
"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, some

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.files.place import decisive
from bayflower.flower.collected import Arriving
from bayflower.maths.exact import Total
from bayflower.rounds import gate, robust, solo
from bayflower.rounds.gate import MANY
from bayflower.rounds.parts import STEP, Part, limited, parts_of, size_of
from bayflower.rounds.robust import Limiter
from bayflower.rounds.suspects import FAR, OPPOSED, TURNED, Suspects
from bayflower.strategies import fedavg, fednp
from bayflower.testing.runs import compare, outcomes
from bayflower.tree import flatten, stack

CLIENTS = 10


def server(kind=fedavg):
    half = kind.Server.__new__(kind.Server)
    half.config = kind.Config()
    return half


def test_what_most_clients_do_is_never_a_reason_to_leave_them_out():
    """Oracle: each reason in turn, if with the ones before it does not reach a majority."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        clients = set(range(int(rng.integers(1, 12))))
        known = Suspects()
        known.clients = clients
        for reason in (OPPOSED, TURNED, FAR):
            chance = rng.choice([0.1, 0.5, 0.9])
            known.of[reason] = {c for c in range(12) if rng.random() < chance}
        known.settle()
        out: set[int] = set()
        for reason in (OPPOSED, TURNED, FAR):
            more = known.of[reason] & clients
            judged = reason == OPPOSED or len(clients) >= MANY
            stands = bool(more) and judged and 2 * len(out | more) <= len(clients)
            assert (reason in known.standing) == stands
            assert (reason in known.spared) == (bool(more) and judged and not stands)
            out |= more if stands else set()
        assert known.left == out
        assert 2 * len(known.left) <= len(clients)


def changes(rng, state, far: set[int], times: float):
    """Return updates around a state; those of some clients go `times` as far."""
    return {
        client: fedavg.Update(
            torch.tensor(int(rng.integers(10, 20))),
            {
                "w": state.params["w"]
                + (times if client in far else 1.0) * torch.tensor(rng.normal(size=(5, 8)))
            },
            {},
        )
        for client in range(CLIENTS)
    }


@pytest.mark.parametrize("far", [3, 5, 6, 10])
def test_a_majority_that_goes_far_is_cut_down_and_used(far):
    """Oracle: the mean of changes cut down one by one, of all if more than half are far. The sum
    has the same bits in any order of arrival, and the faults say what happened.
    """
    rng, half = np.random.default_rng(far), server()
    state = fedavg.State({"w": torch.tensor(rng.normal(size=(5, 8)))}, {})
    sent = state.params["w"].numpy()
    first = changes(rng, state, set(), 1.0)
    later = changes(rng, state, set(range(far)), 500.0)
    norms = np.sort([np.linalg.norm(one.params["w"].numpy() - sent) for one in first.values()])
    most = STEP * norms[(CLIENTS - 1) // 2]
    found = []
    for order in (range(CLIENTS), reversed(range(CLIENTS)), rng.permutation(CLIENTS).tolist()):
        limiter = Limiter(half, "gate")
        limiter.together(state, first)
        limiter.close()
        total, arriving = Total(), Arriving(half, state, limiter, waits=False)
        for client in order:
            arriving.add(total, client, later[client])
        assert arriving.settle(total) == {}
        said = [text for _, text in limiter.lines()]
        left = set(range(far)) if 2 * far <= CLIENTS else set()
        assert limiter.left == left
        assert not limiter.lines()  # each once
        if left:
            assert len(said) == far
            assert all("left out of this round" in text for text in said)
        else:
            assert [f"{far} of {CLIENTS} clients are far" in text for text in said] == [True]
        assert not any(left and "cut down" in text for text in said)
        found.append(half.finalise(state, total.value()))
    want, number = np.zeros_like(sent), 0
    for client, one in later.items():
        if client not in left:
            way = one.params["w"].numpy() - sent
            count = min(int(one.num_examples), int(limiter.limits["num_examples"]))
            want += count * (sent + way * min(1, most / np.linalg.norm(way)))
            number += count
    assert np.allclose(found[0].params["w"].numpy(), want / number, rtol=1e-9, atol=1e-12)
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_a_factor_that_both_sides_keep_is_refused_unless_most_are_as_far():
    """FedNP: nothing is cut; the reply of one client counts as invalid, those of most are used."""
    half, ones = server(fednp), torch.ones(4)

    def replied(times):
        change = fednp.Diagonal(times * ones, times * ones)
        return fednp.Update(torch.tensor(9), {}, {}, {}, change, torch.tensor(1))

    state = fednp.State(*[{}] * len(fednp.State._fields))
    for far, refused in ((1, {0}), (6, set())):
        limiter = Limiter(half, "gate")
        limiter.together(state, {client: replied(1.0) for client in range(CLIENTS)})
        limiter.close()
        verdicts = {
            client: limiter.alone(state, client, replied(900.0 if client < far else 1.0))
            for client in range(CLIENTS)
        }
        limiter.settle()
        assert limiter.refused == limiter.left == refused
        assert verdicts[0].left is None
        assert torch.equal(verdicts[0].used.change.precision, 900 * ones)
        assert len(limiter.lines()) == 1
        assert bool(limiter.lines()) == bool(refused)  # a refused reply is named each time


def test_entries_that_did_not_travel_are_unchanged_and_keep_their_bits():
    """Oracle: numpy over the entries that are there, client by client."""
    rng = np.random.default_rng(1)

    class Half(fedavg.Server):
        def present(self, state, updates):
            return {"params/w": there}

    half = server(fedavg)
    half.__class__ = Half
    there = torch.tensor(rng.random((4, 3, 5)) < 0.6)
    state = fedavg.State({"v": torch.ones(2).double(), "w": torch.ones(3, 5).double() * 50}, {})
    values = rng.normal(size=(4, 3, 5)) + 50 * there.numpy()
    others = 1 + rng.normal(size=(4, 2))
    given = {"v": torch.tensor(others), "w": torch.tensor(values)}
    many = fedavg.Update(torch.full((4,), 7), given, {})
    (part,) = parts_of(half, state, many)
    want = [
        np.linalg.norm(np.concatenate([others[k] - 1, (values[k] - 50)[there[k].numpy()]]))
        for k in range(4)
    ]
    size = size_of(part)
    assert np.allclose(size.numpy(), want, rtol=1e-12)
    most = 0.5 * min(want)
    got = limited([part], many, {"params": size}, {"params": torch.tensor(most)}, False).updates
    for k in range(4):
        here = there[k].numpy()
        moved = 50 + (values[k] - 50) * most / want[k]
        assert np.allclose(got.params["w"][k].numpy()[here], moved[here], rtol=1e-12)
        assert torch.equal(got.params["w"][k][~there[k]], given["w"][k][~there[k]])
        assert np.allclose(got.params["v"][k].numpy(), 1 + (others[k] - 1) * most / want[k])
    sure = Part("s", "s", "precision", {"w": given["w"].abs()}, {}, {"w": there})
    total = [np.abs(values[k])[there[k].numpy()].sum() for k in range(4)]
    assert np.allclose(size_of(sure).numpy(), total, rtol=1e-12)


SPARSE = {
    "metavd": {
        "drop_above": 0.1,
        "drop_after": 1,
        "log_alpha_start": -2.0,
        "kl_weight": 30.0,
        "hyper_width": 20,
    },
    "snip": {"prune_share": 0.7},
}


@pytest.mark.parametrize("method", sorted(SPARSE))
def test_what_a_sparse_reply_changes_is_what_its_message_holds(method):
    """Oracle: the vectors of the two messages, without the mask that a half tells the limiter."""
    done = {"metavd": 2, "snip": 1}[method]  # after round 1 SNIP's server still has what it pruned
    prepared = small_prepared(method, rounds=done, optimizer="sgd", **SPARSE[method])
    state = execute(prepared).server_state
    server, client = prepared.halves.server, prepared.halves.client
    updates, want, share = [], [], []
    for number, data in enumerate(prepared.federation.clients):
        broadcast = server.broadcast(state, number)
        samples = solo.samples(data, torch.device("cpu"), torch.float32)
        fresh = client.init(*prepared.halves.initial)
        place = {"seed": 0, "client": number, "round": 4}
        new = solo.train(client, fresh, broadcast, samples.train, **place).update
        packed, sent = client.pack(new), server.pack(broadcast)
        names = [name for name in packed if name.startswith("params/")]
        want.append(np.sqrt(sum(float((packed[n] - sent[n]).square().sum()) for n in names)))
        layer = f"params/{server.layer(state.params)}"
        share.append(packed[layer].numel() / state.params[layer[7:]].numel())
        updates.append(server.unpack(state, packed))
    assert max(share) < 0.9
    part = next(one for one in parts_of(server, state, stack(updates)) if one.name == "params")
    assert np.allclose(size_of(part).numpy(), want, rtol=1e-4)


@pytest.mark.parametrize("method", some(sorted(SPARSE), ["snip"]))
def test_methods_that_drop_weights_lose_no_round_and_no_client(method):
    """From the round on in which weights are dropped, loop and fused agree, and nobody is named."""
    given = {"rounds": 4, "robust": "gate", "dtype": "float64", "optimizer": "sgd", "lr": 0.05}
    given |= {"num_clients": 8, "keep": 0.2, "new_clients": 0, **SPARSE[method]}
    loop, fused = outcomes(small_prepared(method, **given))
    assert loop.rounds[-1]["sparsity"] > 0.1
    assert loop.faults == fused.faults == ()
    compare(loop, fused, tolerance=1e-9)


@pytest.mark.parametrize("engine", [pytest.param("loop", marks=pytest.mark.slow), "fused"])
def test_a_learned_prior_is_exact_whatever_clients_weigh(engine):
    """One client with far more samples than all others: gate has the bits of off."""
    given = {"prior": "learned", "model": "linear", "rounds": 3, "num_clients": 6}
    given |= {"partition": "dirichlet", "beta": 0.2}
    ends = {}
    for how in ("off", "gate"):
        outcome = execute(prepare(small("fedmap", robust=how, **given), engine))
        assert not outcome.faults
        ends[how] = flatten(outcome.server_state)
    sizes = [len(one.y_train) for one in prepare(small("fedmap", **given)).federation.clients]
    assert max(sizes) > robust.LEVEL * sorted(sizes)[len(sizes) // 2]
    assert all(torch.equal(value, ends["gate"][name]) for name, value in ends["off"].items())


BINDING = ["fedavg", "fedbps", "fedla", "fednp", "metavd", "pfedvmp", "scaffold"]


@pytest.mark.parametrize("method", some(BINDING, ["fedavg"]))
def test_engines_agree_where_limits_bind(method):
    """Ten skewed clients: the numbers differ from robust=off, and hardly between engines."""
    given = {"num_clients": 10, "rounds": 3, "partition": "dirichlet", "beta": 0.1, "keep": 0.3}
    given |= {"optimizer": "sgd", "lr": 0.05, "dtype": "float64", "new_clients": 0}
    loop, fused = outcomes(small_prepared(method, robust="gate", **given))
    compare(loop, fused, tolerance=1e-9)
    assert [one["train_loss"] for one in loop.rounds] == pytest.approx(
        [one["train_loss"] for one in fused.rounds], rel=1e-9
    )
    assert loop.faults == fused.faults
    off = flatten(execute(small_prepared(method, robust="off", **given)).server_state)
    assert any(not torch.equal(v, off[name]) for name, v in flatten(loop.server_state).items())


UNITS = {"fedavg": 60, "fednp": 30, "scaffold": 60}


@pytest.mark.parametrize("method", some(sorted(UNITS), ["fedavg"]))
def test_both_engines_name_the_same_clients(method):
    """A site whose inputs are in other units: far off, on the loop and on the fused engine."""
    given = {"num_clients": 8, "rounds": 3, "optimizer": "sgd", "lr": 0.05, "dtype": "float64"}
    told = {}
    for engine in ("loop", "fused"):
        prepared = small_prepared(method, engine, robust="gate", stacking="yes", **given)
        clients = list(prepared.federation.clients)
        clients[2] = clients[2]._replace(x_train=clients[2].x_train * UNITS[method])
        federation = prepared.federation._replace(clients=tuple(clients))
        faults = execute(prepared._replace(federation=federation)).faults
        told[engine] = [text for text in faults if "(robust)" in text]
    assert any("client 2: far beyond what is usual" in text for text in told["loop"])
    assert told["fused"] == told["loop"]


def test_what_was_reported_survives_a_restart():
    half, rng = server(), np.random.default_rng(3)
    state = fedavg.State({"w": torch.tensor(rng.normal(size=(5, 8)))}, {})
    limiter, said = Limiter(half, "gate"), []
    for _ in range(2):
        updates = changes(rng, state, {1}, 500.0)
        if limiter.holds:
            limiter.together(state, updates)
        else:
            for client, one in updates.items():
                limiter.alone(state, client, one)
            limiter.settle()
        said.append([client for client, _ in limiter.lines()])
        assert limiter.left == {1}
        limiter.close()
        again = Limiter(half, "gate")
        again.remember(json.loads(json.dumps(limiter.memory())))
        limiter = again
    assert said == [[1], []]


@pytest.mark.parametrize("engine", some(["loop", "fused"], ["fused"]))
@pytest.mark.parametrize("how", ["median", "trimmed", "krum"])
def test_the_other_rules_run_on_every_engine(engine, how):
    run = small("fedavg", robust=how, rounds=2)
    outcome = execute(prepare(run, engine))
    assert all(bool(v.isfinite().all()) for v in flatten(outcome.server_state).values())


@pytest.mark.parametrize("engine", some(["loop", "fused"], ["fused"]))
def test_a_run_that_was_begun_without_the_gate_says_so_when_it_goes_on_with_it(engine, tmp_path):
    keys = {"num_clients": 5, "checkpoint_every": 1, "new_clients": 0}
    execute(prepare(small("fedavg", rounds=1, robust="off", **keys), engine), out=tmp_path)
    told = []
    for how in ("off", "gate"):
        more = prepare(small("fedavg", rounds=2, robust=how, **keys), engine)
        start = checkpoint.read(tmp_path)
        told.append(execute(more, resume=start).faults)
    assert told == [(), ("from round 2 on robust is gate; before, it was off",)]


def test_a_file_from_before_there_was_robust_is_a_run_without_it():
    run = small("fedavg", robust="off").flat()
    old = {key: value for key, value in run.items() if key != "robust"}
    assert decisive(old) == decisive(run) != decisive({**run, "robust": "gate"})


def group_of(means: dict[int, float]) -> set[int]:
    """Oracle: every group of the lowest clients, from the definition, the largest first."""
    clients = sorted(means, key=lambda client: (means[client], client))
    for size in range(len(clients), 1, -1):
        low, high = clients[:size], clients[size:]
        if 3 * size > len(clients) - 1:
            continue
        gap = min(means[c] for c in high) - max(means[c] for c in low)
        above = sorted(means[c] for c in high)
        inner = max(b - a for a, b in pairwise(above))
        if max(means[c] for c in low) < gate.UNDER and gap > max(gate.GAP, gate.WIDER * inner):
            return set(low)
    return set()


def test_a_group_that_opposes_the_others_is_found_where_its_clients_alone_are_not():
    """With three of ten the median falls and the spread grows; the gap below the others stays. One
    client alone, clients with a gap between the honest ones, and a third or more are no such group.
    """
    honest = [0.07, 0.1, 0.15, 0.2, 0.25, 0.35, 0.4]
    cases = [
        ([-0.28, -0.2, -0.16], True),
        ([-0.28, -0.2], True),
        ([-0.28], False),
        ([-0.28, -0.2, -0.1], False),  # not all of it is below zero
        ([-0.28, -0.2, -0.17, -0.16], False),  # too many
    ]
    for low, out in cases:
        found = gate.Gate()
        values = [*low, *honest]
        found.learn({client: [mean] * gate.LEAST for client, mean in enumerate(values)})
        found.judge()
        assert set(found.out) == (set(range(len(low))) if out else set())
        found.learn({client: [mean] * (gate.LEAST - 1) for client, mean in enumerate(values)})
        found.out = {}
        found.judge()
        assert not found.out  # so few rounds say too little
    rng, some = np.random.default_rng(0), 0
    for _ in range(2000):
        low = int(rng.integers(0, 5))
        number = int(rng.integers(8, 16))
        means = rng.uniform(-0.1, rng.choice([0.1, 0.3, 0.6]), size=number)
        means[:low] = rng.uniform(-0.5, -0.1, size=low)
        own = {client: float(mean) for client, mean in enumerate(means)}
        assert gate.low_group(np.arange(number), means) == group_of(own)
        some += bool(group_of(own))
    assert 100 < some < 1900


@pytest.mark.slow
def test_feddc_trains_under_the_default_rule_as_without_it():
    """At 30 rounds of digits the changes of two honest clients oppose the sum, their moves do not;
    without these clients accuracy fell to 22 %.
    """
    given = {"rounds": 30, "num_clients": 10, "evaluate_every": 0, "device": "cpu"}
    found = {}
    for how in ("off", "gate"):
        outcome = execute(prepare(parse("feddc", {**given, "robust": how}), "fused"))
        tallies = outcome.views["personal"].values()
        found[how] = np.mean([float(one.correct / one.num_examples) for one in tallies])
    assert found["gate"] > found["off"] - 0.03
