"""Calibration: tables, conformal thresholds and tallies against slow oracles and scikit-learn."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayflower.calibration import conformal, curves, shifts, trust

K = 4


def samples(number: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(number, K, generator=draw, dtype=torch.float64)
    y = torch.multinomial((logits / 2).softmax(-1), 1, generator=draw)[:, 0]
    return logits, y


# -- the table and the choice ----------------------------------------------------------------------
def test_a_table_is_the_nll_of_every_form() -> None:
    logits, y = samples(30)
    bias = torch.tensor([0.3, -0.1, 0.0, -0.2], dtype=torch.float64)
    draw = torch.Generator().manual_seed(5)
    offsets = torch.randn(6, 30, K, generator=draw, dtype=torch.float64)
    floor = curves.floor_of(30)
    level = torch.tensor([0.9, 0.2, -0.4, -0.7], dtype=torch.float64)
    folds = curves.tables(logits, {"one": offsets}, bias, level, floor, y, torch.ones(30))
    raw, found = (part.sum(0) for part in folds)
    forms = curves.forms(["one"])
    assert found.shape == (len(forms), len(curves.SIDES), curves.FINEST)
    assert raw.shape == (len(forms), 2)
    point = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    for place in (0, 3, len(forms) - 1):
        for side, (rest, share) in enumerate(curves.SIDES):
            for at in (0, curves.neutral(), curves.FINEST - 1):
                probs = torch.stack([(logits + forms[place][1] * o).softmax(-1) for o in offsets])
                heat = float(curves.temperatures()[at])
                mean = probs.mean(0).log() / heat + rest * (1 - 1 / heat) * level + share * bias
                even = (1 - floor) * mean.softmax(-1) + floor / K
                nll = -even.gather(1, y[:, None]).log().sum()
                assert float(found[place, side, at]) / curves.UNIT == pytest.approx(
                    float(nll), abs=30 / curves.UNIT
                )
        loss = -probs.mean(0).gather(1, y[:, None])[:, 0].log()
        want = [float(loss.sum()), float((loss - point).square().sum())]
        assert (raw[place] / curves.UNIT).tolist() == pytest.approx(want, abs=30 / curves.UNIT)


def sums(logits, y, offsets=None) -> curves.Sums:
    """Return the sums of some held-out samples without a bias."""
    bias, floor = torch.zeros(K, dtype=torch.float64), curves.floor_of(len(y))
    folds = curves.tables(logits, offsets or {}, bias, bias, floor, y, torch.ones(len(y)))
    return curves.Sums(len(y), *(part.sum(0) for part in folds))


def test_padding_and_numbers_that_are_not_finite() -> None:
    logits, y = samples(10)
    whole = sums(logits, y).raw
    logits[7:] = torch.nan
    mask = torch.ones(10)
    mask[7:] = 0
    bias, floor = torch.zeros(K, dtype=torch.float64), curves.floor_of(10)
    part = curves.tables(logits, {}, bias, bias, floor, y, mask)[0].sum(0)
    assert bool((part <= whole).all())
    worst = sums(logits, y).raw
    assert int(worst[0, 0] - part[0, 0]) == 3 * int(curves.WORST * curves.UNIT)


def test_temperature_is_that_of_the_lowest_nll() -> None:
    logits, y = samples(4000)
    found = sums(logits, y)
    chosen = curves.choose(found, found, [], "client")
    heat = torch.linspace(0.5, 5, 2000, dtype=torch.float64)
    nll = [float(torch.nn.functional.cross_entropy(logits / t, y)) for t in heat]
    best = float(heat[int(np.argmin(nll))])
    assert chosen.temperature == pytest.approx(best, rel=0.02)  # labels were drawn at 2
    assert chosen.posterior == ""
    assert chosen.point == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, y)), abs=1e-4
    )


def test_the_gate_takes_a_posterior_that_helps_and_withholds_one_that_hurts() -> None:
    logits, y = samples(2000)
    draw = torch.Generator().manual_seed(3)
    spread = torch.randn(32, 1, K, generator=draw, dtype=torch.float64)
    sharp = sums(3 * logits, y, {"own": 3 * spread})  # overconfident
    used = curves.choose(sharp, sharp, ["own"], "shrunk")
    assert used.gate[0] == "own"
    assert used.gated < used.point - 0.05
    assert used.calibrated < used.gated
    flat = sums(0.3 * logits, y, {"own": spread})  # underconfident
    kept = curves.choose(flat, flat, ["own"], "shrunk")
    assert (kept.posterior, kept.scale, kept.gate) == ("", 0.0, ("", 0.0))
    assert kept.gated == kept.point
    assert kept.calibrated < kept.point


@pytest.mark.parametrize(("spread", "used"), [(0.1, True), (1.0, False)])
def test_a_gain_within_one_standard_error_is_no_gain(spread: float, used: bool) -> None:
    rows, gain = 25, 0.1
    table = torch.full((8, len(curves.SIDES), curves.FINEST), rows, dtype=torch.float64)
    raw = torch.zeros(8, 2, dtype=torch.float64)
    raw[:, 0] = rows
    raw[3] = torch.tensor([rows * (1 - gain), rows * (gain**2 + spread**2)])
    found = curves.Sums(rows, (raw * curves.UNIT).long(), (table * curves.UNIT).long())
    chosen = curves.choose(found, found, ["own"], "client")  # the error is spread / 5
    assert chosen.gate == (("own", curves.SCALES[2]) if used else ("", 0.0))


@pytest.mark.parametrize(("better", "used"), [(0.01, True), (0.003, False)])
def test_calibrated_a_posterior_must_beat_the_calibrated_point(better: float, used: bool) -> None:
    rows = 100
    table = torch.full((8, len(curves.SIDES), curves.FINEST), 100.0, dtype=torch.float64)
    table[0, 0, 9] = rows * 0.5  # the point at a temperature
    table[5, 1, 12] = rows * (0.5 - better)
    raw = torch.full((8, 2), 100.0, dtype=torch.float64)
    found = curves.Sums(rows, (raw * curves.UNIT).long(), (table * curves.UNIT).long())
    chosen = curves.choose(found, found, ["own"], "client")
    best = ("own", curves.SCALES[4], curves.SHARES[1]) if used else ("", 0.0, 0.0)
    assert (chosen.posterior, chosen.scale) == best[:2]
    assert chosen.share == pytest.approx(best[2], abs=1e-6)


def test_a_small_client_follows_everyone_and_a_large_one_itself() -> None:
    logits, y = samples(6000)
    everyone = sums(logits, y)
    other = {n: sums(3.0 * logits[:n], y[:n]) for n in (5, 5000)}
    alone = curves.choose(other[5000], everyone, [], "client").temperature
    large = curves.choose(other[5000], everyone, [], "shrunk").temperature
    tiny = curves.choose(other[5], everyone, [], "shrunk").temperature
    shared = curves.choose(other[5], everyone, [], "global").temperature
    own = curves.choose(other[5], everyone, [], "client").temperature
    assert large == pytest.approx(alone, rel=0.05)
    assert abs(math.log(tiny / shared)) < abs(math.log(tiny / own))
    nothing = curves.Sums(0, torch.zeros_like(everyone.raw), torch.zeros_like(everyone.table))
    none = curves.choose(nothing, nothing, [], "shrunk")
    assert (none.temperature, none.point) == (1.0, None)


# -- sets ------------------------------------------------------------------------------------------
def test_scores_keep_their_digits_where_a_probability_is_nearly_one() -> None:
    logits = torch.tensor([[40.0, 0.0, -5.0]], dtype=torch.float64)
    found = conformal.scores(logits.log_softmax(-1))[0]
    want = 40 - math.log(1 + math.exp(-5))
    assert float(found[0]) == pytest.approx(want, abs=1e-9)
    probs = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    assert torch.allclose(conformal.scores(probs.log())[0], (probs / (1 - probs)).log()[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-30, 30), min_size=0, max_size=25), min_size=1, max_size=6),
    st.sampled_from([0.5, 0.8, 0.9, 0.95]),
    st.randoms(use_true_random=False),
)
def test_the_federated_quantile_is_the_pooled_one_in_any_order_and_tree(
    clients: list[list[float]], coverage: float, shuffle
) -> None:
    def counts(scores: list[float]) -> torch.Tensor:
        place = conformal.bins(torch.tensor(scores, dtype=torch.float64))
        return torch.bincount(place, minlength=conformal.BINS)[None]

    parts = [counts(one) for one in clients]
    while len(parts) > 1:  # a random tree
        shuffle.shuffle(parts)
        parts = [parts[0] + parts[1], *parts[2:]]
    found = int(conformal.lowest_bin(parts[0].double(), coverage))
    pooled = sorted((score for one in clients for score in one), reverse=True)
    rank = math.ceil((len(pooled) + 1) * coverage - 1e-9)
    if rank > len(pooled):
        assert found == 0
        return
    exact = pooled[rank - 1]
    edge = found * conformal.WIDTH - conformal.SPAN
    clipped = min(max(exact, -conformal.SPAN), conformal.SPAN - 1e-9)
    assert edge - 1e-9 <= clipped < edge + conformal.WIDTH + 1e-9


def test_sets_cover_as_promised_and_counts_stay_in_the_interval() -> None:
    covered, between, inside, number = 0, 0, 0, 150
    for seed in range(number):
        logits, y = samples(160, seed)
        log_probs = logits.log_softmax(-1)
        held = conformal.histogram(log_probs[:60], y[:60], torch.ones(60), by_class=False)
        lowest = conformal.threshold(held, held, 0.9, "client")
        sets = conformal.sets(log_probs[60:], lowest)
        hits = int(sets.gather(1, y[60:, None]).sum())
        covered += hits
        shrunk = conformal.threshold(held[:, :], held, 0.9, "shrunk")
        between += int(conformal.sets(log_probs[60:], shrunk).gather(1, y[60:, None]).sum())
        low, high = conformal.interval(60, 100, 0.9)
        inside += low <= hits <= high
    assert 0.90 < covered / (100 * number) < 0.92
    assert 0.89 < between / (100 * number) <= covered / (100 * number)
    assert inside >= 0.96 * number


def test_a_parameter_fitted_to_the_same_samples_costs_a_fifth_of_a_sample() -> None:
    """Scores of two classes less the classes' difference: the exact cost is known by drawing."""
    held, draws, coverage = 40, 60_000, 0.9
    draw = np.random.default_rng(1)
    score, side = draw.standard_normal((draws, held + 1)), draw.choice([-1.0, 1.0], (draws, 41))
    shift = (score[:, :held] * side[:, :held]).mean(1)  # least squares
    left = score - shift[:, None] * side
    seen, new = np.sort(left[:, :held], 1)[:, ::-1], left[:, held]

    def covered(rank: float) -> float:
        low, share = int(rank) - 1, rank - int(rank)
        return float((new >= seen[:, low] * (1 - share) + seen[:, low + 1] * share).mean())

    rank = (held + 1) * coverage
    counts = torch.full((1, 1), float(held), dtype=torch.float64)
    cost = float(conformal.reused(counts, counts.sum(), coverage)) / conformal.PARAMETERS
    assert cost == pytest.approx(0.2249, abs=1e-4)
    assert covered(rank) < 0.896
    assert covered(rank + cost) == pytest.approx(0.9, abs=0.004)
    # where others' samples count as much as the own, the fit is half as close to the own
    half = conformal.reused(counts, 2 * counts.sum(), coverage) / conformal.PARAMETERS
    assert float(half) == pytest.approx(cost / 2)
    assert conformal.spread(0.4) == 0


