"""Statistics in limbs modulo 2^64 against rational arithmetic and against plain exact sums."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayflower.errors import BayflowerError
from bayflower.maths.exact import Scaled, Total
from bayflower.maths.window import STEP, agree, decode, encode

REALS = st.floats(-1000.0, 1000.0, allow_nan=False)


def added(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum modulo 2^64, by Python's integers."""
    rows = [vector.tolist() for vector in vectors]
    sums = [sum(row[k] for row in rows) % 2**64 for k in range(len(rows[0]))]
    return torch.tensor([s - 2**64 if s >= 2**63 else s for s in sums], dtype=torch.int64)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(REALS, min_size=3, max_size=3), min_size=1, max_size=9), st.integers(1, 4))
def test_every_limb_is_the_rounded_rest_and_sums_are_those_of_fractions(rows, limbs):
    terms = [{"x": torch.tensor(row, dtype=torch.float64)} for row in rows]
    window = agree(terms[0], len(rows), 1000.0, limbs)
    vectors = [encode(term, window) for term in terms]
    lowest = Fraction(2) ** (window.top - STEP * (limbs - 1))
    expected, lost = [Fraction(0)] * 3, 0
    for row in rows:
        for k, value in enumerate(row):
            near = round(Fraction(value) / lowest)  # ties to even, as torch
            lost += near * lowest != Fraction(value)
            # limbs are rounded one after another: never further from x than half a unit
            read = sum(
                Fraction(int(vectors[rows.index(row)][limb * 3 + k]))
                * Fraction(2) ** (window.top - STEP * limb)
                for limb in range(limbs)
            )
            assert abs(read - Fraction(value)) <= lowest / 2
            expected[k] += read
    total = Total()
    assert decode(added(vectors), window, total) == lost
    assert total.value()["x"].tolist() == [float(one) for one in expected]


def test_sums_have_the_bits_of_exact_sums_in_any_order():
    torch.manual_seed(0)
    terms = [
        {
            "num_examples": torch.tensor(10 + k),
            "params/w": Scaled(torch.randn(700) * 10.0 ** torch.randint(-6, 3, (700,)), 10.0 + k),
            "plain": torch.randn(3, 5, dtype=torch.float64),
        }
        for k in range(7)
    ]
    window = agree(terms[0], 7, 2.0**16, 3)
    plain, secure = Total(), Total()
    for term in terms:
        plain.add(term)
    assert decode(added([encode(term, window) for term in reversed(terms)]), window, secure) == 0
    ours, theirs = secure.value(), plain.value()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_limb_counts_what_it_rounds():
    term = {"x": torch.tensor([1.0, 2.0**-50, 3.0], dtype=torch.float64)}
    window = agree(term, 2, 8.0, 1)
    vector, total = encode(term, window), Total()
    assert int(vector[-1]) == 0  # 2^-50 is a multiple of the unit 2^-57
    vector = encode({"x": torch.tensor([1.0, 2.0**-59, 3.0], dtype=torch.float64)}, window)
    assert int(vector[-1]) == 1
    assert decode(vector, window, total) == 1
    assert total.value()["x"].tolist() == [1.0, 0.0, 3.0]


def test_the_largest_numbers_of_all_clients_do_not_overflow():
    for clients, largest in ((3, 1.0), (50, 2.0**20), (65_536, 7.3e5)):
        term = {"x": torch.tensor([largest, -largest], dtype=torch.float64)}
        window = agree(term, clients, largest, 2)
        digits = encode(term, window)
        assert max(abs(one) for one in digits.tolist()) * clients < 2**63


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1001.0])
def test_what_does_not_fit_is_refused(bad):
    term = {"x": torch.tensor([1.0], dtype=torch.float64)}
    window = agree(term, 3, 1000.0, 2)
    with pytest.raises(BayflowerError, match=r"x has a value of size .* raise secure_range"):
        encode({"x": torch.tensor([bad], dtype=torch.float64)}, window)


def test_another_form_is_refused():
    window = agree({"a": torch.zeros(2), "n": torch.tensor(1)}, 3, 10.0, 1)
    with pytest.raises(BayflowerError, match=r"other parts than the agreed ones"):
        encode({"bin/1/a": torch.zeros(2), "n": torch.tensor(1)}, window)
    with pytest.raises(BayflowerError, match="a has shape"):
        encode({"a": torch.zeros(3), "n": torch.tensor(1)}, window)
    with pytest.raises(BayflowerError, match="n has a value"):
        encode({"a": torch.zeros(2), "n": torch.tensor(2**62)}, window)


@pytest.mark.parametrize("sizes", [[40] * 12, [3, 900, 17, 40, 1, 250]])
def test_a_mean_of_models_in_one_limb_is_off_by_no_more_than_the_documented_bound(sizes):
    """secure_range · K · (K · largest share) · 2^-62, by fractions; and it is not far from it."""
    torch.manual_seed(1)
    reach, clients, number = 2.0**20, len(sizes), sum(sizes)
    models = [torch.randn(400) * 10.0 ** torch.randint(-5, 2, (400,)) for _ in sizes]
    terms = [{"w": Scaled(one, float(n))} for one, n in zip(models, sizes, strict=True)]
    window = agree(terms[0], clients, reach * max(sizes), 1)
    vectors = torch.stack([encode(term, window)[:400] for term in terms])
    bound = reach * clients * (clients * max(sizes) / number) * 2.0**-62
    worst = 0.0
    for k in range(400):
        pairs = zip(models, sizes, strict=True)
        exact = sum((Fraction(float(one[k])) * n for one, n in pairs), Fraction(0)) / number
        read = Fraction(int(vectors[:, k].sum())) * Fraction(2) ** window.top / number
        worst = max(worst, float(abs(read - exact)))
    assert bound / 100 < worst <= bound
