"""The contract suite for a method of your own. It needs pytest. A test file of three lines runs it:

from bayflower.testing import MethodContract

class TestMine(MethodContract):
    method = "mine"
"""

from __future__ import annotations

from ..errors import BayflowerError

try:
    import pytest
except ImportError:
    raise BayflowerError(
        "bayflower.testing needs pytest, which is not installed: pip install pytest"
    ) from None

# before these are imported, so that a failed assert shows its values
for part in ("bench", "promises", "declared", "runs", "suite"):
    pytest.register_assert_rewrite(f"bayflower.testing.{part}")

from .bench import Bench, assert_same_bits, small_prepared, worst_difference  # noqa: E402
from .suite import MethodContract  # noqa: E402

__all__ = ["Bench", "MethodContract", "assert_same_bits", "small_prepared", "worst_difference"]
