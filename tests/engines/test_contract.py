"""Every method × every promise of the contract. `bayflower.testing` has the promises, which methods
of other packages keep too.
"""

from __future__ import annotations

import functools

import pytest
from conftest import FEWER, NEEDED, cases

from bayflower.methods import METHODS
from bayflower.testing import Bench
from bayflower.testing.promises import Promises

NAMES = sorted(METHODS)
BEYOND = {
    "feddyn",
    "pvi",
    "fedep",
    "fedep-ft",
    "fedsep",
    "fedivon",
    "qlsd",
    "qlsd-ft",
}  # methods whose global model is not the clients' mean, by definition

# some steps, after which two models that began together differ
STEPS = {name: {"batch_size": 4} for name in ("ditto",)}
CODED = ("qlsd", "qlsd-ft")  # behind BatchNorm rounding may tip a number to the next code


@functools.cache
def bench_of(method: str, model: str, dtype: str = "float32") -> Bench:
    """Return a method with some clients' updates of one round; test files share it."""
    near = 1e-4 if model == "mlp-bn" else 2e-5  # BatchNorm magnifies what CPUs round differently
    return Bench(
        method,
        model,
        dtype,
        settings={**NEEDED.get(method, {}), **FEWER.get(method, {}), **STEPS.get(method, {})},
        returns_one_update=method not in BEYOND,
        near=0.02 if method in CODED else near,  # two codes
    )


@pytest.fixture(scope="module", params=cases("mlp"))
def bench(request) -> Bench:
    return bench_of(*request.param)


class TestPromises(Promises):
    """All of them, for every method."""
