"""The fused engine on Ray workers: numbers do not depend on how many there are. `test_herd.py` has
settings of all kinds and all deaths, without Ray.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import worst_difference
from test_herd import alone, assert_same, ready
from test_herd import on as run_on
from torch import nn

import bayflower
from bayflower import methods
from bayflower.engines import Prepared
from bayflower.fused.workers.crew import Crew
from bayflower.fused.workers.crew import ray as module

pytest.importorskip("ray", reason="the extra `simulation` is not installed")
# slow, because a busy machine takes minutes to start Ray, or fails to
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def collect() -> None:
    """Collect the files that Ray leaves open: later each is a warning in some other test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def tidied():
    yield
    collect()


@contextmanager
def connected() -> Iterator[None]:
    """Ray with eight cores, started here, or the one that RAY_ADDRESS names."""
    there, address = module(), os.environ.get("RAY_ADDRESS")
    here = {"address": "local", "num_cpus": 8, "include_dashboard": False}
    there.init(**({"address": address} if address else here), log_to_driver=False)
    yield
    there.shutdown()


@pytest.fixture(scope="module")
def crew():
    """Four workers, which all tests share; a test that ends one starts its own."""
    logging.getLogger("bayflower").setLevel(logging.ERROR)
    with connected():
        made = Crew("4", "cpu", 4)
        yield made
        made.close()


def on(crew: Crew, number: int, prepared: Prepared, **more: Any) -> Any:
    """Return the outcome of a run on the first workers of a crew."""
    known = dict(crew.actors)
    crew.actors = {one: known[one] for one in sorted(known)[:number]}
    try:
        return run_on(crew, prepared, **more)
    finally:
        crew.actors = known


@pytest.mark.parametrize("method", [row.name for row in methods.ROWS])
def test_one_two_and_four_workers_give_the_bits_of_one_process(crew, method):
    """One by one: all clients' states, every number of the result, and those of new clients."""
    prepared = ready(method, stacking="no")
    wanted = alone(prepared)
    for number in (1, 2, 4):
        assert_same(prepared, on(crew, number, prepared), wanted)


@pytest.mark.parametrize("method", [row.name for row in methods.ROWS])
def test_stacks_are_the_same_on_one_two_and_four_workers(crew, method):
    """Stacked: the same bits on any number of workers, and near those of one stack of all."""
    changes = {"dtype": "float64", "optimizer": "sgd", "lr": 0.05, "stacking": "yes"}
    prepared = ready(method, rounds=2, new_clients=0, evaluate_every=0, **changes)
    found = {number: on(crew, number, prepared) for number in (1, 2, 4)}
    assert_same(prepared, found[1], found[2])
    assert_same(prepared, found[1], found[4])
    assert worst_difference(found[1].server_state, alone(prepared).server_state, 1e-9) < 1e-6


def test_calibration_and_a_network_of_ones_own_give_the_bits_of_one_process(crew):
    changes = {"calibration": "shrunk", "model": "test_herd:Deep", "rounds": 2}
    prepared = ready("fedmap", stacking="no", **changes)
    assert_same(prepared, on(crew, 2, prepared), alone(prepared))


def test_a_network_that_cannot_be_imported_travels(crew):
    """It is defined in this function. `fit` starts from Python objects and ends in a folder."""

    class Here(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    draw = np.random.default_rng(5)
    data = []
    for _ in range(4):
        x = draw.normal(size=(30, 3)).astype(np.float32)
        data.append((x, (x.sum(1) > 0).astype(np.int64)))
    settings = {"rounds": 2, "model": Here, "progress": False, "device": "cpu", "stacking": "no"}
    one, two = (bayflower.fit("fedmap", data, workers=n, **settings) for n in (None, 2))
    assert one.result["final"] == two.result["final"]
    assert two.result["usage"]["workers"] == 2