@pytest.mark.parametrize("how", ["shrunk", pytest.param("client", marks=pytest.mark.slow)])
def test_sets_cover_although_scaling_was_fitted_to_the_same_samples(how: str) -> None:
    rows, tested, number = 24, 200, 150
    hits = {"reused": 0, "ignored": 0}
    for seed in range(number):
        logits, y = samples(rows + tested, seed)
        logits = 1.5 * logits
        bias = 0.5 * torch.randn(K, generator=torch.Generator().manual_seed(seed)).double()
        floor, one = curves.floor_of(rows), torch.ones(rows)
        level = torch.zeros(K, dtype=torch.float64)
        folds = curves.tables(logits[:rows], {}, bias, level, floor, y[:rows], one)
        own = curves.Sums(rows, *(part.sum(0) for part in folds))
        chosen = curves.choose(own, own, [], "client")
        shown = curves.scaled(
            logits.log_softmax(-1), torch.tensor(chosen.temperature), chosen.share * bias
        )
        counts = conformal.histogram(shown[:rows], y[:rows], one, by_class=False)
        if how == "shrunk":
            plain = conformal.between_bins(counts.double(), 0.9, torch.zeros(1))
            more = conformal.reused(counts.double(), torch.tensor(float(rows)), 0.9)
            lowest = conformal.between_bins(counts.double(), 0.9, more)
        else:
            plain = conformal.lowest_bin(counts, 0.9)
            lowest = conformal.threshold(counts, counts, 0.9, how)
        for name, bins in (("ignored", plain), ("reused", lowest)):
            inside = conformal.sets(shown[rows:], bins)
            hits[name] += int(inside.gather(1, y[rows:, None]).sum())
    shares = {name: count / (number * tested) for name, count in hits.items()}
    assert shares["reused"] >= 0.9
    assert shares["ignored"] < shares["reused"] - 0.01
    assert shares["reused"] < (0.94 if how == "shrunk" else 0.97)


