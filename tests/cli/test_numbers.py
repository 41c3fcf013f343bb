"""A user's way with numbers, on the command line: run, compare, report, export, predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import bayflower
from bayflower import load_personal
from bayflower.cli import app
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.personal import export
from bayflower.report.collect import group, read
from bayflower.report.verdict import verdicts


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of sites whose level differs, with one site of one row."""
    draw = np.random.default_rng(5)
    lines = ["site,a,b,y,visits,grade"]
    for site, size in enumerate((60, 40, 30, 1)):
        for _ in range(size):
            a, b = draw.normal(size=2)
            y = 20 + 6 * site + 4 * a - 2 * b + draw.normal()
            visits, grade = draw.poisson(np.exp(0.4 * a + 1)), int(np.digitize(y, [20, 30]))
            word = ("1 low", "2 mid", "3 up")[grade]
            lines.append(f"s{site},{a:.4f},{b:.4f},{y:.4f},{visits},{word}")
    path = tmp_path_factory.mktemp("sites") / "sites.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def words(table: Path, target: str, task: str) -> list[str]:
    others = ",".join({"y", "visits", "grade"} - {target})
    usual = {"drop": others, "task": task, "model": "linear", "lr": 0.1, "local_epochs": 5}
    sets = [word for key, value in usual.items() for word in ("--set", f"{key}={value}")]
    return ["--dataset", str(table), "--target", target, "--site", "site", *sets]


def called(*call: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(call))
    assert done.exit_code == 0, done.output
    return done.output


def test_numbers_on_the_command_line(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*words(table, "y", "regression"), "--rounds", "3", "--out", "runs"]
    said = called("compare", "fedavg", "local", *given)
    assert "RMSE" in said
    assert "in 90 %" in said
    assert "1 of 4 clients have too few samples for a test" in said
    (found,) = verdicts(group(read([Path("runs")])))
    assert found.metric == "rmse"
    assert next(iter(found.means)) == "Local"  # the lowest error is the best
    assert found.means["Local"] == min(found.means.values())
    assert "CRPS" in called("results", "runs", "--metric", "crps")
    called("results", "runs", "--out", "table.csv", "--rows", "runs")
    (first, *_) = csv.DictReader(Path("table.csv").read_text().splitlines())
    assert float(first["rmse"]) > 0
    assert "accuracy" not in first
    called("report", "runs", "--html", "page.html")
    page = Path("page.html").read_text()
    for text in ("PIT: Local", "RMSE of each client", "Can the intervals be trusted?"):
        assert text in page
    change = page.split("Change of RMSE by FedAvg", 1)[1].split("</svg>", 1)[0]
    assert all(f">{site}</text>" in change for site in ("s0", "s1", "s2"))  # who gains, by name
    said = called("export", "runs/local/seed-0", "model.safetensors", "--client", "0")
    assert "regression, gaussian" in said
    Path("new.csv").write_text("id,a,b\nfirst,1.0,0.0\nsecond,-1.0,0.5\n")
    called("predict", "model", "new.csv", "--out", "scores.csv", "--keep", "id")
    rows = list(csv.DictReader(Path("scores.csv").read_text().splitlines()))
    assert list(rows[0]) == ["id", "mean", "lower", "upper"]
    assert float(rows[0]["lower"]) < float(rows[0]["mean"]) < float(rows[0]["upper"])
    call = ["predict", "model", "new.csv", "--out", "w.csv", "--level", "0.5", "--keep", "id"]
    wide = json.loads(called(*call, "--json"))
    assert wide["mean_width"] < float(rows[0]["upper"]) - float(rows[0]["lower"])
    refused = CliRunner().invoke(
        app,
        ["predict", "model", "new.csv", "--out", "x.csv", "--abstain", "0.1", "--keep", "id"],
    )
    assert isinstance(refused.exception, ConfigError)


def test_a_result_in_python_shows_the_metrics_of_numbers(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table).drop(columns=["grade", "visits"])
    shared: dict[str, Any] = {"target": "y", "site": "site", "task": "regression", "rounds": 2}
    found = bayflower.fit("local", frame, model="linear", progress=False, patience=1, **shared)
    assert found.leading[0] == "rmse"
    assert "RMSE" in repr(found)
    assert "CRPS" in found._repr_html_()
    assert {"rmse", "crps", "coverage_90", "width_50"} <= set(found.metrics.columns)
    with pytest.raises(ConfigError, match="has no classes"):
        _ = found.accuracy
    assert found.models["s0"].predict_interval(frame[["a", "b"]]).shape == (131, 2)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "target"), [("regression", "y"), ("counts", "visits"), ("ordinal", "grade")]
)
def test_programs_say_what_the_model_says(
    task: str, target: str, table: Path, tmp_path: Path
) -> None:
    import torch

    others = ",".join({"y", "visits", "grade"} - {target})
    given: dict[str, Any] = {
        "dataset": str(table),
        "target": target,
        "sites": "site",
        "drop": others,
        "task": task,
        "rounds": 2,
        "checkpoint_every": 2,
        "leave_out": "s3",
    }
    run_to_result(prepare(parse("fedavg", given)), tmp_path / "run")
    card = export(tmp_path / "run", 0, tmp_path / "m", ("safetensors", "pt2", "onnx"))
    assert card["files"]["pt2"] == "model.pt2"
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    model: Any = load_personal(tmp_path / "m")
    ends = model.predict_interval(x, 0.9)
    program = torch.export.load(tmp_path / "m" / "model.pt2").module()(torch.as_tensor(x))
    np.testing.assert_allclose(program["lower"].detach().numpy(), ends[:, 0], rtol=1e-4, atol=1e-4)
    onnxruntime = pytest.importorskip("onnxruntime")
    assert card["files"]["onnx"] == "model.onnx"
    session = onnxruntime.InferenceSession(str(tmp_path / "m" / "model.onnx"))
    names = [one.name for one in session.get_outputs()]
    said = dict(zip(names, session.run(None, {session.get_inputs()[0].name: x}), strict=True))
    np.testing.assert_allclose(said["upper"], ends[:, 1], rtol=1e-4, atol=1e-4)
    if task == "ordinal":
        np.testing.assert_allclose(said["probabilities"], model.predict_proba(x), atol=1e-5)
    else:
        np.testing.assert_allclose(said["mean"], model.predict(x), rtol=1e-4, atol=1e-4)
