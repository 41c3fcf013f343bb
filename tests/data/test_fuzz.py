"""Generated tables and arrays of images: each is read as it was made, or refused in one line.

What is generated is the truth (values, labels, sites, marks, pixels). It is written to a file in a
random form (kind of file, types, separators, order, layout), read by the front door and compared.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayflower.data import DataSettings, load_federation, read, save
from bayflower.data.tables import PARQUET, read_table
from bayflower.errors import ConfigError
from bayflower.personal import inputs

NUMBER = 100  # cases of each kind by default; 300 of each with -m slow
WORDS = ("red", "Blue", "grün", "a b", "x,y", "O'Neil", "Nord;Süd", "yes", "no", "01", "1a", 'q"t')


def attempt(given: Any, **options: Any) -> tuple[Any, str]:
    """Return (what was read, ""), or (None, the one line that refuses it)."""
    try:
        return read(given, **options), ""
    except ConfigError as error:
        why = str(error)
    assert "\n" not in why
    assert len(why) > 30
    return None, why


def as_new(given: Any, source: Any) -> np.ndarray:
    """Return what a personal model whose card has this reading sees of new samples."""
    card = {
        "network": {
            "input_shape": list(source.samples(np.arange(1)).shape[1:]),
            "input_dtype": "float32",
            "pixels": source.pixels,
        },
        "reading": json.loads(json.dumps(source.reading())),
        "prepared": source.encoder is not None,
        "inputs": "",
    }
    return inputs.tensor(given, card).numpy()


# -- tables --------------------------------------------------------------------------------------
class Made:
    """A table as it was generated."""

    def __init__(self, draw: np.random.Generator) -> None:
        self.rows = rows = int(draw.integers(12, 70))
        self.columns: dict[str, list[Any]] = {}
        self.kinds: dict[str, str] = {}
        for place in range(int(draw.integers(1, 6))):
            kind = str(draw.choice(["float", "int", "text", "bool", "date", "id", "code"]))
            name = f"{kind} {place}" if kind != "id" else f"patient_id_{place}"
            self.columns[name], self.kinds[name] = self.column(kind, draw), kind
        self.gaps = draw.random() < 0.6
        if self.gaps:
            for name, values in self.columns.items():
                share = draw.choice([0.0, 0.05, 0.4, 1.0], p=[0.4, 0.3, 0.25, 0.05])
                gone = draw.random(rows) < share
                self.columns[name] = [
                    None if lost else v for lost, v in zip(gone, values, strict=True)
                ]
        self.labels = self.some_labels(draw)
        self.sites = None
        if draw.random() < 0.7:
            names = draw.choice([["A", "B", "C"], ["7", "8", "30"], ["Bern", "Köln", "Ærø"]])
            self.sites = [str(s) for s in draw.choice(names, rows, p=[0.05, 0.35, 0.6])]
        self.marks = [bool(b) for b in draw.random(rows) < 0.3] if draw.random() < 0.4 else None

    def column(self, kind: str, draw: np.random.Generator) -> list[Any]:
        rows = self.rows
        if kind == "float":
            return [
                float(v) for v in np.round(draw.normal(0, 10.0 ** draw.integers(-2, 5), rows), 4)
            ]
        if kind == "int":
            return [int(v) for v in draw.integers(-5, 100, rows)]
        if kind == "bool":
            return [bool(v) for v in draw.random(rows) < 0.5]
        if kind == "date":
            days = draw.integers(1, 28, rows)
            form = str(draw.choice(["2021-03-{:02d}", "{:02d}.03.2021", "2021-03-{:02d} 08:15"]))
            return [form.format(day) for day in days]
        if kind == "id":
            return [f"P-{v}" for v in draw.permutation(rows)]
        if kind == "code":
            return [f"0{v}" for v in draw.integers(10, 15, rows)]
        words = draw.choice(WORDS[:9], size=int(draw.integers(2, 6)), replace=False)
        return [str(v) for v in draw.choice(words, rows)]

    def some_labels(self, draw: np.random.Generator) -> list[Any]:
        values = [
            [0, 1],
            [1, 2],
            [-1, 1],
            [3, 7, 500],
            ["no", "yes"],
            [True, False],
            ["b", "a", "c"],
        ]
        chosen = values[int(draw.integers(len(values)))]
        found = [chosen[k] for k in draw.integers(0, len(chosen), self.rows)]
        return [*chosen, *found[len(chosen) :]]  # every class occurs

    def table(self) -> dict[str, list[Any]]:
        found = {**self.columns, "outcome": self.labels}
        if self.sites is not None:
            found["hospital"] = self.sites
        if self.marks is not None:
            found["part"] = ["test" if mark else "train" for mark in self.marks]
        return found


def written(made: Made, folder: Path, draw: np.random.Generator, kind: str) -> Any:
    """Write a table to a file of one kind, or make it a data frame; return what `read` takes."""
    table = made.table()
    names = list(table)
    draw.shuffle(names)
    if kind in ("frame", "parquet"):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({name: table[name] for name in names})
        if kind == "frame":
            return frame
        pytest.importorskip("pyarrow")
        frame.to_parquet(folder / f"t{PARQUET[0]}", index=False)
        return folder / f"t{PARQUET[0]}"
    mark = {"csv": ",", "semicolon": ";", "tab": "\t"}[kind]
    empty = ["", "NA", "?", "null"][int(draw.integers(4))]

    def text(value: Any) -> str:
        if value is None:
            return empty
        if isinstance(value, float) and mark == ";":
            return repr(value).replace(".", ",") if "e" not in repr(value) else repr(value)
        return str(value)

    path = folder / "t.csv"
    with path.open("w", newline="", encoding="utf-8-sig" if draw.random() < 0.3 else "utf-8") as f:
        writer = csv.writer(f, delimiter=mark)
        writer.writerow(names)
        writer.writerows([text(table[n][row]) for n in names] for row in range(made.rows))
    return path


def check_table(made: Made, source: Any) -> None:
    """Compare what was read with what was made, cell by cell."""
    whole = not any(isinstance(one, (str, bool)) for one in made.labels)
    order = sorted(set(made.labels)) if whole else sorted({str(one) for one in made.labels})
    assert source.class_names() == tuple(str(one) for one in order)
    wanted = [order.index(one if whole else str(one)) for one in made.labels]
    assert source.y.tolist() == wanted
    if made.sites is None:
        assert source.client is None
    else:
        found = [source.site_names()[k] for k in source.client]
        assert found == made.sites
    if made.marks is None:
        assert source.test is None
    else:
        assert source.test.tolist() == made.marks
    train = [row for row in range(made.rows) if made.marks is None or not made.marks[row]]
    used = {one.name for one in source.encoder.inputs}
    columns, x = list(source.names.columns), source.x
    assert x.shape == (made.rows, len(columns))
    for name, values in made.columns.items():
        kind = made.kinds[name]
        known = [values[row] for row in train if values[row] is not None]
        if not known or kind in ("date", "id"):
            # an id may repeat too little to tell in a very small table: then it is a category
            if name in used:
                assert kind == "id"
                assert len(set(known)) <= 10
            else:
                assert name in source.encoder.ignored
                continue
        gap = any(values[row] is None for row in train)
        assert (f"{name} missing" in columns) == gap
        if gap:
            marks = x[:, columns.index(f"{name} missing")]
            assert marks.tolist() == [float(v is None) for v in values]
        if kind in ("float", "int"):
            got = x[:, columns.index(name)]
            for value, cell in zip(values, got, strict=True):
                assert math.isnan(cell) if value is None else cell == np.float32(value)
            continue
        categories = sorted({str(v) for v in known})
        place = {text: columns.index(f"{name}={text}") for text in [*categories, "other"]}
        for row, value in enumerate(values):
            hot = {text for text, column in place.items() if x[row, column] == 1.0}
            if value is None:
                assert hot == (set() if gap else {"other"})
            else:
                assert hot == {str(value) if str(value) in categories else "other"}


def tables(folder: Path, seed: int, kinds: tuple[str, ...], number: int) -> Counter:
    """Read generated tables; return how many were read and refused."""
    said: Counter = Counter()
    for case in range(number):
        draw = np.random.default_rng([seed, case])
        made = Made(draw)
        kind = str(draw.choice(kinds))
        given = written(made, folder, draw, kind)
        options = {"target": "outcome", "test": "part" if made.marks is not None else ""}
        source, why = attempt(given, **options)
        if source is None:
            said["refused"] += 1
            # the only reasons: no row to train on, or no column with anything to learn from
            train = [row for row in range(made.rows) if made.marks is None or not made.marks[row]]
            assert all(
                made.kinds[name] in ("date", "id") or all(values[row] is None for row in train)
                for name, values in made.columns.items()
            ), (case, kind, why)
            continue
        check_table(made, source)
        said["read"] += 1
        new = given if kind == "frame" else read_table(given)
        assert np.array_equal(as_new(new, source), source.x, equal_nan=True)
        if case % 10 == 0:  # and the file of our own says the same
            save(source, folder / "ours.npz")
            again = read(folder / "ours.npz", test="test" if made.marks is not None else "")
            assert np.array_equal(again.x, source.x, equal_nan=True)
            assert again.names == source.names
            assert again.encoder == source.encoder
            assert np.array_equal(again.y, source.y)
    return said


@pytest.mark.parametrize("number", [NUMBER, pytest.param(300, marks=pytest.mark.slow)])
def test_tables_are_read_as_they_were_made(tmp_path, number):
    said = tables(tmp_path, 1, ("csv", "semicolon", "tab"), number)
    assert said["read"] > 0.85 * number


@pytest.mark.parametrize("number", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_typed_tables_are_read_as_they_were_made(tmp_path, number):
    pytest.importorskip("pandas")
    said = tables(tmp_path, 2, ("frame", "parquet"), number)
    assert said["read"] > 0.85 * number


# -- images --------------------------------------------------------------------------------------
RANGES = ("uint8", "int64", "int16", "float01", "float255", "float-1", "normal", "bool", "uint16")


def pictures(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None, str, str]:
    """Return (array, the pixels a network should see (N, C, H, W) or None if it must be refused,
    layout, kind of numbers).
    """
    layout = str(draw.choice(["NHW", "NHWC", "NCHW"]))
    channels = 1 if layout == "NHW" else int(draw.choice([1, 3, 4]))
    # mostly images; now and then sides that could be channels
    sides = [int(draw.choice([3, 4, 5, 8, 16, 28, 32], p=[0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.1]))]
    sides.append(sides[0] if draw.random() < 0.6 else int(draw.choice([8, 12, 20])))
    number = int(draw.integers(6, 14))
    kind = str(draw.choice(RANGES))
    shape = (number, channels, *sides)
    pixels = draw.integers(0, 256, shape)
    if draw.random() < 0.15:
        pixels = pixels // 4  # dark
    seen = (pixels / 255 - 0.5) / 0.5
    x: np.ndarray = pixels
    if kind in ("uint8", "int64", "int16"):
        x = pixels.astype(kind)
    elif kind == "float255":
        x = pixels.astype(str(draw.choice(["float32", "float64"])))
    elif kind == "float01":
        x = seen = pixels / 255
    elif kind == "float-1":
        x = seen
    elif kind == "normal":
        x = seen = draw.normal(size=shape)
    elif kind == "bool":
        x = pixels > 128
        seen = np.where(x, 1.0, -1.0)
    else:
        x = (pixels * 16).astype(np.uint16)
        seen = None
    last = {"NHW": x[:, 0], "NHWC": x.transpose(0, 2, 3, 1), "NCHW": x}[layout]
    return np.ascontiguousarray(last), seen, layout, kind


def images(folder: Path, number: int) -> Counter:
    """Read generated arrays of images; return how many were read and refused."""
    said: Counter = Counter()
    for case in range(number):
        draw = np.random.default_rng([3, case])
        x, seen, layout, kind = pictures(draw)
        labels = [[1, 2], [0, 1, 2], ["cat", "dog"], [-4, 9]][int(draw.integers(4))]
        y = np.array([labels[k % len(labels)] for k in range(len(x))])
        np.savez(folder / "images.npz", x=x, y=y)
        told: dict[str, Any] = {}
        if draw.random() < 0.2:
            told = {"layout": layout, "white": 4095 if kind == "uint16" else None}
        source, why = attempt(folder / "images.npz", **told)
        if source is None:
            said["refused"] += 1
            assert any(remedy in why for remedy in ("layout=", "white="))
            if kind != "uint16":  # told how to read it, it is read
                white = 0 if kind in ("float01", "float-1", "normal") else 255
                source = read(folder / "images.npz", layout=layout, white=white)
                got = source.samples(np.arange(len(x)))
                assert np.allclose(got, seen, atol=1e-5), (case, layout, kind)
            continue
        got = source.samples(np.arange(len(x)))
        wanted = (x.astype(float) / 4095 - 0.5) / 0.5 if seen is None else seen
        if seen is None:
            assert told, "whole numbers up to 4080 are no pixels unless we are told so"
            wanted = {"NHW": wanted[:, None] if wanted.ndim == 3 else wanted}.get(
                layout, wanted.transpose(0, 3, 1, 2) if layout == "NHWC" else wanted
            )
        assert got.shape == wanted.shape, (case, x.shape, layout, kind)
        assert np.allclose(got, wanted, atol=1e-5), (case, x.shape, layout, kind)
        assert source.num_classes == len(labels)
        assert [source.class_names()[k] for k in source.y] == [str(one) for one in y]
        said["read"] += 1
        assert np.array_equal(as_new(x, source), got), (case, x.shape, layout, kind)
    return said


@pytest.mark.parametrize("number", [NUMBER, pytest.param(300, marks=pytest.mark.slow)])
def test_images_are_read_as_they_were_made(tmp_path, number):
    said = images(tmp_path, number)
    assert said["read"] > 0.6 * number
    assert said["refused"] > 0.05 * number


# -- clients -------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_every_row_of_a_site_is_with_its_client(tmp_path, number):
    """Tiny sites are refused by name; otherwise each client has its site's rows and no others."""
    said: Counter = Counter()
    for case in range(number):
        draw = np.random.default_rng([4, case])
        rows = int(draw.integers(20, 90))
        site = draw.choice(["A", "B", "C"], rows, p=[0.15, 0.35, 0.5])
        x = draw.permutation(1000)[:rows].astype(float)
        path = tmp_path / f"case{case}.csv"
        lines = [f"{a},{s},{k % 2}" for k, (a, s) in enumerate(zip(x, site, strict=True))]
        path.write_text("value,site,y\n" + "\n".join(lines) + "\n")
        counts = Counter(site.tolist())
        settings = DataSettings(dataset=str(path), calibration="off", test="0.25")
        small = sorted(name for name, count in counts.items() if count < settings.min_size)
        if small:
            with pytest.raises(ConfigError, match=f"site '{small[0]}' has {counts[small[0]]} "):
                load_federation(settings, 0)
            said["refused"] += 1
            continue
        federation = load_federation(settings, 0)
        assert federation.names.sites == tuple(sorted(counts))
        for name, data in zip(federation.names.sites, federation.clients, strict=True):
            mine = x[site == name]
            got = np.concatenate([data.x_train, data.x_test])[:, 0].astype(float)
            # standardised by the client's own numbers: order and spacing stay
            assert len(got) == len(mine)
            mine, got = np.sort(mine), np.sort(got)
            shares = ((part - part[0]) / np.ptp(part) for part in (mine, got))
            assert np.allclose(*shares, atol=1e-5)
        said["read"] += 1
    assert said["read"]
    assert said["refused"]
