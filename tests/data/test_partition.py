"""Who has which samples (partitions) and which step sees which (batches), each against an oracle
written the slow way.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayflower.data import partition, rng
from bayflower.errors import ConfigError

LABELS = np.random.default_rng(7).choice(10, size=6000, p=np.arange(1, 11) / 55)  # unequal classes

MAKERS = {
    "iid": lambda y, n, g: partition.iid(y, n, g),
    "dirichlet": lambda y, n, g: partition.dirichlet(y, n, 0.5, 2, g),
    "quantity": lambda y, n, g: partition.quantity(y, n, 0.3, 3, g),
    "pathological": lambda y, n, g: partition.pathological(y, n, 2, 0, 5, g),
    "major-minor": lambda y, n, g: partition.major_minor(y, n, 2, 0.3, "r1", 0, 5, g),
}
COVERS = {"iid", "dirichlet", "quantity"}  # the others may leave samples over


def counts_of(y: np.ndarray, parts: list[np.ndarray], classes: int = 10) -> np.ndarray:
    """Return (clients, classes) counts."""
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 12),
    per_class=st.lists(st.integers(30, 60), min_size=5, max_size=5),
)
def test_every_partition(kind: str, seed: int, clients: int, per_class: list[int]) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), per_class))
    parts = MAKERS[kind](y, clients, rng(seed, "p"))
    assert len(parts) == clients
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)  # disjoint
    assert joined.min() >= 0
    assert joined.max() < len(y)
    assert all(len(part) >= 2 and (np.diff(part) > 0).all() for part in parts)
    if kind in COVERS:
        assert len(joined) == len(y)
    again = MAKERS[kind](y, clients, rng(seed, "p"))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("kind", MAKERS)
def test_seeds_differ(kind: str) -> None:
    y = LABELS % 5
    first, second = (MAKERS[kind](y, 6, rng(seed, "p")) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_iid_sizes_and_shares() -> None:
    parts = partition.iid(np.sort(LABELS), 7, rng(0, "p"))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    shares = counts_of(np.sort(LABELS), parts) / np.array(sizes)[:, None]
    # though the labels came sorted
    assert np.abs(shares - np.bincount(LABELS) / len(LABELS)).max() < 0.06


@pytest.mark.parametrize(
    ("clients", "beta", "min_size"), [(8, 0.3, 10), (20, 0.1, 20), (5, 3.0, 1000)]
)
def test_dirichlet_against_a_loop(clients: int, beta: float, min_size: int) -> None:
    draw, tries = rng(3, "p"), 0
    while True:  # the definition, class by class
        tries += 1
        table = np.zeros((clients, 10), int)
        for label in range(10):
            q = draw.dirichlet([beta] * clients)
            total, start = int((label == LABELS).sum()), 0
            for client in range(clients):
                end = total if client == clients - 1 else int(np.cumsum(q)[client] * total)
                table[client, label] = end - start
                start = end
        if table.sum(1).min() >= min_size:
            break
    assert tries > 1 or clients == 8  # the redraw is exercised
    parts = partition.dirichlet(LABELS, clients, beta, min_size, rng(3, "p"))
    assert np.array_equal(counts_of(LABELS, parts), table)


def test_dirichlet_shuffles_within_a_class() -> None:
    y = np.zeros(1000, int)
    parts = partition.dirichlet(y, 2, 5.0, 10, rng(0, "p"))
    assert abs(np.corrcoef(np.arange(1000), np.isin(np.arange(1000), parts[0]))[0, 1]) < 0.15


def test_dirichlet_counts_equal_those_of_flwr_datasets() -> None:
    hub = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets")
    other = hub.DirichletPartitioner(
        12, "label", 0.3, min_partition_size=10, self_balancing=False, shuffle=False, seed=5
    )
    other.dataset = datasets.Dataset.from_dict({"label": LABELS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = np.stack(
            [np.bincount(other.load_partition(i)["label"], minlength=10) for i in range(12)]
        )
    ours = partition.dirichlet(LABELS, 12, 0.3, 10, np.random.default_rng(5))
    assert np.array_equal(counts_of(LABELS, ours), theirs)


def test_dirichlet_mean_and_spread() -> None:
    beta, clients, runs = 0.5, 5, 400
    y = np.zeros(1000, int)
    shares = np.array(
        [
            [len(p) / 1000 for p in partition.dirichlet(y, clients, beta, 0, rng(s, "p"))]
            for s in range(runs)
        ]
    )
    assert np.allclose(shares.mean(0), 1 / clients, atol=0.05)
    # variance of Dirichlet(beta 1)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * beta + 1)
    assert np.allclose(shares.var(0), expected, rtol=0.25)


def test_impossible_dirichlet_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="too few for 100 clients of at least min_size 10; lower"):
        partition.dirichlet(np.zeros(500, int), 100, 1.0, 10, rng(0, "p"))
    with pytest.raises(ConfigError, match="raise beta, or lower min_size"):
        partition.dirichlet(np.zeros(500, int), 50, 0.01, 10, rng(0, "p"))


def test_quantity_sizes() -> None:
    parts = partition.quantity(LABELS, 10, 0.3, 25, rng(4, "p"))
    q = rng(4, "p").dirichlet([0.3] * 10)
    exact = 25 + q * (len(LABELS) - 250)
    sizes = np.array([len(part) for part in parts])
    assert np.abs(sizes - exact).max() < 1 + 1e-6
    assert sizes.max() > 4 * sizes.min()
    large = parts[int(sizes.argmax())]
    assert (
        np.abs(np.bincount(LABELS[large]) / len(large) - np.bincount(LABELS) / len(LABELS)).max()
        < 0.03
    )


@pytest.mark.parametrize(("clients", "per_client"), [(50, 3), (7, 4), (3, 10), (2, 1)])
def test_pathological(clients: int, per_client: int) -> None:
    y = np.repeat(np.arange(10), 300)
    table = counts_of(y, partition.pathological(y, clients, per_client, 0, 10, rng(1, "p")))
    assert ((table > 0).sum(1) == per_client).all()
    holders = (table > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):  # all of a held class is split, evenly
        held = table[table[:, label] > 0, label]
        assert held.sum() == 300
        assert held.max() - held.min() <= 1


def test_pathological_with_a_fixed_number_of_samples() -> None:
    y = np.repeat(np.arange(10), 3000)  # pFedVMP: 50 clients, 3 classes, 100 samples of each
    table = counts_of(y, partition.pathological(y, 50, 3, 100, 10, rng(1, "p")))
    assert set(table.ravel()) == {0, 100}
    assert ((table == 100).sum(1) == 3).all()
    with pytest.raises(ConfigError, match="lower samples_per_class"):
        partition.pathological(y, 50, 3, 201, 10, rng(1, "p"))
    with pytest.raises(ConfigError, match=r"classes_per_client must be in \[1, 10\]"):
        partition.pathological(y, 50, 11, 0, 10, rng(1, "p"))


@pytest.mark.parametrize(
    ("reading", "major", "minor"), [("r1", 0.42, 0.02), ("r2", 0.10, 0.10), ("r3", 0.40, 0.025)]
)
def test_major_minor_shares_of_e_b7(reading: str, major: float, minor: float) -> None:
    y = np.repeat(np.arange(10), 6000)
    parts = partition.major_minor(y, 20, 2, 0.2, reading, 600, 10, rng(2, "p"))
    table = counts_of(y, parts)
    assert (table.sum(1) == 600).all()
    ordered = np.sort(table, axis=1)
    assert np.allclose(ordered[:, -2:] / 600, major, atol=1e-9)
    assert np.allclose(ordered[:, :-2] / 600, minor, atol=1e-9)
    if reading != "r2":  # each class is a major one of 20 x 2 / 10 = 4 clients
        assert ((table > 100).sum(0) == 4).all()


@pytest.mark.parametrize("reading", ["r1", "r2", "r3"])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_major_minor_is_as_large_as_the_data_allow(reading: str, share: float) -> None:
    parts = partition.major_minor(LABELS, 6, 3, share, reading, 0, 10, rng(2, "p"))
    size = len(parts[0])
    assert {len(part) for part in parts} == {size}
    major, minor = partition.major_minor_shares(reading, 3, share, 10)
    assert 3 * major + 7 * minor == pytest.approx(1)
    table = np.sort(counts_of(LABELS, parts), axis=1)
    low, high = sorted((major, minor))
    assert table.min() >= np.floor(low * size)
    assert table.max() <= np.ceil(high * size)
    with pytest.raises(ConfigError, match="lower samples_per_client"):
        partition.major_minor(LABELS, 6, 3, share, reading, size + 12, 10, rng(2, "p"))


def test_major_minor_bounds() -> None:
    with pytest.raises(ConfigError, match=r"major_classes must be in \[1, 9\]"):
        partition.major_minor(LABELS, 6, 10, 0.2, "r1", 0, 10, rng(2, "p"))


def test_natural_leaves_out_what_nobody_owns() -> None:
    parts = partition.natural(np.array([5, -1, 2, 5, 2, -1, 2]))
    assert [part.tolist() for part in parts] == [[2, 4, 6], [0, 3]]
