"""Methods whose secure sums have another form than their plain ones: what a client adds tells
nothing of its classes, and no ledger is needed.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from secureruns import SECURE, dropping, run

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files.store import MemoryStore
from bayflower.maths.exact import Total
from bayflower.maths.window import agree, encode, on_grid
from bayflower.rounds.halves import halves_for
from bayflower.strategies import fednp
from bayflower.strategies.fedbps import moments
from bayflower.tree import flatten

FEW = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 4,
    "partition": "pathological",
    "local_epochs": 1,
    "rounds": 2,
    "device": "cpu",
}


def class_messages(method, **settings):
    """Return (server half, state, messages) of clients that have few classes each."""
    ready = prepare(parse(method, {**FEW, **settings}), "loop")
    halves = halves_for(ready.run, ready.federation)
    state = halves.server.init(*halves.initial, tuple(range(4)))
    rng = torch.Generator().manual_seed(0)
    classes, dim = state.centroids.shape
    made = []
    for client in range(4):
        counts = torch.zeros(classes, dtype=torch.int64)
        counts[[client, client + 1, client + 2]] = 7
        made.append(message(halves.server, state, counts, dim, rng))
    return halves.server, state, made


def message(half, state, counts, dim, rng):
    """Return a message of the classes with counts, by the server's own checks."""
    number, present = int(counts.sum()), counts > 0

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    flat = {
        "num_examples": torch.tensor(number),
        "counts": counts,
        "means": normal(int(present.sum()), dim),
        **{f"params/{name}": value + 0.1 for name, value in state.params.items()},
        **{f"buffers/{name}": value for name, value in state.buffers.items()},
    }
    if half.config.centroid == "diag":
        flat["spread/precision"] = normal(int(present.sum()), dim).exp()
    if half.config.centroid == "precision":
        ranks = torch.where(present, 3, 0)
        rows = torch.linalg.qr(normal(dim, int(ranks.sum()))).Q.T.contiguous()
        flat |= {
            "spread/ranks": ranks,
            "spread/basis": rows,
            "spread/weight": normal(len(rows)).exp() * 1e3,
            "spread/triangle": torch.zeros(0, dim * (dim + 1) // 2),
        }
    return half.unpack(state, flat)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pfedvmp", {}),
        ("pfedvmp", {"alpha": 0.03}),
        ("pfedvmp", {"centroid": "diag"}),
        ("pfedvmp-avg", {}),
        ("fedproto", {}),
        ("fedproto", {"proto_average": "mean"}),
    ],
)
def test_the_form_of_a_summand_says_nothing_of_classes_and_sums_give_the_same_centroids(
    method, settings
):
    half, state, messages = class_messages(method, **settings)
    sums, plain = Total(), Total()
    forms, windows = set(), set()
    for client, one in enumerate(messages):
        found = half.summand(state, client, one)
        forms.add(tuple((name, tuple(found[name].shape)) for name in sorted(found)))
        window = agree(found, 4, 2.0**20 * 1000, 2)
        windows.add(window)
        assert int(encode(found, window)[-1]) == 0  # nothing is rounded in two limbs
        sums.add(found)
        plain.add(half.statistic(state, client, one))
    expected = half.summand(state, 0, half.expects(state))
    forms.add(tuple((name, tuple(expected[name].shape)) for name in sorted(expected)))
    assert len(forms) == len(windows) == 1
    ours, theirs = (half.finalise(state, total.value()) for total in (sums, plain))
    assert ours.known.tolist() == theirs.known.tolist() == [True] * 6 + [False] * 4
    assert torch.allclose(ours.centroids, theirs.centroids, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours.centroids[6:], state.centroids[6:])


def test_a_grid_is_exact_and_near():
    values = torch.tensor([1e-30, -3.0, 0.1, 2.0**-55, 1e9 + 0.125], dtype=torch.float64)
    for scale in (1.0, 0.03):
        found = on_grid(values, scale)
        unit = 2.0**-55 if scale == 1.0 else 2.0**-61
        assert torch.equal(on_grid(found, scale), found)
        assert bool(((found - values).abs() <= unit / 2).all())
        assert all(float(one / unit) == int(float(one / unit)) for one in found)


