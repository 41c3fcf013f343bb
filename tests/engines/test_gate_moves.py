"""Where clients add what they sent to what they send later, the gate compares their moves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import small_prepared

from bayflower.engines import execute
from bayflower.fused.workers.cargo import (
    add_seen,
    received,
    seen_by,
    shipped,
    with_half,
    without_half,
)
from bayflower.methods import METHODS
from bayflower.rounds import gate
from bayflower.rounds.gate import Gate
from bayflower.rounds.parts import Part
from bayflower.rounds.robust import Limiter

CLIENTS, SIZE = 10, 3000


def drawn(rng, *shape):
    """Return random directions, of length about 1."""
    return rng.normal(size=(*shape, SIZE)) / np.sqrt(SIZE)


def shown(one: Gate, changes) -> None:
    """Let a gate see changes of a model."""
    part = Part("params", "params", "model", {}, {})
    one.see(list(range(len(changes))), [part], {"params": torch.tensor(changes)})


def cosines(rows):
    """Oracle: the cosine of each row with the sum of the others, all of length 1."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rest = rows.sum(0) - rows
    return (rows * rest).sum(1) / np.linalg.norm(rest, axis=1)


def told(moves, sums):
    """Return what clients send: this move, and the sum of all up to this one."""
    sums += moves
    return moves + sums


def test_moves_are_found_in_changes_that_add_up():
    """Each client pulls in a direction of its own, all of these add up to nothing, and in another
    direction that all share and that changes with each round. The sums are then opposed to each
    other, the moves are not. Oracle: the cosines of the moves themselves.
    """
    rng = np.random.default_rng(0)
    found, sums = Gate(adds_up=True), np.zeros((CLIENTS, SIZE))
    own = drawn(rng, CLIENTS)
    own -= own.mean(0)
    want, other = [], []
    for _ in range(gate.LAST):
        moves = drawn(rng) + 0.7 * own
        moves[3] *= -1
        changes = told(moves, sums)
        shown(found, changes)
        found.close()
        want.append(cosines(moves))
        other.append(cosines(changes))
    got = np.array([found.past[client] for client in range(CLIENTS)]).T
    assert np.abs(got - np.array(want)).max() < 5 / np.sqrt(gate.SIZE)
    assert np.abs(got - np.array(other)).max() > 0.3
    assert set(found.out) == {3}


def test_a_round_that_is_undone_adds_nothing_and_a_resumed_run_goes_on():
    rng = np.random.default_rng(1)
    straight, broken = Gate(adds_up=True), Gate(adds_up=True)
    sums, common = np.zeros((CLIENTS, SIZE)), drawn(rng)
    for _ in range(4):
        changes = told(common + drawn(rng, CLIENTS), sums)
        shown(straight, changes)
        shown(broken, -changes)
        broken.undo()
        shown(broken, changes)
        for one in (straight, broken):
            one.close()
        again = Gate(adds_up=True)
        again.remember(json.loads(json.dumps(broken.memory())))
        broken = again
    assert broken.past == straight.past
    assert broken.memory() == straight.memory()
    assert "drift" not in Gate().memory()


def test_what_parts_of_a_federation_saw_is_what_one_server_sees():
    """Workers and regions see some clients each; the run's gate takes the moves apart."""
    rng = np.random.default_rng(3)
    half = METHODS["feddc"].server.__new__(METHODS["feddc"].server)
    one, many = (Limiter(half, "gate") for _ in range(2))
    sums, common = np.zeros((CLIENTS, SIZE)), drawn(rng)
    part = Part("params", "params", "model", {}, {})
    for _ in range(4):
        changes = told(common + drawn(rng, CLIENTS), sums)
        shown(one.gate, changes)
        for some in ([0, 3, 4, 9], [1, 2, 5, 6, 7, 8]):
            there = with_half(without_half(many), half)
            there.gate.see(some, [part], {"params": torch.tensor(changes[some])})
            add_seen(many, received(shipped(seen_by(there))))
        one.gate.close()
        many.gate.close()
    assert many.gate.past == one.gate.past
    assert many.gate.memory() == one.gate.memory()


def test_numbers_that_are_none_stay_with_their_client():
    """Infinite and huge changes of one client leave no trace in what the others are told."""
    rng = np.random.default_rng(2)
    one, common = Gate(adds_up=True), drawn(rng)
    sums = np.zeros((CLIENTS, SIZE))
    for value in (np.inf, 1e300, np.nan, 1.0):
        changes = told(common + drawn(rng, CLIENTS), sums)
        changes[4] = value
        shown(one, changes)
        one.close()
        assert all(np.isfinite(some).all() for some in one.drift.values())
        assert np.isfinite(list(one.past.values())).all()
    assert not one.out.keys() - {4}


def test_one_that_is_left_out_counts_again_once_it_agrees():
    """Of a client that was left out, a mean below 0 is enough to stay so."""
    others = {client: [0.3] * gate.LAST for client in range(9)}
    for mean, before, out in (
        (-0.4, set(), {9}),
        (-0.1, set(), set()),
        (-0.1, {9}, {9}),
        (0.1, {9}, set()),
    ):
        found = Gate(adds_up=True)
        found.learn(others | {9: [mean] * gate.LAST})
        found.out = dict.fromkeys(before, 0.0)
        found.judge()
        assert set(found.out) == out


@pytest.mark.parametrize("flips", [pytest.param((), marks=pytest.mark.slow), (2,)])
def test_feddc_leaves_out_the_client_that_flips_its_changes_and_no_other(flips, monkeypatch):
    """A real run: the change that a client sends in every round has its sign turned round."""
    half = METHODS["feddc"].client
    honest = half.finish

    def finish(self, state, work, data):
        new, update = honest(self, state, work, data)
        if len(seen) % CLIENTS in flips:
            sent = work.memo.params
            update = update._replace(
                params={name: 2 * sent[name] - mine for name, mine in update.params.items()}
            )
        seen.append(0)
        return new, update

    seen: list[int] = []
    monkeypatch.setattr(half, "finish", finish)
    given = {"num_clients": CLIENTS, "rounds": 5, "robust": "gate", "new_clients": 0}
    given |= {"partition": "iid", "keep": 0.3, "local_epochs": 1, "evaluate_every": 0}
    outcome = execute(small_prepared("feddc", **given))
    told = [text for text in outcome.faults if "oppose" in text]
    assert [text.split(":")[0].split(", ")[1] for text in told] == [f"client {i}" for i in flips]
