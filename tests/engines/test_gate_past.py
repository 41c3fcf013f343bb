"""What the server remembers of clients' changes is bounded."""

from __future__ import annotations

import numpy as np
import torch

from bayflower.rounds import gate
from bayflower.rounds.gate import Gate
from bayflower.rounds.robust import Limiter
from bayflower.strategies import fedavg


def one_round(found: Gate, clients, common, rng, liars=()) -> None:
    """Do one round of changes around a common direction; liars turn theirs."""
    for client in clients:
        change = common + rng.standard_normal(gate.SIZE)
        found.now[client] = gate.unit((-change if client in liars else change)[None])[0]
    found.close()


def test_the_past_of_very_many_clients_is_forgotten_but_for_those_left_out(monkeypatch):
    monkeypatch.setattr(gate, "KEPT", 20)
    rng, found = np.random.default_rng(0), Gate()
    common = rng.standard_normal(gate.SIZE)
    for _ in range(5):
        one_round(found, range(12), common, rng, liars=(0,))
    assert set(found.out) == {0}
    for clients in (range(100, 115), range(200, 215)):
        one_round(found, clients, common, rng)
    assert set(found.own) == {0, *range(111, 115), *range(200, 215)}
    assert set(found.past) == set(found.table.row) == set(found.own)
    again = Gate()
    again.remember(found.memory())
    assert list(again.own) == list(found.own)  # who is forgotten next is the same
    assert set(again.out) == {0}


def test_a_round_that_is_closed_late_counts_as_one_that_is_closed_at_once():
    """The fused engine closes a round while the next one trains."""
    rng = np.random.default_rng(5)
    half = fedavg.Server.__new__(fedavg.Server)
    half.config = fedavg.Config()
    soon, late = Limiter(half, "gate"), Limiter(half, "gate")
    for _ in range(3):
        state = fedavg.State({"w": torch.tensor(rng.normal(size=(30, 40)))}, {})
        updates = {
            client: fedavg.Update(
                torch.tensor(10), {"w": torch.tensor(rng.normal(size=(30, 40)))}, {}
            )
            for client in range(9)
        }
        for limiter, waits in ((soon, False), (late, True)):
            if limiter.holds:
                limiter.together(state, updates)
            else:
                for client, update in updates.items():
                    limiter.alone(state, client, update)
                limiter.settle()
            limiter.close(late=waits)
        assert late.open
        assert not soon.open
    assert len(late.past["num_examples"]) == 2  # rounds; the last one waits
    assert late.memory() == soon.memory()
    assert not late.open
    assert len(late.past["num_examples"]) == 3


def cosine_with_others(rows, counts, place):
    """Oracle: the sum of the others, one after the other, and its cosine."""
    rest = sum(
        (row for k, row in enumerate(rows) if k != place and counts[k]), np.zeros(len(rows[0]))
    )
    length = np.sqrt((rest**2).sum())
    return float((rows[place] * rest).sum() / length) if length > 1e-9 else 0.0


def test_a_cosine_with_the_others_is_that_of_their_sum():
    """Also of one that does not count, of zeros, and where the others cancel almost or wholly."""
    rng = np.random.default_rng(1)
    for number in (2, 9, 300):
        rows = gate.unit(rng.standard_normal((number, 64)) + 0.3)
        counts = (rng.random(number) < 0.7).astype(float)
        rows[0] = 0
        found = gate.with_others(rows, counts)
        want = [cosine_with_others(rows, counts, place) for place in range(number)]
        np.testing.assert_allclose(found, want, atol=1e-12)
    one, other = gate.unit(rng.standard_normal((2, 64)))
    for small in (0.0, 1e-7):
        near = gate.unit((one + small * other)[None])[0]
        rows = np.stack([near, *[one, -one] * 4])  # of the first, the others cancel
        got, want = (
            gate.with_others(rows, np.ones(9))[:2],
            [cosine_with_others(rows, np.ones(9), k) for k in range(2)],
        )
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_rows_of_length_one_whatever_their_numbers():
    rows = np.array(
        [[3.0, 4.0], [3e250, -4e250], [3e-50, 4e-50], [0, 0], [np.nan, 2.0], [np.inf, -5.0]]
    )
    want = [[0.6, 0.8], [0.6, -0.8], [0.6, 0.8], [0, 0], [0, 1], [0, -1]]
    before = rows.copy()
    np.testing.assert_allclose(gate.unit(rows), want, rtol=1e-15)
    np.testing.assert_array_equal(rows, before)
    for row, one in zip(rows, want, strict=True):
        np.testing.assert_allclose(gate.unit(row[None], fresh=True), [one], rtol=1e-15)
