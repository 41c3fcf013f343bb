"""robust: what one client can do is bounded by what the others do, for every method, on every
engine. Oracles are written with numpy, one client after another.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import small, some
from rig import VICTIM, Rig, rewrite

from bayflower import methods
from bayflower.config import parse
from bayflower.contract import ServerHalf
from bayflower.engines import execute, prepare
from bayflower.methods import METHODS
from bayflower.reproduce.cache import engine_values, resolved
from bayflower.rounds import gate, order, parts, robust
from bayflower.rounds.gate import Gate
from bayflower.rounds.parts import CARRIED, LEVEL, STEP, Part, limited, parts_of, size_of
from bayflower.rounds.robust import Limiter
from bayflower.strategies import fedavg, fedbps, fedla, pvi, scaffold
from bayflower.tree import flatten, map_tree, stack

KINDS = {"fedavg", "fedmap", "fedla", "fedbps", "fednp", "metavd", "pfedvmp", "scaffold"}


def server(kind=fedavg):
    half = kind.Server.__new__(kind.Server)
    half.config = kind.Config()
    return half


def made(rng, number: int):
    """Return (a state of FedAvg, updates of some clients around it)."""
    state = fedavg.State({"w": torch.tensor(rng.normal(size=(3, 2)))}, {})
    updates = {
        client: fedavg.Update(
            torch.tensor(int(rng.integers(10, 20))),
            {"w": state.params["w"] + torch.tensor(rng.normal(size=(3, 2)))},
            {},
        )
        for client in range(number)
    }
    return state, updates


def test_the_first_round_is_limited_by_its_own_median_and_the_next_by_those_before():
    """Oracle: numpy's norms; the median of seven is a client's own."""
    rng = np.random.default_rng(0)
    limiter, old = Limiter(server(), "clip"), []
    for _ in range(robust.ROUNDS + 2):
        state, updates = made(rng, 7)
        updates[3] = updates[3]._replace(
            num_examples=torch.tensor(10**8), params={"w": updates[3].params["w"] * 1e6}
        )
        sent = state.params["w"].numpy()
        norms = [np.linalg.norm(one.params["w"].numpy() - sent) for one in updates.values()]
        counts = [int(one.num_examples) for one in updates.values()]
        if limiter.holds:
            assert not old
            found = limiter.together(state, updates)
            seen = [(norms, counts)]
        else:
            found = {c: limiter.alone(state, c, one).used for c, one in updates.items()}
            limiter.settle()
            seen = old[-robust.ROUNDS :]
        most = STEP * np.sort(np.concatenate([one for one, _ in seen]))[(7 * len(seen) - 1) // 2]
        number = int(
            LEVEL * np.sort(np.concatenate([one for _, one in seen]))[(7 * len(seen) - 1) // 2]
        )
        for client, norm in enumerate(norms):
            got = found[client].params["w"].numpy() - sent
            want = (updates[client].params["w"].numpy() - sent) * min(1, most / norm)
            assert np.allclose(got, want, rtol=1e-9, atol=1e-12)
            if norm <= most:  # not a bit of what is within its limits changes
                assert torch.equal(found[client].params["w"], updates[client].params["w"])
            assert int(found[client].num_examples) == min(counts[client], number)
        assert set(limiter.suspects.beyond()) == {3}
        assert set(limiter.suspects.beyond()[3]) == {"params", "num_examples"}
        limiter.close()
        old.append((norms, counts))


def test_certainties_are_limited_by_their_sum_and_by_what_was_sent():
    """FedLA: a weight with 1e4 times the others' precision counts LEVEL times what was sent."""
    half, limiter = server(fedla), Limiter(server(fedla), "clip")
    assert half.update_fields["precision"] == "precision"
    state = fedla.State({"w": torch.zeros(4)}, {}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    number = torch.tensor(10)
    one = fedla.Update(number, {"w": torch.ones(4)}, {}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    lie = one._replace(precision={"w": torch.tensor([1e4, 2.0, 3.0, 4.0])})
    limiter.together(state, {0: one, 1: one, 2: one, 3: one})
    limiter.close()
    got = limiter.alone(state, 0, lie).used
    assert float(got.precision["w"].sum()) <= LEVEL * 10 + 1e-6
    assert float(got.precision["w"][0]) <= LEVEL * 1.0
    times = limiter.suspects.beyond()[0]["precision"]
    assert times == pytest.approx(float(lie.precision["w"].sum()) / (LEVEL * 10))
    assert torch.equal(limiter.alone(state, 1, one).used.precision["w"], one.precision["w"])


def test_a_stack_is_limited_as_its_clients_are_one_by_one():
    rng = np.random.default_rng(1)
    state, updates = made(rng, 6)
    one, many = Limiter(server(), "clip"), Limiter(server(), "clip")
    alone = one.together(state, updates)
    stacked = stack(list(updates.values()))
    seen = many.see(state, list(updates), stacked, {})
    many.renew()
    together = many.limit(seen).updates
    for place, client in enumerate(updates):
        got = map_tree(lambda leaf, place=place: leaf[place], together)
        assert torch.allclose(got.params["w"], alone[client].params["w"], rtol=1e-12)
        assert int(got.num_examples) == int(alone[client].num_examples)


def test_median_trimmed_and_krum():
    """Oracle: numpy, coordinate by coordinate; krum drops those far from all others."""
    rng = np.random.default_rng(2)
    state, updates = made(rng, 7)
    half: ServerHalf = server()
    values = np.stack([one.params["w"].numpy() for one in updates.values()])
    got = order.ordered("median", half, state, updates)
    assert all(np.allclose(one.params["w"].numpy(), np.median(values, 0)) for one in got.values())
    ranked = np.sort(values, 0)
    got = order.ordered("trimmed", half, state, updates)
    for client, one in got.items():
        assert np.allclose(one.params["w"].numpy(), np.clip(values[client], ranked[2], ranked[4]))
        assert int(one.num_examples) == int(updates[client].num_examples)
    for client in (1, 5):
        updates[client] = updates[client]._replace(params={"w": updates[client].params["w"] + 50})
    assert set(order.ordered("krum", half, state, updates)) == {0, 2, 3, 4, 6}


def test_limits_are_remembered():
    rng = np.random.default_rng(3)
    state, updates = made(rng, 9)
    limiter = Limiter(server(), "gate")
    limiter.together(state, updates)
    limiter.close()
    again = Limiter(server(), "gate")
    again.remember(limiter.memory())
    assert {k: float(v) for k, v in again.limits.items()} == {
        k: float(v) for k, v in limiter.limits.items()
    }
    assert not again.holds
    assert len(again.gate.past) == len(again.gate.own) == 9
    assert again.gate.past == limiter.gate.past


def seen(found: Gate, change: np.ndarray) -> None:
    """Let a gate see the changes of a round."""
    part = Part("params", "params", "model", {"w": torch.tensor(change)}, {})
    found.see(range(len(change)), [part], {"params": parts.flat(part)})


def opposed(rng, clients: int, liars: int, rounds: int, size: int = 5000) -> Gate:
    """Return the gate after some rounds of changes around a common direction; liars turn theirs."""
    found, common = Gate(), rng.normal(size=size)
    for _ in range(rounds):
        change = common + rng.normal(size=(clients, size))
        change[:liars] *= -1
        unit = change / np.linalg.norm(change, axis=1, keepdims=True)
        seen(found, change)
        counted = [c for c in range(clients) if c not in found.out]
        for c in range(clients):  # oracle: whole vectors
            others = unit[[o for o in counted if o != c]].sum(0)
            want = unit[c] @ others / np.linalg.norm(others)
            sketch = np.stack([found.now[o] for o in counted if o != c]).sum(0)
            got = float(found.now[c] @ sketch / np.linalg.norm(sketch))
            assert abs(got - want) < 4 / np.sqrt(gate.SIZE)
        found.close()
    return found


def test_clients_that_oppose_the_others_are_left_out_and_come_back():
    rng = np.random.default_rng(5)
    found = opposed(rng, 10, 3, gate.LEAST)
    assert set(found.out) == {0, 1, 2}
    assert "client 1: its changes oppose" in found.why(1)
    assert not opposed(rng, 10, 0, 5).out
    assert not opposed(rng, gate.CROWD - 1, 1, 5).out  # too few to say what most do
    for own, rounds, out in (
        (-0.32, gate.LEAST - 1, False),  # so few rounds say too little
        (-0.32, gate.LEAST, True),
        (-0.35, 1, False),
        (-0.35, 2, True),
        (-0.2, gate.LATER - 1, False),
        (-0.2, gate.LATER, True),  # the others are near each other
    ):
        some = Gate()
        others = {client: [0.2 + 0.01 * client] * rounds for client in range(9)}
        some.learn({**others, 9: [own] * rounds})
        some.judge()
        assert (9 in some.out) == out
    apart = {client: [0.2 + 0.1 * client] * gate.LATER for client in range(9)}
    some.learn({**some.past, **apart})
    some.out = {}
    some.judge()
    assert not some.out  # the others are far apart
    found.learn({**found.past, **{client: [0.5] * gate.LAST for client in range(3)}})
    found.judge()
    assert not found.out


def test_a_client_that_turns_against_its_own_past_is_left_out_at_once():
    """Oracle: whole vectors. One that never was steady is not judged; the past survives a file."""
    rng = np.random.default_rng(8)
    size, clients = 5000, 6
    own, found = rng.normal(size=(clients, size)), Gate()
    past: dict[int, np.ndarray] = {}
    for round in range(7):
        change = own + 0.8 * rng.normal(size=(clients, size))
        change[5] = rng.normal(size=size)  # no direction of its own
        if round == 6:
            change[[2, 5]] *= -1
            change[5] = -past[5]
        seen(found, change)
        for c in range(clients):
            unit = change[c] / np.linalg.norm(change[c])
            if c in past:
                want = unit @ past[c] / np.linalg.norm(past[c])
                assert abs(found.itself[c] - want) < 5 / np.sqrt(gate.OWN)
            before = past.get(c, unit) / np.linalg.norm(past.get(c, unit))
            past[c] = gate.MEMORY * unit + (1 - gate.MEMORY) * before
        assert set(found.turned) == ({2} if round == 6 else set())
        if round == 6:
            assert "client 2: its change is the opposite" in found.why(2)
        found.close()
        assert not found.turned
        again = Gate()
        again.remember(json.loads(json.dumps(found.memory())))
        assert all(np.array_equal(again.own[c], found.own[c]) for c in range(clients))
        found = again


def test_a_leap_is_left_out_unless_the_client_trains_for_longer():
    """FAR times its limit: not used at all. Ten times the samples allow ten times the way."""
    rng = np.random.default_rng(9)
    state, updates = made(rng, 7)
    sent = state.params["w"]

    def farther(one, times, number):
        away = sent + (one.params["w"] - sent) * times
        return one._replace(params={"w": away}, num_examples=torch.tensor(number))

    updates = {c: farther(one, 1.0, 15) for c, one in updates.items()}
    updates[1] = farther(updates[1], 60.0, 15)
    updates[2] = farther(updates[2], 60.0, 150)
    updates[3] = farther(updates[3], 3.0, 15)
    for how, kept in (("gate", {0, 2, 3, 4, 5, 6}), ("clip", {0, 1, 2, 3, 4, 5, 6})):
        limiter = Limiter(server(), how)
        assert set(limiter.together(state, updates)) == kept
        limiter.close()
        assert not limiter.why(1)
        for client, one in updates.items():
            assert bool(limiter.alone(state, client, one).why) == (client not in kept)
        limiter.settle()
        assert limiter.left == set(updates) - kept
    few = Limiter(server(), "gate")  # of four clients nobody is left out, in any round
    for _ in range(3):
        four = {client: updates[client] for client in range(4)}
        if few.holds:
            assert set(few.together(state, four)) == {0, 1, 2, 3}
        else:
            assert few.alone(state, 1, four[1]).why
            few.settle()
        assert not few.left
        few.close()


def test_a_client_that_is_left_out_changes_nothing():
    """Dropped, or where its changes are counted on both sides (PVI), without effect."""
    rng = np.random.default_rng(6)
    state, updates = made(rng, 6)
    limiter = Limiter(server(), "gate")
    limiter.together(state, updates)
    limiter.close()
    limiter.gate.out = {2: -0.9}
    assert limiter.alone(state, 2, updates[2]).left is None
    assert limiter.alone(state, 3, updates[3]).why == frozenset()
    limiter.settle()
    assert limiter.left == {2}  # one of two, no majority
    half = server(pvi)
    like = {"w": torch.ones(3)}
    many = [
        pvi.Update(torch.tensor(9), {}, {"w": torch.ones(3) * (c + 1)}, like, torch.tensor(1))
        for c in range(5)
    ]
    held = Limiter(half, "gate")
    other = pvi.State(like, {}, like, like, {}, *[torch.tensor(0)] * 3)
    held.together(other, dict(enumerate(many)))
    held.close()
    held.gate.out = {4: -0.9}
    got = held.alone(other, 4, many[4]).left
    assert float(got.precision["w"].abs().max()) == float(got.shift["w"].abs().max()) == 0
    assert int(got.num_examples) == 1
    assert int(got.turns) == 1
    assert torch.equal(held.alone(other, 1, many[1]).used.precision["w"], many[1].precision["w"])


def test_what_clients_carry_on_and_what_they_keep_are_limited_apart():
    """SCAFFOLD's control variates have a wider limit; FedBPS's personal entries one of their own;
    PVI's natural parameters are cut by one number.
    """
    half, mask = server(fedbps), torch.tensor([False, False, True, True])
    state = fedbps.State({"w": torch.zeros(4)}, {}, {"w": mask}, torch.zeros(()))
    values = torch.tensor([[1.0, 0, 30, 40], [3, 4, 0, 0]])
    ones = torch.ones(2, 4)
    many = fedbps.Update(torch.tensor([5, 5]), {"w": values}, {"w": ones}, {})
    found = parts_of(half, state, many)
    sizes = {part.name: size_of(part) for part in found}
    assert sizes["params"].tolist() == [1, 5]
    assert sizes["params (kept)"].tolist() == [50, 0]
    limits = {"params": torch.tensor(2.5), "params (kept)": torch.tensor(25.0)}
    got = limited(found, many, sizes, {k: v.double() for k, v in limits.items()}, False)
    assert got.updates.params["w"].tolist() == [[1, 0, 15, 20], [1.5, 2, 0, 0]]
    control = Part("control_change", "control_change", "slope", {}, {})
    assert scaffold.Server.update_fields["control_change"] == "slope"
    assert control.factor == CARRIED > STEP


def test_too_few_clients_limit_nobody():
    """Of three clients no two make a majority that can be told: updates keep their bits."""
    rng = np.random.default_rng(4)
    limiter = Limiter(server(), "gate")
    for _ in range(3):
        state, updates = made(rng, robust.FEW - 1)
        updates[1] = updates[1]._replace(params={"w": updates[1].params["w"] * 1e3})
        assert limiter.holds
        found = limiter.together(state, updates)
        assert all(torch.equal(found[c].params["w"], updates[c].params["w"]) for c in updates)
        assert all(int(found[c].num_examples) == int(updates[c].num_examples) for c in updates)
        limiter.close()
    state, updates = made(rng, robust.FEW)
    assert set(limiter.together(state, updates)) == set(updates)
    limiter.close()
    assert not limiter.holds


def wild(flat) -> None:
    """Change an update as an attacker within all absolute bounds would."""
    for name, value in flat.items():
        if name.startswith(("params/", "means")) and value.is_floating_point():
            value.mul_(-100).add_(50)


SENT = {one for one, row in METHODS.items() if row.server.update_fields.get("params") == "model"}


@pytest.mark.parametrize(
    "method", some(sorted(SENT - {"local", "fedproto"}), {"fedmap", "pfedvmp", "scaffold"})
)
def test_one_client_moves_no_methods_model_far_over_flower(method):
    """The same reply moves it far more without `robust`, unless refused; the client is named."""
    moved = {}
    for how in ("off", "gate"):
        states = []
        for tamper in (None, rewrite(wild)):
            rig = Rig(method, tamper=tamper, robust=how)
            rig.start()
            states.append(rig.halves.server.shared(rig.strategy.state))
        clean, bad = states
        moved[how] = max(float((bad[name] - clean[name]).abs().max()) for name in clean)
        faults = rig.strategy.faults
    if any("reply not used" in fault for fault in faults):
        return  # refused: FedMAP's weight cannot be right that far away
    assert moved["gate"] < moved["off"] / 5
    assert any(f"client {VICTIM}: far beyond what is usual" in fault for fault in faults)


def test_fused_and_loop_agree_and_off_is_what_it_was(monkeypatch):
    """The same limits on both engines; off adds up what came. A low factor, so that limits bind."""
    monkeypatch.setattr(parts, "STEP", 0.5)
    given = {"optimizer": "sgd", "dtype": "float64", "local_epochs": 1, "rounds": 3}
    found = {}
    for engine in ("loop", "fused"):
        for how in ("clip", "off"):
            run = small("fedavg", robust=how, stacking="yes", **given)
            found[engine, how] = flatten(execute(prepare(run, engine)).server_state)
    for how in ("clip", "off"):
        for name, value in found["loop", how].items():
            assert torch.allclose(value, found["fused", how][name], rtol=1e-7, atol=1e-9)
    name = next(iter(found["loop", "off"]))
    assert not torch.allclose(found["loop", "off"][name], found["loop", "clip"][name], rtol=1e-9)


def test_published_runs_trust_their_clients():
    from bayflower.reproduce.tables import Spec

    spec = Spec("engine", "fedavg", (("dataset", "digits"),))
    assert engine_values(spec, 0, "", "cpu")["robust"] == "off"
    assert "robust" not in resolved(spec, 0)[0]  # so that cached runs stay valid
    assert parse("fedavg", {}).limits.robust == "gate"
    assert set(methods.METHODS) >= KINDS
