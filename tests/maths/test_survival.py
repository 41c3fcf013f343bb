"""Judging of times to events: loops over pairs and samples, and scikit-survival where it is
installed.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bayflower import metrics
from bayflower.errors import ConfigError
from bayflower.tasks import censored, make
from bayflower.tasks.censored import SCORES
from bayflower.tasks.survival import Cox, Hazards, breslow
from bayflower.tasks.times import PER_OCTAVE, bin_of, border, histogram, quantiles

N, EDGES = 120, (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
DRAW = torch.Generator().manual_seed(7)
ONES = torch.ones(N, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=DRAW, dtype=torch.float64)


def on_edges() -> Tensor:
    """Return times that all lie on an edge; the first 5, of which 3 are events, on the last."""
    place = torch.randint(0, len(EDGES), (N,), generator=DRAW)
    place[:5] = len(EDGES) - 1
    event = (uniform(N) < 0.6).double()
    event[:5] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    return torch.stack([torch.tensor(EDGES, dtype=torch.float64)[place], event], -1)


Y = on_edges()
TIME, EVENT = Y[:, 0].numpy(), Y[:, 1].numpy() > 0


def in_the_middle(number: int) -> Tensor:
    """Return scores of Cox's model whose risks lie in the middle of their bins."""
    return torch.logit((torch.randint(90, 170, (number,), generator=DRAW).double() + 0.5) / SCORES)


@lru_cache
def g(time: float) -> float:
    """Return the share not censored by a time, by Kaplan and Meier with events first."""
    share = 1.0
    for t in np.unique(TIME[~EVENT]):
        if t <= time:
            risky = (t <= TIME).sum() - ((t == TIME) & EVENT).sum()
            share *= 1 - ((t == TIME) & ~EVENT).sum() / risky
    return share


def by_pairs(risk: np.ndarray, power: int) -> float:
    """Return the concordance over all pairs, weighted by 1/G^power."""
    right = pairs = 0.0
    for i in range(N):
        for j in range(N):
            later = TIME[j] > TIME[i] or (TIME[j] == TIME[i] and not EVENT[j])
            if EVENT[i] and later and (not power or g(TIME[i]) > 0):
                weight = g(TIME[i]) ** -power
                pairs += weight
                right += weight * (float(risk[i] > risk[j]) + 0.5 * float(risk[i] == risk[j]))
    return right / pairs


def brier_at(curves: np.ndarray, place: int) -> float:
    """Return the Brier score at an edge with each sample's weight."""
    total = 0.0
    for i in range(N):
        s = curves[i, place]
        if EVENT[i] and TIME[i] <= EDGES[place]:
            total += s**2 / g(TIME[i])
        elif TIME[i] > EDGES[place]:
            total += (1 - s) ** 2 / g(EDGES[place])
    return total / N


