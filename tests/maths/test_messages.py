"""Class-wise factors and messages: low rank is the dense route, stacked is one by one, the smaller
form travels, garbage does not.
"""

from __future__ import annotations

import pytest
import torch
from gaussians import LowRank
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from vmpplain import dense_precision, finished, halves

from bayflower.errors import WireError
from bayflower.maths import classwise
from bayflower.maths.classmessages import dense_ranks, pack_factors, ranks, roots
from bayflower.maths.classwise import (
    class_factors,
    class_means,
    class_variances,
    from_triangle,
    to_triangle,
)
from bayflower.maths.exact import Total
from bayflower.tree import shapes, stack

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
CUT = {torch.float32: 1e-5, torch.float64: 1e-10}


def spanned(samples: int, dim: int, rank: int, seed: int) -> Tensor:
    """Samples in float64 whose deviations from their mean span exactly `rank` < samples directions,
    with variances within 1 : 100.
    """
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.randn(samples, rank, dtype=torch.float64, generator=generator)
    across = torch.linalg.qr(torch.randn(dim, rank, dtype=torch.float64, generator=generator)).Q
    along = (
        torch.linalg.qr(deviations - deviations.mean(0)).Q
        * samples**0.5
        * torch.logspace(0, -1, rank, dtype=torch.float64)
    )
    return along @ across.mT + 2


