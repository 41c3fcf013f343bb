"""FedRep against plain torch: the head first [eq. 1], then the representation [eq. 2], each with
the other frozen.
"""

from __future__ import annotations

import pytest
from conftest import small, small_prepared
from plain import LR, MOMENTUM, assert_rounds_agree

from bayflower.errors import ConfigError


def is_head(name: str) -> bool:
    return name.startswith("head.")


@pytest.mark.parametrize("model", ["mlp", "mlp-bn"])
def test_two_rounds_equal_plain_torch(model):
    """[eq. 1] and [eq. 2] with different numbers of epochs."""
    prepared = small_prepared(
        "fedrep",
        model=model,
        head_epochs=3,
        optimizer="sgd",
        lr=LR,
        momentum=MOMENTUM,
        dtype="float64",
    )
    assert_rounds_agree(
        prepared,
        lambda name: not is_head(name),
        [("head", is_head), ("base", lambda name: not is_head(name))],
    )


def test_head_epochs_must_be_positive():
    with pytest.raises(ConfigError, match="head_epochs must be at least 1, got 0"):
        small("fedrep", head_epochs=0)
