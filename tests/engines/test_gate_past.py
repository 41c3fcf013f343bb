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