def worst(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


# -- low rank = dense ----------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 14),
    st.data(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(-3, 3),
    st.integers(0, 2**31),
)
def test_a_message_is_the_dense_precision(dim, data, dtype, magnitude, seed):
    """Ranks 0, 1, below D and full, through the wire's form: precision and shift are those of dense
    matrices [eq. 11].
    """
    rank = data.draw(st.sampled_from(sorted({0, 1, dim // 2, dim - 1, dim})), label="rank")
    count = data.draw(st.integers(max(rank + 1, 1), rank + 9), label="samples")
    z = (spanned(count, dim, rank, seed) * 10.0**magnitude).to(dtype)
    exact, alpha = z.double(), 0.7
    server, client, state = halves(dim, 2, alpha=alpha, min_count=1)
    state = state._replace(
        params={n: v.to(dtype) for n, v in state.params.items()},
        centroids=state.centroids.to(dtype),
    )
    update = finished(client, state, z, torch.ones(count, dtype=torch.int64))
    sent = client.pack(update)
    assert sent["spread/ranks"].tolist() == [0, rank]
    assert len(sent["spread/triangle"]) == (2 * rank > dim)
    found = server.statistic(state, 0, server.unpack(state, sent))
    want = (
        torch.as_tensor(dense_precision(exact.numpy(), alpha, CUT[dtype]))
        if rank
        else alpha * torch.eye(dim, dtype=torch.float64)
    )
    assert worst(from_triangle(found["precision/1"][None], dim)[0], want) < TOLERANCE[dtype]
    shift = want @ exact.mean(0)
    assert (
        float(
            (found["shift/1"] - shift).norm()
            / (want.norm() * exact.mean(0).norm()).clamp(min=1e-300)
        )
        < TOLERANCE[dtype]
    )
    assert "precision/0" not in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("samples", "dim"), [(35, 512), (80, 40), (3, 5), (41, 40), (40, 40), (2, 7)]
)
def test_one_class_is_the_low_rank_gaussian(samples, dim, dtype):
    """The factors of a single class are those of `LowRank.from_samples`, whichever matrix is
    decomposed.
    """
    z = spanned(samples, dim, min(samples - 1, dim), 1).to(dtype)
    basis, weight, _ = class_factors(
        z, torch.zeros(samples, dtype=torch.int64), torch.ones(samples), 1
    )
    low, _ = LowRank.from_samples(z.double(), torch.ones(samples), 0.0, cut=CUT[dtype])
    assert int((weight != 0).sum()) == int(low.rank()) == min(samples - 1, dim)
    assert (
        worst(basis.double().mT @ (weight[:, None].double() * basis.double()), low.dense())
        < TOLERANCE[dtype]
    )
    used = basis[weight != 0].double()
    assert worst(used @ used.mT, torch.eye(len(used))) < TOLERANCE[dtype]
    assert not bool(basis[weight == 0].any())


# -- stacked = one by one ------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [6, 40])
def test_padded_clients_together_are_clients_alone(dim, monkeypatch):
    """vmap over padded clients, also in small pieces: every class of every client as alone and
    without padding.
    """
    generator = torch.Generator().manual_seed(3)
    sizes, classes, longest = [1, 5, 30, 64], 5, 64
    z = torch.randn(4, longest, dim, dtype=torch.float64, generator=generator)
    y = torch.randint(0, classes, (4, longest), generator=generator)
    y[3, 10:] = 2  # one large class
    mask = (torch.arange(longest) < torch.tensor(sizes)[:, None]).double()
    whole = vmap(lambda z, y, m: class_factors(z, y, m, classes))(z, y, mask)
    monkeypatch.setattr(classwise, "PIECE", {"cpu": 1})
    pieces = vmap(lambda z, y, m: class_factors(z, y, m, classes))(z, y, mask)
    nested = vmap(vmap(lambda z, y, m: class_factors(z, y, m, classes)), in_dims=(1, 1, 1))(
        z[:, None], y[:, None], mask[:, None]
    )
    # labels without a client axis
    shared = vmap(lambda z, m: class_factors(z, y[3], m, classes), in_dims=(0, 0))(z, mask)
    counts, means = vmap(lambda z, y, m: class_means(z, y, m, classes))(z, y, mask)
    variances = vmap(class_variances)(z, y, mask, means)
    for c, size in enumerate(sizes):
        basis, weight, _ = class_factors(z[c, :size], y[c, :size], mask[c, :size], classes)
        for k in range(classes):
            mine = y[c, :size] == k
            want = basis[mine].mT @ (weight[mine, None] * basis[mine])
            for stacked in (whole, pieces, tuple(part[0] for part in nested)):
                rows, scale = stacked[0][c], stacked[1][c]
                own = (y[c] == k)[:, None] * rows
                torch.testing.assert_close(
                    own.mT @ (scale[:, None] * own), want, rtol=1e-9, atol=1e-9
                )
                assert not bool(scale[size:].any())
            assert int(counts[c, k]) == int(mine.sum())
            if bool(mine.any()):
                torch.testing.assert_close(means[c, k], z[c, :size][mine].mean(0))
                torch.testing.assert_close(variances[c, k], z[c, :size][mine].var(0, correction=0))
    alone = class_factors(z[1], y[3], mask[1], classes)
    torch.testing.assert_close(shared[1][1], alone[1])


def test_the_smaller_matrix_is_decomposed_and_groups_go_together(monkeypatch):
    """Samples × samples up to D samples, D × D beyond: and as many decompositions as there are
    sizes, not as there are classes.
    """
    asked = []
    monkeypatch.setattr(
        classwise,
        "eigh",
        lambda batch: asked.append(tuple(batch.shape)) or torch.linalg.eigh(batch),
    )
    counts = [1, 2, 3, 4, 7, 8, 10, 11, 30, 50]
    y = torch.repeat_interleave(torch.arange(10), torch.tensor(counts))
    class_factors(torch.randn(len(y), 10), y, torch.ones(len(y)), 10)
    assert asked == [(3, 4, 4), (2, 8, 8), (1, 10, 10), (1, 10, 10), (1, 10, 10), (1, 10, 10)]


def test_labels_that_are_no_class_are_left_out():
    z = torch.randn(8, 3)
    basis, weight, _ = class_factors(z, torch.tensor([-1, 7, 0, 0, 0, 1, 1, 1]), torch.ones(8), 2)
    assert not bool(weight[:2].any())
    assert not bool(basis[:2].any())
    assert int((weight != 0).sum()) == 4


def test_equal_samples_have_no_spread():
    """E-P3: rounding is no variance, so the rank is 0 though the
    mean of equal numbers is rounded.
    """
    z = torch.cat([torch.randn(1, 64).expand(20, -1) * 3, torch.zeros(5, 64)])
    _, weight, _ = class_factors(z, torch.tensor([0] * 20 + [1] * 5), torch.ones(25), 2)
    assert not bool(weight.any())


# -- the smaller form ----------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [1, 2, 5, 6, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_triangle_travels_exactly_when_it_is_smaller(dim, dtype):
    """Every rank from 0 to D: the form with fewer numbers is sent, and it is the same matrix."""
    counts = [rank + 1 for rank in range(dim + 1)]
    z = torch.cat([spanned(count, dim, rank, rank) for rank, count in enumerate(counts)]).to(dtype)
    y = torch.repeat_interleave(torch.arange(dim + 1), torch.tensor(counts))
    basis, weight, _ = class_factors(z, y, torch.ones(len(y)), dim + 1)
    found = ranks(weight, y, dim + 1)
    assert found.tolist() == list(range(dim + 1))
    packed = pack_factors(basis, weight, y, dim + 1)
    for k, root in enumerate(roots(packed, list(range(dim + 1)))):
        assert bool(dense_ranks(found[k], dim)) == (dim * (dim + 1) // 2 < k * (dim + 1))
        own = (y == k)[:, None] * basis.double()
        want = own.mT @ (weight[:, None].double() * own)
        assert worst(root.mT @ root, want) < TOLERANCE[dtype] or k == 0
    numbers = sum(packed[name].numel() for name in ("basis", "weight", "triangle"))
    assert numbers == sum(min(rank * (dim + 1), dim * (dim + 1) // 2) for rank in range(dim + 1))


def test_triangles_come_back():
    matrix = torch.randn(3, 6, 6)
    matrix = matrix + matrix.mT
    assert torch.equal(from_triangle(torch.stack([to_triangle(one) for one in matrix]), 6), matrix)


@pytest.mark.parametrize("centroid", ["precision", "diag", "count_mean", "mean"])
def test_shapes_and_sums_of_every_variant(centroid):
    """`packed` gives the shapes of `pack`, and `total` the sum of statistics, for triangles and
    vectors in one message.
    """
    server, client, state = halves(6, 3, centroid=centroid, min_count=2, alpha=0.3)
    generator = torch.Generator().manual_seed(5)
    updates = []
    for client_number in range(4):
        y = torch.tensor([0] * 9 + [1] * 3 + [2] * (client_number % 3))
        y = torch.cat([y, y.new_full((14 - len(y),), 1)]) if client_number == 3 else y
        z = torch.randn(len(y), 6, dtype=torch.float64, generator=generator)
        grown = 14 - len(y)
        if grown:
            # 9 is no class
            z, y = (
                torch.cat([z, torch.zeros(grown, 6).double()]),
                torch.cat([y, y.new_full((grown,), 9)]),
            )
        updates.append(finished(client, state, z, y))
    together = stack(updates)
    assert client.packed_shapes(together) == [shapes(client.pack(update)) for update in updates]
    exact = Total()
    for update in updates:
        exact.add(server.statistic(state, 0, server.unpack(state, client.pack(update))))
    want, got = exact.value(), server.total(state, (0, 1, 2, 3), together)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        torch.testing.assert_close(got[name].double(), value.double(), rtol=1e-12, atol=1e-12)


# -- garbage -------------------------------------------------------------------------------------
def changed(name: str, change):
    return lambda flat: flat.update({name: change(flat[name])})


GARBAGE = [
    (lambda flat: flat.pop("counts"), "key 'counts' is missing"),
    (lambda flat: flat.pop("spread/ranks"), "key 'spread/ranks' is missing"),
    (lambda flat: flat.pop("means"), "key 'means' is missing"),
    (lambda flat: flat.pop("params/base.0.bias"), "key 'params/base.0.bias' is missing"),
    (
        lambda flat: flat.update({"params/head.bias": torch.zeros(3)}),
        "key 'params/head.bias' is not expected",
    ),
    (
        lambda flat: flat.update({"spread/label": torch.zeros(3)}),
        "key 'spread/label' is not expected",
    ),
    (
        changed("counts", lambda x: x.double()),
        "'counts' must be int64 of shape (3,), got float64 (3,)",
    ),
    (changed("counts", lambda x: x[:2]), "'counts' must be int64 of shape (3,), got int64 (2,)"),
    (changed("counts", lambda x: -x), "'counts' has negative values"),
    (changed("counts", lambda x: x + 1), "'counts' add up to 18, more than num_examples, 15"),
    (changed("counts", lambda x: x + 2**62), "more than num_examples, 15"),
    (changed("num_examples", lambda x: x[None]), "'num_examples' must be int64 of shape ()"),
    (changed("num_examples", lambda x: -x), "'num_examples' has negative values"),
    (changed("spread/ranks", lambda x: x - 10), "'spread/ranks' has negative values"),
    (
        changed("spread/ranks", lambda x: x + torch.tensor([0, 0, 5])),
        "'spread/ranks' has 7 for class 2, more than 3 samples can have",
    ),
    (
        changed("spread/ranks", lambda x: x - torch.tensor([0, 0, 1])),
        "'spread/basis' has shape (2, 6), expected (1, 6)",
    ),
    (
        changed("spread/ranks", lambda x: x - torch.tensor([5, 0, 0])),
        "'spread/basis' has shape (2, 6), expected (3, 6)",
    ),
    (changed("means", lambda x: x[:1]), "'means' has shape (1, 6), expected (2, 6)"),
    (changed("means", lambda x: x.float()), "'means' has dtype float32, expected float64"),
    (changed("means", lambda x: x * torch.nan), "'means' has values that are not finite"),
    (changed("spread/weight", lambda x: -x), "'spread/weight' has values that are not positive"),
    (
        changed("spread/weight", lambda x: x * torch.inf),
        "'spread/weight' has values that are not finite",
    ),
    (
        changed("spread/basis", lambda x: x * 1e6),
        "'spread/basis' has rows that are not of length 1",
    ),
    (
        changed("spread/triangle", lambda x: x * torch.nan),
        "'spread/triangle' has values that are not finite",
    ),
    (
        changed("spread/triangle", lambda x: x[:, 1:]),
        "'spread/triangle' has shape (1, 20), expected (1, 21)",
    ),
]


@pytest.mark.parametrize(("change", "words"), GARBAGE, ids=[words for _, words in GARBAGE])
def test_garbage_is_refused_in_one_line(change, words):
    """A client with a dense class (triangle), an absent one, and one of rank 2 (vectors), its
    message changed in one place.
    """
    server, client, state = halves(6, 3, min_count=1)
    z = torch.randn(15, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = client.pack(finished(client, state, z, torch.tensor([0] * 12 + [2] * 3)))
    assert flat["spread/ranks"].tolist() == [6, 0, 2]
    server.unpack(state, dict(flat))
    change(flat)
    with pytest.raises(WireError) as refused:
        server.unpack(state, flat)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_precision_by_coordinate_must_be_positive():
    server, client, state = halves(6, 3, min_count=1, centroid="diag")
    z = torch.randn(15, 6, dtype=torch.float64)
    flat = client.pack(finished(client, state, z, torch.tensor([0] * 12 + [2] * 3)))
    flat["spread/precision"] = flat["spread/precision"] * 0
    with pytest.raises(WireError, match="'spread/precision' has values that are not positive"):
        server.unpack(state, flat)
