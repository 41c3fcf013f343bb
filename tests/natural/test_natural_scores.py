"""The scores of the natural benchmark against slow ones: quadrature, loops over samples, scipy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, stats

from bayflower.calibration.conformal import ENOUGH
from bayflower.natural import scores
from bayflower.tasks.classes import Classification
from bayflower.tasks.numbers import Gaussian
from bayflower.tasks.survival import Hazards

EDGES = (100.0, 300.0, 700.0)


def some_probs(seed=0, rows=40, classes=4):
    draw = np.random.default_rng(seed)
    return draw.dirichlet(np.ones(classes) * 0.7, rows), draw.integers(0, classes, rows)


def test_crps_of_a_number_is_the_integral_of_the_squared_distance_to_the_step():
    value, y = np.array([[1.0, 4.0], [-2.0, 0.25]]), np.array([2.5, -2.2])
    for (mean, variance), seen, found in zip(
        value, y, scores.crps(value, y, Gaussian()), strict=True
    ):
        law = stats.norm(mean, math.sqrt(variance))
        below = integrate.quad(lambda z, law=law: law.cdf(z) ** 2, -40, seen)[0]
        above = integrate.quad(lambda z, law=law: law.sf(z) ** 2, seen, 40)[0]
        assert found == pytest.approx(below + above, rel=1e-6)
        assert scores.nll(np.array([[mean, variance]]), np.array([seen]), Gaussian())[
            0
        ] == pytest.approx(-law.logpdf(seen))


def test_crps_and_nll_of_classes():
    probs, y = some_probs()
    found, losses = (
        scores.crps(probs, y, Classification(4)),
        scores.nll(probs, y, Classification(4)),
    )
    for row in range(len(y)):
        slow = sum((probs[row, c] - (c == y[row])) ** 2 for c in range(4)) / 2
        assert found[row] == pytest.approx(slow)
        assert losses[row] == pytest.approx(-math.log(probs[row, y[row]]))
    two = np.array([[0.3, 0.7]])
    assert scores.crps(two, np.array([1]), Classification(2))[0] == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("time", "event"), [(150.0, 1), (150.0, 0), (700.0, 1), (20.0, 1), (900.0, 0), (900.0, 1)]
)
def test_scores_of_times(time, event):
    curve, task = np.array([[0.9, 0.6, 0.25]]), Hazards(EDGES)
    y = np.array([[time, float(event)]])

    def risk(t):
        return 1 - np.interp(t, (0.0, *EDGES), (1.0, *curve[0]))

    seen, ends = min(time, EDGES[-1]), [0.0, *EDGES]
    parts = sorted({*ends, seen})
    slow = 0.0
    for low, high in pairwise(parts):
        if high <= seen:
            slow += integrate.quad(lambda t: risk(t) ** 2, low, high)[0]
        elif event and time <= EDGES[-1]:
            slow += integrate.quad(lambda t: (1 - risk(t)) ** 2, low, high)[0]
    assert scores.crps(curve, y, task)[0] == pytest.approx(slow / EDGES[-1], rel=1e-6)
    place = sum(time > edge for edge in EDGES)
    before = (1.0, *curve[0])[place]
    happened = event and place < len(EDGES)
    chance = before - curve[0][place] if happened else before
    assert scores.nll(curve, y, task)[0] == pytest.approx(-math.log(chance))


def test_the_smallest_sets_reach_their_level_and_no_smaller_ones_do():
    probs, _ = some_probs(1)
    for row, inside in zip(probs, scores.smallest_sets(probs), strict=True):
        assert row[inside].sum() >= 0.9 - 1e-9
        assert row[inside].sum() - row[inside].min() < 0.9
        assert row[inside].min() >= row[~inside].max(initial=0.0)


@pytest.mark.parametrize("ratio", [1, 4, 10])
def test_an_alarm_has_the_lower_expected_cost_and_its_cost_is_that_of_the_outcome(ratio):
    p = np.linspace(0.013, 0.987, 30)
    for event in (False, True):
        found = scores.cost_of_alarm(p, np.full(len(p), event), ratio)
        for chance, cost in zip(p, found, strict=True):
            acts = (1 - chance) * 1 < chance * ratio  # expected cost of acting and of waiting
            assert cost == ((0 if acts else ratio) if event else (1 if acts else 0))


@pytest.mark.parametrize("ratio", [2, 4, 10])
def test_who_answers_expects_to_pay_less_than_for_asking(ratio):
    probs, y = some_probs(2, classes=3)
    for row, truth, cost in zip(probs, y, scores.cost_of_asking(probs, y, ratio), strict=True):
        answers = (1 - row.max()) * ratio < 1
        assert cost == ((ratio if row.argmax() != truth else 0) if answers else 1)


def test_calibration_errors_by_loops():
    probs, y = some_probs(3, rows=300)
    top, right = probs.max(1), probs.argmax(1) == y
    slow = 0.0
    for low in np.arange(10) / 10:
        inside = [
            i for i in range(300) if low <= top[i] < low + 0.1 or (low == 0.9 and top[i] == 1)
        ]
        slow += abs(sum(top[i] - right[i] for i in inside)) / 300
    assert scores.ece(top, right, Classification(4)) == pytest.approx(slow)
    draw = np.random.default_rng(4)
    pit = draw.beta(2, 2, 500)
    gaps = []
    for level in range(1, 10):
        share = sum(abs(u - 0.5) <= level / 20 for u in pit) / 500
        gaps.append(abs(share - level / 10))
    assert scores.ece(pit, pit > 0, Gaussian()) == pytest.approx(np.mean(gaps))


def test_the_worst_decile_is_the_mean_of_the_largest_tenth():
    assert scores.worst_decile([3.0, 1.0]) == 3.0
    assert scores.worst_decile(list(range(30))) == np.mean([27, 28, 29])
    assert scores.worst_decile(list(range(31))) == np.mean([27, 28, 29, 30])


@pytest.mark.parametrize(("tested", "held"), [(60, 0), (12, 5), (200, 90)])
def test_the_interval_of_covered_samples_is_that_of_the_beta_binomial(tested, held):
    rows = max(held, ENOUGH)
    wanted = math.ceil((rows + 1) * 0.9)
    law = stats.betabinom(tested, wanted, rows + 1 - wanted)
    low, high = scores.bounds(tested, held)
    assert law.cdf(low - 1) <= 0.005 < law.cdf(low)
    assert law.sf(high) <= 0.005 < law.sf(high - 1)


def test_a_summary_pools_samples_and_lists_clients_outside_their_interval():
    draw = np.random.default_rng(5)
    ratios, task, clients, held = (1, 4), Gaussian(), [], [0, 40]
    for width in (1.0, 0.1):  # the second one is far too sure
        value = np.stack([np.zeros(50), np.full(50, width**2)], 1)
        y = draw.normal(size=50)
        clients.append(scores.judge(value, None, y, task, "above", ratios, 0.3))
    found = scores.summary(clients, held, task, ratios)
    both = np.concatenate([one.nll for one in clients])
    assert found["nll"] == pytest.approx(both.mean(), rel=1e-5)
    assert found["nlls"] == pytest.approx([one.nll.mean() for one in clients], rel=1e-3)
    assert found["worst"] == pytest.approx(max(found["nlls"]), rel=1e-3)
    assert found["coverage"] == np.concatenate([one.covered for one in clients]).mean()
    assert found["width"] == pytest.approx(1.1 * 1.6449, rel=1e-4)
    ((place, covered, tested, low, high),) = found["outside"]
    assert (place, tested) == (1, 50)
    assert (low, high) == scores.bounds(50, 40)
    assert covered == clients[1].covered.sum() < low
    assert set(found["cost"]) == {"1", "4"}


def test_times_are_judged_at_the_horizon_where_the_outcome_is_known():
    task = Hazards(EDGES, 300.0)
    y = np.array([[50.0, 1.0], [250.0, 0.0], [400.0, 1.0], [800.0, 0.0]])
    curve = np.array([[0.9, 0.3, 0.1]] * 4)
    probs, truth = scores.at_horizon(curve, y, task)
    assert truth.tolist() == [1, 0, 0]  # the second one was lost before the horizon
    assert probs[:, 1] == pytest.approx([0.7, 0.7, 0.7])
    found = scores.judge(curve, None, y, task, "alarm", (1, 4), 0.0)
    assert len(found.nll) == 4
    assert found.costs.tolist() == [[0, 1, 1], [0, 1, 1]]
