"""Buffered steps on a real clock: clients that sleep are as much faster and slower than each other
as the simulated clock says.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from buffers import QUICK, SLOW, started
from smallruns import small_prepared

from bayflower.engines import execute

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from sleeping import Sleeping

UNIT = 0.3  # real seconds of a simulated one
# as many replies: 25 in five rounds, 26 in thirteen steps
WAYS = {
    "rounds": {"rounds": 5, "client_seconds": "0:1"},
    "buffered, stragglers": {**SLOW, "rounds": 13},
    "rounds, stragglers": {"rounds": 5, "client_seconds": SLOW["client_seconds"]},
}


@pytest.mark.slow  # twenty seconds, asleep
def test_real_seconds_have_the_order_of_simulated_ones(monkeypatch):
    monkeypatch.setattr("bayflower.flower.flow.POLL_SECONDS", 0.01)
    monkeypatch.setattr("bayflower.flower.exchange.POLL_SECONDS", 0.01)
    real, simulated = {}, {}
    for way, settings in WAYS.items():
        prepared = small_prepared("fedavg", **QUICK, **settings)
        known = execute(prepared)
        simulated[way] = sum(record["simulated_seconds"] for record in known.rounds)
        late = {3: 10 * UNIT, 4: 10 * UNIT} if way.endswith("stragglers") else {}
        found = started(prepared, lambda app, nodes, late=late: Sleeping(app, nodes, late, UNIT))
        real[way] = sum(record["seconds"] for record in found.outcome.rounds) / UNIT
        used = [record["num_clients"] for record in found.outcome.rounds]
        assert used == [record["num_clients"] for record in known.rounds]
    print(simulated, real)
    assert sorted(real, key=real.__getitem__) == sorted(simulated, key=simulated.__getitem__)
    assert all(real[way] >= 0.99 * simulated[way] for way in ("rounds", "rounds, stragglers"))
    assert real["rounds, stragglers"] > 2 * real["buffered, stragglers"]
