"""Groups of samples of many clients at once: means, centred rows, where they go, and their sums,
against loops over clients and classes; on a GPU the kernels.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch.func import vmap

from bayflower.maths import classwise
from bayflower.maths.classwise import class_means
from bayflower.stacked import groups

F64 = torch.float64
SIZES = [(3, 70, 20, 4), (2, 7, 5, 3), (4, 130, 130, 2), (2, 300, 512, 3), (1, 1, 1, 1)]
DTYPES = [torch.float32, F64]


def samples(clients, number, dim, classes, dtype, device):
    """Return (z, y, mask) with an empty client, padding, and labels that are no class."""
    draw = torch.Generator().manual_seed(number)
    z = 3 + torch.randn(clients, number, dim, generator=draw, dtype=F64)
    y = torch.randint(-1, classes + 1, (clients, number), generator=draw)
    mask = (torch.rand(clients, number, generator=draw) < 0.8).to(dtype)
    mask[-1] = 0
    y[0, 0], mask[0, 0] = 0, 1
    return z.to(dtype).to(device), y.to(device), mask.to(device)


def grouped(y, mask, classes):
    """Return the places of the samples of each class of each client, as `plan` has them."""
    flat = [
        (c * y.shape[1] + ((y[c] == k) & (mask[c] != 0)).nonzero()[:, 0]).tolist()
        for c in range(len(y))
        for k in range(classes)
    ]
    flat = [one for one in flat if one]
    most = max(map(len, flat)) + 2
    last = y.numel()
    return torch.tensor([one + [last] * (most - len(one)) for one in flat], device=y.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_means_and_centred_rows_are_those_of_each_class(sizes, dtype, device):
    z, y, mask = samples(*sizes, dtype, device)
    close = {"rtol": 1e-6 if dtype == torch.float32 else 1e-12, "atol": 1e-12}
    for found in (
        groups.means(z, y, mask, sizes[3]),
        vmap(lambda *one: class_means(*one, sizes[3]))(z, y, mask),
    ):
        counts, means = found
        assert (counts.dtype, means.dtype) == (torch.int64, dtype)
        for c in range(sizes[0]):
            for k in range(sizes[3]):
                own = z[c, (y[c] == k) & (mask[c] != 0)].double()
                assert int(counts[c, k]) == len(own)
                want = own.mean(0) if len(own) else torch.zeros_like(means[c, k])
                torch.testing.assert_close(means[c, k], want.to(dtype), **close)
    index = grouped(y, mask, sizes[3])
    rows = z.reshape(-1, sizes[2])
    wide, biggest = groups.centred(rows, index)
    for g, places in enumerate(index):
        own = rows[places[places < len(rows)]].double()
        want = (own - own.mean(0)) / len(own) ** 0.5
        torch.testing.assert_close(wide[g, : len(own)], want, rtol=1e-10, atol=1e-12)
        assert not bool(wide[g, len(own) :].any())
        assert float(biggest[g]) == float(own.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_go_to_their_places_largest_first(sizes, scaled, device):
    _, y, mask = samples(*sizes, F64, device)
    index = grouped(y, mask, sizes[3])
    (number, most), dim, last = index.shape, sizes[2], y.numel()
    draw = torch.Generator().manual_seed(1)
    vectors = torch.randn(number, most, dim, generator=draw, dtype=F64)
    values = torch.rand(number, most, generator=draw, dtype=F64).sort(1).values
    least = values[:, most // 2].clone()
    rank = torch.arange(number, dtype=F64) % (most + 1)
    given = [one.to(device) for one in (vectors, values, least, rank)]

    def empty():
        kinds = (torch.float32, torch.float32, torch.bool)
        shapes = ((last, dim), (last,), (last,))
        return tuple(
            torch.zeros(s, dtype=k, device=device) for s, k in zip(shapes, kinds, strict=True)
        )

    eigen, other, want, plain = empty(), empty(), empty(), empty()
    groups.put(given[0], given[1], given[2], index, eigen, scaled)
    groups.put(given[0], given[3], None, index, other)
    for g in range(number):
        for j, place in enumerate(index[g].tolist()):
            if place == last:
                continue
            value = float(values[g, most - 1 - j])
            if value > float(least[g]):
                row = vectors[g, most - 1 - j] / (value**0.5 if scaled else 1)
                want[0][place], want[1][place], want[2][place] = row, 1 / value, True
            plain[0][place] = vectors[g, j]
            plain[1][place] = float(rank[g] > 0)
            plain[2][place] = j < rank[g]
    for got, right in ((eigen, want), (other, plain)):
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_sums_over_clients_are_those_of_each_row(sizes, dtype, device):
    clients, _, dim, classes = sizes
    basis, y, mask = samples(*sizes, dtype, device)
    weight = (mask * 2.5).to(dtype)
    weight[:, ::3] = 0
    label = torch.where((mask != 0) & (y >= 0) & (y < classes), y, classes)
    draw = torch.Generator().manual_seed(2)
    means = torch.randn(clients, classes, dim, generator=draw, dtype=F64).to(device)
    for _, chosen, index, real in classwise.rows_of(label, classes, dim):
        precision, shift = groups.summed(basis, weight, index, real, means, chosen)
        for place, k in enumerate(chosen.tolist()):
            want = torch.zeros(dim, dim, dtype=F64, device=device)
            along = torch.zeros(dim, dtype=F64, device=device)
            for c in range(clients):
                own = basis[c, label[c] == k].double()
                part = own.mT @ (weight[c, label[c] == k, None].double() * own)
                want, along = want + part, along + part @ means[c, k]
            torch.testing.assert_close(precision[place], want, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(shift[place], along, rtol=1e-9, atol=1e-9)
