"""Personal models as a product: inputs of every kind, one clear line for wrong ones, scikit-learn,
and `bayflower predict`.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from personalruns import trained
from test_personal_kinds import run_cli

from bayflower import cli
from bayflower.data import load_source, read_npz
from bayflower.errors import BayflowerError, ConfigError
from bayflower.personal import export, load_personal, personalise
from bayflower.personal.inputs import in_order
from bayflower.personal.load import program
from bayflower.personal.runs import open_run, source_of


class Frame:
    """As much of a data frame as a caller can rely on: columns, selection, to_numpy."""

    def __init__(self, values, columns):
        self.values, self.columns = np.asarray(values), list(columns)

    def __getitem__(self, names):
        return Frame(self.values[:, [self.columns.index(name) for name in names]], names)

    def to_numpy(self):
        return self.values


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A run on a table with missing values, a client's model, and raw rows with labels."""
    root, draw = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    x = (draw.normal(size=(900, 4)) * [1, 10, 100, 1000] + 50).astype(np.float32)
    y = (x[:, 1] + 5 * draw.normal(size=900) > 50).astype(int)
    x[draw.random(x.shape) < 0.1] = np.nan
    np.savez(root / "table.npz", x=x, y=y, client=np.arange(900) % 5)
    data = {"dataset": str(root / "table.npz"), "partition": "natural", "keep": 1.0}
    out = trained(root / "run", "fedmap", num_clients=4, new_clients=1, rounds=4, **data)
    export(out, 0, root / "model", ("safetensors",))
    return root, x[:200], y[:200]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A model of images that were uint8 with three channels."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    y = draw.integers(2, size=120)
    x = draw.integers(256, size=(120, 8, 8, 3)).astype(np.uint8)
    np.savez(root / "pictures.npz", x=x, y=y)
    more = {"dataset": str(root / "pictures.npz"), "num_clients": 2, "new_clients": 0, "keep": 1.0}
    export(trained(root / "run", "fedavg", rounds=1, **more), 0, root / "model", ("safetensors",))
    return root, x


# -- inputs --------------------------------------------------------------------------------------
def test_every_kind_of_input_gives_the_same(tables):
    root, x, _ = tables
    model = load_personal(root / "model")
    want = model.predict_proba(x)
    assert want.shape == (200, 2)
    assert isinstance(want, np.ndarray)
    rows = [[None if np.isnan(value) else float(value) for value in row] for row in x]
    for given in (
        torch.as_tensor(x),
        torch.as_tensor(x).double().requires_grad_(),
        x.astype(np.float64),
        x.tolist(),
        rows,
        Frame(x, "abcd"),
        Frame(np.array(rows, dtype=object), "abcd"),
    ):
        assert np.array_equal(model.predict_proba(given), want)
    assert np.allclose(model.predict_proba(x[3]), want[3:4], atol=1e-12)
    assert np.allclose(model.predict_proba(list(x[3])), want[3:4], atol=1e-12)
    whole = np.round(np.nan_to_num(x, nan=1)).astype(int)
    assert np.array_equal(model.predict_proba(whole), model.predict_proba(whole.astype(float)))
    assert np.allclose(model.predict_proba(x[:1]), want[:1], atol=1e-12)


