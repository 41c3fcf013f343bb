"""Paired differences: against slow oracles, and how often the intervals contain the truth."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from bayflower.report.paired import (
    holm,
    interval,
    paired,
    power,
    residual,
    seeds_for,
    sign_test,
)


def table(d: np.ndarray, nested: bool = False) -> dict[tuple[int, str], float]:
    """Return d[s, i] as the values of clients; nested ones are others in every seed."""
    return {
        (s, f"{s}/{i}" if nested else str(i)): float(d[s, i])
        for s in range(d.shape[0])
        for i in range(d.shape[1])
    }


def draw(seed: int, shape: tuple[int, int], spread: tuple[float, float, float]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    s, n = shape
    return (
        spread[0] * rng.normal(size=(s, 1))
        + spread[1] * rng.normal(size=(1, n))
        + spread[2] * rng.normal(size=(s, n))
    )


def test_balanced_crossed_is_the_analysis_of_variance():
    """Mean squares the slow way, where every term matters."""
    d = 0.3 + draw(1, (4, 6), (1.0, 2.0, 0.5))
    s, n = d.shape
    grand = d.sum() / d.size
    ms_seed = sum(n * (d[a].mean() - grand) ** 2 for a in range(s)) / (s - 1)
    ms_client = sum(s * (d[:, b].mean() - grand) ** 2 for b in range(n)) / (n - 1)
    ms_rest = sum(
        (d[a, b] - d[a].mean() - d[:, b].mean() + grand) ** 2 for a in range(s) for b in range(n)
    ) / ((s - 1) * (n - 1))
    variance = (ms_seed + ms_client - ms_rest) / (s * n)
    freedom = variance**2 / (
        (ms_seed / (s * n)) ** 2 / (s - 1) + (ms_client / (s * n)) ** 2 / (n - 1)
    )
    found = paired(table(d))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert found.over == "seeds and clients"
    assert found.mean == pytest.approx(grand)
    assert (found.low, found.high) == (pytest.approx(grand - half), pytest.approx(grand + half))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(grand) / math.sqrt(variance), freedom))
    assert found.parts == (
        pytest.approx((ms_seed - ms_rest) / n),
        pytest.approx((ms_client - ms_rest) / s),
        pytest.approx(ms_rest),
    )
    # for just these clients: the paired t-test over seeds
    test = stats.ttest_1samp(d.mean(1), 0.0)
    assert found.these == tuple(pytest.approx(x) for x in test.confidence_interval())


def test_nested_and_one_seed_are_plain_t_tests():
    d = draw(2, (5, 7), (1.0, 0.5, 1.0))
    nested, want = paired(table(d, nested=True)), stats.ttest_1samp(d.mean(1), 0.0)
    assert (nested.over, nested.clients, nested.sign_p) == ("seeds and clients", 35, None)
    assert nested.p == pytest.approx(want.pvalue)
    assert (nested.low, nested.high) == tuple(pytest.approx(x) for x in want.confidence_interval())
    one, want = paired(table(d[:1])), stats.ttest_1samp(d[0], 0.0)
    assert (one.over, one.these, one.sd_seeds) == ("clients", None, None)
    assert one.p == pytest.approx(want.pvalue)
    assert (one.low, one.high) == tuple(pytest.approx(x) for x in want.confidence_interval())
    assert seeds_for(one, 0.01) is None
    single = paired({(0, "a"): 0.5})
    assert (single.mean, single.low, single.p, single.over) == (0.5, None, None, "nothing")
    over = paired({(0, "a"): 0.5, (1, "a"): 0.7})
    assert over.over == "seeds"


def test_the_residual_of_an_incomplete_table_is_that_of_least_squares():
    values = table(draw(3, (4, 5), (1.0, 1.0, 1.0)))
    for seed in range(4):
        del values[seed, str(seed)]  # another client is left out in every seed
    seeds, ids = sorted({s for s, _ in values}), sorted({i for _, i in values})
    # the slow way: alternate between fitting rows and columns until nothing changes
    row, column = dict.fromkeys(seeds, 0.0), dict.fromkeys(ids, 0.0)
    for _ in range(3000):
        for s in seeds:
            row[s] = statistics.fmean(v - column[i] for (a, i), v in values.items() if a == s)
        for i in ids:
            column[i] = statistics.fmean(v - row[s] for (s, b), v in values.items() if b == i)
    left = sum((v - row[s] - column[i]) ** 2 for (s, i), v in values.items())
    assert residual(values, seeds, ids) == pytest.approx(left / (16 - 4 - 5 + 1))
    found = paired(values)
    assert found.over == "seeds and clients"
    assert found.low < found.mean < found.high


@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        ((3, 7), (1.0, 1.0, 1.0)),
        pytest.param((5, 4), (0.0, 1.0, 0.3), marks=pytest.mark.slow),
        pytest.param((5, 7), (1.0, 0.0, 1.0), marks=pytest.mark.slow),
        ((10, 5), (0.3, 1.0, 1.0)),
    ],
)
def test_intervals_contain_the_truth_as_often_as_they_say(shape, spread):
    """400 studies with new seeds and new clients each, truth 0; a percentile bootstrap of clients
    and seeds contains it less often.
    """
    ours = boot = 0
    rng = np.random.default_rng(7)
    for number in range(400):
        d = draw(1000 + number, shape, spread)
        found = paired(table(d))
        ours += found.low <= 0 <= found.high
        rows = rng.integers(shape[0], size=(200, shape[0]))
        columns = rng.integers(shape[1], size=(200, shape[1]))
        again = d[rows[:, :, None], columns[:, None, :]].mean((1, 2))
        boot += np.quantile(again, 0.025) <= 0 <= np.quantile(again, 0.975)
    assert ours >= 0.92 * 400
    assert boot < ours


def test_the_number_of_seeds_gives_the_power_it_says():
    """By simulation: with that many seeds a difference of 1 is seen in about 80 % of studies."""
    d = draw(5, (6, 4), (1.0, 0.0, 0.5))
    found = paired(table(d, nested=True))
    need = seeds_for(found, 1.0)
    rng = np.random.default_rng(0)
    means = 1.0 + found.sd_seeds * rng.normal(size=(4000, need))
    p = stats.ttest_1samp(means, 0.0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.12)
    fewer = 1.0 + found.sd_seeds * rng.normal(size=(4000, need - 1))
    assert np.mean(stats.ttest_1samp(fewer, 0.0, axis=1).pvalue < 0.05) < 0.82
    # sites that differ much: no number of seeds shows it beyond them, but it does for just these
    apart = paired(table(draw(6, (5, 4), (0.2, 5.0, 0.2))))
    assert seeds_for(apart, 1.0) is None
    assert seeds_for(apart, 1.0, beyond=False) <= 10
    assert power(1.0, 0.0, 3.0) == 1.0


def test_the_sign_test_and_holm_against_their_definitions():
    for better, worse in itertools.product(range(6), repeat=2):
        want = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert sign_test(better, worse) == pytest.approx(want)
    assert holm([0.01, 0.04, 0.03, None]) == [pytest.approx(0.03), 0.06, 0.06, None]
    assert interval(0.0, 0.0, 3.0) == (0.0, 0.0, 1.0)
    assert interval(0.5, 0.0, 3.0) == (0.5, 0.5, 0.0)