def test_fewer_samples_than_needed_leave_every_class_in() -> None:
    fewest = conformal.fewest(0.9)
    assert fewest == 16
    for number, open_set in ((fewest - 1, True), (fewest, False)):
        counts = torch.zeros(1, conformal.BINS, dtype=torch.int64)
        counts[0, 1000 : 1000 + number] = 1
        assert (int(conformal.threshold(counts, counts, 0.9, "client")) == 0) is open_set
    for above in (0, 3):  # a model that is sure of everything: many scores in one bin
        counts = torch.zeros(1, conformal.BINS, dtype=torch.int64)
        counts[0, 1300], counts[0, 1400] = 40 - above, above
        for how in ("shrunk", "client", "global"):
            assert int(conformal.threshold(counts, counts, 0.9, how)) == 1300


def test_the_interval_is_the_beta_binomials() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for held, tested in ((30, 50), (60, 100), (500, 300)):
        rank = math.ceil((held + 1) * 0.9)
        exact = scipy_stats.betabinom(tested, rank, held + 1 - rank)
        assert conformal.interval(held, tested, 0.9) == (exact.ppf(0.005), exact.isf(0.005))
    assert conformal.interval(3, 10, 0.9) == (10, 10)  # every class is in every set


def test_sets_by_class_promise_each_class() -> None:
    logits, y = samples(8000)
    logits[:, 0] -= 3  # class 0 is rarely thought likely
    log_probs = logits.log_softmax(-1)
    held = slice(0, 4000)
    test = slice(4000, 8000)
    hits = {}
    for by_class in (False, True):
        counts = conformal.histogram(log_probs[held], y[held], torch.ones(4000), by_class)
        lowest = conformal.threshold(counts, counts, 0.9, "client")
        sets = conformal.sets(log_probs[test], lowest)
        own = sets.gather(1, y[test][:, None])[:, 0].double()
        hits[by_class] = [float(own[y[test] == k].mean()) for k in range(K)]
    assert min(hits[True]) > 0.87
    assert min(hits[False]) < 0.86


