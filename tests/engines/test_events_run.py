"""Times to events and several labels in whole runs, on the loop and the fused engine."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import some
from rich.console import Console
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.config import parse
from bayflower.data import read
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.report.text import comparison_table, result_table

SIZES = (70, 45, 30, 15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same samples as .npz and .csv files: x, times with events of which
    about half are censored, and three labels of which some are not known.
    """
    draw = np.random.default_rng(3)
    client = np.repeat(np.arange(4), SIZES)
    x = draw.normal(size=(len(client), 3))
    life = 400 * draw.exponential(np.exp(-(x @ [1.2, -0.8, 0.0])))
    until = draw.uniform(50, 1500, len(client))
    times = np.stack([np.ceil(np.minimum(life, until)), life <= until], 1)
    marks = (x @ draw.normal(size=(3, 3)) + draw.normal(size=x.shape) > 0).astype(float)
    marks[draw.random(marks.shape) < 0.1] = np.nan
    path = tmp_path_factory.mktemp("events")
    np.savez(path / "times.npz", x=x, y=times, client=client)
    np.savez(path / "labels.npz", x=x, y=marks, client=client)
    with (path / "all.csv").open("w", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["a", "b", "c", "time", "event", "label_u", "label_v", "label_w", "site"])
        for row, (t, e), some, site in zip(x, times, marks, client, strict=True):
            said = ["" if np.isnan(one) else ("yes" if one else "no") for one in some]
            out.writerow([*row, t, bool(e), *said, f"s{site}"])
    return path


def result(method: str, engine: str, data: Path, **settings: Any) -> dict[str, Any]:
    usual = {"dataset": str(data), "partition": "natural", "rounds": 3, "lr": 0.05, "seed": 1}
    return run_to_result(prepare(parse(method, {**usual, "stacking": "yes", **settings}), engine))


CASES = {
    "hazard": ("times.npz", {"task": "survival"}, "c_index"),
    "cox": ("times.npz", {"task": "survival", "likelihood": "cox", "batch_size": 32}, "c_index"),
    "labels": ("labels.npz", {"task": "labels"}, "macro_auroc"),
}


@pytest.mark.parametrize("method", some(["fedavg", "fedmap", "fedbps"], ["fedmap"]))
@pytest.mark.parametrize("case", CASES)
def test_both_engines_learn_alike(method: str, case: str, folder: Path) -> None:
    name, settings, metric = CASES[case]
    more = {"model": "linear", "dtype": "float64", "local_epochs": 4, **settings}
    loop, fused = (result(method, engine, folder / name, **more) for engine in ("loop", "fused"))
    found, other = loop["final"]["personal"], fused["final"]["personal"]
    assert fused["remark"] is None
    assert found["num_examples"] == sum(round(0.2 * size) for size in SIZES)
    assert found["nll"] == pytest.approx(other["nll"], rel=1e-6)
    assert found[metric] == pytest.approx(other[metric], rel=1e-6)
    assert loop["rounds"][-1]["personal"][metric] == found[metric]
    assert found[metric] > 0.6
    if case == "labels":
        assert len(found["per_label"]) == 3
        assert found["per_label"][0]["num_examples"] < found["num_examples"]  # some are not known
    else:
        assert 0 < found["integrated_brier"] < 0.3
        assert found["per_client"][0]["events"] > 0
    if case == "cox":
        hazard = found["baseline"]["cumulative_hazard"]
        assert len(hazard) == 50
        assert np.all(np.diff(hazard) >= 0)
        assert hazard[-1] > 0
    console = Console(width=200, record=True, file=StringIO())
    console.print(result_table(loop))
    assert {metric, metric.removeprefix("macro_")} & set(console.export_text().split())


