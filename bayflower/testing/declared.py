"""What a half declares is true: an engine, the guard and the report rely on it."""

from __future__ import annotations

from typing import Any, get_args

import torch

from ..contract import ClientHalf, Kind, ServerHalf
from ..maths.laplace import Seen
from ..methods import ROWS
from ..rounds import solo
from ..rounds.uncertain import Uncertain
from .bench import Bench


def averaging() -> list[Any]:
    """Return the functions `finalise` of servers that average whole models."""
    return [row.server.finalise for row in ROWS if row.server.averages_models]


class Declared:
    """Declarations of both halves; `bench` is a fixture."""

    def test_a_server_that_averages_models_keeps_their_mean_and_nothing_else(
        self, bench: Bench
    ) -> None:
        """`averages_models` says that the state is the mean by sample count."""
        kept: Any = bench.server.state_type  # a NamedTuple
        updates = {client: bench.trained[client].update for client in bench.clients}
        if not bench.server.averages_models:
            more = set(kept._fields) - {"params", "buffers"}
            whole = set(bench.client.model.anatomy.trainable)
            parts = set(bench.server.shared(bench.state)) >= whole
            own = type(bench.server).finalise not in averaging()
            assert more or own or not parts, "it could run inside a wrapper: averages_models = True"
            return
        assert kept._fields == ("params", "buffers")
        state = bench.finalised(bench.clients)
        assert set(state.params) == set(bench.client.model.anatomy.trainable)
        sizes = {client: int(update.num_examples) for client, update in updates.items()}
        for name, value in state.params.items():
            mean = sum(sizes[k] * updates[k].params[name].double() for k in updates)
            torch.testing.assert_close(
                value.double(), mean / sum(sizes.values()), rtol=1e-6, atol=1e-7
            )

    def test_declared_fields_are_fields_of_an_update(self, bench: Bench) -> None:
        """`update_fields` names what a client sends."""
        received = bench.received(bench.clients[0])
        for name, kind in bench.server.update_fields.items():
            held = received._asdict().get(name.split("/")[0])
            # params and buffers are declared for every method; a method may not send one of them
            assert held is not None or name in ("params", "buffers"), name
            assert any(kind in get_args(part) for part in get_args(Kind))

    def test_claims_and_bounds_are_declared(self, bench: Bench) -> None:
        """A half with `claims` says so and can reduce them."""
        half = type(bench.server)
        assert half.has_claims == (half.claims is not ServerHalf.claims)
        assert (half.claims is ServerHalf.claims) == (half.reduced is ServerHalf.reduced)

    def test_headings_are_of_numbers_that_are_reported(self, bench: Bench) -> None:
        """`headings` names numbers of `report`."""
        said = bench.server.report(bench.finalised(bench.clients))
        for key in bench.server.headings:
            # only where weights are dropped; only where a prior is learned
            optional = key in ("sparsity", "data_share")
            below = [name for name in said if key.endswith("/") and name.startswith(key)]
            assert key in said or below or optional, key

    def test_a_plain_loop_has_steps_of_its_loss_alone(self, bench: Bench) -> None:
        """`plain_loop` holds for steps that the contract defines."""
        half = type(bench.client)
        if bench.client.plain_loop and len(bench.client.phases("train")) == 1:
            assert half.step is ClientHalf.step

    def test_posteriors_are_finite_and_have_a_name_and_an_origin(self, bench: Bench) -> None:
        """Posteriors of the personal model can be used and explained."""
        client, half = bench.clients[0], bench.client
        broadcast = bench.server.broadcast(bench.state, client)
        uncertain = Uncertain(half, by_class=False)
        data = bench.data[client].train
        params, buffers = bench.params, bench.buffers
        if half.top() is not None or type(half).spread is not ClientHalf.spread:
            keys: dict[str, Any] = {"seed": 0, "client": client, "round": 1}
            state = solo.adapt(half, half.init(params, buffers), broadcast, data, "new", **keys)
            params, buffers = uncertain.numbers(state, broadcast, data.x[:1])
        _, seen = uncertain.see(params, buffers, data)
        if not isinstance(seen, Seen):  # no last layer: predictions have their variance inside
            assert half.posterior(params, broadcast, None, None) == {}
            return
        found = half.posterior(params, broadcast, seen, uncertain.layer)
        assert "laplace" in found
        if type(half).posterior is ClientHalf.posterior:
            assert set(found) == {"laplace"}
        for name, one in found.items():
            assert one.kind in ("kronecker", "diagonal", "dense", "classes", "sampled"), name
            assert one.origin
            assert one.tensors
            for value in one.tensors.values():
                assert bool(torch.isfinite(value).all()), name
        bare = half.posterior(bench.params, broadcast, None, None)
        assert {one.kind for one in bare.values()} <= {"sampled"}
