"""What the server remembers of clients' changes is bounded."""

from __future__ import annotations

import numpy as np

from bayflower.rounds import gate
from bayflower.rounds.gate import Gate


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
    assert set(found.past) == set(found.means) == set(found.own)
    again = Gate()
    again.remember(found.memory())
    assert list(again.own) == list(found.own)  # who is forgotten next is the same
    assert set(again.out) == {0}
