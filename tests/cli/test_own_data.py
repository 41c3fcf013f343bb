"""`bayflower data`, and the way from a file to scores for new samples: from CSV, Parquet and a
folder of images.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from prefork import bayflower
from wards import SITES, patients, write

from bayflower.config import parse
from bayflower.data import load_client, read, save
from bayflower.data.tables import read_table
from bayflower.errors import ConfigError
from bayflower.personal import export, inputs, load_personal, personalise

QUICK = ("--rounds", "1", "--set", "local_epochs=1", "--set", "device=cpu")
TABLE = ("--target", "outcome", "--site", "hospital")


def call(folder: Path, *words: str) -> str:
    """Run a command; return what it printed."""
    done = bayflower(*words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_seconds(result: dict) -> dict:
    """Return what must be equal to the bit."""
    return {"final": result["final"], "uncertainty": result["uncertainty"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a table, one exported model and its scores for new rows."""
    folder = tmp_path_factory.mktemp("table")
    write(folder / "patients.csv", patients(120))
    new = patients(9, seed=4)
    new[0]["stage"], new[1]["age"], new[2]["cholesterol"] = "IV", None, None
    new[3]["age"] = 900
    for row in new:
        del row["outcome"]
    write(folder / "new.csv", [dict(sorted(row.items())) for row in new])  # another order
    said = {"data": call(folder, "data", "patients.csv", *TABLE)}
    given = ("--dataset", "patients.csv", *TABLE, *QUICK, "--out", "runs")
    said["compare"] = call(folder, "compare", "fedmap", "local", *given)
    with contextlib.chdir(folder):
        export(folder / "runs" / "fedmap", 1, folder / "model", ("safetensors",))
    keep = ("--keep", "patient_id", "--out", "scores.csv")
    said["predict"] = call(folder, "predict", "model", "new.csv", *keep)
    return folder, said, new


def test_values_that_training_did_not_have_are_named(trained):
    """A new category and a number far away, a line each; missing cells are none of them."""
    warned = [line for line in trained[1]["predict"].splitlines() if line.startswith("warning: co")]
    assert warned == [
        "warning: column 'stage': 1 of 9 samples have a value that the training data do not have, "
        "such as 'IV'; it counts as other",
        "warning: column 'age': 1 of 9 samples are more than 6 standard deviations away from the "
        "training data's mean, such as 900",
    ]


def test_a_client_is_exported_by_its_name_and_replaces_no_other(trained, tmp_path):
    folder, run, only = trained[0], trained[0] / "runs" / "fedmap", ("safetensors",)
    card = json.loads((folder / "model" / "card.json").read_text())
    assert card["client"] == 1
    assert card["site"]
    with contextlib.chdir(folder):
        assert export(run, card["site"], tmp_path / "own", only)["client"] == 1
        with pytest.raises(ConfigError, match=r"model of client 1; .*overwrite"):
            export(run, 0, tmp_path / "own", only)
        assert json.loads((tmp_path / "own" / "card.json").read_text())["client"] == 1
        assert export(run, "0", tmp_path / "own", only, overwrite=True)["client"] == 0
        with pytest.raises(ConfigError, match=f"no client 'nobody'; .* names .*{card['site']}"):
            export(run, "nobody", tmp_path / "none", only)


@pytest.mark.slow  # README.md has the same commands
def test_from_a_table_to_scores(trained):
    folder, said, new = trained
    assert "table of 120 rows, 3 columns as 7 inputs" in said["data"]
    assert "column 'admitted' left out: dates" in said["data"]
    assert "settings: partition=natural, num_clients=3" in said["data"]
    assert "Network: mlp, inputs 7, 2 classes" in said["compare"]
    call(folder, "report", "runs", "--html", "page.html")
    assert (folder / "page.html").stat().st_size > 10_000
    rows = list(csv.DictReader((folder / "scores.csv").read_text().splitlines()))
    assert [row["patient_id"] for row in rows] == [row["patient_id"] for row in new]
    assert {row["label"] for row in rows} <= {"sick", "well"}
    for row in rows:
        assert float(row["p_sick"]) + float(row["p_well"]) == pytest.approx(1, abs=1e-5)
    # the model's own words on the same rows, encoded by hand
    model = load_personal(folder / "model")
    encoded = []
    for row in new:
        chol, age = row["cholesterol"], row["age"]
        stage = [float(row["stage"] == one) for one in ("I", "II", "III")]
        known = [np.nan if age is None else age, *stage, float(not any(stage))]
        encoded.append([*known, np.nan if chol is None else chol, float(chol is None)])
    want = model.predict_proba(np.array(encoded))
    got = np.array([[float(row["p_sick"]), float(row["p_well"])] for row in rows])
    assert np.allclose(got, want, atol=1e-6)


