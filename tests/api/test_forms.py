"""Clients' data in the forms people have them: every form gives the same samples, and what cannot
be used is refused in one line before anything starts.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from test_fit import SITES, Net, clients
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import bayflower
from bayflower.data.npz import Options
from bayflower.data.objects import read_objects
from bayflower.data.parts import Reading
from bayflower.errors import ConfigError


class Hugging:
    """What is used of a Hugging Face Dataset."""

    def __init__(self, columns: dict, names: tuple[str, ...] = ()) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {"label": SimpleNamespace(names=list(names) or None)}

    def with_format(self, kind: str) -> Hugging:
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict:
        return {name: values[rows] for name, values in self.columns.items()}

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns)


class Partitioner:
    """What is used of a partitioner of Flower Datasets."""

    num_partitions = 3

    def load_partition(self, number: int) -> Hugging:
        x, y = clients()[SITES[number]]
        return Hugging({"img": x, "label": y}, ("a", "b", "c"))


def tensors(pair):
    return TensorDataset(*map(torch.as_tensor, pair))


def frame(pair):
    return pd.DataFrame({**{f"v{k}": pair[0][:, k] for k in range(5)}, "outcome": pair[1]})


MAPPED = {
    "arrays": lambda pair: pair,
    "tensors": lambda pair: tuple(map(torch.as_tensor, pair)),
    "keys": lambda pair: {"x": pair[0], "y": pair[1]},
    "data set": tensors,
    "shuffled loader": lambda pair: DataLoader(tensors(pair), batch_size=7, shuffle=True),
    "loader of a part": lambda pair: DataLoader(
        tensors([np.concatenate([part, part]) for part in pair]),
        batch_size=7,
        sampler=SubsetRandomSampler(range(60)),
    ),
    "table and column": lambda pair: (pd.DataFrame(pair[0]), pd.Series(pair[1])),
    "floats as labels": lambda pair: (pair[0], pair[1].astype(float)[:, None]),
}


@pytest.mark.parametrize("form", MAPPED)
def test_every_form_of_a_client_gives_the_same_samples(form):
    wanted = read_objects(clients(), Reading())
    found = read_objects({name: MAPPED[form](pair) for name, pair in clients().items()}, Reading())
    assert np.array_equal(found.x, wanted.x)
    assert np.array_equal(found.y, wanted.y)
    assert np.array_equal(found.client, wanted.client)
    assert found.site_names() == SITES
    assert found.plain
    assert found.x.dtype == np.float32


def test_partitioners_and_hugging_face_data_sets():
    wanted = read_objects(list(clients().values()), Reading())
    parts = read_objects(Partitioner(), Reading())
    assert np.array_equal(parts.x, wanted.x)
    assert parts.class_names() == ("a", "b", "c")
    pairs = clients()
    owner = np.repeat(np.array(SITES), 60)
    whole = {
        "img": np.concatenate([pairs[name][0] for name in SITES]),
        "label": np.concatenate([pairs[name][1] for name in SITES]),
    }
    sites = read_objects(Hugging({**whole, "hospital": owner}), Reading())
    assert sites.site_names() == SITES
    assert np.array_equal(sites.x, wanted.x)
    assert read_objects(Hugging(whole), Reading()).client is None  # for a partition
    table = {f"v{k}": whole["img"][:, k] for k in range(5)} | {"label": whole["label"]}
    read = read_objects(Hugging({**table, "hospital": owner}), Reading())
    assert read.encoder is not None
    assert read.names.columns == tuple(f"v{k}" for k in range(5))


def test_data_frames_one_or_several_are_read_as_a_table_is():
    several = {name: frame(pair) for name, pair in clients().items()}
    one = pd.concat([part.assign(hospital=name) for name, part in several.items()])
    found, wanted = read_objects(several, Reading()), read_objects(one, Reading())
    assert found.site_names() == wanted.site_names() == SITES
    assert np.array_equal(found.x, wanted.x)
    assert np.array_equal(found.client, wanted.client)
    tested = {name: (part[:40], part[40:]) for name, part in several.items()}
    marked = read_objects(tested, Reading())
    assert marked.test.sum() == 60
    assert np.array_equal(marked.x, found.x)
    named = read_objects(
        {name: part.rename(columns={"outcome": "ill"}) for name, part in several.items()},
        Reading(Options(target="ill")),
    )
    assert np.array_equal(named.y, found.y)


def test_whole_numbers_stay_whole_for_ones_own_network_and_pixels_are_read_as_images():
    tokens = {name: (pair[0].astype(int), pair[1]) for name, pair in clients().items()}
    assert read_objects(tokens, Reading(whole=True)).x.dtype == np.int64
    assert read_objects(tokens, Reading()).x.dtype == np.float32
    draw = np.random.default_rng(0)
    pictures = [(draw.integers(0, 256, (12, 9, 9, 3), np.uint8), np.arange(12) % 2)] * 2
    read = read_objects(pictures, Reading())
    assert read.pixels
    assert read.samples(np.arange(2)).shape == (2, 3, 9, 9)
    words = [(x, np.where(y == 0, "no", "yes")) for x, y in clients().values()]
    assert read_objects(words, Reading()).class_names() == ("no", "yes")


class Noisy(Dataset):
    """A data set that augments at random."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int):
        return torch.randn(5), place % 2


