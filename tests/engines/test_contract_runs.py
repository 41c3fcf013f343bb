"""Every method × the promises that whole runs and whole totals must keep."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import BOTH, LATER, NEEDED, PEACE, cases, small_prepared, whole_run
from test_contract import NAMES, bench_of

from bayflower.methods import METHODS, ROWS
from bayflower.testing import runs

# methods whose server or clients keep something from round to round, each in its own way; three of
# them go on from a client's file on the loop engine too
KEEP = {*BOTH, "fedavg", "feddc", "feddyn", "fedpa", "fedper", "local", "moon", "scaffold", "snip"}
LOOP = {"fedbn", "fednp", "metavd"}
REPEATED = {*((name, "fused") for name in BOTH - {"metavd"}), ("fedavg", "loop")}


def kept(name: str, engine: str) -> bool:
    """Return whether `make test` stops and resumes the method on the engine."""
    return name in BOTH or (engine == "fused" and name not in LATER)


@pytest.mark.parametrize("case", cases("mlp-bn"))
def test_a_fast_total_is_the_exact_sum(case):
    """`total` of stacked updates finalises to what the exact sum of their statistics does, whole or
    in two parts. Stacked broadcasts are those of each client.
    """
    runs.check_broadcasts(bench_of(*case, "float64"))
    runs.check_fast_total(bench_of(*case, "float64"))


# a run that goes on from its file, below, repeats the run left in peace too; the scope puts tests
# of one method side by side, so that they share it
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        pytest.param(name, engine, marks=() if (name, engine) in REPEATED else pytest.mark.slow)
        for name in NAMES
        for engine in ("fused", "loop")
    ],
    scope="module",
)
def test_runs_repeat_to_the_bit(method, engine):
    """The same seed gives the same bits, another seed others."""
    runs.check_repeats(
        whole_run(method, engine).outcome,
        lambda seed: small_prepared(method, engine, **PEACE, seed=seed),
    )


def test_no_half_imports_flwr():
    """All halves, the fused engine and the benchmarks run in a process in which flwr cannot be
    imported.
    """
    stems = sorted({row.stem for row in ROWS})
    code = (
        "import sys; sys.modules['flwr'] = sys.modules['ray'] = None\n"
        "import importlib\n"
        f"for stem in {stems!r}:\n"
        "    importlib.import_module(f'bayflower.strategies.{stem}'); "
        "importlib.import_module(f'bayflower.clients.{stem}')\n"
        "from bayflower import bench; assert bench.SUITES\n"
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
            name,
            engine,
            marks=() if name in {"fused": KEEP, "loop": LOOP}[engine] else pytest.mark.slow,
        )
        for name in NAMES
        for engine in ("loop", "fused")
    ],
    scope="module",
)
def test_every_method_goes_on_where_it_stopped(tmp_path, method, engine):
    """One round from the file of the second equals three at once."""
    whole = whole_run(method, engine)
    runs.check_goes_on(
        whole.outcome,
        lambda rounds: small_prepared(
            method, engine, **{**PEACE, "checkpoint_every": 1, "rounds": rounds}
        ),
        tmp_path,
        whole.stopped,
    )