def test_images_with_and_without_channels_and_as_pixels(images, runs, tmp_path):
    """uint8 is scaled as in training where training had uint8, and refused where it had not."""
    root, x = images
    model = load_personal(root / "model")
    source = read_npz(root / "pictures.npz")
    want = model.predict_proba(source.samples(np.arange(120)))
    assert np.array_equal(model.predict_proba(x), want)
    assert np.allclose(model.predict_proba(x[5]), want[5:6], atol=1e-12)
    assert source_of(open_run(root / "run").run.data).pixels
    assert np.array_equal(model.predict_proba(x.transpose(0, 3, 1, 2)), want)
    assert np.array_equal(model.predict_proba(x.astype(np.int64)), want)
    with pytest.raises(ConfigError, match=r"shape \('N', 8, 8, 3\), got \(120, 8, 3, 8\)"):
        model.predict(x.transpose(0, 1, 3, 2))
    with pytest.raises(ConfigError, match=r"put the channels first: x.transpose\(0, 3, 1, 2\)"):
        model.predict(x / 255)
    with pytest.raises(ConfigError, match="which look like pixels 0…255; give them as whole num"):
        model.predict(x.astype(float))
    with pytest.raises(ConfigError, match="from 0 to 510, but pixels go from 0 to 255"):
        model.predict(x.astype(int) * 2)
    export(str(runs("fedmap")), 0, str(tmp_path), ("safetensors",))
    digits, model = load_source(open_run(runs("fedmap")).run.data).x[:5], load_personal(tmp_path)
    want = model.predict_proba(digits)
    assert np.array_equal(model.predict_proba(digits[:, 0]), want)
    assert np.allclose(model.predict_proba(digits[2]), want[2:3], atol=1e-12)
    assert np.allclose(model.predict_proba(digits[2, 0]), want[2:3], atol=1e-12)
    with pytest.raises(ConfigError, match="images of type uint8, but the model was trained on fl"):
        model.predict((digits * 255).astype(np.uint8))
    with pytest.raises(ConfigError, match="no rule for missing values"):
        model.predict(np.where(digits == 0, np.nan, digits))
    with pytest.raises(ConfigError, match=r"reshape the rows: x.reshape\(-1, 1, 8, 8\)"):
        model.predict(digits.reshape(5, 64))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            np.zeros((3, 5)),
            r"shape \(N, 4\), got \(3, 5\); a sample has 4 features here, yours.* 5",
        ),
        (np.zeros(7), r"shape \(N, 4\), got \(7,\)"),
        (np.zeros((2, 4, 4)), r"shape \(N, 4\), got \(2, 4, 4\); prepare the samples"),
        (np.zeros((0, 4)), "have no samples; give at least one"),
        (3.0, r"shape \(N, 4\), got \(\)"),
        ([[1, 2, 3, 4], [1, 2]], "rows have different lengths"),
        ([[1, 2, 3, "red"]], "must be numbers, got 'red' .value 3 of the table.; encode it"),
        (np.array([[1, 2, 3, np.inf]]), r"1 values that are not \(first: sample 0, place 3\)"),
        (np.array([[1, 2, 3, 1e300]]), "must be finite"),
        (np.zeros((2, 4), complex), "must be numbers, got complex128"),
        ({"a": 1}, "must be numbers"),
    ],
)
def test_wrong_inputs_give_one_line(given, text, tables):
    model = load_personal(tables[0] / "model")
    with pytest.raises(ConfigError, match=text) as error:
        model.predict_proba(given)
    assert len(str(error.value).splitlines()) == 1


def test_columns_are_checked_by_name(tables, tmp_path):
    """Where the card names them: any order, none missing, none more."""
    root, x, _ = tables
    model = load_personal(root / "model")
    want = model.predict_proba(x)
    model.card["network"]["columns"] = list("abcd")
    assert np.array_equal(model.predict_proba(Frame(x[:, ::-1], "dcba")), want)
    with pytest.raises(ConfigError, match="lacks d and also has e; the model needs the 4 columns"):
        model.predict_proba(Frame(x, "abce"))
    assert in_order(["b", "a"], ["a", "b"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="also has id"):
        in_order(["b", "a", "id"], ["a", "b"])


def test_a_network_that_fails_says_it_in_one_line(tables, monkeypatch):
    model = load_personal(tables[0] / "model")
    monkeypatch.setitem(model.card["network"], "input_shape", [3])
    with pytest.raises(BayflowerError, match="the network failed on inputs of shape") as error:
        model.predict(np.zeros((2, 3)))
    assert len(str(error.value).splitlines()) == 1


# -- scikit-learn --------------------------------------------------------------------------------
def test_data_that_changed_since_the_run_are_said_on_the_card(tables, tmp_path, capsys):
    """One row of client 0 is missing: its other rows are split anew."""
    assert "remark" not in load_personal(tables[0] / "model").card["data"]
    file = tables[0] / "table.npz"
    before = file.read_bytes()
    found = dict(np.load(file))
    np.savez(file, **{name: values[5:] for name, values in found.items()})
    try:
        run_cli("export", str(tables[0] / "run"), f"{tmp_path / 'model'}.safetensors", "--client=0")
    finally:
        file.write_bytes(before)
    assert "warning: the client's data are not those of the run" in capsys.readouterr().out
    assert "restore the data" in load_personal(tmp_path / "model").card["data"]["remark"]


@pytest.mark.parametrize("name", ["model", "extras"])
def test_a_flipped_byte_is_named(name, tables, tmp_path):
    shutil.copytree(tables[0] / "model", tmp_path / "model")
    file = tmp_path / "model" / f"{name}.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}.safetensors is damaged .*export the model aga"):
        load_personal(tmp_path / "model")


