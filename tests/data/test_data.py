"""Settings, sources, federations and the synthetic generator."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayflower.data import (
    PARTITIONS,
    DataSettings,
    Federation,
    load_client,
    load_federation,
    load_source,
    synthetic,
)
from bayflower.data import federation as federations
from bayflower.data.vision import import_torchvision, prepare_torchvision
from bayflower.errors import ConfigError


def same(a: Any, b: Any) -> bool:
    """Return whether two ClientData are equal to the bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# -- settings ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_clients": -1}, "num_clients must be at least 0, got -1"),
        ({"num_clients": 2.5}, "num_clients must be an integer of at least 0, got 2.5"),
        ({"new_clients": -1}, "new_clients must be at least 0, got -1"),
        (
            {"min_size": 1},
            "min_size must be at least 2, got 1; a client needs one "
            "sample to train and one to test",
        ),
        ({"beta": 0.0}, r"beta must be in \[0.001, 1000000\], got 0.0"),
        ({"beta": float("nan")}, "beta must be in"),
        ({"keep": 0.0}, r"keep must be in \(0, 1\], got 0.0"),
        ({"test_fraction": 1.0}, r"test_fraction must be in \[0, 1\), got 1.0"),
        ({"minor_share": 1.2}, r"minor_share must be in \[0, 1\], got 1.2"),
        ({"partition": "shards"}, "partition must be one of dirichlet, iid, .*, got 'shards'"),
        ({"major_minor_reading": "r4"}, "major_minor_reading must be one of r1, r2, r3, got 'r4'"),
        ({"scenario": "none"}, "scenario must be one of feature, quantity, label, got 'none'"),
        (
            {"dataset": "fminst"},
            r"dataset must be one of digits, synthetic, crowd, mnist.*got 'fminst'; did you mean "
            r"'fmnist'\? a path to an .npz file",
        ),
        ({"nuisance_variance": -1.0}, "nuisance_variance must be at least 0 and finite, got -1.0"),
        (
            {"dataset": "synthetic", "partition": "iid"},
            "partition must not be set for dataset 'synthetic', got 'iid'; set scenario",
        ),
        ({"dataset": "synthetic", "test_fraction": 0.0}, "test_fraction must be in"),
        ({"partition": "natural"}, "'digits', which has no natural clients"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        DataSettings(**wrong)
    assert "\n" not in str(caught.value)


# -- federations ---------------------------------------------------------------------------------
def check_federation(federation: Federation, given: DataSettings) -> None:
    everyone = federation.clients + federation.new_clients
    assert len(federation.clients) == given.num_clients
    assert len(federation.new_clients) == given.new_clients
    assert [data.client for data in everyone] == list(range(given.total_clients))
    for data in everyone:
        assert data.x_train.dtype == data.x_test.dtype == np.float32
        assert data.y_train.dtype == np.int64
        assert data.x_train.shape[1:] == data.x_test.shape[1:] == federation.input_shape
        n = len(data.y_train) + len(data.y_test)
        assert len(data.y_test) == min(max(int(given.fraction * n + 0.5), 1), n - 1)
        assert np.isfinite(data.x_train).all()
        assert np.isfinite(data.x_test).all()
    assert json.loads(json.dumps(federation.partition)) == federation.partition


@pytest.mark.parametrize("kind", [kind for kind in PARTITIONS if kind != "natural"])
def test_digits(kind: str) -> None:
    given = DataSettings(
        num_clients=6, new_clients=2, partition=kind, test_fraction=0.25, calibration="off"
    )
    federation = load_federation(given, 3)
    check_federation(federation, given)
    assert federation.input_shape == (1, 8, 8)
    assert federation.num_classes == 10
    assert federation.partition["kind"] == kind
    rows = np.concatenate(
        [
            np.concatenate([d.x_train, d.x_test]).reshape(-1, 64)
            for d in federation.clients + federation.new_clients
        ]
    )
    assert rows.min() == 0
    assert rows.max() == 1
    # No sample twice, and each is one of digits: compare as multisets of rows with the pool.
    pool = {row.tobytes() for row in load_source(given).x.reshape(-1, 64)}
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert {row.tobytes() for row in rows} <= pool
    assert same(load_client(given, 3, 7), federation.new_clients[1])
    assert same(load_client(given, 3, 0), federation.clients[0])
    federations._federation.cache_clear()
    assert all(
        same(a, b)
        for a, b in zip(load_federation(given, 3).clients, federation.clients, strict=True)
    )
    assert not all(
        same(a, b)
        for a, b in zip(load_federation(given, 4).clients, federation.clients, strict=True)
    )
    with pytest.raises(ConfigError, match=r"client must be in \[0, 7\], got 8"):
        load_client(given, 3, 8)


def test_new_clients_are_any_of_the_partition() -> None:
    chosen = {
        tuple(
            load_federation(
                DataSettings(num_clients=4, new_clients=2, partition="iid"), s
            ).partition["parts"]
        )
        for s in range(8)
    }
    assert len(chosen) > 3
    for members in chosen:
        assert sorted(members) == list(range(6))
        assert list(members[:4]) == sorted(members[:4])
        assert members[4] < members[5]
    # Who is new changes nobody's samples: the parts of 6 + 0 clients are those of 4 + 2.
    plain = load_federation(DataSettings(num_clients=6, partition="iid"), 1)
    mixed = load_federation(DataSettings(num_clients=4, new_clients=2, partition="iid"), 1)
    for data, member in zip(
        mixed.clients + mixed.new_clients, mixed.partition["parts"], strict=True
    ):
        assert same(data[1:], plain.clients[member][1:])


def test_keep_takes_a_uniform_share() -> None:
    federation = load_federation(
        DataSettings(num_clients=3, partition="iid", keep=0.5, calibration="off"), 0
    )
    labels = np.concatenate([np.concatenate([d.y_train, d.y_test]) for d in federation.clients])
    assert len(labels) == 899 == federation.partition["kept"]
    assert federation.partition["pooled"] == 1797
    assert np.abs(np.bincount(labels) / 899 - 0.1).max() < 0.04


def test_min_size_holds_for_every_partition() -> None:
    with pytest.raises(ConfigError, match="fewer than min_size 40; lower min_size"):
        load_federation(DataSettings(num_clients=50, partition="iid", min_size=40), 0)
    federation = load_federation(DataSettings(num_clients=20, beta=0.3, min_size=30), 0)
    assert min(len(d.y_train) + len(d.y_test) for d in federation.clients) >= 30


def test_torchvision_can_be_imported() -> None:
    pytest.importorskip("PIL")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    module = import_torchvision()
    assert module.datasets.FashionMNIST.__name__ == "FashionMNIST"
    assert not prepare_torchvision()  # once is enough


def test_torchvision_reads_what_the_npz_holds(unpacked: Path) -> None:
    archived = load_source(DataSettings(dataset="fmnist", data_dir=str(unpacked)))
    (unpacked / "fmnist.npz").rename(unpacked / "other.npz")
    try:
        original = load_source(DataSettings(dataset="fmnist", data_dir=str(unpacked)))
    finally:
        (unpacked / "other.npz").rename(unpacked / "fmnist.npz")
    assert np.array_equal(original.x, archived.x)
    assert np.array_equal(original.y, archived.y)
    assert original.test is not None
    assert archived.test is not None
    assert np.array_equal(original.test, archived.test)
    assert original.test.sum() == 10_000
    assert original.num_classes == archived.num_classes == 10
    assert original.note == archived.note == ""
    assert original.client is None


def test_pfedvmp_protocol_on_fashion_mnist(unpacked: Path) -> None:
    given = DataSettings(
        dataset="fmnist",
        data_dir=str(unpacked),
        num_clients=50,
        keep=0.25,
        beta=0.3,
        calibration="off",
    )
    federation = load_federation(given, 0)
    check_federation(federation, given)
    # SPEC §1.5
    assert np.mean([len(data.y_train) for data in federation.clients]) == pytest.approx(280, abs=1)


def test_heart_with_missing_values(unpacked: Path) -> None:
    given = DataSettings(
        dataset="heart",
        data_dir=str(unpacked),
        partition="natural",
        num_clients=4,
        calibration="off",
    )
    federation = load_federation(given, 0)
    check_federation(federation, given)
    assert [len(d.y_train) + len(d.y_test) for d in federation.clients] == [303, 294, 123, 200]


# -- the synthetic generator ---------------------------------------------------------------------
def test_synthetic_facts_of_e_m6() -> None:
    q = synthetic.basis(0)
    assert np.allclose(q.T @ q, np.eye(30), atol=1e-12)
    radii: list[list[float]] = [[], []]
    nuisance = []
    for index in range(10):
        raw, y = synthetic.client_samples(0, index, 10, "feature", 9.0)
        matrix, offset = synthetic.transform(0, index)
        x = np.linalg.solve(matrix.T, (raw - offset).T).T  # undo x <- A^T x + b
        assert np.allclose(x, synthetic.latent(0, index, 2000, 0.5, 9.0)[0], atol=1e-6)
        u, v = x @ q[:, :4], x @ q[:, 4:]
        nuisance.append(v)
        assert (y == 0).sum() == 1000
        for label in (0, 1):
            radii[label] += list(np.linalg.norm(u[y == label], axis=1))
    assert np.mean(radii[0]) == pytest.approx(2.66, abs=0.03)
    assert np.std(radii[0]) == pytest.approx(0.97, abs=0.03)
    assert np.mean(radii[1]) == pytest.approx(8.0, abs=0.05)
    assert np.std(radii[1]) == pytest.approx(1.41, abs=0.04)
    errors = np.mean(np.array(radii[0]) > 5.0) / 2 + np.mean(np.array(radii[1]) < 5.0) / 2
    assert errors == pytest.approx(0.0155, abs=0.004)  # the Bayes error at the cut 5.00
    assert np.var(np.concatenate(nuisance)) == pytest.approx(9.0, rel=0.02)


def test_synthetic_offsets_grow_with_the_client() -> None:
    offsets = np.array(
        [[synthetic.transform(seed, index)[1] for index in range(10)] for seed in range(40)]
    )
    assert np.allclose(offsets.std(axis=(0, 2)), 5.0 * np.arange(1, 11), rtol=0.1)
    matrices = np.array([synthetic.transform(seed, 0)[0] for seed in range(20)])
    assert matrices.std() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    ("scenario", "sizes", "shares"),
    [
        ("feature", [2000] * 10, [0.5] * 10),
        ("quantity", [2000] * 5 + [500] * 5, [0.5] * 10),
        ("label", [2000] * 10, [0.5] * 5 + [0.85] * 5),
    ],
)
def test_synthetic_scenarios(scenario: str, sizes: list[int], shares: list[float]) -> None:
    given = DataSettings(dataset="synthetic", scenario=scenario, calibration="off")
    federation = load_federation(given, 1)
    check_federation(federation, given)
    assert federation.input_shape == (30,)
    assert federation.num_classes == 2
    assert federation.partition["test_fraction"] == 0.3
    for data, size, share in zip(federation.clients, sizes, shares, strict=True):
        labels = np.concatenate([data.y_train, data.y_test])
        assert len(labels) == size
        assert len(data.y_test) == 0.3 * size
        assert (labels == 0).mean() == pytest.approx(share)
        assert np.allclose(data.x_train.mean(0), 0, atol=1e-5)
        assert np.allclose(data.x_train.std(0), 1, atol=1e-5)