def test_few_samples_are_filled_up_with_everyones() -> None:
    logits, y = samples(1000)
    log_probs = logits.log_softmax(-1)
    total = conformal.histogram(log_probs, y, torch.ones(1000), False)
    own = conformal.histogram(log_probs[:4], y[:4], torch.ones(4), False)
    assert int(conformal.threshold(own, total, 0.9, "client")) == 0  # too few by themselves
    assert int(conformal.threshold(own, total, 0.9, "shrunk")) > 0
    assert int(conformal.threshold(own, torch.zeros_like(total), 0.9, "shrunk")) == 0
    enough = conformal.histogram(log_probs[:50], y[:50], torch.ones(50), False)
    # with enough samples of its own only the rank's rounding differs: 45.9 or 46 of 50
    lower = int(conformal.threshold(enough, total, 0.9, "client"))
    assert lower <= int(conformal.threshold(enough, total, 0.9, "shrunk")) < lower + 40


# -- tallies ---------------------------------------------------------------------------------------
def test_tallies_are_those_of_scikit_learn_and_add_up() -> None:
    sk = pytest.importorskip("sklearn.metrics")
    logits, y = samples(500)
    log_probs = logits.log_softmax(-1)
    sets = conformal.sets(log_probs, torch.tensor([900]))
    whole = trust.tally(log_probs, sets, y, torch.ones(500))
    probs = log_probs.exp().numpy()
    onehot = np.eye(K)[y]
    assert float(whole.brier) / 500 == pytest.approx(((probs - onehot) ** 2).sum(1).mean())
    wrong = probs.argmax(1) != y.numpy()
    exact = sk.roc_auc_score(wrong, 1 - probs.max(1))
    assert trust.auroc(whole) == pytest.approx(exact, abs=2e-3)
    risk = {point["coverage"]: point["risk"] for point in trust.risks(whole)}
    assert risk[1.0] == pytest.approx(wrong.mean())
    first = np.argsort(1 - probs.max(1))[:250]
    assert risk[0.5] == pytest.approx(wrong[first].mean(), abs=5e-3)
    assert int(whole.covered) == int(sets.gather(1, y[:, None]).sum())
    parts = [
        trust.tally(log_probs[s], sets[s], y[s], torch.ones(len(y[s])))
        for s in (slice(0, 7), slice(7, 300), slice(300, 500))
    ]
    total = reduce(trust.add, parts)
    for name in trust.Trust._fields:
        assert torch.equal(getattr(total, name), getattr(whole, name)), name
    assert trust.possible(whole, 500)
    assert not trust.possible(whole._replace(covered=torch.tensor(501)), 500)
    assert trust.auroc(trust.zero()) is None


