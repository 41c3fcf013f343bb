"""pFedVMP against golden vectors and a slow oracle: dense pseudo-inverses in numpy, loops over
clients and classes, plain torch.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small, small_prepared
from vmpplain import Oracle, aggregated, finished, halves

from bayflower.clients import pfedvmp as client_half
from bayflower.contract import Work
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.rounds import solo
from bayflower.strategies import pfedvmp as server_half
from bayflower.strategies.pfedvmp import Update

CHOSEN = {
    "xi": 3.0,
    "alpha": 0.6,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.5,
    "dtype": "float64",
    "keep": 0.15,
}


def test_the_weight_of_the_pull_where_classes_cannot_be_told_apart():
    """Without centroids, with one, or with equal ones the pull is off; with opposite ones it is the
    paper's for 512 features (E-P13).
    """
    _, client, state = halves(512, 3, xi=50.0)
    one = torch.randn(512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def weight(*centroids: torch.Tensor) -> float:
        rows, known = torch.zeros(3, 512, dtype=torch.float64), torch.zeros(3, dtype=torch.bool)
        for k, centroid in enumerate(centroids):
            rows[k], known[k] = centroid, True
        return float(client.weight(Work({}, {}, state._replace(centroids=rows, known=known))))

    assert weight() == 0
    assert weight(one) == 0
    assert weight(one, one, one) == pytest.approx(0, abs=1e-12)
    assert weight(one, -one) == pytest.approx(50)
    assert weight(1e-3 * one, -1e-3 * one) == pytest.approx(50)  # whatever the features' size
    assert weight(one, torch.zeros_like(one)) == pytest.approx(25)


@pytest.mark.parametrize("method", ["pfedvmp", "fedproto", "fedpac"])
def test_the_weight_of_the_pull_is_found_once_a_round(method, monkeypatch):
    server, half, _, initial = small_prepared(method, model="mlp").halves
    data = small_prepared(method, model="mlp").federation.clients[0]
    own = solo.samples(data, torch.device("cpu"), torch.float32).train
    asked = []
    plain = type(half).weight
    monkeypatch.setattr(type(half), "weight", lambda *args: asked.append(1) or plain(*args))
    state = server.init(*initial, (data.client,))
    sent = server.broadcast(state, data.client)
    solo.train(half, half.init(*initial), sent, own, seed=0, client=data.client, round=1)
    assert len(asked) == 1


# -- golden --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "mu"),
        ({"prior_precision": 1.0}, "mu_with_unit_prior"),
        ({"centroid": "count_mean"}, "mu_count_weighted_mean"),
        ({"centroid": "mean"}, "mu_plain_mean"),
    ],
)
def test_golden_aggregate(golden, config, key):
    """[eq. 11] and [eq. 13], with and without the prior of [eq. 5], on a rank-deficient class, one
    sample, an absent class.
    """
    case = golden["pfedvmp_aggregate"]
    server, client, state = halves(3, 2, alpha=case["alpha"], min_count=1, **config)
    updates = []
    for name, features in case["features"].items():
        z = torch.tensor([row for rows in features.values() for row in rows], dtype=torch.float64)
        y = torch.tensor([int(k) for k, rows in features.items() for _ in rows])
        updates.append(finished(client, state, z, y))
        for k, want in case["clients"][name].items():
            assert int(updates[-1].counts[int(k)]) == want["count"]
            torch.testing.assert_close(
                updates[-1].means[int(k)],
                torch.tensor(want["mean"], dtype=torch.float64),
                rtol=2e-5,
                atol=1e-9,
            )
            if not config:
                mine = (y == int(k)) & (updates[-1].spread["weight"] != 0)
                assert int(mine.sum()) == want["rank"]
                eigenvalues = sorted((1 / updates[-1].spread["weight"][mine]).tolist())
                assert eigenvalues == pytest.approx(want["eig_sigma"], rel=2e-5)
                found = server.statistic(state, 0, server.unpack(state, client.pack(updates[-1])))
                upper = torch.tensor(want["Lambda"], dtype=torch.float64)[
                    tuple(torch.triu_indices(3, 3))
                ]
                torch.testing.assert_close(found[f"precision/{k}"], upper, rtol=2e-5, atol=1e-5)
                torch.testing.assert_close(
                    found[f"shift/{k}"],
                    torch.tensor(want["Lambda_mu"], dtype=torch.float64),
                    rtol=2e-5,
                    atol=1e-5,
                )
    after = aggregated(server, client, state, updates)
    for k, want in case["global"].items():
        torch.testing.assert_close(
            after.centroids[int(k)],
            torch.tensor(want[key], dtype=torch.float64),
            rtol=2e-5,
            atol=1e-5,
        )
    assert bool(after.known.all())


def test_golden_base(golden):
    """[eq. 12] with the weights of [eq. 10]: the base is averaged by sample count (E-P8)."""
    case = golden["pfedvmp_base"]
    server, client, state = halves(3, 2)
    state = state._replace(params={"w": torch.zeros(2, dtype=torch.float64)}, buffers={})
    total = Total()
    for theta, count in zip(case["theta_b"], case["S_n"], strict=True):
        counts, means = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.float64)
        spread = {
            "basis": torch.zeros(count, 3).double(),
            "weight": torch.zeros(count).double(),
            "label": torch.zeros(count).long(),
        }
        update = Update(
            torch.tensor(count),
            {"w": torch.tensor(theta, dtype=torch.float64)},
            {},
            counts,
            means,
            spread,
        )
        total.add(server.statistic(state, 0, server.unpack(state, client.pack(update))))
    after = server.finalise(state, total.value())
    torch.testing.assert_close(
        after.params["w"], torch.tensor(case["out"], dtype=torch.float64), rtol=2e-5, atol=1e-9
    )
    assert not bool(after.known.any())


@pytest.mark.parametrize(
    "config",
    [
        {"min_count": 1, "xi": 50.0},
        pytest.param({"min_count": 1, "xi_rule": "fixed"}, marks=pytest.mark.slow),
        pytest.param({"min_count": 3, "prior_precision": 0.8}, marks=pytest.mark.slow),
        {"min_count": 2, "centroid": "diag", "diag_floor": 0.02, "prior_precision": 0.5},
        pytest.param(
            {"min_count": 3, "centroid": "count_mean", "prior_precision": 0.5},
            marks=pytest.mark.slow,
        ),
        {"min_count": 1, "centroid": "mean"},
        {"min_count": 2, "model": "mlp-bn"},
    ],
)
def test_three_rounds_equal_the_oracle(config):
    """Every term of [eq. 9] with both rules for xi (E-P13), [eq. 11], [eq. 12] and [eq. 13], and
    both views, on clients of unequal size with absent and single classes.
    """
    prepared = small_prepared("pfedvmp", **{"model": "mlp", **CHOSEN, **config})
    oracle, (server, half, _, initial) = Oracle(prepared), prepared.halves
    present = [np.bincount(data.y_train, minlength=10) for data in oracle.clients]
    assert any((counts == 0).any() for counts in present)
    assert any((counts == 1).any() for counts in present)
    assert len({int(counts.sum()) for counts in present}) > 1
    state = server.init(*initial, ())
    states = {data.client: half.init(*initial) for data in oracle.clients}
    samples = {
        data.client: solo.samples(data, torch.device("cpu"), torch.float64)
        for data in oracle.clients
    }
    for round in (1, 2, 3):
        total, keys = Total(), {"seed": 0, "round": round}
        for data in oracle.clients:
            own = samples[data.client].train
            states[data.client], update, _ = solo.train(
                half, states[data.client], state, own, client=data.client, **keys
            )
            total.add(server.statistic(state, data.client, server.unpack(state, half.pack(update))))
        state = server.finalise(state, total.value())
        oracle.round(round)
        for name, value in oracle.base.items():
            torch.testing.assert_close(server.shared(state)[name], value, rtol=1e-6, atol=1e-8)
        for client, head in oracle.heads.items():
            for name, value in head.items():
                torch.testing.assert_close(states[client].params[name], value, rtol=1e-6, atol=1e-8)
        assert state.known.nonzero()[:, 0].tolist() == sorted(oracle.centroids)
        for k, centroid in oracle.centroids.items():
            torch.testing.assert_close(
                state.centroids[k], torch.as_tensor(centroid), rtol=1e-5, atol=1e-6
            )
    data = oracle.clients[1]
    tuned = solo.adapt(
        half,
        states[data.client],
        state,
        samples[data.client].train,
        "finetune",
        seed=0,
        client=data.client,
        round=3,
    )
    x = samples[data.client].test.x
    before = oracle.model.factory().double()
    before.load_state_dict({**oracle.base, **oracle.heads[data.client]})
    for view, module in (("before", before), ("personal", oracle.train(data, 3, "finetune"))):
        with torch.no_grad():
            want = torch.softmax(module.eval()(x), 1)
        torch.testing.assert_close(
            half.predict(view, tuned, state, x, {}), want, rtol=1e-5, atol=1e-6
        )


def test_round_one_has_no_penalty():
    """E-P6: without centroids a round is FedPer's, whatever xi is."""
    ours, fedper = (
        small_prepared(name, model="mlp", optimizer="sgd", lr=0.05)
        for name in ("pfedvmp", "fedper")
    )
    data = solo.samples(ours.federation.clients[0], torch.device("cpu"), torch.float32).train
    updates = []
    for prepared in (ours, fedper):
        server, half, _, initial = prepared.halves
        updates.append(
            solo.train(
                half,
                half.init(*initial),
                server.init(*initial, ()),
                data,
                seed=0,
                client=0,
                round=1,
            ).update
        )
    assert_same_bits(updates[0].params, updates[1].params)


