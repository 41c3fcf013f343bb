"""Data whose targets are numbers: every door, everyone's moments, small clients, and splits."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bayflower
from bayflower.config import parse
from bayflower.data import flamby, load_federation
from bayflower.data.moments import input_sums, read_scaling, together
from bayflower.data.sources import load_source
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of houses in counties of 1 to 40 houses, with a gap and a category."""
    draw = np.random.default_rng(5)
    lines = ["county,floor,uranium,kind,week,radon"]
    for county, size in enumerate((40, 25, 12, 2, 1)):
        for house in range(size):
            floor = draw.integers(2)
            uranium = "" if (county, house) == (0, 3) else f"{100 + county + draw.normal():.3f}"
            kind, week = ("wood", "stone")[int(draw.integers(2))], size - house
            y = 3 + 0.5 * county - floor + 0.3 * draw.normal()
            lines.append(f"c{county},{floor},{uranium},{kind},{week},{y:.4f}")
    path = tmp_path_factory.mktemp("houses") / "houses.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(path: Path, **more: Any) -> dict[str, Any]:
    usual = {"dataset": str(path), "target": "radon", "sites": "county", "task": "regression"}
    return {**usual, "rounds": 2, "lr": 0.05, "calibration": "off", **more}


def test_everyones_moments_are_those_of_the_pooled_rows_in_any_order() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 3)) * [1, 5, 100] + [0, 1e4, -3]
    x[draw.random(x.shape) < 0.1] = np.nan
    flags = np.array([False, False, True])
    sums = [input_sums(part, flags) for part in np.split(x, [1, 20, 45])]
    found = read_scaling(together(sums))
    assert together(sums[::-1]) == together(sums)
    np.testing.assert_allclose(found.mean[:2], np.nanmean(x, 0)[:2], rtol=1e-12)
    np.testing.assert_allclose(found.std[:2], np.nanstd(x, 0)[:2], rtol=1e-7)
    assert (found.mean[2], found.std[2]) == (0, 1)
    ready = found.apply(x)
    assert not np.isnan(ready).any()
    assert (ready[np.isnan(x[:, 0]), 0] == 0).all()


def test_clients_see_everyones_scale_and_not_their_own(table: Path) -> None:
    run = parse("fedavg", settings(table, drop="week"))
    raw, prepared = load_federation(run.data, 0), prepare(run)
    names = raw.names.columns
    column = names.index("uranium")
    everyone = np.concatenate([one.x_train[:, column] for one in raw.clients]).astype(float)
    low = (np.nanmin(everyone) - np.nanmean(everyone)) / np.nanstd(everyone)
    seen = np.concatenate([one.x_train for one in prepared.federation.clients])
    assert seen[:, column].min() == pytest.approx(low, rel=1e-5)
    kinds = [place for place, name in enumerate(names) if name.startswith("kind")]
    assert set(seen[:, kinds].ravel()) == {0.0, 1.0}
    own = prepare(parse("fedavg", settings(table, drop="week", input_scale="client")))
    first = own.federation.clients[0].x_train[:, column]
    assert first.mean() == pytest.approx(0, abs=1e-5)
    kept = prepare(parse("fedavg", settings(table, drop="week,uranium", input_scale="none")))
    assert set(kept.federation.clients[0].x_train[:, 0]) == {0.0, 1.0}


def test_a_county_with_one_house_takes_part_and_has_no_test(table: Path) -> None:
    found = run_to_result(prepare(parse("fedmap", settings(table, model="linear"))))
    assert found["num_clients"] == 5
    assert found["partition"]["train_sizes"] == [32, 20, 10, 1, 1]
    assert found["partition"]["test_sizes"][-1] == 0
    assert found["remark"].startswith("1 of 5 clients have too few samples for a test")
    last = found["final"]["personal"]["per_client"][-1]
    assert (last["name"], last["num_examples"], last["rmse"]) == ("c4", 0, None)
    loop = run_to_result(prepare(parse("fedmap", settings(table, model="linear")), "loop"))
    ours, theirs = found["final"]["personal"], loop["final"]["personal"]
    assert ours["rmse"] == pytest.approx(theirs["rmse"], rel=1e-5)


def test_a_data_frame_an_npz_file_and_a_csv_file_train_the_same_model(
    table: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table)
    common: dict[str, Any] = {
        "task": "regression",
        "rounds": 2,
        "lr": 0.05,
        "calibration": "off",
        "progress": False,
    }
    ours = bayflower.fit("fedavg", frame, target="radon", site="county", **common)
    theirs = run_to_result(prepare(parse("fedavg", settings(table))))
    assert ours.result["final"]["personal"] == theirs["final"]["personal"]
    groups = [part for _, part in frame.dropna().groupby("county")]
    x = [part[["floor", "uranium", "week"]].to_numpy() for part in groups]
    y = [part["radon"].to_numpy() for part in groups]
    arrays = bayflower.fit("fedavg", list(zip(x, y, strict=True)), standardise=True, **common)
    np.savez(
        tmp_path / "houses.npz",
        x=np.concatenate(x),
        y=np.concatenate(y),
        client=np.repeat(np.arange(5), [len(one) for one in y]),
    )
    file = settings(tmp_path / "houses.npz", target="", sites="", partition="natural")
    theirs = run_to_result(prepare(parse("fedavg", file)))
    assert arrays.result["final"]["personal"]["rmse"] == theirs["final"]["personal"]["rmse"]


