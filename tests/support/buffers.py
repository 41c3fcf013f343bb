"""What tests of buffered steps share: a small federation with stragglers, and its grid."""

from __future__ import annotations

from smallruns import assert_same_bits

from bayflower.files.store import MemoryStore
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy
from bayflower.flower.records import to_arrays

# of five clients two train at a tenth of the others' speed
SLOW = {"aggregation": "buffered", "buffer": 2, "client_seconds": "3-4:10"}
QUICK = {"local_epochs": 1, "evaluate_every": 0, "new_clients": 0}
OWN = ("seconds", "simulated_seconds", "staleness")  # numbers of a record that are not results


def begun(prepared, grid_of=InProcessGrid, store=None, clock=None, **more):
    """Return a strategy and a grid for a prepared run."""
    run, federation, halves = prepared.run, prepared.federation, prepared.halves
    app = federation_app(run, federation, halves, store or MemoryStore())
    grid = grid_of(app, contexts(data.client for data in federation.clients))
    return make_strategy(run, quiet=True, clock=clock, **more), grid


def started(prepared, *args, timeout=60.0, **more):
    """Return the strategy after the rounds of a prepared run."""
    strategy, grid = begun(prepared, *args, **more)
    params, buffers = prepared.halves.initial
    rounds = prepared.run.settings.rounds
    strategy.start(grid, to_arrays({**params, **buffers}), num_rounds=rounds, timeout=timeout)
    return strategy


def same_outcome(one, other):
    """Assert equal states, tests and records."""
    assert_same_bits(one.server_state, other.server_state)
    assert one.views.keys() == other.views.keys()
    for view, tallies in one.views.items():
        for client, tally in tallies.items():
            assert_same_bits(tally, other.views[view][client])
    kept = [
        [{key: value for key, value in record.items() if key not in OWN} for record in some]
        for some in (one.rounds, other.rounds)
    ]
    assert kept[0] == kept[1]
