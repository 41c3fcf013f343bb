"""A user's own files and how their numbers are scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayflower.data import (
    DataSettings,
    load_federation,
    load_source,
    read_npz,
    scaling,
    sources,
)
from bayflower.errors import ConfigError


# -- files ---------------------------------------------------------------------------------------
def write(folder: Path, **arrays: Any) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return path


def table(n: int = 60) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(n, 3)),
        "y": np.arange(n) % 3,
        "client": np.arange(n) % 4 - 1,
        "test": np.arange(n) % 5 == 0,
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"y": None}, "has no array 'y', only client, test, x; it needs x and y"),
        ({"x": None}, "has no array 'x'"),
        ({"y": np.arange(59) % 3}, "x in .* must have one entry for each of the 59 labels"),
        ({"client": np.arange(58)}, "client in .* must have one entry for each of the 60 labels"),
        ({"test": np.array(True)}, "test in .* must have one entry for each of the 60 labels"),
        ({"y": np.arange(60) / 2}, "y in .* must hold classes, got numbers such as 0.5"),
        (
            {"y": np.arange(60) % 3 - 1, "num_classes": np.array(3)},
            "labels in .* must be at least 0, got -1",
        ),
        (
            {"num_classes": np.array(2)},
            r"labels in .* must be in \[0, 1\] for num_classes 2, got 2",
        ),
        ({"y": np.zeros(60, int)}, "y in .* has one class only"),
        ({"x": np.array([None, 1] * 30)}, "has an array of Python objects"),
        ({"x": np.array(["a", "b"] * 30).reshape(60, 1)}, "x in .* must be numbers"),
        ({"x": np.full((60, 3), np.inf)}, "must be finite in float32"),
        ({"x": np.full((60, 3), 1e300)}, "must be finite in float32"),
        ({"x": np.full((60, 1, 2, 2), np.nan)}, "must not have NaN unless it is a table"),
        ({"x": np.zeros((60, 4, 4, 4))}, "may have its channels first or last; set layout=NHWC"),
        ({"x": np.zeros((60, 5, 7, 9))}, "has no axis of 1, 3 or 4 channels; set layout=NHWC"),
        ({"x": np.zeros((60, 2, 8, 8, 3))}, "images have 3 or 4 axes"),
        ({"x": np.zeros((60, 50, 3))}, "may be grey images or series; set layout=NHW"),
        ({"x": np.full((60, 8, 8), 16.0)}, "neither within −1…1 nor pixels of 0…255; set white"),
        ({"x": np.full((60, 8, 8), 4095)}, "where pixels go from 0 to 255; set white"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    arrays = {key: value for key, value in {**table(), **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=text) as caught:
        read_npz(write(tmp_path, **arrays))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*nowhere.npz"):
        load_federation(DataSettings(dataset=str(tmp_path / "nowhere.npz")), 0)
    for content in (b"", b"hello", b"PK\x03\x04broken"):
        (tmp_path / "odd.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"odd.npz is not an .npz file of plain arrays"):
            read_npz(tmp_path / "odd.npz")
    np.save(tmp_path / "bare.npy", np.zeros(3))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    with pytest.raises(ConfigError, match="one bare array"):
        read_npz(tmp_path / "bare.npz")


def test_a_missing_data_set_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"neither .*cifar10.npz nor torchvision's CIFAR10 .*set download=true"
    ):
        load_source(DataSettings(dataset="cifar10", data_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no file .*heart.npz; set data_dir"):
        load_source(DataSettings(dataset="heart", data_dir=str(tmp_path)))


def test_images_are_scaled_and_channels_first(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
    colour = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    y = np.arange(6) % 2
    a, b = (read_npz(write(tmp_path, x=x, y=y)).samples(np.array([4, 1])) for x in (grey, colour))
    assert a.shape == (2, 1, 4, 5)
    assert b.shape == (2, 3, 4, 5)
    assert a.dtype == b.dtype == np.float32
    assert a[1, 0, 2, 3] == pytest.approx((int(grey[1, 2, 3]) / 255 - 0.5) / 0.5, abs=1e-6)
    assert b[0, 2, 3, 1] == pytest.approx((int(colour[4, 3, 1, 2]) / 255 - 0.5) / 0.5, abs=1e-6)


def test_num_classes_may_exceed_the_labels(tmp_path: Path) -> None:
    assert (
        read_npz(
            write(tmp_path, x=np.zeros((4, 2)), y=np.array([0, 1, 0, 1]), num_classes=np.array(7))
        ).num_classes
        == 7
    )


def test_natural_clients_and_the_test_mark(tmp_path: Path) -> None:
    arrays = table()
    path = str(write(tmp_path, **arrays))
    given = DataSettings(
        dataset=path,
        partition="natural",
        num_clients=3,
        test_fraction=0.0,
        min_size=2,
        calibration="off",
    )
    federation = load_federation(given, 0)
    assert federation.partition["natural_clients"] == [0, 1, 2]
    assert federation.dataset == "mine"
    for data in federation.clients:
        mine = arrays["client"] == data.client
        assert sorted(data.y_train) == sorted(arrays["y"][mine & ~arrays["test"]])
        assert sorted(data.y_test) == sorted(arrays["y"][mine & arrays["test"]])
        assert np.allclose(data.x_train.mean(0), 0, atol=1e-5)
        assert np.allclose(data.x_train.std(0), 1, atol=1e-5)
    assert federation.names.sites == ("0", "1", "2")
    assert federation.names.classes == ("0", "1", "2")
    assert federation.names.columns == ()
    drawn = load_federation(DataSettings(dataset=path, partition="iid", num_clients=3), 0)
    assert drawn.names.sites == ()
    with pytest.raises(
        ConfigError, match="must be at most 3, the natural clients of 'mine', got 4"
    ):
        load_federation(DataSettings(dataset=path, partition="natural", num_clients=4), 0)


def test_what_a_file_does_not_have(tmp_path: Path) -> None:
    arrays = table()
    path = str(write(tmp_path, x=arrays["x"], y=arrays["y"], client=np.full(60, -1)))
    with pytest.raises(ConfigError, match="no natural clients"):
        load_federation(DataSettings(dataset=path, partition="natural", num_clients=2), 0)
    with pytest.raises(ConfigError, match="does not mark test samples"):
        load_federation(
            DataSettings(dataset=path, partition="iid", num_clients=2, test_fraction=0.0), 0
        )


def test_a_client_without_test_samples_is_an_error(tmp_path: Path) -> None:
    arrays = table()
    path = str(write(tmp_path, **{**arrays, "test": arrays["client"] == 0}))
    with pytest.raises(ConfigError, match="client 0 would have 0 training and 15 test samples"):
        load_federation(
            DataSettings(dataset=path, partition="natural", num_clients=3, test_fraction=0.0), 0
        )


def test_scaling_against_a_loop() -> None:
    nan = np.nan
    train = np.array(
        [
            [1.0, 5.0, nan, 0.1, nan],
            [nan, 5.0, nan, 0.1, 2.0],
            [4.0, 5.0, nan, 0.1, 4.0],
            [9.0, nan, nan, 0.1, 9.0],
        ]
    )
    test = np.array([[2.0, 6.0, 3.0, 0.2, nan], [nan, nan, nan, 0.1, 1.0]])
    a, b = (scaling(train).apply(part) for part in (train, test))
    for column in range(5):
        known = sorted(v for v in train[:, column] if v == v)
        median = 0.0 if not known else (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
        filled = [v if v == v else median for v in train[:, column]]
        mean = sum(filled) / 4
        std = (sum((v - mean) ** 2 for v in filled) / 4) ** 0.5 if len(set(filled)) > 1 else 1.0
        other = [0.0 if not known else (v if v == v else median) for v in test[:, column]]
        assert np.allclose(a[:, column], [(v - mean) / std for v in filled], atol=1e-6)
        assert np.allclose(b[:, column], [(v - mean) / std for v in other], atol=1e-6)


def test_scaling_keeps_the_scale_of_a_constant_column() -> None:
    train = np.full((50, 1), 0.1)
    assert train.std() != 0  # rounding alone: dividing by it would give huge values
    a, b = (scaling(train).apply(part) for part in (train, np.array([[0.1], [1.1]])))
    assert np.allclose(a, 0, atol=1e-6)
    assert np.allclose(b, [[0.0], [1.0]], atol=1e-6)


# -- digits --------------------------------------------------------------------------------------
@pytest.mark.parametrize("hidden", [False, True])
def test_digits_are_those_of_scikit_learn(hidden, monkeypatch):
    """From its file, and through its function where the file is not found."""
    from sklearn.datasets import load_digits

    if hidden:
        monkeypatch.setattr(sources, "find_spec", lambda name: None)
    want, got = load_digits(), sources._digits()
    assert np.array_equal(got.x, (want.images / 16).astype(np.float32)[:, None])
    assert np.array_equal(got.y, want.target)
    assert (got.x.dtype, got.y.dtype, got.num_classes) == (np.float32, np.int64, 10)