def test_a_class_that_nobody_sends_keeps_its_centroid():
    server, client, state = halves(3, 4, min_count=2)
    z, y = torch.randn(9, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 0])
    first = aggregated(server, client, state, [finished(client, state, z, y)])
    assert first.known.tolist() == [True, True, False, False]  # class 2 has one sample
    second = aggregated(server, client, first, [finished(client, first, z[:3] + 1, y[:3])])
    assert second.known.tolist() == first.known.tolist()
    assert torch.equal(second.centroids[1], first.centroids[1])
    assert not torch.allclose(second.centroids[0], first.centroids[0])
    assert server.report(second) == {"known_classes": 2}
    assert_same_bits(server.finalise(second, {}), second)


def test_too_few_samples_are_not_sent():
    """E-P12: of a class below min_count neither mean nor directions are in the message."""
    _, client, state = halves(3, 2, min_count=4)
    z, y = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    sent = client.pack(finished(client, state, z, y))
    assert sent["counts"].tolist() == [0, 4]
    assert sent["means"].shape == (1, 3)
    assert sent["spread/ranks"].tolist() == [0, 3]
    assert "label" not in str(sorted(sent))


def test_memory_of_the_server_is_that_of_the_classes():
    """Forty clients take the room of one: K packed triangles, no message is kept."""
    server, client, state = halves(8, 3, min_count=1)
    total, sizes = Total(), []
    for number in range(40):
        z = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        total.add(
            server.statistic(
                state,
                number,
                server.unpack(state, client.pack(finished(client, state, z, torch.arange(12) % 3))),
            )
        )
        sizes.append(sum(value.numel() for value in total.value().values()))
    assert set(sizes) == {
        1 + sum(value.numel() for value in state.params.values()) + 3 * (8 * 9 // 2 + 8 + 1)
    }


def test_absurd_weights_do_not_end_a_run():
    """A precision beyond float64's reach next to alpha: still a finite centroid (E-P11)."""
    server, client, state = halves(3, 2, min_count=1)
    z, y = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    update = finished(client, state, z, y)
    huge = update.spread["weight"] * torch.tensor([1e60, 1e30, 1.0, 1.0], dtype=torch.float64)
    update = update._replace(spread={**update.spread, "weight": huge})
    after = aggregated(server, client, state, [update, finished(client, state, z, y)])
    assert bool(after.centroids.isfinite().all())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("alpha", 0, "alpha must be positive and finite, got 0"),
        ("xi", -1, "xi must not be negative"),
        (
            "centroid",
            "median",
            "centroid must be one of precision, diag, count_mean, mean, got 'median'",
        ),
        ("min_count", 0, "min_count must be at least 1, got 0"),
        ("cut", 1, "cut must be in"),
        ("diag_floor", "nan", "diag_floor must be positive"),
        ("features", 0, "features must be at least 1"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words):
        small("pfedvmp", **{key: value})
    assert small("pfedvmp-avg").options.centroid == "mean"


def test_errata_are_all_named():
    text = "".join(Path(half.__file__).read_text() for half in (server_half, client_half))
    assert {f"E-P{i}" for i in range(1, 13)} <= set(re.findall(r"E-P\d+", text))
