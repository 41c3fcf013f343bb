"""Every method × the promises that whole runs and whole totals must keep."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import (
    BOTH,
    NEEDED,
    PEACE,
    assert_same_bits,
    cases,
    small_prepared,
    some,
    whole_run,
    worst_difference,
)
from test_contract import NAMES, Bench

from bayflower.engines import execute
from bayflower.files import checkpoint
from bayflower.maths.exact import Total
from bayflower.methods import METHODS, ROWS
from bayflower.tree import digest, stack


@pytest.mark.parametrize("case", cases("mlp-bn"))
def test_a_fast_total_is_the_exact_sum(case):
    """`total` of stacked updates finalises to what the exact sum of their statistics does, whole or
    in two parts.
    """
    bench = Bench(*case, "float64")
    updates = [bench.padded(client) for client in bench.clients]
    parts = []
    for piece in (slice(0, 3), slice(3, None)):
        parts.append(
            bench.server.total(bench.state, tuple(bench.clients[piece]), stack(updates[piece]))
        )
    if parts[0] is None:
        pytest.skip("the method has no fast total")
    joined = {
        name: sum(part[name] for part in parts if name in part)
        for name in {name for part in parts for name in part}
    }
    joined = {
        name: value for name, value in joined.items() if name not in bench.server.negligible(joined)
    }
    exact = Total()
    for client, update in zip(bench.clients, updates, strict=True):
        exact.add(
            bench.server.statistic(
                bench.state, client, bench.server.unpack(bench.state, bench.client.pack(update))
            )
        )
    want = exact.value()
    for total in (bench.server.total(bench.state, tuple(bench.clients), stack(updates)), joined):
        assert worst_difference({name: total[name] for name in want}, want) < 1e-12
        finalised = (bench.server.finalise(bench.state, one) for one in (total, want))
        # solving with matrices of condition 1e7 (pFedVMP) costs that many digits
        assert worst_difference(*finalised, zero=1e-12) < 1e-9


def assert_repeats(method: str, engine: str) -> None:
    """The same seed gives the same bits, another seed others."""
    first, second = whole_run(method, engine), execute(small_prepared(method, engine, **PEACE))
    assert_same_bits(first.server_state, second.server_state)
    for view in first.views:
        for client, tally in first.views[view].items():
            assert_same_bits(tally, second.views[view][client])
    other = execute(small_prepared(method, engine, **PEACE, seed=1))
    assert digest(other.views["personal"][0]) != digest(first.views["personal"][0])


# a run that goes on from its file, below, repeats the run left in peace too; the scope puts tests
# of one method side by side, so that they share it
@pytest.mark.parametrize("engine", ["fused", "loop"], scope="module")
@pytest.mark.parametrize("method", some(NAMES, {*BOTH, "fedavg"}), scope="module")
def test_runs_repeat_to_the_bit(method, engine):
    assert_repeats(method, engine)


def test_no_half_imports_flwr():
    """All halves and the fused engine run in a process in which flwr cannot be imported."""
    stems = sorted({row.stem for row in ROWS})
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import importlib\n"
        f"for stem in {stems!r}:\n"
        "    importlib.import_module(f'bayflower.strategies.{stem}'); "
        "importlib.import_module(f'bayflower.clients.{stem}')\n"
        "from bayflower.config import parse\nfrom bayflower.engines import prepare, run_to_result\n"
        "run = parse('fedmap', {'num_clients': 2, 'rounds': 1, 'keep': 0.05, 'local_epochs': 1, "
        "'device': 'cpu'})\n"
        "assert run_to_result(prepare(run, 'fused'))['final']['personal']['num_clients'] == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_row_needs_what_it_says():
    assert set(NEEDED) <= set(METHODS)


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        pytest.param(
            name, engine, marks=() if engine == "fused" or name in BOTH else pytest.mark.slow
        )
        for name in NAMES
        for engine in ("loop", "fused")
    ],
    scope="module",
)
def test_every_method_goes_on_where_it_stopped(tmp_path, method, engine):
    """Two rounds, then one more from the file, equal three at once."""
    common = {**PEACE, "checkpoint_every": 1}
    whole = whole_run(method, engine)
    execute(small_prepared(method, engine, **{**common, "rounds": 2}), out=tmp_path)
    rest = small_prepared(method, engine, **common)
    outcome = execute(rest, out=tmp_path, resume=checkpoint.to_resume(tmp_path, rest.run))
    assert_same_bits(outcome.server_state, whole.server_state)
    for view, tallies in whole.views.items():
        for client, tally in tallies.items():
            assert_same_bits(outcome.views[view][client], tally)
    assert [record["train_loss"] for record in outcome.rounds] == [
        record["train_loss"] for record in whole.rounds
    ]