def test_the_doubt_in_use_is_the_one_that_finds_errors_better() -> None:
    sk = pytest.importorskip("sklearn.metrics")
    logits, y = samples(400)
    shown = (logits + torch.tensor([1.5, 0.0, 0.0, 0.0])).log_softmax(-1)
    plain = 1 - logits.softmax(-1).amax(-1)
    counts = trust.doubts(shown, plain, y, torch.ones(400))
    wrong = (shown.argmax(-1) != y).numpy()
    exact = [sk.roc_auc_score(wrong, one) for one in (1 - shown.exp().amax(-1), plain)]
    found = [trust.area(*one) for one in counts]
    assert found == pytest.approx(exact, abs=3e-3)
    assert abs(exact[0] - exact[1]) > 0.02
    assert trust.keeps_plain(counts) == (exact[1] > exact[0] - 0.02)
    assert trust.keeps_plain(counts.flip(0)) != trust.keeps_plain(counts)
    assert trust.keeps_plain(torch.stack([counts[0], counts[0]]))  # calibrated must be better
    assert not trust.keeps_plain(torch.zeros_like(counts))
    inside = torch.zeros_like(shown, dtype=torch.bool)
    for use in (0, 1):
        tally = trust.tally(shown, inside, y, torch.ones(400), plain, torch.tensor(use))
        assert trust.auroc(tally) == found[use]
        assert trust.summarise({0: tally})["error_auroc_plain"] == found[1]
        assert trust.possible(tally, 400)
    assert not trust.possible(tally._replace(plain_right=tally.plain_wrong), 400)
    mask = torch.arange(400) < 300
    parts = [trust.doubts(shown, plain, y, one) for one in (mask, ~mask)]
    assert torch.equal(parts[0] + parts[1], counts)


@pytest.mark.parametrize("number", [1, 4, 10, 128])
def test_folds_add_up(number: int) -> None:
    values = torch.arange(2 * number).reshape(2, number)
    found = curves.by_fold(values)
    fold = curves.fold_of(number)
    for part in range(curves.FOLDS):
        assert torch.equal(found[:, part], values[:, fold == part].sum(-1))


@pytest.mark.parametrize("shape", [(6, 3, 8, 8), (6, 5)])
def test_shifts_change_samples_and_follow_from_the_draw(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    for kind in shifts.kinds(x):
        one, two = (shifts.shifted(x, kind, np.random.default_rng(4)) for _ in range(2))
        assert torch.equal(one, two)
        assert one.shape == x.shape
        assert not torch.allclose(one, x)
    assert shifts.kinds(torch.zeros(2, 3, dtype=torch.int64)) == ()
