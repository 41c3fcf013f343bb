"""What a half declares is true: an engine, the guard and the report rely on it."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDED
from test_contract import Bench

from bayflower.contract import ClientHalf, ServerHalf
from bayflower.methods import METHODS
from bayflower.tree import flatten

NAMES = tuple(METHODS)


@pytest.fixture(scope="module", params=NAMES)
def bench(request) -> Bench:
    return Bench(request.param, NEEDED.get(request.param, {}).get("model", "mlp"))


def test_a_server_that_averages_models_keeps_their_mean_and_nothing_else(bench):
    updates = {client: bench.trained[client].update for client in bench.clients}
    if not bench.server.averages_models:
        more = set(bench.server.state_type._fields) - {"params", "buffers"}
        whole = set(bench.client.model.anatomy.trainable)
        parts = set(bench.server.shared(bench.state)) >= whole
        own = type(bench.server).finalise is not METHODS["fedavg"].server.finalise
        assert more or own or not parts, "it could run inside a wrapper: averages_models = True"
        return
    assert bench.server.state_type._fields == ("params", "buffers")
    state = bench.finalised(bench.clients)
    assert set(state.params) == set(bench.client.model.anatomy.trainable)
    sizes = {client: int(update.num_examples) for client, update in updates.items()}
    for name, value in state.params.items():
        mean = sum(sizes[k] * updates[k].params[name].double() for k in updates)
        torch.testing.assert_close(value.double(), mean / sum(sizes.values()), rtol=1e-6, atol=1e-7)


def test_declared_fields_are_fields_of_an_update(bench):
    received = bench.received(bench.clients[0])
    for name, kind in bench.server.update_fields.items():
        held = received._asdict().get(name.split("/")[0])
        # params and buffers are declared for every method; a method may not send one of them
        assert held is not None or name in ("params", "buffers"), name
        assert kind in ("model", "slope", "precision", "root", "buffers")


def test_claims_and_bounds_are_declared(bench):
    half = type(bench.server)
    assert half.has_claims == (half.claims is not ServerHalf.claims)
    assert (half.claims is ServerHalf.claims) == (half.reduced is ServerHalf.reduced)


def test_headings_are_of_numbers_that_are_reported(bench):
    said = bench.server.report(bench.finalised(bench.clients))
    for key in bench.server.headings:
        optional = key == "sparsity"  # only where weights are dropped
        below = [name for name in said if key.endswith("/") and name.startswith(key)]
        assert key in said or below or optional, key


def test_a_plain_loop_has_steps_of_its_loss_alone(bench):
    half = type(bench.client)
    if bench.client.plain_loop and len(bench.client.phases("train")) == 1:
        assert half.step is ClientHalf.step


def test_a_posterior_is_finite_and_names_parameters(bench):
    client, params = bench.clients[0], bench.params
    broadcast = bench.server.broadcast(bench.state, client)
    found = bench.client.posterior(params, bench.buffers, broadcast, bench.data[client].train)
    if found is None:
        assert type(bench.client).posterior is ClientHalf.posterior
        return
    assert found.kind in ("sampled", "linear")
    assert found.origin
    assert set(found.std) <= set(params)
    assert found.std
    for name, value in flatten(found.std).items():
        assert value.shape == params[name].shape
        assert bool(torch.isfinite(value).all())
        assert bool((value >= 0).all())
