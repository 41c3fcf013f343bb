"""Folders of images, and new samples read as a data set was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from wards import SITES, patients, write

from bayflower.data import DataSettings, read, read_alike, resolve
from bayflower.data.look import in_words
from bayflower.errors import ConfigError


# -- folders of images ---------------------------------------------------------------------------
def pictures(root: Path, names: list[str], size: tuple[int, int] = (20, 20), mode: str = "L"):
    """Write images whose grey is their number; return the greys by name."""
    from PIL import Image

    greys = {}
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        greys[name] = (k * 7) % 256
        colour = greys[name] if mode == "L" else (greys[name], 0, 255)
        Image.new(mode, size, colour).save(root / name)
    return greys


def test_a_folder_of_images_by_site_and_class(tmp_path):
    names = [f"{s}/{c}/{k}.png" for s in SITES for c in ("cat", "dog") for k in range(3)]
    greys = pictures(tmp_path / "pets", names)
    (tmp_path / "pets" / "notes.txt").write_text("no image")
    source = read(tmp_path / "pets")
    assert source.names[:2] == (SITES, ("cat", "dog"))
    assert source.x.shape == (18, 20, 20)
    for k, name in enumerate(sorted(names)):
        site, label, _ = name.split("/")
        assert (SITES[source.client[k]], source.class_names()[source.y[k]]) == (site, label)
        got = source.samples(np.array([k]))
        assert got.shape == (1, 1, 20, 20)
        assert np.allclose(got, (greys[name] / 255 - 0.5) / 0.5, atol=1e-6)
    assert resolve(DataSettings(dataset=str(tmp_path / "pets"))).num_clients == 3
    assert "images 20×20 grey (NHW), 0…255 scaled to −1…1" in in_words(source)


def test_folders_with_parts_a_manifest_and_other_sizes(tmp_path):
    names = [
        f"{p}/{c}/{k}.png" for p in ("train", "test") for c in ("1", "2", "10") for k in (0, 1)
    ]
    pictures(tmp_path / "a", names, mode="RGB")
    source = read(tmp_path / "a")
    assert source.class_names() == ("1", "2", "10")  # numbers by value
    assert source.test.sum() == 6
    assert source.x.shape == (12, 20, 20, 3)
    flat = [f"{c}/{k}.png" for c in ("x", "y") for k in range(6)]
    pictures(tmp_path / "b", flat[:6])
    pictures(tmp_path / "b", flat[6:], size=(300, 30))
    rows = [{"file": name, "site": SITES[k % 3], "late": k % 2} for k, name in enumerate(flat)]
    write(tmp_path / "where.csv", rows)
    source = read(tmp_path / "b", site=str(tmp_path / "where.csv"), test="late")
    assert [SITES[k] for k in source.client] == [row["site"] for row in rows]
    assert source.test.tolist() == [bool(row["late"]) for row in rows]
    assert source.lines == ("images of 2 different sizes brought to 64×64 (bilinear)",)
    assert read(tmp_path / "b", image_side=16).x.shape == (12, 16, 16)
    write(tmp_path / "where.csv", rows[1:])
    with pytest.raises(ConfigError, match=r"does not name x/0.png, one of 1 images"):
        read(tmp_path / "b", site=str(tmp_path / "where.csv"))
    (tmp_path / "b" / "x" / "bad.png").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"bad.png cannot be read as an image"):
        read(tmp_path / "b")
    pictures(tmp_path / "c", ["one.png", "x/two.png"])
    with pytest.raises(ConfigError, match="images at different depths"):
        read(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no image"):
        read(tmp_path / "empty")


# -- arrays --------------------------------------------------------------------------------------
def test_white_is_what_it_is_said_to_be(tmp_path):
    """Whole numbers beyond 255 do not wrap, and a stated white holds for every type."""
    x = np.arange(-40, 472).reshape(2, 16, 16)
    y = np.array([5, 9])
    for kind in (np.int64, np.float32):
        np.savez(tmp_path / "x.npz", x=x.astype(kind), y=y)
        got = read(tmp_path / "x.npz", white=255).samples(np.arange(2))
        assert np.allclose(got, (x[:, None] / 255 - 0.5) / 0.5, atol=1e-5)
    small = np.arange(512).reshape(2, 16, 16) % 17
    np.savez(tmp_path / "x.npz", x=small.astype(np.uint8), y=y)
    got = read(tmp_path / "x.npz", white=16).samples(np.arange(2))
    assert np.allclose(got, (small[:, None] / 16 - 0.5) / 0.5, atol=1e-6)
    plain = read(tmp_path / "x.npz", layout="flat").samples(np.arange(2))
    assert np.array_equal(plain, small.astype(np.float32))


# -- new samples ---------------------------------------------------------------------------------
def test_new_samples_are_read_as_the_data_were(tmp_path):
    like = read(write(tmp_path / "p.csv", patients()))
    new = [row for row in patients(30, seed=5) if row["outcome"] == "well"]  # one class only
    new[0]["stage"] = "IV"
    source = read_alike(write(tmp_path / "new.csv", new), like)
    assert source.names.columns == like.names.columns
    assert set(source.y.tolist()) == {1}
    assert source.num_classes == 2
    assert source.x[0, like.names.columns.index("stage=other")] == 1
    assert source.x[:, 0].tolist() == [np.float32(row["age"]) for row in new]
    new[0]["outcome"] = "dead"
    with pytest.raises(ConfigError, match="label 'dead'; the federation's models know 2 classes"):
        read_alike(write(tmp_path / "new.csv", new), like)
    del new[1]["age"]
    for row in new:
        row.pop("age", None)
        row["outcome"] = "well"
    with pytest.raises(ConfigError, match=r"lacks age; the model needs the 3 columns age, stage"):
        read_alike(write(tmp_path / "new.csv", new), like)
