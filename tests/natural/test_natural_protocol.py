"""Who trains on what in the natural benchmark: the same for every rival, no test sample."""

from __future__ import annotations

from dataclasses import replace

import madeup
import numpy as np
import pytest

from bayflower.errors import ConfigError
from bayflower.natural import forecast, rivals, sets
from bayflower.natural.protocol import Case, cases, federation, split, standardised
from bayflower.natural.sets import ALL, Rows


@pytest.fixture
def heart(tmp_path):
    madeup.heart(tmp_path)
    return sets.load("heart", tmp_path)


SPEC = sets.SETS["heart"]


def test_a_split_is_that_of_the_case_and_larger_ones_contain_it(heart):
    few, more = (split(SPEC, heart, Case("heart", n, False, 3)) for n in (10, ALL))
    assert few.digest == split(SPEC, heart, Case("heart", 10, False, 3)).digest
    assert few.digest != split(SPEC, heart, Case("heart", 10, False, 4)).digest
    assert few.owners == more.owners
    for small, large, one, other in zip(few.train, more.train, few.test, more.test, strict=True):
        assert small.tolist() == large[:10].tolist()
        assert one.tolist() == other.tolist()
        assert not set(large) & set(other)
    for owner, train, test in zip(more.owners, more.train, more.test, strict=True):
        own = np.flatnonzero(heart.owner == owner)
        assert sorted([*train, *test]) == own.tolist()
        assert len(test) == round(0.3 * len(own))


def test_every_hospital_is_new_in_turn_and_a_fifth_of_many_clients_is(heart):
    found = [split(SPEC, heart, Case("heart", 5, False, seed)) for seed in range(4)]
    assert sorted(one.owners[-1] for one in found) == [0, 1, 2, 3]
    owner = np.repeat(np.arange(23), 50)
    many = Rows(np.zeros((len(owner), 2)), np.zeros(len(owner), np.int64), owner, 2)
    parts = split(SPEC, many, Case("heart", 5, False, 0))
    assert (parts.num_old, parts.num_new) == (19, 4)


def test_later_tests_come_after_training(tmp_path):
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(5), 60)
    rows = Rows(draw.normal(size=(300, 4)), draw.normal(size=300), owner, 1, draw.random(300))
    spec = sets.SETS["parkinson"]
    parts = split(spec, rows, Case("parkinson", 20, True, 0))
    for train, test in zip(parts.train, parts.test, strict=True):
        assert len(train) == 20
        assert np.all(np.diff(rows.time[train]) > 0)
        assert rows.time[train].max() < rows.time[test].min()
    with pytest.raises(ConfigError, match="has no time"):
        split(spec, rows._replace(time=None), Case("parkinson", 20, True, 0))


def test_inputs_are_standardised_by_training_samples_of_training_clients_alone(heart):
    parts = split(SPEC, heart, Case("heart", 20, False, 0))
    changed = heart.x.copy()
    seen = np.concatenate(parts.train[: parts.num_old])
    others = np.setdiff1d(np.arange(len(changed)), seen)
    before = standardised(SPEC, heart, parts)
    changed[others] = changed[others] * 3 + 1
    after = standardised(SPEC, heart._replace(x=changed), parts)
    assert np.array_equal(before[seen], after[seen])
    slow = np.nanmean(heart.x[seen, 0].astype(float))
    gap = np.flatnonzero(np.isnan(heart.x[:, 0]))
    assert np.all(before[gap, 0] == 0)
    some = seen[~np.isnan(heart.x[seen, 0])][0]
    spread = np.nanstd(heart.x[seen, 0].astype(float))
    assert before[some, 0] == pytest.approx((heart.x[some, 0] - slow) / spread, rel=1e-4)


