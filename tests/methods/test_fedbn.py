"""FedBN: normalisation layers stay, the rest is FedAvg's."""

from __future__ import annotations

import torch
from conftest import assert_same_bits, small_prepared

from bayflower.engines import execute, run_to_result


def test_norms_stay_and_the_rest_is_averaged():
    prepared = small_prepared("fedbn")
    half, (params, buffers) = prepared.halves.client, prepared.halves.initial
    own = half.init(params, buffers)
    names = {*own.params, *own.buffers}
    assert names == prepared.halves.model.norm_names
    assert {"base.2.running_mean", "base.2.weight"} <= names
    state = prepared.halves.server.init(params, buffers, ())
    assert {*state.params, *state.buffers} == {*params, *buffers} - names


def test_clients_end_with_different_norms():
    outcome = execute(small_prepared("fedbn", "fused"))
    means = [state.buffers["base.2.running_mean"] for state in outcome.client_states.values()]
    assert not torch.allclose(means[0], means[1])


def test_without_norms_it_is_fedavg_and_says_so():
    fedbn, fedavg = (small_prepared(method, model="mlp") for method in ("fedbn", "fedavg"))
    assert_same_bits(execute(fedbn).server_state, execute(fedavg).server_state)
    short = {"rounds": 1, "local_epochs": 1}
    for model, said in (("mlp", True), ("mlp-bn", False)):
        remark = run_to_result(small_prepared("fedbn", model=model, **short))["remark"]
        assert ("fedbn equals fedavg here" in (remark or "")) == said
        assert (remark is None) != said
