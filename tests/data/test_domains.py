"""FEMNIST's and CelebA's own files, written here as their makers write them, and federations of
several data sets.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bayflower.config import parse
from bayflower.data import DataSettings, load_client, load_federation, load_source
from bayflower.data.domains import SIDE, brought, shares
from bayflower.engines import execute, prepare
from bayflower.errors import ConfigError
from bayflower.reproduce.data import pooled, remedy

WRITERS = {"f0001_41": 14, "f0000_14": 12, "f0002_09": 11}


def leaf(folder: Path, part: str, take: slice = slice(None), seed: int = 0) -> None:
    """Write a file of LEAF's FEMNIST: images as lists of 784 numbers, white as 1."""
    draw = np.random.default_rng(seed)
    data = {}
    for writer, number in WRITERS.items():
        x, y = draw.integers(0, 256, (number, 784)) / 255, draw.integers(0, 62, number)
        data[writer] = {"x": x[take].tolist(), "y": y[take].tolist()}
    content = {
        "users": list(data),
        "num_samples": [len(one["y"]) for one in data.values()],
        "user_data": data,
    }
    (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / part / "all_data_0_niid_0_keep_0_train_9.json").write_text(json.dumps(content))


def faces(folder: Path, people: dict[int, int]) -> None:
    """Write CelebA's lists and small photographs of them: people → how many each has. Whoever
    smiles has a bright photograph.
    """
    images = folder / "img_align_celeba"
    images.mkdir(parents=True)
    names, attributes, identities, parts = [], [], [], []
    for person, number in people.items():
        for place in range(number):
            name = f"{len(names) + 1:06d}.jpg"
            smiling = place % 2
            Image.new("RGB", (178, 218), (200, 180, 160) if smiling else (30, 20, 10)).save(
                images / name
            )
            names.append(name)
            attributes.append(f"{name} -1  1 {1 if smiling else -1:2d} -1")
            identities.append(f"{name} {person}")
            parts.append(f"{name} {2 if place == 0 else 0}")
    header = f"{len(names)}\n5_o_Clock_Shadow Arched_Eyebrows Smiling Young \n"
    (folder / "list_attr_celeba.txt").write_text(header + "\n".join(attributes) + "\n")
    (folder / "identity_CelebA.txt").write_text("\n".join(identities) + "\n")
    (folder / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")


def square(path: Path, name: str, classes: int, shape: tuple[int, ...], number: int = 120) -> None:
    draw = np.random.default_rng(classes)
    y = np.arange(number) % classes
    x = draw.integers(0, 40, (number, *shape)) + (180 * y / classes).astype(int).reshape(
        -1, *[1] * len(shape)
    )
    np.savez(path / f"{name}.npz", x=x.astype(np.uint8), y=y)


# -- files of their makers -----------------------------------------------------------------------
@pytest.mark.parametrize("below", ["", "data"])
def test_femnist_by_writer(tmp_path, below):
    """Train and test files are pooled and marked; a writer is one owner in both; 1 is white."""
    folder = tmp_path / "femnist" / below
    leaf(folder, "train", slice(0, 8))
    leaf(folder, "test", slice(8, None))
    source = load_source(DataSettings(dataset="femnist", data_dir=str(tmp_path)))
    assert source.x.shape == (37, 28, 28)
    assert (source.x.dtype, source.num_classes) == (np.uint8, 62)
    assert source.note == "37 samples of femnist's 805263"
    assert np.bincount(source.client).tolist() == [12, 14, 11]  # f0000, f0001, f0002
    assert int(source.test.sum()) == 37 - 3 * 8
    # of the first writer in the file
    wanted = np.random.default_rng(0).integers(0, 256, (14, 784))[0].reshape(28, 28)
    assert np.array_equal(source.x[np.flatnonzero(source.client == 1)[0]], wanted)
    federation = load_federation(
        DataSettings(
            dataset="femnist",
            data_dir=str(tmp_path),
            partition="natural",
            num_clients=3,
            calibration="off",
        ),
        0,
    )
    assert sorted(len(one.y_train) + len(one.y_test) for one in federation.clients) == [11, 12, 14]


def test_celeba_by_person(tmp_path):
    """Smiling or not, 84×84; people with fewer than five photographs are nobody; only what a client
    has is read.
    """
    faces(tmp_path / "celeba", {2880: 12, 7: 10, 99: 4})
    settings = DataSettings(
        dataset="celeba", data_dir=str(tmp_path), partition="natural", num_clients=2
    )
    source = load_source(settings)
    assert (len(source.y), source.num_classes, source.x.shape) == (26, 2, (26, 84, 84, 3))
    assert sorted(np.unique(source.client).tolist()) == [-1, 7, 2880]
    assert int(source.test.sum()) == 3
    # of 99, who is nobody
    (tmp_path / "celeba" / "img_align_celeba" / "000024.jpg").write_bytes(b"no image")
    one = load_client(settings, 0, 0)
    assert one.x_train.shape[1:] == (3, 84, 84)
    bright = one.x_train.mean((1, 2, 3)) > 0
    assert np.array_equal(bright, one.y_train == 1)
    with pytest.raises(
        ConfigError,
        match=r"000024.jpg cannot be read as an image \(UnidentifiedImageError\); fetch it again",
    ):
        source.x[np.array([23])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: None, r"no \*.json in .*femnist.*; make them with LEAF's preprocess.sh"),
        (
            lambda f: (f / "a.json").write_text("{}"),
            r"a.json is not a file of LEAF's FEMNIST \(KeyError: 'users'\); it needs users and "
            r"user_data",
        ),
        (
            lambda f: (f / "a.json").write_text("[1"),
            r"a.json is not a file of LEAF's FEMNIST \(JSONDecodeError",
        ),
        (
            lambda f: (f / "a.json").write_text(
                json.dumps({"users": ["u"], "user_data": {"u": {"x": [[0.5] * 3], "y": [1]}}})
            ),
            r"x of 'u' in .*a.json must be 1 lists of 784 numbers in \[0, 1\], got shape \(1, 3\)",
        ),
        (
            lambda f: (f / "a.json").write_text(
                json.dumps({"users": ["u"], "user_data": {"u": {"x": [[0.5] * 784], "y": [62]}}})
            ),
            r"y of 'u' in .*a.json must be integers in \[0, 61\], got 62 to 62",
        ),
        (
            lambda f: (f / "a.json").write_text(json.dumps({"users": [], "user_data": {}})),
            "hold no sample",
        ),
    ],
)
def test_femnist_that_is_none(tmp_path, change, words):
    (tmp_path / "femnist").mkdir()
    change(tmp_path / "femnist")
    with pytest.raises(ConfigError, match=words):
        load_source(DataSettings(dataset="femnist", data_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("list_attr_celeba.txt", None, "no file .*list_attr_celeba.txt; it is part of CelebA"),
        (
            "list_attr_celeba.txt",
            "1\nYoung \n000001.jpg 1\n",
            "second line of .* must name the attributes, Smiling among them, got 'Young'",
        ),
        (
            "list_attr_celeba.txt",
            "1\nSmiling Young \n000001.jpg 1\n",
            "line 3 of .* must be a file name and 2 times 1 or -1",
        ),
        (
            "identity_CelebA.txt",
            "000001.jpg\n",
            "line 1 of .*identity_CelebA.txt must be a file name and a number, got '000001.jpg'",
        ),
        ("identity_CelebA.txt", "0.jpg 1\n", "have no file name in common"),
        (
            "img_align_celeba/000001.jpg",
            None,
            "no file .*000001.jpg, which the lists name; unpack img_align_celeba.zip there",
        ),
    ],
)
def test_celeba_that_is_none(tmp_path, name, text, words):
    faces(tmp_path / "celeba", {1: 5})
    path = tmp_path / "celeba" / name
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_source(DataSettings(dataset="celeba", data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["femnist", "celeba"])
def test_a_data_set_that_is_not_here(tmp_path, name):
    with pytest.raises(
        ConfigError,
        match=f"dataset '{name}' was not found: no file .*{name}.npz and no folder .*{name}; set "
        "data_dir",
    ):
        load_source(DataSettings(dataset=name, data_dir=str(tmp_path)))
    assert pooled(name, str(tmp_path)) is None
    assert f"put the files of {name}" in remedy(f"cifar100+{name}", str(tmp_path))
    (tmp_path / "celeba").mkdir()
    if name == "celeba":
        with pytest.raises(ConfigError, match=r"no folder .*img_align_celeba; CelebA needs"):
            load_source(DataSettings(dataset=name, data_dir=str(tmp_path)))


# -- several data sets ---------------------------------------------------------------------------
def test_images_are_brought_to_one_shape():
    """Against the mean of blocks where an image shrinks by an even factor, and constants where it
    grows.
    """
    flat = np.arange(3, dtype=np.uint8).reshape(3, 1, 1) * np.ones((3, 28, 28), np.uint8)
    assert np.array_equal(
        brought(flat, True), np.broadcast_to(flat[:, :1, :1, None], (3, SIDE, SIDE, 3))
    )
    assert brought(flat, False).shape == (3, SIDE, SIDE)
    slope = np.repeat(np.arange(64, dtype=np.uint8)[None, None, :, None], 64, axis=1).repeat(
        3, axis=3
    )
    small = brought(slope, True)[0, 5, 2:-2, 0].astype(float)
    assert np.abs(small - (2 * np.arange(2, SIDE - 2) + 0.5)).max() <= 0.5
    same = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3)).astype(np.uint8)
    assert np.array_equal(brought(same, True), same)