def test_a_damaged_program_is_named(tmp_path):
    file = tmp_path / "model.pt2"
    for content in (b"no archive", b""):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{file} is damaged, or of another version"):
            program(tmp_path)


def test_scikit_learn_takes_it_for_a_classifier(tables):
    from sklearn.base import is_classifier
    from sklearn.inspection import permutation_importance
    from sklearn.metrics import get_scorer, log_loss

    root, x, y = tables
    model = load_personal(root / "model")
    probs = model.predict_proba(x)
    assert is_classifier(model)
    assert model.classes_.tolist() == [0, 1]
    assert model.n_features_in_ == 4
    assert np.array_equal(model.predict(x), probs.argmax(1))
    assert np.allclose(probs.sum(1), 1, atol=1e-12)
    assert get_scorer("accuracy")(model, x, y) == model.score(x, y) > 0.7
    assert get_scorer("neg_log_loss")(model, x, y) == pytest.approx(-log_loss(y, probs))
    assert get_scorer("roc_auc")(model, x, y) > 0.8
    found = permutation_importance(model, x, y, scoring="accuracy", n_repeats=2, random_state=0)
    assert found.importances_mean.argmax() == 1  # the column that decides
    with pytest.raises(BayflowerError, match="`bayflower personalise` makes one"):
        model.fit(x, y)
    with pytest.raises(ConfigError, match="200 samples and 3 labels"):
        model.score(x, y[:3])


def test_what_uncertainty_returns(tables):
    root, x, _ = tables
    model = load_personal(root / "model")
    said = model.uncertainty(x)
    plain = "of the network itself" in model.card["uncertainty"]["doubt"]
    assert np.allclose(said.doubt, 1 - (said.point if plain else said.probabilities).max(1))
    assert np.array_equal(said.abstains, said.sets.sum(1) != 1)
    assert said.set_labels() == [[k for k in (0, 1) if row[k]] for row in said.sets]
    assert said.promise == model.card["uncertainty"]["sets"]["promise"]
    assert "36 held-out" in said.promise or "29 held-out" in said.promise
    even = model.card["uncertainty"]["calibration"]["even"]
    before = (said.probabilities - even / 2) / (1 - even)
    entropy = -(before * np.log(before)).sum(1)
    assert np.allclose(said.entropy, entropy)
    strict, loose = (model.uncertainty(x, abstain=risk).abstains for risk in (0.1, 0.5))
    assert loose.sum() < strict.sum() <= 200
    assert said.doubt[~strict].max(initial=0) <= said.doubt[strict].min()
    assert model.drift(x).warning is None
    far = model.drift(x * 20)
    assert "these 200 samples are unlike the held-out ones" in far.warning
    assert far.rates["distance"] > 0.5


# -- the command ---------------------------------------------------------------------------------
def write(path, x, head="a,b,c,d", first=None):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head.split(","))
        for number, row in enumerate(x):
            values = ["" if np.isnan(value) else repr(float(value)) for value in row]
            writer.writerow([*(first(number) if first else []), *values])


