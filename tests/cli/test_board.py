"""The numbers and words of the report's first screen, against slow oracles."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.report import made
from bayflower.report.board import caveats, cost, section
from bayflower.report.collect import Found, group, unequal
from bayflower.report.flat import of_runs
from bayflower.report.numbers import summary
from bayflower.report.twoclass import Z, delong, net_benefit, numbers, wilson
from bayflower.report.uncertainty import honest, trusted
from bayflower.report.verdict import verdict

SITES = ("Basel", "Bern", "Chur", "Zug")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, dict]:
    """A real result of two methods on two classes and four sites, calibrated."""
    folder = tmp_path_factory.mktemp("two")
    rng = np.random.default_rng(1)
    y = np.arange(240) % 2
    x = rng.normal(size=(240, 3)) + y[:, None]
    np.savez(folder / "wards.npz", x=x, y=y, client=np.arange(240) // 60)
    found = {}
    for method in ("fedmap", "local"):
        given = {"dataset": str(folder / "wards.npz"), "partition": "natural", "num_clients": 4}
        given |= {"new_clients": 0, "rounds": 1, "local_epochs": 2, "device": "cpu"}
        run_to_result(prepare(parse(method, given), "fused"), folder / method)
        found[method] = json.loads((folder / method / "result.json").read_text())
        for one in found[method]["clients"]:
            one["name"] = SITES[one["client"]]
    return found


def run(result: dict, seed: int, gain: float = 0.0, **config) -> Found:
    """Return a run with another seed, its clients' accuracies moved by `gain`."""
    made = copy.deepcopy(result)
    made["seed"] = made["config"]["seed"] = seed
    made["config"] |= config
    rng = np.random.default_rng(seed)
    for row in made["final"]["personal"]["per_client"]:
        row["accuracy"] = 0.7 + 0.01 * rng.normal() + gain + 0.001 * seed * bool(gain)
    return Found(Path(f"{result['method']}-{seed}"), made)