@pytest.mark.slow
def test_a_federation_of_three_domains(tmp_path):
    """Labels are offset, a client has one domain, both kinds of clients come from every domain, and
    one output layer learns them all.
    """
    leaf(tmp_path / "femnist", "all_data")
    faces(tmp_path / "celeba", {5: 12, 8: 14, 3: 11, 2: 3})
    square(tmp_path, "cifar100", 10, (32, 32, 3))
    given = {
        "dataset": "celeba+cifar100+femnist",
        "data_dir": str(tmp_path),
        "partition": "natural",
        "num_clients": 6,
        "new_clients": 3,
    }
    federation = load_federation(DataSettings(**given), 0)
    assert (federation.num_classes, federation.input_shape, federation.dataset) == (
        2 + 10 + 62,
        (3, 32, 32),
        given["dataset"],
    )
    assert [
        (one["num_clients"], one["new_clients"], one["owners"])
        for one in federation.partition["domains"]
    ] == [(2, 1, True), (2, 1, False), (2, 1, True)]
    assert "3 domains, all images brought to 32x32" in federation.note
    assert "37 samples of femnist's 805263" in federation.note
    spans = [(0, 2), (2, 12), (12, 74)]
    for place, data in enumerate((*federation.clients, *federation.new_clients)):
        low, high = spans[place // 2 if place < 6 else place - 6]
        labels = np.concatenate([data.y_train, data.y_test])
        assert labels.min() >= low
        assert labels.max() < high
    again = load_client(DataSettings(**given), 0, 7)
    assert np.array_equal(again.x_train, federation.new_clients[1].x_train)
    run = parse(
        "metavd",
        {
            **given,
            "model": "cnn3",
            "rounds": 1,
            "local_steps": 1,
            "adapt_steps": 1,
            "new_client_epochs": 1,
            "device": "cpu",
            "evaluate_every": 0,
            "calibration": "off",
        },
    )
    outcome = execute(prepare(run))
    assert set(outcome.new_clients["personal"]) == {6, 7, 8}


def test_clients_are_shared_out_evenly():
    assert shares(7, 3) == [3, 2, 2]
    assert shares(2, 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"dataset": "cifar10+cifra"},
            "dataset must be names joined by .*, got 'cifra' in 'cifar10.cifra'",
        ),
        ({"dataset": "mnist+mnist"}, "dataset must name each data set once"),
        (
            {"dataset": "mnist+cifar10", "partition": "pathological"},
            "partition must be dirichlet, natural or iid for several data sets",
        ),
        (
            {"dataset": "mnist+cifar10", "num_clients": 1},
            "num_clients must be at least 2, one for each data set, got 1",
        ),
    ],
)
def test_domains_that_cannot_be(given, words):
    with pytest.raises(ConfigError, match=words):
        DataSettings(**given)


def test_a_domain_with_too_few_owners_or_no_images(tmp_path):
    leaf(tmp_path / "femnist", "all_data")
    square(tmp_path, "mnist", 4, (28, 28))
    with pytest.raises(
        ConfigError,
        match="'femnist' has 3 owners of at least min_size 10 samples, fewer than the 4 clients",
    ):
        load_federation(
            DataSettings(
                dataset="femnist+mnist", data_dir=str(tmp_path), partition="natural", num_clients=8
            ),
            0,
        )
    np.savez(tmp_path / "heart.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    with pytest.raises(
        ConfigError,
        match="'heart' cannot be a domain: its samples must be grey or RGB images of type uint8",
    ):
        load_source(DataSettings(dataset="heart+mnist", data_dir=str(tmp_path)))
