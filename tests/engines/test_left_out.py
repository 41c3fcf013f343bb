"""Who a round does without, apart from the gate: entries that did not travel under median, trimmed
and krum, clients that cannot be dropped, and clients whose training diverged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small_prepared, some

from bayflower.engines import execute
from bayflower.errors import BayflowerError
from bayflower.fused.replies import Replies
from bayflower.rounds import order
from bayflower.rounds.halves import Halves
from bayflower.rounds.robust import Limiter
from bayflower.strategies import fedavg, fednp, pvi
from bayflower.tree import flatten, stack

CLIENTS, BAD = 7, 2


class Sparse(fedavg.Server):
    """FedAvg some of whose entries do not travel: those of `w` that are NaN in an update."""

    def present(self, state, updates):
        return {"params/w": ~updates.params["w"].isnan()}


def half_of(kind):
    half = kind.__new__(kind)
    half.config = fedavg.Config()
    return half


def sparse():
    """Return (a state, updates with gaps, the same as numpy with what was sent in the gaps)."""
    rng = np.random.default_rng(5)
    sent = {"v": rng.normal(size=4), "w": 50 + rng.normal(size=(3, 5))}
    state = fedavg.State({name: torch.tensor(value) for name, value in sent.items()}, {})
    own = {name: value + rng.normal(size=(CLIENTS, *value.shape)) for name, value in sent.items()}
    gaps = rng.random((CLIENTS, 3, 5)) < 0.4
    filled = {**own, "w": np.where(gaps, sent["w"], own["w"])}
    own["w"][gaps] = np.nan
    updates = {
        client: fedavg.Update(
            torch.tensor(9), {name: torch.tensor(value[client]) for name, value in own.items()}, {}
        )
        for client in range(CLIENTS)
    }
    return state, updates, filled, gaps


@pytest.mark.parametrize("how", ["median", "trimmed"])
def test_entries_that_did_not_travel_count_as_unchanged_and_stay_as_they_are(how):
    """Oracle: numpy, with the value that was sent in place of each gap."""
    state, updates, filled, gaps = sparse()
    got = order.ordered(how, half_of(Sparse), state, updates)
    for client, update in got.items():
        for name, values in filled.items():
            ranked = np.sort(values, 0)
            middle = np.median(values, 0)
            clipped = np.clip(values[client], ranked[BAD], ranked[CLIENTS - 1 - BAD])
            want = middle if how == "median" else clipped
            found = update.params[name].numpy()
            there = ~gaps[client] if name == "w" else np.ones_like(found, dtype=bool)
            assert np.allclose(found[there], want[there], rtol=1e-12)
            assert np.isnan(found[~there]).all()


def test_krum_measures_distances_between_what_clients_changed():
    """Oracle: numpy's distances, with what was sent in the gaps. With 0 in them, the clients with
    few gaps would be near each other."""
    state, updates, filled, gaps = sparse()
    flat = np.concatenate([filled[name].reshape(CLIENTS, -1) for name in ("v", "w")], 1)
    apart = ((flat[:, None] - flat[None]) ** 2).sum(-1)
    scores = [np.sort(row)[1 : CLIENTS - BAD - 1].sum() for row in apart]
    want = set(np.argsort(scores, kind="stable")[: CLIENTS - BAD].tolist())
    assert set(order.ordered("krum", half_of(Sparse), state, updates)) == want
    zeros = np.concatenate([filled["v"], np.where(gaps, 0, filled["w"]).reshape(CLIENTS, -1)], 1)
    wrong = ((zeros[:, None] - zeros[None]) ** 2).sum(-1)
    scores = [np.sort(row)[1 : CLIENTS - BAD - 1].sum() for row in wrong]
    assert set(np.argsort(scores, kind="stable")[: CLIENTS - BAD].tolist()) != want


def test_what_both_sides_keep_is_no_matter_of_a_median():
    """FedNP's client adds the change of its factor to its own: the server must add the same."""
    fields = [name for name, kind in fednp.Server.update_fields.items() if kind == "exact"]
    assert fields == ["change"]
    prepared = small_prepared("fednp", "loop", robust="median", rounds=2, num_clients=6)
    outcome = execute(prepared)
    assert outcome.faults == ()
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(outcome.server_state).values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_client_that_krum_leaves_out_of_pvi_does_not_make_all_factors_start_anew(engine):
    """PVI's server counts the changes of each factor as its client does."""
    given = {"robust": "krum", "rounds": 3, "num_clients": 7, "new_clients": 0}
    outcome = execute(small_prepared("pvi", engine, **given))
    assert any("robust=krum" in text for text in outcome.faults)
    state = outcome.server_state
    assert int(state.epoch) == 0
    assert {name: int(turns) for name, turns in state.turns.items()} == {
        str(client): 3 for client in range(7)
    }


