"""The fused engine on workers: numbers do not depend on how many there are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from conftest import assert_same_bits, small_prepared, some, worst_difference

from bayflower import methods
from bayflower.engines import Prepared
from bayflower.fused.run import run_fused
from bayflower.fused.workers.crew import Crew
from bayflower.fused.workers.run import run_workers
from bayflower.rounds.result import result

pytest.importorskip("ray", reason="the extra `simulation` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
CHEAP = {"fedmap"}  # in the default run; `make test-all` has all methods
# eight clients in four blocks, of which six train in a round; so some blocks have one, some two
WORK: dict[str, Any] = {
    "num_clients": 8,
    "new_clients": 2,
    "rounds": 3,
    "fraction_train": 0.75,
    "evaluate_every": 2,
    "local_epochs": 1,
    "new_client_epochs": 1,
    "worker_block": 2,
}
TIMES = ("seconds", "usage")


@pytest.fixture(scope="module")
def crew():
    """Four workers, which all tests share; a test that ends one starts its own."""
    logging.getLogger("bayflower").setLevel(logging.ERROR)
    made = Crew("4", "cpu", 4)
    yield made
    made.close()


def ready(method: str, **changes: Any) -> Prepared:
    return small_prepared(method, "fused", **{**WORK, **changes})


def on(crew: Crew, number: int, prepared: Prepared, **more: Any) -> Any:
    """Return the outcome of a run on the first workers of a crew."""
    known = dict(crew.actors)
    crew.actors = {one: known[one] for one in sorted(known)[:number]}
    try:
        return run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew, **more)
    finally:
        crew.actors = known


def numbers(prepared: Prepared, outcome: Any) -> dict[str, Any]:
    """Return all that a run's result says but for its times."""
    found = result(prepared.run, "fused", prepared.federation, prepared.halves, outcome)
    rounds = [{k: v for k, v in one.items() if k not in TIMES} for one in found["rounds"]]
    return {**{k: v for k, v in found.items() if k not in TIMES}, "rounds": rounds}


def assert_same(prepared: Prepared, first: Any, second: Any) -> None:
    assert_same_bits(first.server_state, second.server_state)
    assert first.client_states.keys() == second.client_states.keys()
    for client, state in first.client_states.items():
        assert_same_bits(state, second.client_states[client])
    assert numbers(prepared, first) == numbers(prepared, second)


@pytest.mark.parametrize("method", some([row.name for row in methods.ROWS], CHEAP))
def test_one_two_and_four_workers_give_the_bits_of_one_process(crew, method):
    """One by one: all clients' states, every number of the result, those of new clients and of
    calibration too.
    """
    prepared = ready(method, stacking="no")
    alone = run_fused(prepared.run, prepared.federation, prepared.halves)
    for number in (1, 2, 4):
        assert_same(prepared, on(crew, number, prepared), alone)


@pytest.mark.parametrize("method", some([row.name for row in methods.ROWS], CHEAP))
def test_stacks_are_the_same_on_one_two_and_four_workers(crew, method):
    """Stacked: the same bits on any number of workers, and near those of one stack of all."""
    changes = {"dtype": "float64", "optimizer": "sgd", "lr": 0.05, "stacking": "yes"}
    prepared = ready(method, **changes)
    found = {number: on(crew, number, prepared) for number in (1, 2, 4)}
    assert_same(prepared, found[1], found[2])
    assert_same(prepared, found[1], found[4])
    together = run_fused(prepared.run, prepared.federation, prepared.halves)
    assert worst_difference(found[1].server_state, together.server_state, 1e-9) < 1e-6