# -- no turns ---
@pytest.mark.parametrize("method", ["pvi", pytest.param("fedep", marks=pytest.mark.slow)])
def test_factors_without_turns_have_the_bits_of_a_plain_run(method):
    """Drop-outs at every stage; nothing but the count of turns is missing."""
    settings = {"ep_warm_rounds": 1} if method == "fedep" else {}
    ours = flatten(run(method, dropping, **SECURE, **settings).state)
    theirs = flatten(run(method, dropping, **settings).state)
    assert {name for name in theirs if name not in ours} == {f"turns/{k}" for k in range(4)}
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert not bool(ours["fresh"])


def test_a_lost_factor_of_all_weights_makes_all_start_anew():
    store = MemoryStore()
    done = run("pvi", losing(store), store=store, num_rounds=4, **SECURE)
    assert int(done.state.epoch) == 1
    assert not bool(done.state.fresh)
    for name, value in done.state.precision.items():
        own = sum(saved[0].state[f"precision/{name}"] for saved in store.kept.values())
        assert torch.allclose(value, 1 + own, rtol=1e-12, atol=1e-12)
        assert float(own.max()) > 1


def test_a_lost_memory_makes_all_start_anew():
    store = MemoryStore()
    done = run("qlsd", losing(store), store=store, num_rounds=4, **SECURE)
    assert int(done.state.epoch) == 1
    for name, value in done.state.memory.items():
        own = sum(saved[0].state[f"memory/{name}"] for saved in store.kept.values())
        assert torch.allclose(value, own, rtol=1e-12, atol=1e-12)
        assert float(value.abs().max()) > 0


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("qlsd", {f"turns/{k}" for k in range(4)}),
        ("fedsep", {f"sizes/{k}" for k in range(4)}),
        pytest.param("vd", set(), marks=pytest.mark.slow),
        ("fedbps", set()),
    ],
)
def test_sums_of_another_form_have_the_numbers_of_a_plain_run(method, missing):
    """With drop-outs at every stage. Gradients and FedSEP's changes are the same to the bit; VD's
    weights and FedBPS's moments are rounded first, and FedBPS shifts them by another point.
    """
    ours = flatten(run(method, dropping, **SECURE).state)
    theirs = flatten(run(method, dropping).state)
    rest = {name for name in theirs if not name.startswith("belief/seen")}
    assert rest - set(ours) == missing
    for name in rest & set(ours):
        if method in ("qlsd", "fedsep"):
            assert torch.equal(ours[name], theirs[name]), name
        else:
            near = {"rtol": 1e-6, "atol": 1e-7}
            assert torch.allclose(ours[name].double(), theirs[name].double(), **near), name
    if method == "fedsep":
        counted = sum(int(value) for name, value in theirs.items() if name.startswith("sizes/"))
        assert int(ours["sizes/all"]) == counted > 0


def test_a_client_that_was_counted_is_not_counted_again_when_its_state_is_gone():
    store = MemoryStore()
    done = run("fedsep", losing(store), store=store, num_rounds=3, **SECURE)
    plain = run("fedsep", num_rounds=3)
    assert int(done.state.sizes["all"]) == sum(int(one) for one in plain.state.sizes.values())


@pytest.mark.parametrize("settings", [{}, {"ranking": "balanced"}, {"statistics": "average"}])
def test_the_mask_does_not_depend_on_the_shift(settings):
    """Against Python's fractions: clients shift by what they were sent, 0 on personal entries."""
    ready = prepare(parse("fedbps", {**FEW, **settings}), "loop")
    half, state = ready.halves.server, ready.halves.server.init(*ready.halves.initial, (0, 1, 2))
    rng = torch.Generator().manual_seed(3)
    mask = {
        name: torch.rand(value.shape, generator=rng) < 0.5 for name, value in state.params.items()
    }
    state = state._replace(mask=mask)
    sent, sums, plain, updates = half.broadcast(state, 0), Total(), Total(), []
    for number in (3, 50, 7):

        def near(value):
            return value + 1e-3 * torch.randn(value.shape, generator=rng)

        def positive(value):
            return 1e-4 * torch.rand(value.shape, generator=rng) + 1e-5

        params = {name: near(value) for name, value in state.params.items()}
        variance = {name: positive(value) for name, value in state.params.items()}
        updates.append(half.expects(state)._replace(num_examples=torch.tensor(number)))
        updates[-1] = updates[-1]._replace(params=params, variance=variance)
        sums.add(half.summand(sent, 0, updates[-1]))
        plain.add(half.statistic(state, 0, updates[-1]))
    ours, theirs = half.finalise(state, sums.value()), half.finalise(state, plain.value())
    assert all(torch.equal(ours.mask[name], theirs.mask[name]) for name in mask)
    assert all(torch.equal(ours.params[name], theirs.params[name]) for name in mask)
    assert float(ours.disagreement) == pytest.approx(float(theirs.disagreement), rel=1e-6)
    name = next(iter(mask))
    _, between = moments(sent.params, sums.value())
    for place in (0, 5, 11):
        values = [Fraction(float(one.params[name].reshape(-1)[place])) for one in updates]
        mean = sum(n * v for n, v in zip((3, 50, 7), values, strict=True)) / 60
        exact = sum(n * (v - mean) ** 2 for n, v in zip((3, 50, 7), values, strict=True)) / 60
        assert float(between[name].reshape(-1)[place]) == pytest.approx(float(exact), rel=1e-6)