def test_a_card_agrees_with_how_the_training_data_were_read(trained):
    """What the model sees of a training row is what training saw, to the bit."""
    folder, _, _ = trained
    config = json.loads((folder / "runs" / "fedmap" / "seed-0" / "result.json").read_text())[
        "config"
    ]
    method = config.pop("method")
    data = load_client(
        parse(method, {**config, "dataset": str(folder / "patients.csv")}).data, 0, 1
    )
    model = load_personal(folder / "model")
    x = inputs.tensor(read_table(folder / "patients.csv"), model.card)
    seen = model.ready.prepared(x).numpy()
    mine = {row.tobytes() for row in seen}
    assert all(row.tobytes() in mine for row in np.concatenate([data.x_train, data.x_test]))


@pytest.mark.slow
def test_parquet_and_our_own_file_give_the_same_bits(trained, monkeypatch):
    folder, _, new = trained
    monkeypatch.chdir(folder)
    save(read(folder / "patients.csv", target="outcome", site="hospital"), folder / "ours.npz")
    files = {"ours.npz": ("--site", "client")}
    try:
        import pandas
        import pyarrow
    except ImportError:
        pyarrow = None
    if pyarrow is not None:
        frame = pandas.DataFrame(patients(120))
        frame.to_parquet(folder / "patients.parquet")
        pandas.DataFrame(new).to_parquet(folder / "new.parquet")
        files["patients.parquet"] = TABLE
    want = json.loads((folder / "runs" / "fedmap" / "seed-0" / "result.json").read_text())
    for name, options in files.items():
        call(folder, "run", "fedmap", "--dataset", name, *options, *QUICK, "--out", f"runs-{name}")
        got = json.loads((folder / f"runs-{name}" / "result.json").read_text())
        assert without_seconds(got) == without_seconds(want), name
    if pyarrow is not None:
        export(folder / "runs-patients.parquet", 1, folder / "model-p", ("safetensors",))
        keep = ("--keep", "patient_id", "--out", "scores-p.csv")
        call(folder, "predict", "model-p", "new.parquet", *keep)
        assert (folder / "scores-p.csv").read_text() == (folder / "scores.csv").read_text()


def test_data_are_saved_as_they_were_read_and_errors_are_one_line(trained, tmp_path):
    folder, _, _ = trained
    path = str(folder / "patients.csv")
    said = json.loads(call(tmp_path, "data", path, *TABLE, "--save", "mine.npz", "--json"))
    assert said["network"]["name"] == "mlp"
    assert {row["site"]: row["rows"] for row in said["sites"]} == dict.fromkeys(SITES, 40)
    assert [row["column"] for row in said["columns"]] == ["age", "stage", "cholesterol"]
    want = read(path, target="outcome", site="hospital")
    assert np.array_equal(read(tmp_path / "mine.npz").x, want.x, equal_nan=True)
    for words, text in (
        (["synthetic"], "synthetic data are generated"),
        ([path, "--target", "outcom"], "has no column 'outcom' for --target"),
        ([path, "--set", "leave_out=Cork,Derby"], "leave_out names no site 'Derby'"),
        (["nowhere.csv"], "no file nowhere.csv"),
        (["nowhere/*.csv"], "no file matches 'nowhere/*.csv'"),
    ):
        done = bayflower("data", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert text in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_new_site_with_one_class_gets_a_model(trained, tmp_path, monkeypatch):
    folder, _, _ = trained
    mine = [row for row in patients(40, seed=9) if row["outcome"] == "well"]
    write(tmp_path / "mine.csv", mine)
    monkeypatch.chdir(folder)
    card = personalise(
        folder / "runs" / "fedmap", tmp_path / "mine.csv", tmp_path / "model", ("safetensors",)
    )
    assert card["data"]["train_per_class"][0] == 0
    assert card["reading"]["classes"] == ["sick", "well"]
    found = load_personal(tmp_path / "model").predict_proba(read_table(folder / "new.csv"))
    assert found.shape == (9, 2)


def test_from_a_folder_of_images_to_scores(tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    for site in SITES[:2]:
        for label, level in (("dark", 60), ("light", 190)):
            (tmp_path / "scans" / site / label).mkdir(parents=True)
            for k in range(8):
                pixels = np.clip(draw.normal(level, 20, (10, 10)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "scans" / site / label / f"{k}.png")
    said = json.loads(call(tmp_path, "data", "scans", "--json"))
    assert said["classes"] == ["dark", "light"]
    assert [row["rows"] for row in said["sites"]] == [16, 16]
    assert said["input_shape"] == [1, 10, 10]
    more = ("--rounds", "1", "--set", "local_epochs=20", "--set", "lr=0.01", "--set", "device=cpu")
    call(tmp_path, "run", "fedavg", "--dataset", "scans", *more, "--out", "run")
    call(tmp_path, "report", "run", "--html", "page.html")
    with contextlib.chdir(tmp_path):  # README.md exports by the command
        export(tmp_path / "run", 0, tmp_path / "model", ("safetensors",))
    (tmp_path / "new").mkdir()
    for k, level in enumerate((50, 200)):
        Image.fromarray(np.full((20, 30), level, np.uint8)).save(tmp_path / "new" / f"{k}.png")
    call(tmp_path, "predict", "model", "new", "--out", "scores.csv")
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == ["0.png", "1.png"]
    assert [row["label"] for row in rows] == ["dark", "light"]