def judged(name: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return (the block of a result, every sample's curve, every sample's risk)."""
    if name == "cox":
        task, scores = Cox(EDGES, 2.1), in_the_middle(N)
        tally = metrics.add(
            task.tally(scores[:, None], Y, ONES), task.tally_training(scores[:, None], Y, ONES)
        )
        hazard = breslow(tally.events, tally.at_risk)
        found = task.summarise({4: tally})
        assert found["baseline"]["cumulative_hazard"] == hazard.tolist()
        return found, task.curves(scores, hazard).numpy(), scores.numpy()
    discrete = Hazards(EDGES, 2.1)
    said = discrete.predict(uniform(N, len(EDGES)) * 2 - 1)
    # risks in the middle of their bins, so that only equal ones are ties
    risk = (discrete.risk(said) * SCORES).long()
    found = discrete.summarise({4: discrete.tally(said, Y, ONES)})
    return found, said.numpy(), risk.numpy()


@pytest.mark.parametrize("name", ["hazard", "cox"])
def test_metrics_equal_sums_over_samples_and_pairs(name: str) -> None:
    found, curves, risk = judged(name)
    assert found["c_index"] == pytest.approx(by_pairs(risk, 0))
    assert found["c_index_uno"] == pytest.approx(by_pairs(risk, 2))
    assert found["horizon"] == 2.0
    assert found["brier"] == pytest.approx(brier_at(curves, 2), abs=1e-8)
    last = sum(g(edge) > 0 for edge in EDGES)
    scores = [brier_at(curves, k) for k in range(last)]
    mean = np.trapezoid(scores, EDGES[:last]) / (EDGES[last - 1] - EDGES[0])
    assert found["integrated_brier"] == pytest.approx(mean, abs=1e-8)
    whole = np.concatenate([np.ones((N, 1)), curves, np.zeros((N, 1))], 1)
    place = np.searchsorted(EDGES, TIME)
    each = np.where(EVENT, whole[range(N), place] - whole[range(N), place + 1], 0)
    nll = -np.log(np.where(EVENT, each, whole[range(N), place]))
    assert found["nll"] == pytest.approx(nll.mean(), abs=1e-8)
    # calibration: each bin's mean against Kaplan and Meier within the bin
    said = 1 - curves[:, 2]
    rows, off = found["calibration"], 0.0
    bins = (said * censored.NEAR).astype(int)
    for row, one in zip(rows, np.unique(bins), strict=True):
        mine, share = bins == one, 1.0
        for edge in EDGES[:3]:
            risky = (mine & (edge <= TIME)).sum()
            share *= 1 - (mine & (edge == TIME) & EVENT).sum() / max(risky, 1)
        assert row["num_examples"] == mine.sum()
        assert row["predicted"] == pytest.approx(said[mine].mean(), abs=1e-8)
        assert row["observed"] == pytest.approx(1 - share)
        off += mine.sum() * abs(said[mine].mean() - 1 + share) / N
    assert found["calibration_error"] == pytest.approx(off, abs=1e-8)
    # groups: neighbouring bins with at least ten samples, which have the bins' samples and sums
    groups = found["calibration_groups"]
    assert all(one["num_examples"] >= censored.FEW for one in groups)
    assert len(groups) <= censored.GROUPS
    assert sum(one["num_examples"] for one in groups) == N
    sums = [sum(one["num_examples"] * one["predicted"] for one in some) for some in (rows, groups)]
    assert sums[0] == pytest.approx(sums[1])
    # over time: the mean curve, Kaplan and Meier's, and the Brier score
    share = 1.0
    for k, row in enumerate(found["curve"]):
        at_risk = (EDGES[k] <= TIME).sum()
        share *= 1 - ((EDGES[k] == TIME) & EVENT).sum() / max(at_risk, 1)
        assert row["time"] == EDGES[k]
        assert row["predicted"] == pytest.approx(curves[:, k].mean(), abs=1e-8)
        assert row["observed"] == pytest.approx(share)
        assert row["brier"] == pytest.approx(scores[k], abs=1e-8)
    assert len(found["curve"]) == last


@pytest.mark.parametrize("name", ["hazard", "cox"])
def test_metrics_equal_those_of_scikit_survival(name: str) -> None:
    oracle = pytest.importorskip("sksurv.metrics")
    found, curves, risk = judged(name)
    y = np.array(list(zip(EVENT, TIME, strict=True)), dtype=[("event", bool), ("time", float)])
    assert found["c_index"] == pytest.approx(
        oracle.concordance_index_censored(EVENT, TIME, risk)[0]
    )
    # the library refuses an event where nobody is left uncensored, and a horizon at the last time
    tau = EDGES[-1] if g(EDGES[-1]) == 0 else None
    uno = oracle.concordance_index_ipcw(y, y, risk, tau)[0]
    assert found["c_index_uno"] == pytest.approx(uno)
    times, scores = oracle.brier_score(y, y, curves[:, :-1], EDGES[:-1])
    assert found["brier"] == pytest.approx(scores[list(times).index(2.0)], abs=1e-8)


def test_breslows_baseline_adds_up_over_clients_and_is_breslows_for_times_on_edges() -> None:
    task, scores = Cox(EDGES), in_the_middle(N)
    parts = [
        task.tally_training(scores[a:b, None], Y[a:b], ONES[a:b]) for a, b in ((0, 25), (25, N))
    ]
    total = metrics.add(*parts)
    want = [
        sum(
            1 / float(scores[Y[:, 0] >= Y[i, 0]].exp().sum())
            for i in range(N)
            if EVENT[i] and TIME[i] <= edge
        )
        for edge in EDGES
    ]
    np.testing.assert_allclose(breslow(total.events, total.at_risk), want, rtol=1e-7)
    # between edges a person counts for the share of the interval that was lived through
    y = torch.tensor([[1.5, 0.0], [2.0, 1.0]], dtype=torch.float64)
    some = task.tally_training(torch.zeros(2, 1, dtype=torch.float64), y, torch.ones(2))
    assert some.at_risk.tolist() == [2.0, 2.0, 1.5, 0.0, 0.0, 0.0]
    assert some.events.tolist() == [0, 0, 1, 0, 0, 0]


def test_on_a_fine_grid_the_numbers_are_those_without_one() -> None:
    """256 bins of the risk and 50 intervals change Harrell's C by less than 0.003."""
    draw = np.random.default_rng(3)
    scores = 0.8 * draw.normal(size=400)
    life, until = draw.exponential(np.exp(-scores)), draw.uniform(0.2, 3, 400)
    time, event = np.minimum(life, until), life <= until
    y = torch.tensor(np.stack([time, event], 1))
    task = Cox(quantiles([histogram(y.tolist())], 50))
    found = task.summarise({0: task.tally(torch.tensor(scores)[:, None], y, torch.ones(400))})
    right = pairs = 0
    for i in np.flatnonzero(event):
        right += (scores[time > time[i]] < scores[i]).sum()
        pairs += (time > time[i]).sum()
    assert found["c_index"] == pytest.approx(right / pairs, abs=0.003)


def test_an_output_of_zero_means_that_half_survive_the_last_edge() -> None:
    said = Hazards(EDGES).predict(torch.zeros(1, len(EDGES), dtype=torch.float64))
    steps = torch.tensor([0.5 ** (k / len(EDGES)) for k in range(1, len(EDGES) + 1)])
    torch.testing.assert_close(said[0], steps.double(), rtol=1e-6, atol=0)


def test_intervals_end_at_quantiles_of_everyones_events() -> None:
    draw = np.random.default_rng(2)
    times = draw.lognormal(6, 1, 900)
    events = draw.random(900) < 0.7
    y = np.stack([times, events], 1).tolist()
    parts = [histogram(y[a:b]) for a, b in ((0, 100), (100, 500), (500, 900))]
    found = quantiles(parts, 10)
    assert found == quantiles([histogram(y)], 10) == quantiles(parts[::-1], 10)
    want = np.quantile(times[events], np.arange(1, 11) / 10, method="inverted_cdf")
    assert all(a <= b <= a * 2 ** (1 / PER_OCTAVE) for a, b in zip(want, found, strict=True))
    assert parts[0][0] == 100
    assert sum(parts[0][2::2]) == events[:100].sum()
    # few distinct times: the widest intervals are halved, so that there are as many as asked for
    few = quantiles([histogram([(4.0, 1), (16.0, 1), (9.0, 0)])], 4)
    assert few == (4.0, 7.0, 10.0, 16.0)
    for time in (1e-30, 0.0, 0.3, 1.0, 2.0, 2.0000001, 365.0, 1e30):
        place = bin_of(time)
        assert time <= border(place) or time == 1e30
        assert border(place - 1) < time or place == bin_of(0.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no client has seen an event"):
        quantiles([histogram([(1.0, 0)])], 3)
    with pytest.raises(ConfigError, match="impossible"):
        quantiles([(3.0, 0.5, 1.0)], 3)
    for edges, horizon in (((2.0, 1.0), 0.0), ((1.0, 2.0), -1.0), ((1.0, 2.0), math.inf)):
        with pytest.raises(ConfigError):
            make("survival", edges=edges, horizon=horizon)
