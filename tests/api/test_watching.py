"""Callbacks, early stopping and trackers of `fit` and `compare`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_fit import SHORT, Net, clients, same

import bayflower
from bayflower.api.watching import callbacks_of, takes

BRIEF = {**SHORT, "rounds": 2, "calibration": "off", "model": Net}


def points(folder) -> dict[str, list[int]]:
    """Return the rounds of each number in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return {name: [one.step for one in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_callbacks_and_trackers_see_every_run_of_a_comparison(tmp_path):
    seen, plain = [], []
    callbacks = [
        lambda round, numbers, run: seen.append((run.label, run.seed, round, run.folder)),
        lambda round, numbers, more=plain: more.append(numbers["personal/accuracy"]),
    ]
    how = {"callbacks": callbacks, "tensorboard": True, "out": tmp_path / "both", "seeds": 2}
    wide = bayflower.Method("fedmap", sigma2=50.0, label="wide")
    both = bayflower.compare(["fedavg", wide], clients(), **how, **BRIEF)
    want = [
        (label, seed, round, tmp_path / "both" / label / f"seed-{seed}")
        for seed in (0, 1)
        for label in ("fedavg", "wide")
        for round in (1, 2)
    ]
    assert seen == want
    final = {(one.folder.parent.name, one.result["seed"]): one.curves_rows for one in both.results}
    assert plain == [
        final[label, seed][round - 1]["personal/accuracy"] for label, seed, round, _ in want
    ]
    for one in both.results:
        assert points(one.folder / "tensorboard")["train_loss"] == [1, 2]
    # what is there is not told again
    bayflower.compare(["fedavg", wide], clients(), **how, **BRIEF)
    assert seen == want
    with pytest.raises(bayflower.ConfigError, match="leave jobs out"):
        bayflower.compare(["fedavg"], clients(), callbacks=print, jobs=2, **BRIEF)
    with pytest.raises(bayflower.ConfigError, match="no run of a comparison ends early"):
        bayflower.compare(["fedavg"], clients(), callbacks=lambda round, n: True, **BRIEF)


def test_one_run_is_tracked_too(tmp_path):
    bayflower.fit("local", clients(), tensorboard=True, out=tmp_path / "one", **BRIEF)
    found = points(tmp_path / "one" / "tensorboard")
    assert found["train_loss"] == found["personal/accuracy"] == [1, 2]
    with pytest.raises(bayflower.ConfigError, match="mlflow must be a tracking URI or a folder"):
        bayflower.fit("local", clients(), mlflow=True, out=tmp_path / "two", **BRIEF)
    assert not (tmp_path / "two").exists()


def test_functions_that_cannot_be_called_are_refused():
    assert takes(print, 2)
    assert takes(lambda a, b, c=1: None, 2)
    assert not takes(lambda a, b, c: None, 2)
    with pytest.raises(bayflower.ConfigError, match=r"or \(round, numbers, run\), got on_end\(x\)"):
        callbacks_of(on_end)


def on_end(x):
    """Take one argument, which is too few."""


@pytest.mark.slow
def test_a_comparison_chooses_rounds_once_for_each_method(tmp_path):
    """The rounds are those that `fit` chooses with the first seed; every seed trains them. Another
    setting leads to another search, a second call to none.
    """
    how = {**BRIEF, "rounds": 12, "patience": 2}
    one = bayflower.fit("fedavg", clients(), seed=3, out=tmp_path / "one", **how)
    how["jobs"], where = 1, tmp_path / "two"
    found = bayflower.compare(["fedavg"], clients(), seed=3, seeds=2, out=where, **how)
    chosen = len(one.result["rounds"])
    assert 1 < chosen < 12
    assert [len(run.result["rounds"]) for run in found.results] == [chosen, chosen]
    same(one.result, found.results[0].result)
    (kept,) = (tmp_path / "two" / "fedavg").glob("stopping-*/stopping.json")
    content = json.loads(kept.read_text())
    assert (
        content["best"]
        == chosen
        == json.loads((tmp_path / "one/stopping.json").read_text())["best"]
    )
    kept.write_text(json.dumps({**content, "best": 1}))  # read, not sought again
    short = bayflower.compare(["fedavg"], clients(), seed=3, out=tmp_path / "two", **how)
    assert len(short.results[0].result["rounds"]) == 1
    # a run that is replaced with another learning rate gets a choice of its own
    del how["jobs"]
    how = {**how, "lr": 1e-9, "overwrite": True}
    still = bayflower.fit("fedavg", clients(), seed=3, out=tmp_path / "one", **how)
    assert len(still.result["rounds"]) == 1
    again = json.loads((tmp_path / "one" / "stopping.json").read_text())
    assert again["best"] == 1
    assert np.ptp([value for _, value in again["curve"]]) == 0


@pytest.mark.slow
def test_processes_of_their_own_find_the_network_and_track(tmp_path):
    """A network in a module that only this process's path has, and what that module imports."""
    out, how = tmp_path / "two", {"seeds": 2, "jobs": 2, "tensorboard": True}
    apart = bayflower.compare(["fedavg"], clients(), out=out, **how, **BRIEF)
    here = bayflower.compare(["fedavg"], clients(), seeds=2, jobs=1, **BRIEF)
    for one, other in zip(apart.results, here.results, strict=True):
        same(one.result, other.result)
        assert points(one.folder / "tensorboard")["train_loss"] == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing the libraries warns, and that is theirs
def test_mlflow_and_wandb_have_the_runs_of_python(tmp_path, monkeypatch):
    """The real libraries in their local modes: a database in a folder, files of offline runs."""
    pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("wandb", exc_type=ImportError)
    from mlflow.tracking import MlflowClient

    from bayflower.files.trackers import located

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    how = {"mlflow": tmp_path / "track", "wandb": "tries", **BRIEF}
    one = bayflower.fit("fedmap", clients(), out=tmp_path / "one", **how)
    both = bayflower.compare(["fedavg", "local"], clients(), out=tmp_path / "both", **how)
    client = MlflowClient(tracking_uri=located(str(tmp_path / "track")))
    found = client.search_runs([client.get_experiment_by_name("bayflower").experiment_id])
    assert {(run.data.tags["method"], run.data.tags.get("group")) for run in found} == {
        *(("fedmap", None), ("fedavg", "both"), ("local", "both"))
    }
    for run in found:
        (mine,) = (r for r in (one, *both.results) if r.result["method"] == run.data.tags["method"])
        assert run.info.status == "FINISHED"
        assert run.data.metrics["final/personal/accuracy"] == pytest.approx(mine.accuracy)
        history = client.get_metric_history(run.info.run_id, "train_loss")
        want = [pytest.approx(row["train_loss"]) for row in mine.curves_rows]
        assert [point.value for point in history] == want
        assert len(list((mine.folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
