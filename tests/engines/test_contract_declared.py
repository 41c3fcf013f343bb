"""What a half declares is true: an engine, the guard and the report rely on it."""

from __future__ import annotations

import pytest
from conftest import LATER, NEEDED, some
from test_contract import bench_of

from bayflower.methods import METHODS
from bayflower.testing import Bench
from bayflower.testing.declared import Declared


@pytest.fixture(scope="module", params=some(METHODS, set(METHODS) - LATER))
def bench(request) -> Bench:
    return bench_of(request.param, NEEDED.get(request.param, {}).get("model", "mlp"))


class TestDeclared(Declared):
    """All declarations, for every method."""
