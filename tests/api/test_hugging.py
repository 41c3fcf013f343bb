"""Hugging Face data sets and Flower's partitioners themselves, where the libraries are installed:
tables, images and splits give the samples, classes and clients that they have.
"""

from __future__ import annotations

import numpy as np
import pytest

import bayflower
from bayflower.data.npz import Options
from bayflower.data.objects import read_objects
from bayflower.data.parts import Reading

pytestmark = pytest.mark.filterwarnings("ignore")  # importing the libraries warns
datasets = pytest.importorskip("datasets", exc_type=ImportError)
partitioner = pytest.importorskip("flwr_datasets.partitioner", exc_type=ImportError)

NAMES = ["owl", "cat", "dog"]
ROWS = 120
draw = np.random.default_rng(0)
Y = draw.integers(0, 3, ROWS)
X = draw.normal(size=(ROWS, 4)).astype(np.float32) + np.eye(4, dtype=np.float32)[Y]
WARDS = [f"ward {number % 3}" for number in range(ROWS)]
PIXELS = draw.integers(0, 256, (ROWS, 8, 8), np.uint8)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        yield


def table():
    """Return columns of numbers with classes that have names."""
    features = {f"v{k}": datasets.Value("float32") for k in range(4)}
    features |= {"label": datasets.ClassLabel(names=NAMES), "ward": datasets.Value("string")}
    columns = {f"v{k}": X[:, k] for k in range(4)} | {"label": Y, "ward": WARDS}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def pictures():
    """Return images, as most data sets of the hub have them."""
    from PIL import Image

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    content = {"image": [Image.fromarray(one) for one in PIXELS], "label": Y}
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def vectors():
    """Return rows of one column, with sites."""
    content = {"x": X.tolist(), "label": Y, "hospital": WARDS}
    found = datasets.Dataset.from_dict(content)
    return found.cast_column("label", datasets.ClassLabel(names=NAMES))


def words(source) -> list[str]:
    """Return each sample's class by name."""
    return [source.class_names()[k] for k in source.y]


def test_a_table_has_its_classes_by_name_and_its_sites():
    source = read_objects(table(), Reading(Options(site="ward")))
    assert words(source) == [NAMES[k] for k in Y]
    assert np.array_equal(source.x, X)
    assert source.site_names() == ("ward 0", "ward 1", "ward 2")
    missing = table().to_dict() | {"label": [-1, *Y[1:]]}
    some = datasets.Dataset.from_dict(missing, features=table().features)
    assert len(read_objects(some, Reading(Options(site="ward"))).y) == ROWS - 1


def test_images_and_rows_are_read_as_they_are():
    source = read_objects(pictures().shuffle(seed=3), Reading())
    assert sorted(map(bytes, source.x)) == sorted(map(bytes, PIXELS))
    assert source.class_names() == tuple(NAMES)
    for form in (vectors(), vectors().with_format("torch")):
        read = read_objects(form, Reading())
        assert read.site_names() == ("ward 0", "ward 1", "ward 2")
        assert words(read) == [NAMES[k] for place in range(3) for k in Y[place::3]]
    with pytest.raises(bayflower.ConfigError, match="is read as a stream; load it into a Dataset"):
        read_objects(table().to_iterable_dataset(), Reading())


@pytest.mark.parametrize("kind", ["table", "vectors", "pictures"])
def test_splits_are_training_and_test_samples(kind):
    whole = {"table": table, "vectors": vectors, "pictures": pictures}[kind]()
    parts = {"train": whole.select(range(90)), "test": whole.select(range(90, ROWS))}
    source = read_objects(datasets.DatasetDict(parts), Reading(Options(site="")))
    assert source.test.sum() == 30
    assert len(source.owners()) == (3 if kind == "vectors" else 0)
    with pytest.raises(bayflower.ConfigError, match="has a part 'validation' besides train"):
        read_objects(datasets.DatasetDict({**parts, "validation": whole}), Reading())
    each = {f"h{k}": whole.shard(3, k).train_test_split(0.25, seed=0) for k in range(3)}
    source = read_objects(each, Reading())
    assert source.site_names() == ("h0", "h1", "h2")
    assert source.test.sum() == 30


def test_partitioners_give_a_client_for_each_partition():
    even = partitioner.IidPartitioner(4)
    with pytest.raises(bayflower.ConfigError, match=r"set partitioner\.dataset first"):
        read_objects(even, Reading())
    even.dataset = pictures()
    source = read_objects(even, Reading())
    assert [(source.client == k).sum() for k in range(4)] == [30] * 4
    for whole in (table(), vectors().rename_column("hospital", "ward")):
        natural = partitioner.NaturalIdPartitioner("ward")
        natural.dataset = whole
        source = read_objects(natural, Reading())
        assert source.site_names() == ("ward 0", "ward 1", "ward 2")
        assert words(source) == [NAMES[k] for place in range(3) for k in Y[place::3]]
        assert source.x.shape == (ROWS, 4)  # the name of a partition is no input


def test_a_federated_data_set_trains_to_personal_models(tmp_path):
    from flwr_datasets import FederatedDataset

    for name, rows in (("train", range(90)), ("test", range(90, ROWS))):
        table().select(rows).to_json(tmp_path / f"{name}.json")
    files = {name: str(tmp_path / f"{name}.json") for name in ("train", "test")}
    both = {name: partitioner.IidPartitioner(3) for name in files}
    given = FederatedDataset(
        dataset="json", data_files=files, partitioners=both, cache_dir=str(tmp_path)
    )
    how = {"model": "linear", "rounds": 2, "device": "cpu", "calibration": "off", "drop": "ward"}
    found = bayflower.fit("fedavg", given, **how)
    assert found.metrics["num_examples"].tolist()[:3] == [10, 10, 10]
    even = partitioner.IidPartitioner(3)
    even.dataset = table()
    found = bayflower.fit("fedavg", even, **how)
    model = found.personal(0)
    assert set(model.classes_) == set(NAMES)
    assert set(model.predict(table().to_pandas().drop(columns="label"))) <= set(NAMES)
