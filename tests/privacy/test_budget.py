"""Differential privacy: the cost of noisy sums against independent computations; what one client
can change, for every method; runs against a slow oracle; the budget that stops a run.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from privateruns import BASE
from scipy import optimize, stats

from bayflower import methods
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.files import checkpoint
from bayflower.files.texts import read_json
from bayflower.fused.run import FusedRun
from bayflower.maths.exact import Total
from bayflower.personal.runs import export
from bayflower.privacy import accounting, discrete
from bayflower.privacy.budget import FILE, Budget
from bayflower.privacy.discrete import Entropy, gaussian
from bayflower.privacy.noisy import CHANGE, WEIGHTS, Mechanism, kind_of, private_half, with_share
from bayflower.recipes.secrecy import Privacy
from bayflower.rounds.halves import make_halves
from bayflower.tree import flatten, map_tree, unflatten

pytest.importorskip("dp_accounting")
# methods with portions: test_portions.py
PRIVATE = [
    row.name for row in methods.ROWS if not (row.additive or row.private or row.server.portions)
]


@pytest.fixture
def fixed(monkeypatch):
    monkeypatch.setattr(Entropy, "seed", 7)


# -- the cost of noisy sums ------------------------------------------------------------------------
def exact_epsilon(noise, count, delta):
    """Return the ε of `count` Gaussian sums: they are one with noise z/√T, whose δ is known in
    closed form (Balle and Wang 2018).
    """
    s = noise / math.sqrt(count)

    def excess(eps):
        first = stats.norm.cdf(0.5 / s - eps * s)
        return first - math.exp(eps) * stats.norm.cdf(-0.5 / s - eps * s) - delta

    return optimize.brentq(excess, 0, 100)


def fourier_epsilon(noise, count, delta, share):
    """Return the ε of `count` sums with secret sampling: the density of one privacy loss on a fine
    grid, to the power T in the frequency domain; the worse of both directions.
    """
    worst = 0.0
    for removed in (True, False):
        x = np.linspace(-40 * noise, 40 * noise, 400_001)
        null = stats.norm.pdf(x, 0, noise)
        there = (1 - share) * null + share * stats.norm.pdf(x, 1, noise)
        with np.errstate(all="ignore"):
            loss = np.log1p(share * np.expm1((2 * x - 1) / (2 * noise**2)))
        mass = (there if removed else null) * (x[1] - x[0])
        loss = loss if removed else -loss
        step, half = 1e-3, 2**16
        place = np.round(loss / step)
        good = np.abs(place) < half
        grid = np.zeros(2 * half)
        np.add.at(grid, place[good].astype(int) + half, mass[good])
        power = np.fft.fft(np.fft.ifftshift(grid)) ** count
        total = np.fft.fftshift(np.fft.ifft(power).real)
        losses = (np.arange(2 * half) - half) * step

        def excess(eps, total=total, losses=losses):
            beyond = losses > eps
            return (total[beyond] * -np.expm1(eps - losses[beyond])).sum() - delta

        worst = max(worst, optimize.brentq(excess, 0, 60))
    return worst


@pytest.mark.parametrize(
    ("noise", "count", "delta", "share"),
    [
        (5.0, 50, 1e-5, 1.0),
        (1.2, 50, 1e-5, 0.2),
        pytest.param(0.9, 200, 1e-6, 0.05, marks=pytest.mark.slow),
    ],
)
def test_epsilon_is_that_of_an_independent_computation(noise, count, delta, share):
    found = accounting.epsilon(noise, count, delta, share)
    if share == 1:
        expected = exact_epsilon(noise, count, delta)
    else:
        expected = fourier_epsilon(noise, count, delta, share)
    assert found == pytest.approx(expected, rel=0.01)  # asked for: 5 %
    assert found >= expected * (1 - 1e-3)  # it is rounded up
    if share < 1:
        return
    back = accounting.noise_for(found, count, delta, share)
    assert back == pytest.approx(noise, rel=3e-3)
    assert accounting.affordable(found * 1.001, noise, delta, share, 2 * count) == count


def test_noise_is_the_discrete_gaussian(monkeypatch, fixed):
    monkeypatch.setattr(discrete, "BITS", 1)  # σ = 2: every number can be counted
    values, number = np.arange(-9, 10), 200_000
    drawn = gaussian(Entropy(), number)
    expected = np.exp(-(values**2) / 8) / np.exp(-(np.arange(-60, 61) ** 2) / 8).sum()
    seen = np.array([(drawn == one).sum() for one in values])
    apart = (seen - number * expected) / np.sqrt(number * expected)
    assert np.abs(apart).max() < 4
    monkeypatch.setattr(discrete, "BITS", 20)
    fine = gaussian(Entropy(), 50_000) / 2**20
    assert stats.kstest(fine, "norm").pvalue > 0.01
    assert gaussian(Entropy(), 0).size == 0


# -- what one client can change --------------------------------------------------------------------
def half_of(method):
    run = parse(method, {"model": "mlp", "calibration": "off"})
    made = make_halves(run, (6,), 3)
    return made.server, made.server.init(*made.initial, (0, 1, 2))


def some_update(half, state, draw, size=1.0, weight=1):
    """Return an update with random numbers; clients weigh `weight`."""

    def one(name, leaf):
        if leaf.is_floating_point() and kind_of(half, name) in WEIGHTS:
            return torch.zeros_like(leaf) + math.log(weight)
        if leaf.is_floating_point():
            return (leaf + size * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)).abs()
        return torch.full_like(leaf, weight) if name == "num_examples" else leaf

    expected = half.expects(state)
    flat = {name: one(name, leaf) for name, leaf in flatten(expected).items()}
    return unflatten(type(expected), flat)


def summed(half, state, updates):
    total = Total()
    for client, update in enumerate(updates):
        total.add(half.statistic(state, client, update))
    return total.value()


@pytest.mark.parametrize("method", PRIVATE)
def test_the_method_goes_on_from_the_mean_and_no_client_counts_for_more_than_the_clip(method):
    half, state = half_of(method)
    draw = torch.Generator().manual_seed(1)
    updates = [some_update(half, state, draw, 0.1) for _ in range(4)]
    # without noise, and with a clip that nothing reaches: the method's own sum [eq. 1] [eq. 2]
    wide = private_half(half, Mechanism(1e4, 1e-3, 4.0), None)
    ours = flatten(wide.finalise(state, summed(wide, state, updates)))
    theirs = flatten(half.finalise(state, summed(half, state, updates)))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-4, atol=1e-5)
    # with one: the change of any client, whatever it claims, is at most the clip
    tight = private_half(half, Mechanism(0.5, 1.0, 4.0), None)
    unit = tight.mechanism.unit
    for size, weight in ((0.1, 1), (1e3, 1), (1e6, 10**9)):
        update = some_update(half, state, draw, size, weight)
        change = tight.statistic(state, 0, update)[CHANGE].double() * unit
        assert float(change.norm()) <= 0.5
        assert float(change.norm()) == pytest.approx(0.5, rel=1e-3)
    stacked = map_tree(lambda *leaves: torch.stack(leaves), *updates)
    fast, slow = tight.total(state, (0, 1, 2, 3), stacked), summed(tight, state, updates)
    assert torch.equal(fast[CHANGE], slow[CHANGE])


def test_a_method_whose_sums_are_no_means_is_refused():
    half, state = half_of("fedla")
    draw = torch.Generator().manual_seed(1)
    updates = [some_update(half, state, draw) for _ in range(4)]
    wide = private_half(half, Mechanism(1e4, 1e-3, 4.0), None)
    ours = flatten(wide.finalise(state, summed(wide, state, updates)))
    theirs = flatten(half.finalise(state, summed(half, state, updates)))
    assert any(not torch.allclose(ours[k], theirs[k], rtol=1e-2) for k in theirs)
    for row in methods.ROWS:
        if row.private or row.additive:
            with pytest.raises(ConfigError, match=f"dp=client is not for {row.name}: "):
                parse(row.name, {"dp": "client"})
    for settings, text in (
        ({"dp": "all"}, "dp must be off, client, local or sample"),
        ({"dp": "client", "max_share": 0.5}, "counts every client the same"),
        ({"dp": "client", "prior": "learned"}, "not for fedmap with prior=learned"),
        ({"dp_delta": 0.5}, "dp_delta must be in"),
        ({"dp_noise": 1e-9}, "dp_noise must be 0 or at least"),
        ({"dp_epsilon": 0}, "dp_epsilon must be in"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse("fedmap", settings)


def test_shares_of_the_clients_add_up_to_the_noise(fixed):
    """Nine of twelve shares are the noise that is needed; all twelve are more."""
    mechanism = Mechanism(2.0, 1.5, 12.0, shares=9)
    statistic = {CHANGE: torch.zeros(20_000, dtype=torch.int64)}
    source = Entropy()
    shares = [with_share(statistic, source)[CHANGE].double() * mechanism.unit for _ in range(12)]
    assert float(sum(shares[:9]).std()) == pytest.approx(1.5 * 2.0, rel=0.02)
    assert float(sum(shares).std()) == pytest.approx(1.5 * 2.0 * math.sqrt(12 / 9), rel=0.02)


# -- runs ------------------------------------------------------------------------------------------
def carried(method, engine, out=None, resume=None, **settings):
    ready = prepare(parse(method, {**BASE, **settings}), engine)
    return run_to_result(ready, out, resume=resume)


def test_a_round_is_the_clipped_and_noisy_mean(fixed):
    """The state after a round against a slow loop over clients."""
    settings = {**BASE, "rounds": 1, "dp": "client", "dp_clip": 0.1, "dp_noise": 2.0}
    ready = prepare(parse("fedavg", settings), "fused")
    known = (ready.run, ready.federation, ready.halves)
    plain, private = (FusedRun(*known), FusedRun(*known))
    before = plain.state
    clients = list(plain.everyone)
    updates = plain.engine.train(clients, plain.broadcast_to(clients), 1).updates
    private.round(1)
    names = sorted(before.params)
    flat = torch.cat([before.params[name].reshape(-1).double() for name in names])
    total = np.zeros(len(flat))
    cut = 0
    for place in range(len(clients)):
        own = torch.cat([updates.params[name][place].reshape(-1).double() for name in names])
        change = (own - flat).numpy()
        norm = math.sqrt(sum(float(one) ** 2 for one in change))
        cut += norm > 0.1
        total += change * min(1, 0.1 / norm)
    noise = gaussian(Entropy(), len(flat)) / 2**20 * 0.1 * 2.0
    expected = flat.numpy() + (total + noise) / 6
    found = torch.cat([private.state.params[name].reshape(-1) for name in names]).numpy()
    assert cut >= 3
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedmap", marks=pytest.mark.slow)])
def test_fused_and_loop_are_private_with_the_same_bits(method, fixed):
    settings = {"dp": "client", "dp_noise": 1.0, "dp_epsilon": 20.0, "fraction_train": 0.3}
    ours, theirs = (carried(method, engine, **settings) for engine in ("fused", "loop"))
    assert ours["privacy"] == theirs["privacy"]
    assert ours["final"]["personal"]["nll"] == theirs["final"]["personal"]["nll"]
    numbers = [[one["num_clients"] for one in r["rounds"]] for r in (ours, theirs)]
    assert numbers[0] == numbers[1]
    assert ours["privacy"]["sampling"] == "poisson"
    assert ours["privacy"]["epsilon"] == pytest.approx(fourier_epsilon(1.0, 3, 1e-5, 0.3), rel=0.01)
    assert [one["epsilon"] for one in ours["rounds"]] == sorted(
        one["epsilon"] for one in ours["rounds"]
    )


def test_a_round_in_which_nobody_is_sampled_is_as_noisy_as_any_other(fixed, monkeypatch):
    monkeypatch.setattr(Entropy, "chosen", lambda self, share, size: np.zeros(size, dtype=bool))
    settings = {"dp": "client", "dp_noise": 1.0, "dp_epsilon": 20.0, "fraction_train": 0.3}
    for engine in ("fused", "loop"):
        found = carried("fedavg", engine, rounds=1, **settings)
        assert found["rounds"][0]["num_clients"] == 0
        assert found["privacy"]["rounds"] == 1
        assert found["final"]["personal"]["nll"] > 3  # the model is noise


def test_secure_sums_with_noise_of_the_clients():
    """ε counts each client's rounds, without sampling; the noise is there though the server adds
    none.
    """
    settings = {"dp": "client", "dp_noise": 3.0, "dp_epsilon": 50.0, "secure": "sum"}
    found = carried("fedavg", "loop", **settings, fraction_train=0.7, rounds=2)
    cost = found["privacy"]
    assert cost["noise_from"] == "clients"
    assert cost["epsilon"] == pytest.approx(max(cost["per_client"].values()))
    assert {round(one, 6) for one in cost["per_client"].values()} <= {
        round(accounting.epsilon(3.0, count, 1e-5), 6) for count in (1, 2)
    }
    assert found["faults"] == []
    assert found["final"]["personal"]["nll"] > 3


# -- the budget ------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["fused", "loop"])
def test_a_run_stops_before_the_budget_is_overspent_and_cannot_be_resumed(engine, tmp_path):
    noise = 4.0
    budget = accounting.epsilon(noise, 2, 1e-5) * 1.01
    settings = {"dp": "client", "dp_noise": noise, "dp_epsilon": budget, "checkpoint_every": 9}
    found = carried("fedavg", engine, tmp_path, rounds=5, **settings)
    assert len(found["rounds"]) == 2
    assert found["privacy"]["epsilon"] <= budget
    assert found["privacy"]["rounds_left"] == 0
    assert "dp: stopped after 2 rounds" in found["remark"]
    assert "after round 2" in found["final"]["personal"]["clients"]
    card = export(tmp_path, 1, tmp_path / "model", ("safetensors",))  # of the last round, 2
    assert (card["round"], card["privacy"]["level"]) == (2, "client")
    assert card["privacy"]["epsilon"] == found["privacy"]["epsilon"]
    run = parse("fedavg", {**BASE, "rounds": 5, **settings})
    saved = checkpoint.to_resume(tmp_path, run)
    with pytest.raises(ConfigError, match="privacy budget of this run is spent"):
        carried("fedavg", engine, tmp_path, saved, rounds=5, **settings)


def test_rounds_that_are_repeated_after_a_crash_count_twice(tmp_path):
    settings = {"dp": "client", "dp_epsilon": 6.0, "rounds": 4, "checkpoint_every": 1}
    run = parse("fedavg", {**BASE, **settings})
    ready = prepare(run, "fused")
    first = FusedRun(run, ready.federation, ready.halves, out=tmp_path)
    noise = first.budget.noise
    first.round(1)
    first.save(1)
    first.round(2)
    first.round(3)  # and the machine is switched off
    assert read_json(tmp_path / FILE)["done"] == 3
    saved = checkpoint.to_resume(tmp_path, run)
    found = carried("fedavg", "fused", tmp_path, saved, **settings)
    assert [one["round"] for one in found["rounds"]] == [1, 2]  # 1, then 2 and 3, then 2 again
    assert found["privacy"]["rounds"] == 4
    assert found["privacy"]["noise"] == noise
    assert found["privacy"]["epsilon"] <= 6.0


def test_a_budget_that_is_too_small_for_one_round_is_refused():
    with pytest.raises(ConfigError, match="one round with dp_noise=1 spends"):
        Budget.of(Privacy(dp="client", dp_noise=1.0, dp_epsilon=1.0), 5, 1.0, None, None)
    assert Budget.of(Privacy(), 5, 1.0, None, None) is None


def test_without_the_package_the_run_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    accounting.epsilon.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'bayflower\[privacy\]'"):
        Budget.of(Privacy(dp="client"), 5, 1.0, None, None)


# -- an attack -------------------------------------------------------------------------------------
def audited(mechanism, trials):
    """Return the greatest ε that an attacker who knows everything but whether a client took part
    can prove, with 95 % confidence: the client sends a canary, a change of its own direction; the
    attacker looks how far the model moved along it.
    """
    half, state = half_of("fedavg")
    private, names = private_half(half, mechanism, Entropy()), sorted(state.params)
    expected = half.expects(state)
    canary = {name: value.clone() for name, value in expected.params.items()}
    canary[names[0]].view(-1)[0] += 100.0  # cut to the clip
    update = expected._replace(num_examples=torch.tensor(9), params=canary)
    there = {CHANGE: private.statistic(state, 0, update)[CHANGE]}
    seen = []
    for total in (there, {}):
        moved = [
            float(
                (private.finalise(state, total).params[names[0]] - state.params[names[0]]).view(-1)[
                    0
                ]
            )
            for _ in range(trials)
        ]
        seen.append(np.sort(np.array(moved)) * mechanism.people)
    best = 0.0
    for place in np.linspace(-2, 4, 61) * mechanism.clip:  # "it took part" above this place
        hits, alarms = ((one > place).sum() for one in seen)
        for right, wrong in ((hits, alarms), (trials - alarms, trials - hits)):
            least = stats.beta.ppf(0.025, right, trials - right + 1) if right else 0.0
            most = stats.beta.ppf(0.975, wrong + 1, trials - wrong) if wrong < trials else 1.0
            if least > 1e-5:
                best = max(best, math.log((least - 1e-5) / most))
    return best


@pytest.mark.slow
def test_an_attacker_who_inserts_a_canary_proves_no_more_than_epsilon():
    epsilon = accounting.epsilon(1.0, 1, 1e-5)
    proved = audited(Mechanism(0.5, 1.0, 8.0), 1500)
    assert 1.5 < proved <= epsilon
    assert (
        audited(Mechanism(0.5, 0.15, 8.0), 1500) > epsilon
    )  # the attack would see too little noise
