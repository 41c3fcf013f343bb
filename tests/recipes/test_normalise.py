"""Normalised images: the numbers, in every part of a client's data, and in what it takes home."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import SHARED, assert_same_bits, small, small_prepared, some
from personalruns import trained

from bayflower.config import parse
from bayflower.data import (
    DataSettings,
    client_scaling,
    load_client,
    load_federation,
    load_source,
    normalise,
)
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.personal import load_personal
from bayflower.personal.runs import export, personalise

GIVEN = "0.2,0.4,0.6/0.1,0.25,0.5"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A file of pictures of type uint8 with channels of different brightness."""
    root, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    y = draw.integers(3, size=240)
    x = np.clip(draw.normal((40, 120, 200), 30, size=(240, 8, 8, 3)), 0, 255)
    x[:, :4] += 20 * (y == 1)[:, None, None, None]
    np.savez(root / "pictures.npz", x=np.clip(x, 0, 255).astype(np.uint8), y=y)
    return root / "pictures.npz"


def settings(path, **more) -> DataSettings:
    return DataSettings(dataset=str(path), num_clients=3, new_clients=1, **more)


def parts(data):
    return data.x_train, data.x_test, data.x_held


def test_given_numbers_are_on_the_scale_0_to_1(pictures):
    raw, found = (load_client(settings(pictures, normalise=rule), 0, 1) for rule in ("none", GIVEN))
    mean, std = (np.array(part)[:, None, None] for part in normalise.given(GIVEN))
    for before, after in zip(parts(raw), parts(found), strict=True):
        pixels = (before * 0.5 + 0.5).astype(np.float64)  # from 0 to 1
        np.testing.assert_allclose(after, (pixels - mean) / std, atol=2e-6)
        assert after.dtype == np.float32


def test_a_client_normalises_by_its_own_training_images(pictures):
    for client in range(4):
        raw, found = (
            load_client(settings(pictures, normalise=rule), 0, client)
            for rule in ("none", "client")
        )
        flat = found.x_train.transpose(1, 0, 2, 3).reshape(3, -1).astype(np.float64)
        np.testing.assert_allclose(flat.mean(1), 0, atol=1e-6)
        np.testing.assert_allclose(flat.std(1), 1, atol=1e-6)
        axes = (0, 2, 3)
        mean, std = (
            moment(raw.x_train.astype(np.float64), axis=axes)[:, None, None]
            for moment in (np.mean, np.std)
        )
        np.testing.assert_allclose(found.x_test, (raw.x_test - mean) / std, atol=1e-5)
        np.testing.assert_allclose(found.x_held, (raw.x_held - mean) / std, atol=1e-5)


def test_images_in_floating_point_keep_their_scale():
    digits = {"dataset": "digits", "num_clients": 3}
    raw, found = (
        load_client(DataSettings(normalise=rule, **digits), 0, 1) for rule in ("none", "0.3/0.2")
    )
    np.testing.assert_allclose(found.x_test, (raw.x_test - 0.3) / 0.2, atol=1e-6)


def test_a_channel_without_variance_keeps_its_scale():
    mean, std = normalise.channels("client", "", False, np.full((4, 2, 3, 3), 7.0))
    assert std.reshape(-1).tolist() == [1, 1]
    assert mean.reshape(-1).tolist() == [7, 7]


def test_without_the_setting_nothing_is_prepared(pictures):
    assert client_scaling(settings(pictures), 0, 0) is None
    assert client_scaling(settings(pictures, normalise="client"), 0, 0) is not None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"normalise": "published"}, "normalise=published knows mnist, .*got dataset=digits"),
        ({"normalise": "zca"}, "normalise must be none, client, published or MEAN"),
        ({"normalise": "0.5/0"}, "one positive STD a channel"),
        ({"normalise": "0.5,0.5/0.1"}, "one positive STD a channel"),
    ],
)
def test_rules_that_are_none_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        parse("fedavg", values)


def test_data_that_do_not_suit_are_refused_before_anything_starts(pictures):
    with pytest.raises(ConfigError, match="normalise is for images, and these data are a table"):
        small_prepared("fedavg", dataset="synthetic", keep=1, normalise="client")
    with pytest.raises(ConfigError, match="normalise has 1 channels, but the images have 3"):
        load_federation(settings(pictures, normalise="0.5/0.5"), 0)


def run_of(pictures, **more) -> dict:
    return {
        "dataset": str(pictures),
        "num_clients": 3,
        "new_clients": 1,
        "keep": 1.0,
        "rounds": 2,
        "crop_padding": 1,
        "flip": 0.5,
        **more,
    }