class Words(torch.nn.Sequential):
    """A network of texts of five words."""

    def __init__(self, known):
        super().__init__(torch.nn.Embedding(known, 3), torch.nn.Flatten(), torch.nn.Linear(15, 3))


def tokens():
    """Return texts whose last word, the largest number, only the last client has."""
    texts = {name: (np.arange(300).reshape(60, 5) % 9, y) for name, (_, y) in clients().items()}
    texts[SITES[-1]][0][-1, -1] = 9
    return texts


def spoilt(**changes):
    return {**clients(), **changes}


X, Y = clients()["Bern"]
TWO = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2))
SPLIT = {name: ((x[:40], y[:40]), (x[40:], y[40:])) for name, (x, y) in clients().items()}


def broken():
    """Fail as a network does whose weights are missing."""
    raise OSError("no\nweights")


class Infinite(Net):
    """A network that divides by zero."""

    def forward(self, x):
        return super().forward(x) / 0.0


BAD = {
    "other columns": (
        {"a": frame((X, Y)), "b": frame((X, Y)).rename(columns={"v1": "w"})},
        {},
        "lacks column 'v1'",
    ),
    "no labels": (
        {"a": frame((X, Y)).drop(columns="outcome")},
        {},
        "column of the labels with tar",
    ),
    "missing labels": (spoilt(Bern=(X, np.where(Y == 1, np.nan, Y))), {}, "missing or below 0"),
    "other shapes": (spoilt(Bern=(X[:, :4], Y)), {}, "samples of shape (4,)"),
    "too few labels": (spoilt(Bern=(X, Y[:-1])), {}, "one label for each sample"),
    "no samples": (spoilt(Bern=(X[:0], Y[:0])), {}, "'Bern' has no samples"),
    "no test part": ({**SPLIT, "Bern": (X, Y)}, {}, "has no test part"),
    "one-hot": (spoilt(Bern=(X, np.eye(3)[Y])), {}, "argmax"),
    "augmented": (spoilt(Bern=Noisy()), {}, "augments at random"),
    "not a number": (spoilt(Bern=(np.where(X > 2, np.nan, X), Y)), {}, "standardise=True"),
    "outputs": (clients(), {"model": TWO}, "has 2 outputs, but the data have 3 classes"),
    "a batch": (clients(), {"model": partial(torch.nn.Linear, 4, 3)}, "cannot take a batch"),
    "few tokens": (tokens(), {"model": partial(Words, 9)}, "from 0 to 9; they must be"),
    "tokens as numbers": (spoilt(), {"model": partial(Words, 9)}, "reach the network as they are"),
    "open argument": (clients(), {"model": torch.nn.Linear}, "needs in_features, out_features"),
    "an option": (clients(), {"local_epoch": 2}, "did you mean 'local_epochs'?"),
    "an argument": (clients(), {"callback": print}, "did you mean 'callbacks'?"),
    "a word of others": (clients(), {"learning_rate": 0.1}, "did you mean 'lr'?"),
    "another": (clients(), {"hospital": "place"}, "did you mean 'site'?"),
    "a network": (clients(), {"model": "mpl"}, "did you mean 'mlp'?"),
    "an engine": (clients(), {"engine": "fuse"}, "engine must be one of"),
    "not importable": (clients(), {"model": lambda: TWO, "engine": "ray"}, "other processes"),
    "a module": (clients(), {"model": TWO, "engine": "deployment"}, "exists already"),
    "a thing": (7, {}, "cannot be read; give a list or dict"),
    "nobody": ([], {}, "no clients"),
    "patience": (clients(), {"patience": 0}, "patience must be a number of rounds"),
    "a callback": (clients(), {"callbacks": [3]}, "functions of (round, numbers)"),
    "a text in a name": (clients(), {"model": "os:system(command='ls')"}, "must be named numbers"),
    "broken": (clients(), {"model": broken}, "broken() cannot be made (OSError: no weights)"),
    "no numbers": (clients(), {"model": Infinite}, "gives values that are not finite"),
    "no sites": (frame((X, Y)), {}, "name the column of the sites with site=, or divide"),
    "a missing module": (clients(), {"model": "nowhere:Net"}, "cannot be imported"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line_before_anything_starts(case, tmp_path):
    data, more, text = BAD[case]
    method = {"method": "fedmap", "model": Net, "rounds": 2, "device": "cpu", **more}
    with pytest.raises(ConfigError) as error:
        bayflower.fit(data=data, out=tmp_path / "deep" / "run", **method)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)  # the words of Python
    assert not (tmp_path / "deep").exists()


def test_what_is_left_out_is_said_and_a_split_is_not_used_unasked(tmp_path):
    """Rows without a label and columns that are no inputs: one warning with the caller's line."""
    one = pd.concat([frame(pair).assign(hospital=name) for name, pair in clients().items()])
    one = one.assign(outcome=one.outcome.where(np.arange(180) > 1), split="train", v9="as")
    how = {"model": "linear", "rounds": 1, "device": "cpu", "calibration": "off", "drop": "v9"}
    with pytest.warns(UserWarning, match="left out") as seen:
        found = bayflower.fit("local", one, **how)
    (line,) = (str(warning.message) for warning in seen)
    assert line == (
        "data: 2 rows without a label in 'outcome' left out; column 'split' left out: it marks "
        "test rows (use it with test=split)"
    )
    assert seen[0].filename == __file__
    assert sum(found.metrics["num_examples"]) == 36  # a fifth of each client's samples
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; choose another"):
        bayflower.fit("local", clients(), out=tmp_path / "file" / "run", **how)
    with pytest.raises(ConfigError, match="has no finished run; give the `out` of one"):
        bayflower.Result.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"also has v8; .* rename or drop columns$"):
        found.personal("Bern").predict(one.assign(v8=1))
    with pytest.raises(ConfigError, match=r"methods must be a list of methods, got 'local'"):
        bayflower.compare("local", clients(), **how)


def test_a_finished_run_is_never_replaced_unasked(tmp_path):
    how = {"rounds": 1, "device": "cpu", "calibration": "off", "out": tmp_path / "run"}
    first = bayflower.fit("fedmap", clients(), model=Net, **how)
    written = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"holds a finished run .* resume=True"):
        bayflower.fit("fedmap", clients(), model=Net, **how)
    again = bayflower.fit("fedmap", clients(), model=Net, resume=True, **how)  # it is there
    assert again.result == first.result
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == written
    longer = bayflower.fit("fedmap", clients(), model=Net, resume=True, **{**how, "rounds": 2})
    assert len(longer.result["rounds"]) == 2
    with pytest.raises(ConfigError, match="dataset is"):  # other data
        bayflower.fit("fedmap", clients(59), model=Net, resume=True, **{**how, "rounds": 3})
    assert len(list((tmp_path / "run").glob("data-*"))) == 1
    fresh = bayflower.fit("fedmap", clients(), model=Net, overwrite=True, **how)
    assert len(fresh.result["rounds"]) == 1
    moved = fresh.save(tmp_path / "copy")
    assert bayflower.Result.load(moved, model=Net).personal("Cork").predict(X[:2]).shape == (2,)