def test_a_csv_goes_in_and_scores_come_out(tables, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    root, x, _ = tables
    write(tmp_path / "new.csv", x, "id,a,b,c,d", lambda number: [f"patient {number}"])
    call = ["predict", str(root / "model"), str(tmp_path / "new.csv"), "--keep", "id"]
    run_cli(*call, "--out", str(tmp_path / "scores.csv"))
    text = capsys.readouterr().out
    assert "200 samples: " in text
    assert "sets: For about 90%" in text
    assert "warning" not in text
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    said = load_personal(root / "model").uncertainty(x)
    assert [row["id"] for row in rows[:2]] == ["patient 0", "patient 1"]
    assert [int(row["label"]) for row in rows] == said.label.tolist()
    for k in (0, 1):
        got = np.array([float(row[f"p{k}"]) for row in rows])
        assert np.abs(got - said.probabilities[:, k]).max() < 1e-6
    sets = [[int(k) for k in row["set"].split("|") if k] for row in rows]
    assert sets == said.set_labels()
    assert [row["abstains"] == "yes" for row in rows] == said.abstains.tolist()
    sounding = [set(row["alarms"].split("|")) - {""} for row in rows]
    for name, above in said.alarms.items():
        assert [name in one for one in sounding] == above.tolist()
    # where the card names columns, their order does not matter
    shutil.copytree(root / "model", tmp_path / "named")
    card = json.loads((tmp_path / "named" / "card.json").read_text())
    card["network"]["columns"] = list("abcd")
    (tmp_path / "named" / "card.json").write_text(json.dumps(card))
    write(tmp_path / "turned.csv", x[:, ::-1], "d,c,b,a")
    turned = ["predict", str(tmp_path / "named"), str(tmp_path / "turned.csv")]
    run_cli(*turned, "--out", str(tmp_path / "turned-scores.csv"))
    again = list(csv.DictReader((tmp_path / "turned-scores.csv").read_text().splitlines()))
    assert [row["p1"] for row in again] == [row["p1"] for row in rows]
    capsys.readouterr()
    # arrays say the same, with abstention at a risk
    np.save(tmp_path / "new.npy", x)
    np.savez(tmp_path / "new.npz", x=x * 20)
    more = ["predict", str(root / "model"), str(tmp_path / "new.npy"), "--abstain", "0.1"]
    run_cli(*more, "--out", str(tmp_path / "risk.csv"), "--json")
    found = json.loads(capsys.readouterr().out)
    strict = load_personal(root / "model").uncertainty(x, abstain=0.1).abstains
    assert found["abstains"] == pytest.approx(strict.mean())
    assert found["drift"] is None
    run_cli(*call[:2], str(tmp_path / "new.npz"), "--out", str(tmp_path / "far.csv"))
    assert "warning: these 200 samples are unlike the held-out ones" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "more", "text"),
    [
        ("a,b,c,d,e", [], "has 5 input columns, but the model needs 4; name columns"),
        ("a,b,c,d", ["--keep", "id"], "has no column id to keep; it has a, b, c, d"),
        ("1,2,3,4", [], "the first row of new.csv must name the columns"),
        ("a,b,c,c", [], "must name the columns, each once"),
        ("a,b,c,d", ["--abstain", "7"], "must be a share of errors in (0, 1), got 7.0"),
        ("a,b,c,text", [], "column 'text' of new.csv must hold numbers, got 'red' in row 1"),
        ("a,b,short,row", [], "row 1 of new.csv has 3 values, the header 4"),
        ("", [], "has no samples; it needs a header row"),
        ("there", [], "scores.csv exists; choose another --out, or add --overwrite"),
        ("new.txt", [], "new.txt must be a .csv, .parquet, .npy or .npz file, or a folder"),
        ("new.npz", [], "new.npz has y, but no array x with the samples"),
        ("bad.npy", [], "bad.npy cannot be read as arrays"),
        ("none.csv", [], "no file none.csv; give the path of a .csv or .parquet file"),
    ],
)
def test_files_that_do_not_fit_change_nothing(
    head, more, text, tables, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = head.split(",")
    values = {"text": ["1", "2", "3", "red"], "row": ["1", "2", "3"]}.get(names[-1], ["1"] * 5)
    (tmp_path / "new.csv").write_text(f"{head}\n{','.join(values[: len(names)])}\n" if head else "")
    np.savez("new.npz", y=np.zeros(3))
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    (tmp_path / "new.txt").write_text("a")
    if head == "there":
        (tmp_path / "scores.csv").write_text("mine")
    file = head if "." in head else "new.csv"
    call = ["bayflower", "predict", str(tables[0] / "model"), file, "--out", "scores.csv", *more]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())
    if head == "there":
        assert (tmp_path / "scores.csv").read_text() == "mine"
    else:
        assert not (tmp_path / "scores.csv").exists()


def test_a_new_client_with_few_samples_says_whose_samples_its_sets_rest_on(tables, tmp_path):
    root, x, y = tables
    np.savez(tmp_path / "few.npz", x=x[:30], y=y[:30], num_classes=2)
    card = personalise(root / "run", tmp_path / "few.npz", tmp_path / "few", ("safetensors",))
    assert card["data"]["num_held_out"] == 5
    assert "client's 5 held-out samples, filled up to 30" in card["uncertainty"]["sets"]["promise"]
    assert card["uncertainty"]["sets"]["filled_up"]