def test_samples_are_split_by_time_and_the_first_ones_train(table: Path) -> None:
    run = parse("fedavg", settings(table, split="time", time="week", input_scale="none", drop=""))
    data = load_federation(parse("local", settings(table, split="time", time="week")).data, 0)
    weeks = data.names.columns.index("week")
    for one in data.clients[:3]:
        assert one.x_train[:, weeks].max() < one.x_test[:, weeks].min()
        assert (np.diff(one.x_train[:, weeks]) > 0).all()
    few = parse("local", settings(table, split="time", time="week", train_rows=5))
    for one, whole in zip(load_federation(few.data, 0).clients, data.clients, strict=True):
        np.testing.assert_array_equal(one.x_train, whole.x_train[:5])
        np.testing.assert_array_equal(one.y_test, whole.y_test)
    assert run.data.time == "week"


def test_posteriordbs_own_file_is_read(tmp_path: Path) -> None:
    known = {
        "floor_measure": [1, 0, 1],
        "log_uranium": [0.5, -0.5],  # of counties
        "log_radon": [1.0, 2.0, 3.0],
        "county_idx": [1, 2, 2],
    }
    (tmp_path / "radon_all.json").write_text(json.dumps(known))
    run = parse("local", {"dataset": "radon", "data_dir": str(tmp_path), "task": "regression"})
    found = load_federation(run.data, 0)
    assert found.names.sites == ("1", "2")
    assert found.names.columns == ("floor", "log_uranium")
    np.testing.assert_array_equal(found.clients[0].x_train, [[1.0, 0.5]])


def test_posteriordbs_packed_file_of_votes_is_read(tmp_path: Path) -> None:
    known = {name: [1, 0, 1, 0] for name in ("black", "female", "age", "edu", "y")}
    known |= {"region_full": [3, 5], "v_prev_full": [0.4, 0.6], "state": [1, 2, 2, 1]}
    with zipfile.ZipFile(tmp_path / "election88_full.json.zip", "w") as archive:
        archive.writestr("election88_full.json", json.dumps(known))
    found = load_source(parse("local", {"dataset": "election88", "data_dir": str(tmp_path)}).data)
    np.testing.assert_allclose(found.x[:, 4:], [[3, 0.4], [5, 0.6], [5, 0.6], [3, 0.4]], rtol=1e-6)
    np.testing.assert_array_equal(found.y, [1, 0, 1, 0])
    np.testing.assert_array_equal(found.client, [0, 1, 1, 0])


def test_flambys_own_tables_are_read(tmp_path: Path) -> None:
    file = tmp_path / "brca.csv"
    file.write_text("pid,age,stage,E,T\nA,50,1,0,900\nB,60,0,1,30\nC,70,1,1,5\nD,1,1,1,1\n")
    with pytest.raises(ConfigError, match="needs FLamby's train_test_split"):
        flamby.read(file)
    split = tmp_path / "dataset_creation_scripts" / "train_test_split.csv"
    split.parent.mkdir()
    split.write_text("pid,fold,fold2\nC,test,test_0\nA,train,train_3\nB,train,train_0\n")
    run = parse("local", {"dataset": "brca", "data_dir": str(tmp_path), "task": "survival"})
    found = load_source(run.data)
    np.testing.assert_array_equal(found.x, [[50, 1], [60, 0], [70, 1]])
    np.testing.assert_array_equal(found.y, [[900, 0], [30, 1], [5, 1]])
    np.testing.assert_array_equal(found.client, [1, 0, 0])
    np.testing.assert_array_equal(found.test, [False, False, True])
    assert (found.names.sites, found.names.columns) == (("0", "3"), ("age", "stage"))
    for text, said in (
        ("pid,fold\nC,test\n", "are not FLamby's tables"),
        ("pid,fold,fold2\nE,test,test_0\n", "no patient of"),
    ):
        split.write_text(text)
        with pytest.raises(ConfigError, match=said):
            flamby.read(file)


def test_wrong_targets_are_one_clear_line(table: Path, tmp_path: Path) -> None:
    numbers = {"dataset": str(table), "sites": "county"}
    for given, said in (
        ({"task": "regression", "target": "kind"}, "must hold numbers, got"),
        ({"task": "counts", "target": "radon"}, "needs whole numbers from 0"),
        ({"task": "regression", "target": "radon", "time": "week"}, "time is for split=time"),
        ({"task": "regression", "target": "radon", "scaling": "none"}, "set input_scale"),
        ({"task": "regression", "target": "radon", "input_scale": "none"}, "missing values"),
        ({"task": "regression", "target": "radon", "input_scale": "1/2"}, "has 1 columns"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(parse("fedavg", {**numbers, **given}))
    with pytest.raises(ConfigError, match="is for task=regression"):
        parse("fedavg", {"dataset": "radon"})