def test_engines_agree_on_normalised_images(pictures):
    given = run_of(pictures, normalise="client", dtype="float64", optimizer="sgd", lr=0.05)
    fused, loop = (
        execute(small_prepared("fedavg", engine=engine, **given)) for engine in ("fused", "loop")
    )
    for view in loop.views:
        for client, tally in loop.views[view].items():
            assert_same_bits(
                {"correct": tally.correct}, {"correct": fused.views[view][client].correct}
            )
    assert small("fedavg", **given).flat()["normalise"] == "client"


@pytest.mark.parametrize("formats", some([(), ("pt2",)], [()]))
@pytest.mark.parametrize("rule", some(["client", GIVEN], ["client"]))
def test_a_personal_model_takes_raw_pixels(pictures, tmp_path, rule, formats):
    """From raw pixels it says what the network says of normalised images, in every format."""
    folder = trained(tmp_path / "run", "fedavg", **run_of(pictures, normalise=rule))
    card = export(folder, 1, tmp_path / "model", ("safetensors", *formats))
    model = load_personal(tmp_path / "model")
    data = parse("fedavg", {**run_of(pictures, normalise=rule), "min_size": 8, "beta": 0.5}).data
    source = load_source(data)
    x = source.x[:40]
    known = client_scaling(data, 0, 1)
    assert known is not None
    assert card["network"]["normalise"] == {
        name: getattr(known, name).reshape(-1).tolist() for name in ("mean", "std")
    }
    assert card["inputs"].endswith("the model normalises them")
    ready = torch.as_tensor(known.apply(source.samples(np.arange(40))))
    with torch.no_grad():
        want = model.ready.log_probabilities(ready).exp().numpy()
    np.testing.assert_allclose(model.predict_proba(x), want, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(source.samples(np.arange(40))), want, atol=1e-6)
    for name in formats:
        program = torch.export.load(tmp_path / "model" / card["files"][name]).module()
        said = program(torch.as_tensor(source.samples(np.arange(40))))
        np.testing.assert_allclose(said["probabilities"].detach().numpy(), want, atol=1e-6)
    with pytest.raises(ConfigError, match="no rule for missing values"):
        model.predict(np.full((1, 3, 8, 8), np.nan))


@pytest.mark.slow
def test_a_personal_model_in_onnx_takes_images_that_are_not_normalised(pictures, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = trained(tmp_path / "run", "fedavg", **run_of(pictures, normalise=GIVEN))
    card = export(folder, 0, tmp_path / "model", ("safetensors", "onnx"))
    x = load_source(settings(pictures)).samples(np.arange(10))
    session = runtime.InferenceSession(tmp_path / "model" / card["files"]["onnx"])
    names = [one.name for one in session.get_outputs()]
    said = dict(zip(names, session.run(None, {session.get_inputs()[0].name: x}), strict=True))
    want = load_personal(tmp_path / "model").predict_proba(x)
    np.testing.assert_allclose(said["probabilities"], want, atol=1e-5)


def test_a_new_client_normalises_as_the_run_did(pictures, tmp_path):
    folder = trained(tmp_path / "run", "fedavg", **run_of(pictures, normalise="client"))
    own = np.load(pictures)
    np.savez(tmp_path / "own.npz", x=own["x"][:60] // 2, y=own["y"][:60])
    card = personalise(folder, tmp_path / "own.npz", tmp_path / "model", ("safetensors",))
    dark = np.array(card["network"]["normalise"]["mean"]) * 0.5 + 0.5  # from 0 to 1
    np.testing.assert_allclose(dark, own["x"][:60].mean((0, 1, 2)) / 255 / 2, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fmnist", "cifar10", "cifar100", "emnist47"])
def test_published_constants_are_those_of_the_training_images(name, tmp_path):
    if not (SHARED / "unpack").is_file():
        pytest.skip("the real data sets (../shared/data) are not beside this repository")
    call = [sys.executable, str(SHARED / "unpack"), str(tmp_path), name]
    subprocess.run(call, check=True, capture_output=True)
    source = load_source(DataSettings(dataset=name, data_dir=str(tmp_path)))
    x = source.x[~source.test] if source.test is not None else source.x
    x = x[::5].reshape(-1, x.shape[-1] if x.ndim == 4 else 1) / 255
    mean, std = normalise.KNOWN[name]
    np.testing.assert_allclose(x.mean(0), mean, atol=2e-3)
    np.testing.assert_allclose(x.std(0), std, atol=2e-3)