def test_held_out_samples_come_from_the_n_samples(heart):
    parts = split(SPEC, heart, Case("heart", 10, False, 0))
    with_all, with_held = (federation(SPEC, heart, parts, held) for held in (False, True))
    for one, other in zip(with_all.clients, with_held.clients, strict=True):
        assert (len(one.y_train), len(other.y_train), len(other.y_held)) == (10, 8, 2)
        assert np.array_equal(one.x_train, np.concatenate([other.x_held, other.x_train]))
        assert np.array_equal(one.x_test, other.x_test)


def test_cases_have_their_seeds():
    assert len(cases(SPEC)) == 10 * len(SPEC.sizes)
    assert {case.seed for case in cases(sets.SETS["officecaltech"])} == {0, 1, 2}
    quick = cases(SPEC, quick=True)
    assert {case.n for case in quick} == {2, 50}
    assert {case.seed for case in quick} == {0, 1}
    assert {case.seed for case in cases(SPEC, seeds=3)} == {0, 1, 2}


def test_every_rival_is_paired_and_its_forecasts_are_each_clients_own(tmp_path):
    """Clients of unequal size: the engine stacks them in the order of sizes."""
    draw = np.random.default_rng(0)
    sizes = (80, 41, 120, 60, 44, 100)
    slopes = np.array([-3, 3, -1, 1, -2, 2])
    owner = np.repeat(np.arange(6), sizes)
    x = draw.normal(size=(len(owner), 1))
    y = slopes[owner] * x[:, 0] + 0.1 * draw.normal(size=len(owner))
    rows = Rows(x, y, owner, 1)
    spec = replace(sets.SETS["radon"], least=40, level=0.0)
    case, found = Case("radon", ALL, False, 1), {}
    lengths = [len(part) for part in split(spec, rows, case).train[:5]]
    assert lengths != sorted(lengths, reverse=True)
    for name in ("local", "exact-hierarchy", "fedmap"):
        found[name] = rivals.score(rivals.RIVALS[name], spec, rows, case)
    assert len({one["split"] for one in found.values()}) == 1
    for name in ("local", "exact-hierarchy", "fedmap"):
        assert found[name]["here"]["crps"] < 0.4
        assert found[name]["new"]["crps"] < 1.5
        assert found[name]["moved"]["crps"] > 1  # some neighbours have the other slope
    assert found["local"]["here"]["samples"] == found["fedmap"]["here"]["samples"]


def test_a_temperature_is_that_with_the_lowest_nll():
    from bayflower.tasks.classes import Classification
    from bayflower.tasks.numbers import Gaussian

    probs = np.array([[0.2, 0.8], [0.5, 0.5]])
    heated = forecast.warm(probs, Classification(2), 2.0)
    assert heated[0, 1] / heated[0, 0] == pytest.approx((0.8 / 0.2) ** 0.5)
    assert heated.sum(1) == pytest.approx([1, 1])
    said = forecast.warm(np.array([[1.0, 4.0]]), Gaussian(), 3.0)
    assert said.tolist() == [[1.0, 12.0]]
    for place, heat in enumerate(forecast.HEATS[1:]):
        assert heat > forecast.HEATS[place]


def test_speeches_become_letters_of_their_speakers(tmp_path):
    text = "Duke:\nabcd\nef\n\nMaid:\nHello; you\n\nDuke:\nghi\n"
    path = tmp_path / "shakespeare.txt"
    path.write_text(text)
    rows = sets.load("shakespeare", tmp_path)
    said = "abcd ef ghi"
    first = rows.owner == rows.owner[0]
    assert "".join(sets.LETTERS[k] for k in rows.y[first]) == said[sets.CONTEXT :]
    seen = rows.x[first][0].reshape(sets.CONTEXT, -1).argmax(1)
    assert "".join(sets.LETTERS[k] for k in seen) == "abc"
    assert np.all(np.diff(rows.time[first]) > 0)
    with pytest.raises(ConfigError, match="shakespeare"):
        sets.load("shakespeare", tmp_path / "elsewhere")
