"""Exact sums against rational arithmetic: every order and every tree gives the bits of the
correctly rounded sum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bayflower.maths.accumulator import CHUNK, LIMIT, Accumulator
from bayflower.maths.exact import Scaled, Total

LARGEST = math.ldexp(1.0 - 2.0**-53, 1024)
SMALLEST = 5e-324
finite = st.floats(allow_nan=False, allow_infinity=False)
rows = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=12
    )
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Chunks are small: on a busy machine a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(terms: list[list[float]]) -> list[float | None]:
    """Return the correctly rounded sum of each column; None where it is beyond float64."""
    out: list[float | None] = []
    for column in zip(*terms, strict=True):
        try:
            out.append(float(sum(map(Fraction, column), Fraction(0))))
        except OverflowError:
            out.append(None)
    return out


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def total_of(terms: list[list[float]]) -> Total:
    total = Total()
    for term in terms:
        total.add({"x": vector(term)})
    return total


def bits(x: Tensor) -> list[int]:
    return x.view(torch.int64).tolist()


def tree(terms: list[list[float]], rng: random.Random) -> Total:
    """Return the total of a random tree of aggregators."""
    if len(terms) == 1 or rng.random() < 0.2:
        return total_of(terms)
    cut = rng.randrange(1, len(terms))
    left, right = tree(terms[:cut], rng), tree(terms[cut:], rng)
    left.merge(right)
    return left


def check(terms: list[list[float]]) -> None:
    want = oracle(terms)
    total = total_of(terms)
    if None in want:
        with pytest.raises(OverflowError, match="x"):
            total.value()
    else:
        assert total.value()["x"].tolist() == want


@settings(max_examples=100, deadline=None)
@given(rows)
def test_equals_rational_sum(terms: list[list[float]]) -> None:
    check(terms)


@settings(max_examples=60, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_any_order_and_any_tree_give_equal_bits(
    terms: list[list[float]], rng: random.Random
) -> None:
    terms = [[x / 16 for x in term] for term in terms]  # no overflow
    first = bits(total_of(terms).value()["x"])
    rng.shuffle(terms)
    assert bits(total_of(terms).value()["x"]) == first
    assert bits(tree(terms, rng).value()["x"]) == first


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=1, max_size=5))
def test_one_term_comes_back(values: list[float]) -> None:
    assert bits(total_of([values]).value()["x"]) == bits(vector(values) + 0.0)  # -0.0 becomes 0.0


@pytest.mark.parametrize(
    "column",
    [
        [1e300, 1.0, -1e300],
        [LARGEST, LARGEST, -LARGEST],
        [LARGEST] * 300 + [-LARGEST] * 299,
        [LARGEST, math.ldexp(1.0, 969)],  # below the tie: stays
        [LARGEST, math.ldexp(1.0, 970)],  # the tie: beyond
        [LARGEST, math.ldexp(1.0, 970), -SMALLEST],
        [-LARGEST, -math.ldexp(1.0, 970), SMALLEST],
        [SMALLEST] * 3,
        [SMALLEST, 2.2250738585072014e-308, -SMALLEST],
        [1.0, 2.0**-53],  # a tie, to even
        [1.0, 2.0**-53, SMALLEST],  # just above it
        [1.0, 2.0**-53, -SMALLEST],
        [1.0 + 2.0**-52, 2.0**-53, -SMALLEST],
        [1.0, -(2.0**-54), -SMALLEST],  # where the spacing halves
        [1.0, -(2.0**-54), SMALLEST],
        [2.0**52 + 0.5, 2.0**-60],
        [0.0, -0.0],
        [0.1] * 10,
    ],
)
def test_hard_cases(column: list[float]) -> None:
    check([[x] for x in column])
    check([[x] for x in reversed(column)])


def test_many_terms_pass_carries() -> None:
    rng = random.Random(1)
    terms = [
        [math.ldexp(rng.uniform(-1, 1), rng.randint(-70, 30)), 1048576.0, -0.7, rng.gauss(0, 1)]
        for _ in range(5 * LIMIT + 7)
    ]
    check(terms)
    # the largest digits of a window, all of one sign
    check([[1048575.999, -(2.0**-27), 2.0**-28]] * (20 * LIMIT))


def test_windows_never_leave_the_range_in_which_they_are_exact() -> None:
    big, one = Total(), Total()
    term = {"x": vector([1048575.999, -1048575.999, 2.0**-27 + 2.0**-72])}
    one.add(term)
    for i in range(5 * LIMIT):
        if i % 2:
            big.add(term)
        else:
            big.merge(one)
        for limb in big._places["x"][0].chunk.limbs.values():
            assert bool(((limb >= 2.0**52) & (limb <= 2.0**53)).all())
    assert big.value()["x"].tolist() == [float(5 * LIMIT * Fraction(x)) for x in term["x"].tolist()]


def test_sum_of_cancelling_terms_in_halves_of_a_unit() -> None:
    rng = random.Random(2)
    # digits at ±half of a window: the place where a carry, a remainder or a tie goes wrong
    for _ in range(200):
        term = [
            [sum(rng.choice((-1, 0, 1)) * 2.0 ** (46 * w - 26) for w in range(low, low + 2))]
            for low in rng.choices(range(-3, 3), k=6)
        ]
        check(term)


@pytest.mark.parametrize("scale", [2.0**-1060, 2.0**-1000, 1.0, 2.0**500, 2.0**1000])
def test_many_columns_of_one_scale(scale: float) -> None:
    rng = random.Random(3)
    check(
        [
            [scale * rng.uniform(-1, 1) * 2.0 ** rng.randint(-20, 0) for _ in range(50)]
            for _ in range(9)
        ]
    )


def test_weighted_mean_of_equal_models_is_that_model() -> None:
    theta = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 0.05).double()
    total = Total()
    for n in (3, 17, 101, 999):
        total.add({"n": torch.tensor(n), "nx": n * theta})
    value = total.value()
    assert value["n"].item() == 1120
    assert bits(value["nx"] / value["n"]) == bits(theta)


def test_chunks_and_shared_chunks() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"b": (3,), "a": (CHUNK + 5,), "c": (2, 3), "scalar": (), "empty": (0,), "late": (4,)}
    terms = [
        {k: torch.randn(v, generator=generator, dtype=torch.float64) for k, v in shapes.items()}
        for _ in range(5)
    ]
    del terms[0]["late"], terms[1]["c"], terms[2]["a"], terms[3]["b"]  # a missing name is zero
    total, left, right = Total(), Total(), Total()
    for i, term in enumerate(terms):
        total.add(term)
        (left if i < 2 else right).add(dict(reversed(term.items())))
    right.merge(left)  # laid out differently
    value, merged = total.value(), right.value()
    assert list(value) == sorted(shapes) == total.names() == list(merged)
    for name, shape in shapes.items():
        parts = [term[name].flatten().tolist() for term in terms if name in term]
        assert value[name].shape == shape
        assert value[name].flatten().tolist() == [
            math.fsum(column) for column in zip(*parts, strict=True)
        ]
        assert bits(value[name]) == bits(merged[name])


def test_extremes_cost_memory_only_where_they_occur() -> None:
    x = torch.full((4 * CHUNK,), 0.5, dtype=torch.float64)
    x[CHUNK] = 1e300
    x[3 * CHUNK] = 1e-300
    total = Total()
    total.add({"x": x})
    assert bits(total.value()["x"]) == bits(x)
    windows = [len(place.chunk.limbs) for place in total._places["x"]]
    assert windows[0] == windows[2] == 1
    assert windows[1] > 15
    assert windows[3] > 15


def test_arguments_are_not_changed_and_values_are_not_shared() -> None:
    x, n = torch.tensor([0.1, 1e-30], dtype=torch.float64), torch.tensor([4])
    total = Total()
    total.add({"x": x, "n": n})
    total.value()["n"].add_(1)
    total.value()["x"].add_(1)
    n.add_(100)
    assert x.tolist() == [0.1, 1e-30]
    assert total.value()["n"].tolist() == [4]
    assert total.value()["x"].tolist() == [0.1, 1e-30]


def test_other_dtypes() -> None:
    total = Total()
    total.add(
        {
            "h": torch.tensor([0.1], dtype=torch.float16),
            "s": torch.tensor([0.1]),
            "b": torch.tensor([True]),
        }
    )
    total.add({"i": torch.tensor([2], dtype=torch.int32)})
    total.add(
        {
            "h": torch.tensor([0.1], dtype=torch.float64),
            "s": torch.tensor([0.1]),
            "b": torch.tensor([True]),
        }
    )
    value = total.value()
    assert value["h"].tolist() == [
        float(Fraction(torch.tensor(0.1, dtype=torch.float16).item()) + Fraction(0.1))
    ]
    assert value["s"].tolist() == [2 * torch.tensor(0.1).item()]
    assert value["b"].dtype == value["i"].dtype == torch.int64
    assert value["b"].tolist() == value["i"].tolist() == [2]


def test_identity_and_drop() -> None:
    total = Total()
    total.add({})
    assert total.value() == {}
    total.merge(Total())
    total.add({"a": vector([1.0]), "b": vector([2.0]), "n": torch.tensor(1)})
    total.drop(["a", "n", "never seen"])
    assert total.names() == ["b"]
    total.add({"a": vector([1.0, 5.0])})  # forgotten, so another shape is fine
    total.add({"b": vector([0.5])})
    value = total.value()
    assert value["a"].tolist() == [1.0, 5.0]
    assert value["b"].tolist() == [2.5]


@pytest.mark.parametrize(
    ("statistic", "error", "words"),
    [
        ({"new": vector([1.0]), "x": vector([1.0])}, ValueError, r"x has shape \(1,\)"),
        ({"new": vector([1.0]), "x": torch.tensor([1, 2])}, ValueError, "x holds integers"),
        ({"new": vector([1.0]), "n": vector([1.0])}, ValueError, "n holds real numbers"),
        ({"n": torch.tensor([1]), "x": vector([1.0, math.nan])}, ValueError, "x .*nan"),
        ({"n": torch.tensor([1]), "new": vector([-math.inf])}, ValueError, "new .*inf"),
        (
            {"new": vector([1.0]), "n": torch.tensor([2**62]), "x": vector([1.0, 1.0])},
            OverflowError,
            "n .*int64",
        ),
        ({"x": vector([1.0, 1.0]), "new": torch.tensor([1j])}, ValueError, "new .*complex"),
    ],
)
def test_errors_leave_the_total_unchanged(
    statistic: dict[str, Tensor], error: type[Exception], words: str
) -> None:
    total = Total()
    total.add({"x": vector([0.1, 0.2]), "n": torch.tensor([2**62])})
    with pytest.raises(error, match=words):
        total.add(statistic)
    if words.startswith(("x has", "x holds", "n ")):
        other = Total()
        other.add(statistic)
        with pytest.raises(error, match=words):
            total.merge(other)
    value = total.value()
    assert list(value) == ["n", "x"]
    assert value["x"].tolist() == [0.1, 0.2]
    assert value["n"].tolist() == [2**62]


def test_accumulator_alone() -> None:
    accumulator = Accumulator(2)
    with pytest.raises(ValueError, match="nan"):
        accumulator.add(vector([math.nan, 1.0]))
    accumulator.add(vector([0.1, -3.0]))
    accumulator.add(vector([0.2, 3.0]))
    assert accumulator.value().tolist() == [0.1 + 0.2, 0.0]


def test_products_formed_on_the_way_equal_products_formed_before():
    generator = torch.Generator().manual_seed(5)
    one, two = Total(), Total()
    for weight in (3.0, 0.1, 1e-200, 7e150):
        tensors = {
            "a": torch.randn(70_000, generator=generator),
            "b": torch.randn(5, 4, generator=generator, dtype=torch.float64),
            "c": torch.arange(6),
        }
        one.add({name: Scaled(x, weight) for name, x in tensors.items()})
        two.add({name: x.double() * weight for name, x in tensors.items()})
    left, right = one.value(), two.value()
    assert all(torch.equal(left[name], right[name]) for name in right)
    with pytest.raises(ValueError, match="b has a value that is not finite"):
        one.add(
            {
                "a": Scaled(torch.zeros(70_000), 1.0),
                "b": Scaled(torch.full((5, 4), 1e300, dtype=torch.float64), 1e300),
            }
        )
    assert torch.equal(one.value()["a"], left["a"])


@settings(max_examples=60, deadline=None)
@given(rows, rows)
@pytest.mark.slow
def test_a_packed_total_goes_on_as_if_it_had_stayed(
    first: list[list[float]], second: list[list[float]]
) -> None:
    """Two totals of different shape travel, are added, travel again, and go on."""
    here, there, whole = Total(), Total(), Total()
    for total, terms in ((here, first), (there, second)):
        for row in terms:
            statistic = {
                f"x{len(row)}": torch.tensor(row, dtype=torch.float64) / 64,
                "count": torch.tensor(len(row)),
            }
            total.add(statistic)
            whole.add(statistic)
    joined = Total.unpacked(here.packed())
    joined.merge(Total.unpacked(there.packed()))
    last = {"late": torch.tensor([0.1, 1e300], dtype=torch.float64)}
    again = Total.unpacked(joined.packed())
    again.add(last)
    whole.add(last)
    found, wanted = again.value(), whole.value()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_packed_total_of_many_chunks_and_additions() -> None:
    drawn = torch.Generator().manual_seed(3)
    total, whole = Total(), Total()
    for number in range(3 * LIMIT):
        term = {
            "long": torch.randn(CHUNK + 7, generator=drawn, dtype=torch.float64) * 2.0**number,
            "short": torch.randn(3, generator=drawn),
        }
        total.add(term)
        whole.add(term)
        if number % 50 == 0:
            total = Total.unpacked(total.packed())
    assert all(torch.equal(total.value()[name], x) for name, x in whole.value().items())