# -- no ledger -------------------------------------------------------------------------------------
def factors(store, accepted):
    """Return the sum of the clients' own factors (precision, shift), of rounds that were used."""
    total = [torch.zeros(10, dtype=torch.float64) for _ in range(2)]
    for (_, client), saved in store.kept.items():
        state = next((one.state for one in saved if one.round <= accepted.get(client, 0)), None)
        if state is not None:
            total[0] += state["factor/precision"]
            total[1] += state["factor/shift"]
    return total


def losing(store):
    """Return what deletes the state of client 1 before round 2."""

    def lost(request, client, round):
        if request == "train" and (client, round) == (1, 2):
            for key in [key for key in store.kept if key[1] == 1]:
                del store.kept[key]
        return False

    return lost


def test_without_a_ledger_the_total_is_the_prior_and_the_clients_own_factors():
    """With drop-outs at every stage; what a client trained in vain is in no factor."""
    store = MemoryStore()
    done = run("fednp", dropping, store=store, **SECURE)
    assert done.state.ledger == {}
    precision, shift = factors(store, done.roster.accepted)
    assert torch.allclose(done.state.total.precision, 1 + precision, rtol=0, atol=1e-14)
    assert torch.allclose(done.state.total.shift, shift, rtol=0, atol=1e-14)
    assert float(precision.max()) > 1e-3
    plain = run("fednp", dropping)
    for ours, theirs in zip(done.state.total, plain.state.total, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_a_client_that_lost_its_factor_makes_all_start_anew():
    """Its state is gone before round 2. Factors of before are no part of the total of round 3."""
    store = MemoryStore()
    done = run("fednp", losing(store), store=store, num_rounds=3, **SECURE)
    assert int(done.state.epoch) == 1
    precision, shift = factors(store, done.roster.accepted)
    assert torch.allclose(done.state.total.precision, 1 + precision, rtol=0, atol=1e-14)
    assert torch.allclose(done.state.total.shift, shift, rtol=0, atol=1e-14)
    assert "factors" not in done.records[-1]


def test_a_client_that_leaves_makes_all_start_anew():
    done = run("fednp", **SECURE)
    half, state = done._half(), done.state
    left = half.forget(state, 1)
    assert int(left.epoch) == int(state.epoch) + 1
    assert torch.equal(left.total.precision, torch.ones(10, dtype=torch.float64))
    assert half.forget(left, 2) is not None
    assert int(half.forget(left, 2).epoch) == int(left.epoch)  # there is nothing to take out
    assert isinstance(left, fednp.State)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "pfedvmp",
        "pfedvmp-avg",
        "fedproto",
        "fednp",
        "pvi",
        "fedep",
        "fedsep",
        "qlsd",
        "vd",
        "fedbps",
    ],
)
def test_the_fused_engine_makes_these_sums_too(method):
    """To the bit if clients are trained one by one."""
    settings = {**FEW, "secure": "sum", "calibration": "off", "stacking": "no"}
    loop, fused = (execute(prepare(parse(method, settings), one)) for one in ("loop", "fused"))
    ours, theirs = flatten(fused.server_state), flatten(loop.server_state)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key in ("bytes_up", "bytes_down"):
        assert fused.rounds[1][key] == pytest.approx(loop.rounds[1][key], rel=0.05)
