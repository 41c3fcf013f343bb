"""Tasks other than classes in whole runs, on the loop and the fused engine."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of numbers of five sites that differ in their means."""
    draw = np.random.default_rng(3)
    client = np.repeat(np.arange(5), 40)
    x = draw.normal(size=(200, 3))
    y = 50 + 8 * (x @ [1.0, -2.0, 0.5] + 0.5 * client + 0.3 * draw.normal(size=200))
    path = tmp_path_factory.mktemp("numbers") / "numbers.npz"
    more = {
        "counts": draw.poisson(np.exp(x[:, 0] * 0.5 + 1)),
        "levels": np.digitize(y, [40, 55, 70]),
    }
    np.savez(path, x=x, y=y, client=client, **more)
    return path


def result(method: str, engine: str, data: Path, **settings: Any) -> dict[str, Any]:
    usual = {"dataset": str(data), "partition": "natural", "rounds": 3, "lr": 0.02, "seed": 1}
    usual |= {"calibration": "off", "input_scale": "client"}
    return run_to_result(prepare(parse(method, {**usual, **settings}), engine))


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "local"])
def test_numbers_are_learned_alike_on_both_engines(method: str, data: Path) -> None:
    settings = {"task": "regression", "model": "linear", "local_epochs": 10, "dtype": "float64"}
    loop, fused = (
        result(method, engine, data, stacking="yes", **settings) for engine in ("loop", "fused")
    )
    found, other = loop["final"]["personal"], fused["final"]["personal"]
    for key in ("rmse", "nll", "crps", "width_90"):
        assert found[key] == pytest.approx(other[key], rel=1e-6), key
    assert found["num_examples"] == sum(found["pit"]) == 40
    assert loop["rounds"][-1]["personal"]["rmse"] == found["rmse"]
    assert loop["uncertainty"] is None
    y = np.load(data)["y"]
    if method == "local":
        assert found["rmse"] < 0.8 * y.std()
    assert math.isfinite(found["nll"])


def test_clients_are_told_everyones_moments(data: Path) -> None:
    prepared = prepare(
        parse(
            "fedavg",
            {"dataset": str(data), "partition": "natural", "task": "regression", "rounds": 1},
        )
    )
    task = prepared.halves.model.task
    everyone = np.concatenate([one.y_train for one in prepared.federation.clients])
    assert task.location == pytest.approx(everyone.mean())  # type: ignore[attr-defined]
    assert task.scale == pytest.approx(everyone.std())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"task": "regression", "noise": "input"}, "crps"),
        ({"task": "regression", "likelihood": "student-t", "noise": "known"}, "coverage_90"),
        ({"task": "counts", "target": "counts"}, "deviance"),
        ({"task": "counts", "target": "counts", "likelihood": "negative-binomial"}, "deviance"),
        ({"task": "ordinal", "target": "levels"}, "accuracy"),
    ],
)
def test_every_likelihood_runs_stacked(settings: dict[str, str], metric: str, data: Path) -> None:
    first, last = (
        result("fedavg", "fused", data, stacking="yes", **{**settings, "rounds": rounds})
        for rounds in (1, 4)
    )
    assert math.isfinite(last["final"]["personal"][metric])
    assert last["rounds"][-1]["train_loss"] < first["rounds"][0]["train_loss"]
    assert last["remark"] is None


def test_what_needs_classes_is_refused_in_one_line(data: Path) -> None:
    numbers = {"dataset": str(data), "partition": "natural", "task": "regression"}
    for method, more, said in (
        ("pfedvmp", {}, "needs classes"),
        ("fedavg", {"task": "counts", "calibration": "client"}, "calibration is for task=class"),
        ("fedavg", {"partition": "dirichlet"}, "partition must be"),
        ("fedavg", {"dataset": "digits", "partition": "iid"}, "has classes"),
        ("fedavg", {"label_smoothing": 0.1}, "label_smoothing is for"),
        ("fedavg", {"likelihood": "poisson"}, "likelihood must be"),
        ("fedavg", {"target_scale": "1,0"}, "target_scale must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(method, {**numbers, **more})


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("mild", "severe", "critical"), "critical, mild, severe"),
        (("1 mild", "2 severe", "10 critical"), "1 mild, 10 critical, 2 severe"),
        (("1 mild", "2 severe", "3 critical"), ""),
        (("no", "yes", "yes"), ""),  # either order of two says the same
    ],
)
def test_classes_whose_names_do_not_say_their_order_are_refused(
    names: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    rows = [f"s{i % 2},{i},{names[i % 3]}" for i in range(60)]
    table = tmp_path / "grades.csv"
    table.write_text("\n".join(["site,a,grade", *rows]) + "\n")
    run = parse(
        "fedavg", {"dataset": str(table), "target": "grade", "sites": "site", "task": "ordinal"}
    )
    if not wrong:
        assert prepare(run).federation.names.classes == tuple(sorted(set(names)))
        return
    with pytest.raises(ConfigError, match=f"order the classes as {wrong}, which is the alphabet"):
        prepare(run)


def test_the_table_of_a_result_shows_the_metrics_of_numbers(data: Path) -> None:
    from rich.console import Console

    from bayflower.report.text import result_table

    found = result("fedavg", "fused", data, task="regression", rounds=1)
    console = Console(width=200, record=True, file=StringIO())
    console.print(result_table(found))
    assert {"rmse", "crps", "covered"} <= set(console.export_text().split())