def test_compare_and_results_show_the_metrics_of_the_task(folder: Path, tmp_path: Path) -> None:
    usual = {"dataset": str(folder / "times.npz"), "partition": "natural", "task": "survival"}
    results = []
    for method in ("fedavg", "local"):
        for seed in (0, 1):
            run = parse(method, {**usual, "rounds": 1, "seed": seed, "model": "linear"})
            results.append(run_to_result(prepare(run), tmp_path / f"{method}-{seed}"))
    console = Console(width=200, record=True, file=StringIO())
    console.print(comparison_table(results[::2]))
    assert "Uno's C" in console.export_text()
    seen = CliRunner().invoke(app, ["results", str(tmp_path)])
    assert seen.exit_code == 0, seen.output
    assert "C-index" in seen.output
    brier = CliRunner().invoke(app, ["results", str(tmp_path), "--metric", "integrated_brier"])
    assert "integrated Brier score" in brier.output


def test_intervals_come_from_everyones_training_data(folder: Path) -> None:
    settings = {"dataset": str(folder / "times.npz"), "partition": "natural", "task": "survival"}
    prepared = prepare(parse("fedavg", {**settings, "rounds": 1, "intervals": 5}))
    everyone = np.concatenate([one.y_train for one in prepared.federation.clients])
    events = everyone[everyone[:, 1] > 0, 0]
    want = np.quantile(events, np.arange(1, 6) / 5, method="inverted_cdf")
    edges = prepared.halves.model.task.edges  # type: ignore[attr-defined]
    assert all(a <= b <= 1.0219 * a for a, b in zip(want, edges, strict=True))
    given = prepare(parse("fedavg", {**settings, "rounds": 1, "edges": "100,200,400.5"}))
    assert given.halves.model.task.edges == (100, 200, 400.5)  # type: ignore[attr-defined]


def test_tables_and_arrays_give_the_same_targets(folder: Path) -> None:
    table, arrays = folder / "all.csv", np.load(folder / "times.npz")
    drop = "label_u,label_v,label_w"
    times = read(table, kind="times", drop=drop)
    np.testing.assert_array_equal(times.y, arrays["y"])
    assert times.names.columns == ("a", "b", "c")
    named = read(table, kind="times", target="time,event", drop=drop)
    np.testing.assert_array_equal(named.y, times.y)
    marks = read(table, kind="labels", drop="time,event")
    assert marks.class_names() == ("label_u", "label_v", "label_w")
    known = np.nan_to_num(np.load(folder / "labels.npz")["y"], nan=-1)
    some = (known >= 0).any(axis=1)
    np.testing.assert_array_equal(marks.y, known[some])
    two = read(table, kind="labels", target="label_w,label_u", drop="time,event,label_v")
    np.testing.assert_array_equal(two.y, known[(known[:, [2, 0]] >= 0).any(axis=1)][:, [2, 0]])


def test_what_cannot_be_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    data = {"dataset": str(folder / "times.npz"), "partition": "natural", "task": "survival"}
    for method, more, said in (
        ("pfedvmp", {}, "needs classes"),
        ("fedavg", {"calibration": "client"}, "calibration is for"),
        ("fedavg", {"partition": "dirichlet"}, "partition must be"),
        ("fedavg", {"edges": "3,2"}, "edges must be"),
        ("fedavg", {"edges": "1,2", "intervals": 2}, "give intervals or edges"),
        ("fedavg", {"likelihood": "poisson"}, "likelihood must be"),
        ("fedavg", {"horizon": -1.0}, "horizon must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(method, {**data, **more})
    x = np.zeros((4, 2))
    for y, kind, said in (
        ([[1, 2]] * 4, "times", "1 or 0 for an event"),
        ([[-1.0, 1]] * 4, "times", "times from 0"),
        ([[1, 1, 1]] * 4, "times", "time and event"),
        ([1, 0, 1, 0], "labels", "shape"),
        ([[2, 0]] * 4, "labels", "0 and 1"),
    ):
        np.savez(tmp_path / "odd.npz", x=x, y=np.array(y))
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / "odd.npz", kind=kind)
    for target, kind, said in (
        ("time", "times", "TIME,EVENT"),
        ("time,nothing", "times", "no column 'nothing'"),
        ("a,event", "times", "must be a number from 0"),
        ("time,a", "times", "must hold 1 and 0"),
        ("a,b", "labels", "must hold 1 and 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(folder / "all.csv", kind=kind, target=target)