def test_synthetic_clients_do_not_depend_on_their_number() -> None:
    few, many = (
        DataSettings(dataset="synthetic", scenario="feature", num_clients=n) for n in (4, 13)
    )
    assert all(same(load_client(few, 5, k), load_client(many, 5, k)) for k in range(4))
    assert not same(load_client(few, 5, 0)[1:], load_client(few, 5, 1)[1:])
    assert not same(load_client(few, 5, 0), load_client(few, 6, 0))
    large, small = (synthetic.client_samples(5, 9, n, "quantity", 9.0) for n in (40, 10))
    assert len(large[1]) == 2000
    assert len(small[1]) == 500


# -- imports -------------------------------------------------------------------------------------
def test_data_imports_neither_flower_nor_heavy_packages() -> None:
    root = Path(__file__).resolve().parents[2]
    for path in [*(root / "bayflower" / "data").glob("*.py"), root / "bayflower" / "config.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            )
            assert not {name.split(".")[0] for name in names} & {
                "flwr",
                "flwr_datasets",
                "pandas",
                "pickle",
                "torchvision",
            }, path


def test_held_out_samples_are_training_samples() -> None:
    given = {"num_clients": 4, "partition": "iid"}
    off = load_federation(DataSettings(**given, calibration="off"), 2)
    on = load_federation(DataSettings(**given, calibration_share=0.25, calibration_rows=80), 2)
    for before, after in zip(off.clients, on.clients, strict=True):
        count = min(int(0.25 * len(before.y_train) + 0.5), 80)
        assert len(after.y_held) == count > 0
        both = np.concatenate([after.x_held, after.x_train])
        assert np.array_equal(both, before.x_train)
        assert np.array_equal(np.concatenate([after.y_held, after.y_train]), before.y_train)
        assert np.array_equal(after.x_test, before.x_test)
    assert on.partition["calibration_sizes"] == [len(one.y_held) for one in on.clients]
    tuned = load_federation(DataSettings(**given, validation=0.2), 2)
    assert all(one.y_held is None for one in tuned.clients)
    for wrong in ({"calibration": "yes"}, {"calibration_share": 1.0}, {"coverage": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DataSettings(**wrong)
