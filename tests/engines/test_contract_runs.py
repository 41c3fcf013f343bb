"""Every method × the promises that whole runs and whole totals must keep."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import NEEDED, assert_same_bits, small_prepared, worst_difference
from test_contract import MODELS, NAMES, Bench

from bayflower.engines import execute
from bayflower.maths.exact import Total
from bayflower.methods import METHODS, ROWS
from bayflower.tree import digest, shapes, stack


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", NAMES)
def test_a_fast_total_is_the_exact_sum(method, model):
    """`total` of stacked updates finalises to what the exact sum of their statistics does, whole or
    in two parts.
    """
    bench = Bench(method, model, "float64")
    updates = [bench.padded(client) for client in bench.clients]
    parts = []
    for some in (slice(0, 3), slice(3, None)):
        parts.append(
            bench.server.total(bench.state, tuple(bench.clients[some]), stack(updates[some]))
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", NAMES)
def test_shapes_of_messages_are_known_without_making_them(method, model):
    bench = Bench(method, model)
    updates = [bench.trained[client].update for client in bench.clients]
    want = [shapes(bench.client.pack(update)) for update in updates]
    assert (
        bench.client.packed_shapes(stack([bench.padded(client) for client in bench.clients]))
        == want
    )


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize("method", NAMES)
def test_runs_repeat_to_the_bit(method, engine):
    first, second = (execute(small_prepared(method, engine, fraction_train=0.6)) for _ in range(2))
    assert_same_bits(first.server_state, second.server_state)
    for view in first.views:
        for client, tally in first.views[view].items():
            assert_same_bits(tally, second.views[view][client])
    other = execute(small_prepared(method, engine, fraction_train=0.6, seed=1))
    assert digest(other.views["personal"][0]) != digest(first.views["personal"][0])


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
