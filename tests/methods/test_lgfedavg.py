"""LG-FedAvg against plain torch: own feature extractor, shared head."""

from __future__ import annotations

import pytest
from conftest import small_prepared
from plain import LR, MOMENTUM, assert_rounds_agree


@pytest.mark.parametrize("model", ["mlp", "mlp-bn"])
def test_two_rounds_equal_plain_torch(model):
    prepared = small_prepared(
        "lgfedavg", model=model, optimizer="sgd", lr=LR, momentum=MOMENTUM, dtype="float64"
    )
    assert_rounds_agree(
        prepared, lambda name: name.startswith("head."), [("local", lambda name: True)]
    )
