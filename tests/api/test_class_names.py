"""Personal models name classes as the data do: `predict`, `classes_`, sets and the scores' file."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pandas
import pytest
import torch

import bayflower
from bayflower.cli import app
from bayflower.personal import card, classes

WORDS = ("benign", "malignant", "unclear")


def frame() -> pandas.DataFrame:
    """Return three sites whose labels are words, one column of which decides."""
    draw = np.random.default_rng(4)
    x = draw.normal(size=(360, 3))
    y = np.digitize(x[:, 0] + 0.2 * draw.normal(size=360), (-0.5, 0.5))
    table = pandas.DataFrame(x, columns=["size", "age", "dose"])
    return table.assign(finding=np.array(WORDS)[y], ward=[f"ward {k % 3}" for k in range(360)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    how = {"rounds": 3, "lr": 0.05, "model": "linear", "device": "cpu"}
    out = tmp_path_factory.mktemp("words")
    return bayflower.fit("fedavg", frame(), target="finding", site="ward", out=out, **how)


def test_labels_are_words_where_the_data_have_words(trained):
    from sklearn.metrics import confusion_matrix, get_scorer

    table = frame()
    x, y = table[["size", "age", "dose"]], table["finding"]
    model = trained.personal("ward 1")
    said, found = model.uncertainty(x), model.predict(x)
    assert model.classes_.tolist() == list(WORDS)
    assert np.array_equal(found, np.array(WORDS)[model.predict_proba(x).argmax(1)])
    assert np.array_equal(found, said.label)
    assert said.set_labels() == [
        [w for w, k in zip(WORDS, row, strict=True) if k] for row in said.sets
    ]
    share = np.mean(found == y.to_numpy())
    assert share > 0.7
    assert model.score(x, y) == get_scorer("accuracy")(model, x, y) == pytest.approx(share)
    assert get_scorer("roc_auc_ovr")(model, x, y) > 0.8
    assert np.trace(confusion_matrix(y, found, labels=model.classes_)) == round(share * 360)
    with pytest.raises(bayflower.ConfigError, match="labels must be classes of the model"):
        model.score(x, np.zeros(360, int))


def test_the_file_of_scores_and_cards_of_before(trained, tmp_path, capsys):
    model = trained.personal("ward 2")
    folder = trained.folder / "personal" / "client-2"
    frame().to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "scores.csv"
    with pytest.raises(SystemExit) as end:
        app(["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(out)])
    assert not end.value.code
    said = model.uncertainty(frame()[["size", "age", "dose"]])
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["label"] for row in rows] == said.label.tolist()
    assert [row["set"].split("|") if row["set"] else [] for row in rows] == said.set_labels()
    assert {"p_benign", "p_malignant", "p_unclear"} < set(rows[0])
    assert f"label benign: {np.sum(said.label == 'benign')}" in capsys.readouterr().out
    shutil.copytree(folder, tmp_path / "before")
    before = json.loads((folder / "card.json").read_text())
    del before["data"]["classes"], before["reading"]["classes"]
    (tmp_path / "before" / "card.json").write_text(json.dumps(before))
    assert bayflower.load_personal(tmp_path / "before").classes_.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["0", "1"], [0, 1]),
        (["1", "2", "-3"], [1, 2, -3]),
        (["False", "True"], [False, True]),
        (["007", "8"], ["007", "8"]),
        (["2", "yes"], ["2", "yes"]),
        (["²", "3"], ["²", "3"]),
        (None, [0, 1, 2]),
        (["too", "few"], [0, 1, 2]),
    ],
)
def test_classes_have_the_type_of_the_labels(names, wanted):
    known = {"network": {"num_classes": len(wanted)}, "reading": None, "data": {"classes": names}}
    assert classes.values(known).tolist() == wanted
    assert len(classes.texts(known)) == len(wanted)


def test_a_promise_names_the_class_that_every_set_holds():
    lowest = torch.tensor([3, 0])
    said = card.promise(0.9, [40, 4], False, "client", 99, lowest, ("well", "ill"))
    assert said.endswith("Class ill is in every set: too few samples.")
    assert "Class 1 is" in card.promise(0.9, [40, 4], False, "client", 99, lowest)