def scores_of(rng, negatives: int, positives: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Return counts by bin, and the bins of the samples one by one."""
    low = (50 * rng.beta(2, 3, negatives)).astype(int).tolist()
    high = (50 * rng.beta(3, 2, positives)).astype(int).tolist()
    return np.array([np.bincount(some, minlength=50) for some in (low, high)], float), low, high


def test_delong_by_loops_over_samples():
    scores, low, high = scores_of(np.random.default_rng(3), 31, 17)

    def won(p: int, n: int) -> float:
        return 1.0 if p > n else 0.5 if p == n else 0.0

    of_high = [sum(won(p, n) for n in low) / len(low) for p in high]
    of_low = [sum(won(p, n) for p in high) / len(high) for n in low]
    area = sum(of_high) / len(high)
    variance = np.var(of_high, ddof=1) / len(high) + np.var(of_low, ddof=1) / len(low)
    assert delong(scores) == pytest.approx((area, variance), rel=1e-12)
    one = np.zeros((2, 50))
    one[0, 3], one[1, 4] = 5, 1
    assert delong(one) is None


def test_delong_intervals_cover():
    """Intervals of 300 draws of 40 + 40 samples have the true AUROC in them 95 times of 100."""
    rng = np.random.default_rng(0)
    big = delong(scores_of(rng, 200_000, 200_000)[0])
    assert big is not None
    inside = 0
    for _ in range(300):
        scores = scores_of(rng, 40, 40)[0]
        found = numbers([{"scores": scores.tolist(), "confusion": [[30, 10], [10, 30]]}])
        inside += found.auroc.low <= big[0] <= found.auroc.high
    assert 0.91 < inside / 300 < 0.985


@pytest.mark.parametrize(("part", "whole"), [(0, 7), (7, 7), (3, 11), (61.5, 70)])
def test_wilson_is_the_set_of_shares_that_a_score_test_keeps(part, whole):
    found = wilson(part, whole)
    grid = np.linspace(0, 1, 200_001)
    kept = grid[abs(part / whole - grid) <= Z * np.sqrt(grid * (1 - grid) / whole) + 1e-12]
    assert (found.low, found.high) == pytest.approx((kept.min(), kept.max()), abs=1e-5)
    assert wilson(0, 0).text() == "–"


def test_net_benefit_by_loop():
    scores, low, high = scores_of(np.random.default_rng(5), 40, 25)
    for i, (threshold, benefit, every) in enumerate(net_benefit(scores), 1):
        assert threshold == pytest.approx(i / 50)
        odds = threshold / (1 - threshold)
        true, false = sum(p >= i for p in high), sum(n >= i for n in low)
        assert benefit == pytest.approx(true / 65 - false / 65 * odds)
        assert every == pytest.approx(25 / 65 - 40 / 65 * odds)


def test_seeds_do_not_make_intervals_narrower():
    """The same samples in three runs are no more samples."""
    scores = scores_of(np.random.default_rng(2), 40, 25)[0].tolist()
    block = {"scores": scores, "confusion": [[30, 10], [5, 20]]}
    one, three = numbers([block]), numbers([block] * 3)
    assert one[:5] == three[:5]
    assert one.sensitivity.value == 0.8
    assert numbers([{"accuracy": 1.0}]) is None  # a file from before, or more classes


def test_honest_and_dishonest_probabilities_are_told_apart():
    rng, good, sure = np.random.default_rng(0), 0, 0
    for _ in range(200):
        bars, boasting = [], []
        for low in (0.5, 0.6, 0.7, 0.8, 0.9):
            number, p = 40, low + 0.05
            share = rng.binomial(number, p) / number
            bars.append({"count": number, "confidence": p, "accuracy": share})
            less = rng.binomial(number, p - 0.2) / number
            boasting.append({"count": number, "confidence": p, "accuracy": less})
        good += honest([bars])[0]
        found, _, text = honest([boasting])
        sure += not found and "too sure" in text
    assert 0.9 <= good / 200 <= 0.99  # a 95 % limit
    assert sure / 200 > 0.95
    assert not honest([bars])[1]
    assert honest([[{"count": 8, "confidence": 0.75, "accuracy": 0.75}]])[1]  # too few to tell


def test_the_first_screen_answers_the_questions(base):
    runs = [run(base["fedmap"], s, 0.1) for s in range(3)] + [
        run(base["local"], s) for s in range(3)
    ]
    groups = group(runs)
    text = section(groups, verdict(groups))
    assert "FedMAP beats local training beyond noise." in text
    for words in ("Best here", "Who gains", "Who loses", "Can the probabilities be trusted?"):
        assert words in text
    for name in SITES:
        assert f"{name} +1" in text
    assert re.search(r"FedMAP: finds \d+ % \(\d+–\d+\) of “1” and clears|of “class 1”", text)
    assert re.search(r"FedMAP: [\d.]+ s for 1 rounds? on cpu", text)
    assert "Few test samples" in text
    assert re.match(
        r"FedMAP: (yes|no|in part|too few test samples to tell)\. Stated and true",
        trusted(groups[0]),
    )
    page = made(groups, "none", "", lambda text: None)
    order = [
        page.index(f"<h3>{name}</h3>") for name in ("Verdict", "Sites", "Two classes", "Tables")
    ]
    assert order == sorted(order)
    assert page.index("<h2>Runs and versions</h2>") > order[-1]


def test_bold_means_beyond_noise_over_seeds(base):
    clear = [run(base["fedmap"], s, 0.1) for s in range(3)]
    clear += [run(base["local"], s) for s in range(3)]
    assert "class=best" in summary(group(clear))
    assert "class=best" not in summary(group([clear[0], clear[3]]))  # one seed
    same = [run(base["fedmap"], s) for s in range(3)] + [run(base["local"], s) for s in range(3)]
    assert "class=best" not in summary(group(same))
    single = copy.deepcopy(base["local"])
    single["final"]["personal"] |= {"num_clients": 1, "fairness_cv": 0.0}
    assert '"fairness CV, %">–<' in summary(group([Found(Path("x"), single)]))


def test_labels_tell_all_settings_apart_and_twins_are_named(base):
    runs = [run(base["fedmap"], 0, lr=lr, momentum=m) for lr, m in ((0.1, 0), (0.1, 0.9), (0.2, 0))]
    groups = group(runs)
    assert [one.title for one in groups] == [
        "FedMAP (lr=0.1, momentum=0)",
        "FedMAP (lr=0.1, momentum=0.9)",
        "FedMAP (lr=0.2, momentum=0)",
    ]
    assert set(unequal(groups)) == {"lr", "momentum"}
    mixed = group([*runs[:1], run(base["local"], 0)])
    assert any("lr, momentum differ" in line for line in caveats(mixed, verdict(mixed)))
    twin = Found(Path("again"), runs[0].result)
    groups = group([runs[0], twin])
    assert len(groups) == 1
    assert any("left out" in line for line in caveats(groups, verdict(groups)))


def test_old_files_and_drawn_clients_have_their_words(base):
    old = copy.deepcopy(base["local"])
    old["uncertainty"] = None
    for row in (old["final"]["personal"], *old["final"]["personal"]["per_client"]):
        for key in ("scores", "confusion", "auroc", "sensitivity", "specificity"):
            row.pop(key)
    del old["final"]["personal"]["reliability"]
    groups = group([Found(Path("old"), old)])
    text = made(groups, "none", "", lambda text: None)
    assert "One method was run" in text
    assert "the runs have no reliability diagram" in text
    assert "<h3>Two classes" not in text
    assert not math.isnan(verdict(groups).means["Local"])


def test_a_navigation_stays_short(base):
    runs = []
    for number in range(15):
        one = copy.deepcopy(base["local"])
        one["dataset"] = one["config"]["dataset"] = f"data {number}"
        runs.append(Found(Path(str(number)), one))
    text = made(group(runs), "none", "", lambda text: None)
    top = text.partition("<nav>")[2].partition("</nav>")[0]
    assert "<details><summary>15 data sets</summary>" in top
    assert top.partition("</details>")[2].count("<a ") == 2


def test_simulated_seconds_are_shown_where_every_round_has_them(base):
    """The cost of a run on the loop engine with `client_seconds`; a mean over seeds."""
    plain = [run(base["fedmap"], seed) for seed in (0, 1)]
    timed = copy.deepcopy(plain)
    for number, one in enumerate(timed):
        for record in one.result["rounds"]:
            record["simulated_seconds"] = 10.0 + number
    (before,), (after,) = group(plain), group(timed)
    assert "simulated" not in cost(before)
    assert "(10.5 s by the clients' simulated clock)" in cost(after)
    assert "simulated_seconds" not in of_runs(plain)[0]
    assert of_runs(timed)[0]["simulated_seconds"] == 10.0
