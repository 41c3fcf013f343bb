"""What every method promises, on the updates of one round."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import vmap

from ..files.store import DiskStore, Saved
from ..flower.records import to_arrays, to_tensors
from ..maths.exact import Total
from ..networks.model import Batch
from ..rounds import solo
from ..tree import digest, flatten, shapes, stack, take, unflatten
from .bench import Bench, assert_same_bits, worst_difference


class Promises:
    """Promises of both halves; `bench` is a fixture."""

    def test_one_update_is_returned(self, bench: Bench) -> None:
        """Finalising one update at server rate 1 gives that client's shared part, to the bit."""
        if not bench.returns_one_update:
            pytest.skip(
                "the method's server goes beyond the mean of the updates; its test has the formula"
            )
        client = bench.clients[0]
        after = bench.server.shared(bench.finalised([client]))
        update = bench.trained[client].update
        sent = {**update.params, **getattr(update, "buffers", {})}
        assert after.keys() <= sent.keys()
        for name, value in after.items():
            assert torch.equal(value, sent[name]), name

    def test_no_reply_changes_nothing(self, bench: Bench) -> None:
        """An empty total returns the state."""
        assert_same_bits(bench.server.finalise(bench.state, Total().value()), bench.state)

    def test_an_absent_client_is_the_identity(self, bench: Bench) -> None:
        """The total without a client is the total to which the empty statistic was added for it."""
        some = bench.clients[1:]
        total = Total()
        total.add({})
        for client in some:
            total.add(bench.statistic(client))
        assert_same_bits(bench.server.finalise(bench.state, total.value()), bench.finalised(some))

    def test_order_and_trees_change_no_bit(self, bench: Bench) -> None:
        """Replies in any order, or added in two parts, give the same state."""
        want = bench.finalised(bench.clients)
        for seed in range(4):
            order = bench.clients.copy()
            random.Random(seed).shuffle(order)
            assert_same_bits(bench.finalised(order), want)
            left, right = Total(), Total()
            for client in order:
                (left if random.Random(client + seed).random() < 0.5 else right).add(
                    bench.statistic(client)
                )
            left.merge(right)
            assert_same_bits(bench.server.finalise(bench.state, left.value()), want)

    def test_updates_are_what_the_server_expects(self, bench: Bench) -> None:
        """`check` accepts them, and the wire does not change them."""
        for client, trained in bench.trained.items():
            direct = bench.server.unpack(bench.state, bench.client.pack(trained.update))
            assert bench.server.check(bench.state, client, direct) is None
            assert_same_bits(flatten(bench.received(client)), flatten(direct))

    def test_states_survive_the_wire_and_the_disk(self, bench: Bench, tmp_path: Path) -> None:
        """What is sent or saved comes back with the same bits."""
        client = bench.clients[0]
        trained = bench.trained[client]
        broadcast = bench.server.broadcast(bench.state, client)
        sent = to_tensors(to_arrays(bench.server.pack(broadcast)))
        assert_same_bits(bench.client.unpack(type(broadcast), sent), broadcast)
        assert_same_bits(
            unflatten(type(bench.state), to_tensors(to_arrays(bench.state))), bench.state
        )
        store = DiskStore(tmp_path)
        for round in (1, 2, 3):
            store.save(
                "run",
                client,
                Saved(
                    round,
                    f"cause-{round}",
                    flatten(trained.state),
                    flatten(trained.update),
                    {},
                    {"loss": 0.5},
                ),
            )
        kept = store.load("run", client)
        assert [saved.round for saved in kept] == [3, 2]
        assert_same_bits(unflatten(type(trained.state), kept[0].state), trained.state)
        assert_same_bits(unflatten(type(trained.update), kept[0].update), trained.update)
        assert kept[0].numbers == {"loss": 0.5}

    def test_the_same_seed_gives_the_same_bits(self, bench: Bench) -> None:
        """Training repeats to the bit; another round is another training."""
        client = bench.clients[0]
        again = bench.train(client)
        assert_same_bits(again.update, bench.trained[client].update)
        assert_same_bits(again.state, bench.trained[client].state)
        other = bench.train(client, round=2)
        assert digest(other.state) != digest(again.state) or digest(other.update) != digest(
            again.update
        )

    def test_private_fields_are_not_in_the_update(self, bench: Bench) -> None:
        """What is declared private in the state after training has no equal in the update, but for
        tensors that never moved, but for rounding, from what the server sent.
        """
        for client, trained in bench.trained.items():
            known = flatten(bench.server.broadcast(bench.state, client)).values()
            private = {
                name: leaf
                for field in bench.client.private
                for name, leaf in flatten({field: getattr(trained.state, field)}).items()
            }
            sent = flatten(trained.update)
            for name, leaf in private.items():
                alike = [x for x in known if (x.shape, x.dtype) == (leaf.shape, leaf.dtype)]
                if any(torch.allclose(leaf, one) for one in alike):
                    continue
                assert not any(
                    torch.equal(leaf, other)
                    for other in sent.values()
                    if other.shape == leaf.shape and leaf.numel() > 1
                ), name

    def test_padding_contributes_nothing(self, bench: Bench) -> None:
        """A step on a padded batch equals the step without the padding (models whose samples are
        independent).
        """
        if bench.model.coupled:
            pytest.skip("layers couple the samples: engines never pad such a model")
        client = bench.clients[0]
        data = bench.data[client].train
        phase = bench.client.phases("train")[0]
        state, broadcast = (
            bench.client.init(bench.params, bench.buffers),
            bench.server.broadcast(bench.state, client),
        )
        work = solo.fresh_optimizer(phase, bench.client.begin(state, broadcast, data))
        small = Batch(*(tensor[:5] for tensor in data))
        noise = bench.noise(phase.name, phase.batch_size)
        garbage = Batch(
            *(
                torch.cat([a, b * 7])
                for a, b in zip(small, Batch(*(tensor[5:8] for tensor in data)), strict=True)
            )
        )
        garbage = garbage._replace(
            mask=torch.cat([torch.ones(5), torch.zeros(3)]),
            y=torch.cat([small.y, torch.zeros(3, dtype=torch.int64)]),
        )
        want, want_info = bench.client.step(phase, work, (small,) * phase.batches, noise)
        got, got_info = bench.client.step(phase, work, (garbage,) * phase.batches, noise)
        assert worst_difference(got.params, want.params) < 1e-6
        assert float(got_info["loss"]) == pytest.approx(float(want_info["loss"]), rel=1e-5)

    def test_all_functions_stack_over_clients(self, bench: Bench) -> None:
        """begin, step, survey, finish and predict under vmap equal the same calls one by one;
        updates as the server reads them.
        """
        phase = bench.client.phases("train")[0]
        clients = bench.clients[:3]
        size = min(len(bench.data[client].train.y) for client in clients)
        cut = {
            client: Batch(*(tensor[:size] for tensor in bench.data[client].train))
            for client in clients
        }
        states = {client: bench.trained[client].state for client in clients}
        broadcast = bench.server.broadcast(bench.state, clients[0])

        half = bench.client
        drawn, seen = bench.noise(phase.name, size), bench.noise("predict", size)

        def whole(lift: Callable[[Any], Any], state: Any, data: Any) -> Any:
            work = lift(lambda s, d: solo.fresh_optimizer(phase, half.begin(s, broadcast, d)))(
                state, data
            )
            work, info = lift(lambda w, d: half.step(phase, w, (d,) * phase.batches, drawn))(
                work, data
            )
            if half.survey_size:
                work = lift(lambda w, d: w._replace(survey=half.survey(w, d)))(work, data)
            state, update = lift(half.finish)(state, work, data)
            probs = {
                view: lift(lambda s, d, view=view: half.predict(view, s, broadcast, d.x, seen))(
                    state, data
                )
                for view in half.views()
            }
            return state, update, info, probs

        together = whole(
            vmap,
            stack([states[client] for client in clients]),
            stack([cut[client] for client in clients]),
        )
        for position, client in enumerate(clients):
            alone = whole(lambda fn: fn, states[client], cut[client])
            for got, want in zip(
                map(bench.read, take(together, position)), map(bench.read, alone), strict=True
            ):
                assert worst_difference(got, want, zero=1e-5) < bench.near

    def test_shapes_of_messages_are_known_without_making_them(self, bench: Bench) -> None:
        """`packed_shapes` of stacked updates are the shapes of `pack`."""
        updates = [bench.trained[client].update for client in bench.clients]
        want = [shapes(bench.client.pack(update)) for update in updates]
        padded = stack([bench.padded(client) for client in bench.clients])
        assert bench.client.packed_shapes(padded) == want

    def test_a_new_client_gets_a_model(self, bench: Bench) -> None:
        """A client that never trained is adapted as the method defines; it predicts
        probabilities.
        """
        half = bench.client
        data = bench.data[bench.clients[-1]]
        fresh = half.init(bench.params, bench.buffers)
        broadcast = bench.server.broadcast(bench.finalised(bench.clients[:-1]), 99)
        state = solo.adapt(half, fresh, broadcast, data.train, "new", seed=0, client=99, round=1)
        probs = half.predict(
            "personal", state, broadcast, data.test.x, bench.noise("predict", len(data.test.y))
        )
        torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