def test_krum_without_muting_would_lose_the_count_of_turns():
    """The same on the level of the limiter: who is left out is there, with a change of nothing."""
    rng = np.random.default_rng(1)
    half = pvi.Server.__new__(pvi.Server)
    half.config = pvi.Config()
    params = {"w": torch.zeros(3, 4, dtype=torch.float64)}
    state = half.init(params, {}, tuple(range(CLIENTS)))
    updates = {
        client: pvi.Update(
            torch.tensor(9),
            {},
            {"w": torch.tensor(rng.random((3, 4)))},
            {"w": torch.tensor(rng.normal(size=(3, 4)) + (9 if client in (1, 4) else 0))},
            torch.tensor(0),
        )
        for client in range(CLIENTS)
    }
    limiter = Limiter(half, "krum")
    found = limiter.together(state, updates)
    gone = limiter.suspects.farthest
    assert gone == {1, 4}
    assert set(found) == set(updates)
    for client, update in found.items():
        changed = bool(update.shift["w"].any()) or bool(update.precision["w"].any())
        assert changed == (client not in gone)


def broken(method: str, engine: str, clients: list[int], **given):
    """Return a prepared run in which some clients' inputs are so large that training diverges."""
    keys = {"num_clients": 6, "new_clients": 0, "optimizer": "sgd", "lr": 0.1, "dtype": "float64"}
    prepared = small_prepared(method, engine, **{"rounds": 4, **keys, **given})
    own = list(prepared.federation.clients)
    for client in clients:
        wild = own[client].x_train.astype(np.float64) * 1e300
        own[client] = own[client]._replace(x_train=wild)
    return prepared._replace(federation=prepared.federation._replace(clients=tuple(own)))


@pytest.mark.parametrize("robust", ["gate", "off"])
@pytest.mark.parametrize("method", some(["fedavg", "fedmap", "fednp", "scaffold"], ["fedavg"]))
def test_a_client_whose_training_diverged_is_left_out_and_named_as_on_the_loop(method, robust):
    outcomes = {
        engine: execute(broken(method, engine, [2], robust=robust, stacking="yes"))
        for engine in ("loop", "fused")
    }
    loop, fused = outcomes["loop"], outcomes["fused"]
    assert len(loop.faults) == 4
    assert fused.faults == loop.faults
    assert all("client 2: reply not used" in text for text in fused.faults)
    for one, other in zip(loop.rounds, fused.rounds, strict=True):
        for name in ("num_clients", "bytes_up"):
            assert one[name] == other[name]
        assert np.isclose(one["train_loss"], other["train_loss"], rtol=1e-9)
    want = flatten(loop.server_state)
    for name, value in flatten(fused.server_state).items():
        assert np.allclose(value.numpy(), want[name].numpy(), rtol=1e-7, atol=1e-9), name


def test_it_keeps_its_state_and_the_others_do_not_notice_it():
    """Oracle: the run without that client; and the bits of its state before."""
    given = {"engine": "fused", "robust": "off", "method": "fedmap", "stacking": "no", "rounds": 2}
    with_it = execute(broken(clients=[2], **given))
    prepared = broken(clients=[], **given)
    rest = tuple(one for one in prepared.federation.clients if one.client != 2)
    without = execute(prepared._replace(federation=prepared.federation._replace(clients=rest)))
    assert_same_bits(with_it.server_state.params, without.server_state.params)
    fresh = prepared.halves.client.init(*prepared.halves.initial)
    assert_same_bits(with_it.client_states[2], fresh)


def test_rounds_in_which_all_training_diverges_end_the_run():
    with pytest.raises(BayflowerError, match=r"no valid reply in 3 rounds in a row.*lower lr"):
        execute(broken("fedavg", "fused", list(range(6))))


def test_a_large_sum_of_finite_numbers_is_no_reason_to_leave_a_client_out():
    """The quick look is at sums, which may be infinite where no number is."""
    prepared = small_prepared("fedavg", "fused")
    halves: Halves = prepared.halves
    params, buffers = halves.initial
    fine = fedavg.Update(torch.tensor(9), params, buffers)
    large = fine._replace(params={n: torch.full_like(v, 3e38) for n, v in params.items()})
    nan = fine._replace(params={n: v * float("nan") for n, v in params.items()})
    state = halves.server.init(params, buffers, (0, 1, 2, 3))
    found = Replies(
        [4, 5, 6, 7],
        stack([halves.client.init(params, buffers)] * 4),
        stack([fine, large, nan, fine]),
        torch.tensor([1.0, 1.0, 1.0, float("inf")]),
        {},
    ).valid(halves, state)
    assert found.clients == [4, 5]
    assert sorted(found.lost) == [6, 7]
    assert "not finite" in found.lost[6]
    assert "train-loss must be a finite number" in found.lost[7]
    assert_same_bits(found.updates, stack([fine, large]))
