"""FedPer against plain torch: shared base, private head, trained jointly."""

from __future__ import annotations

import pytest
from conftest import small_prepared
from plain import LR, MOMENTUM, assert_rounds_agree

from bayflower.engines import execute


@pytest.mark.parametrize("model", ["mlp", "mlp-bn"])
def test_two_rounds_equal_plain_torch(model):
    prepared = small_prepared(
        "fedper", model=model, optimizer="sgd", lr=LR, momentum=MOMENTUM, dtype="float64"
    )
    assert_rounds_agree(
        prepared, lambda name: not name.startswith("head."), [("local", lambda name: True)]
    )


def test_new_clients_fit_a_head_and_leave_the_base():
    prepared = small_prepared("fedper", "fused", rounds=3, new_client_epochs=30)
    (phase,) = prepared.halves.client.phases("new")
    assert set(phase.trainable) == {"head.weight", "head.bias"}
    outcome = execute(prepared)
    tally = next(iter(outcome.new_clients["personal"].values()))
    assert int(tally.num_examples) > 0
