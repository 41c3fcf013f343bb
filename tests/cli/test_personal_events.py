"""Personal models of times to events and of several labels: files, programs and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayflower import load_personal
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.personal.events import PersonalSurvival
from bayflower.personal.runs import export, export_all, personalise
from bayflower.report import write_report
from bayflower.tasks.survival import breslow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data of three sites."""
    draw = np.random.default_rng(5)
    client = np.repeat(np.arange(3), (60, 40, 30))
    x = draw.normal(2, 3, size=(130, 4))
    z = (x - 2) / 3
    life, until = draw.exponential(np.exp(-1.5 * z[:, 0])), draw.uniform(0.2, 4, 130)
    times = np.stack([np.minimum(life, until), life <= until], 1)
    path = tmp_path_factory.mktemp("personal")
    np.savez(path / "times.npz", x=x, y=times, client=client)
    labels = (z[:, :2] + 0.5 * draw.normal(size=(130, 2)) > 0).astype(int)
    np.savez(path / "labels.npz", x=x, y=labels, client=client, class_names=["u", "v"])
    return path


def run(folder: Path, name: str, out: Path, **settings: Any) -> tuple[dict[str, Any], Any]:
    usual = {"dataset": str(folder / name), "partition": "natural", "model": "linear", "lr": 0.05}
    prepared = prepare(parse("fedper", {**usual, "rounds": 4, "seed": 2, **settings}))
    return run_to_result(prepared, out), prepared


def models_of(path: Path) -> list[dict[str, Any]]:
    return [one for one, _ in export_all(path / "run", path / "models", ("safetensors",))]


def reported(path: Path) -> str:
    """Return the report of the run."""
    assert write_report([path / "run"], path / "report.html") == 1
    return (path / "report.html").read_text()


def outputs_drawn(model: Any, x: np.ndarray, number: int = 3000) -> torch.Tensor:
    """Return the outputs for weights drawn from the last layer's posterior, the slow way."""
    ready, draw = model.ready, torch.Generator().manual_seed(0)
    known = {name.removeprefix("posterior/"): v.double() for name, v in ready.extras().items()}
    out, features = ready.last(ready.prepared(torch.tensor(x)))
    phi = features.double()
    if len(known["in"]) > phi.shape[1]:
        phi = torch.cat([phi, torch.ones_like(phi[:, :1])], -1)
    shape = (number, *known["inverse"].shape)
    some = torch.randn(shape, generator=draw, dtype=torch.float64) * known["inverse"].sqrt()
    weights = known["in"] @ some @ known["out"].T  # (draws, D, outputs)
    found: torch.Tensor = (out.double() + phi @ weights).detach()
    return found


@pytest.mark.parametrize("likelihood", ["hazard", "cox"])
def test_survival_models_give_curves_risks_and_medians(
    likelihood: str, folder: Path, tmp_path: Path
) -> None:
    settings = {"task": "survival", "likelihood": likelihood, "intervals": 12}
    result, _ = run(folder, "times.npz", tmp_path / "run", **settings)
    cards = models_of(tmp_path)
    block = result["final"]["personal"]
    for card, row in zip(cards, block["per_client"], strict=True):
        assert card["uncertainty"]["used"] == "posterior"
        for key in ("c_index", "integrated_brier", "nll"):
            point = card["uncertainty"]["tests"]["test"]["point"][key]
            assert point == pytest.approx(row[key], rel=1e-4), key
            assert card["metrics"][key] == pytest.approx(point, rel=0.3), key
    model = load_personal(tmp_path / "models" / "client-1")
    with np.load(folder / "times.npz") as raw:
        x, y = raw["x"][60:100].astype(np.float32), raw["y"][60:100]
    curves, risk = model.predict_survival(x), model.predict(x)
    assert curves.shape == (40, 12)
    assert np.all(np.diff(curves, axis=1) <= 0)
    assert np.corrcoef(curves.mean(1), risk)[0, 1] < -0.9  # a higher risk is a lower curve
    np.testing.assert_allclose(model(torch.tensor(x)).detach(), curves, rtol=1e-5, atol=1e-6)
    drawn = outputs_drawn(model, x)  # (draws, N, outputs)
    if likelihood == "cox":
        hazard = torch.tensor(block["baseline"]["cumulative_hazard"])  # everyone's
        want = torch.exp(-hazard * drawn.exp()).mean(0)
    else:
        chance = torch.sigmoid(drawn + np.log(2 ** (1 / 12) - 1))  # of an event in each interval
        want = torch.cumprod(1 - chance, -1).mean(0)
    np.testing.assert_allclose(curves, want, atol=0.015)  # both are means over draws
    shares = model.predict_quantile(x, (0.25, 0.5))  # type: ignore[attr-defined]
    np.testing.assert_allclose(shares[:, 1], model.predict_median(x))
    assert np.all(shares[:, 0] <= shares[:, 1])
    first = [
        next((t for t, s in zip(model.times, row, strict=True) if s <= 0.5), np.inf)
        for row in curves
    ]
    np.testing.assert_allclose(model.predict_median(x), first)
    at = [0.0, model.times[0], (model.times[3] + model.times[4]) / 2, 1e9]
    want = np.stack([np.ones(40), curves[:, 0], curves[:, 3], curves[:, -1]], 1)
    np.testing.assert_array_equal(model.predict_survival(x, at), want)
    assert model.score(x, y) > 0.6
    with pytest.raises(ConfigError, match="predict_survival"):
        model.predict_proba(x)
    page = reported(tmp_path)
    for words in ("Share without the event over time", "Calibration at the horizon", "C-index"):
        assert words in page
    assert f"by time {block['horizon']:.4g}, predicted and observed" in page
    # a new client fits its own model, under everyone's baseline
    np.savez(tmp_path / "new.npz", x=x, y=y)
    card = personalise(tmp_path / "run", tmp_path / "new.npz", tmp_path / "new", ("safetensors",))
    assert card["never_trained"]
    assert load_personal(tmp_path / "new").predict_survival(x).shape == (40, 12)


def test_without_a_result_cox_has_the_clients_own_baseline(folder: Path, tmp_path: Path) -> None:
    settings = {"task": "survival", "likelihood": "cox"}
    _, prepared = run(folder, "times.npz", tmp_path / "run", **settings)
    (tmp_path / "run" / "result.json").unlink()
    cards = models_of(tmp_path)
    assert cards[0]["data"]["targets"]["events"] > 0
    model: Any = load_personal(tmp_path / "models" / "client-0")
    data, task = prepared.federation.clients[0], prepared.halves.model.task
    scores = model.network(torch.tensor(data.x_train))
    own = task.tally_training(scores.detach(), torch.tensor(data.y_train), torch.ones(len(scores)))
    found = model.ready.extras()["baseline/hazard"]
    np.testing.assert_allclose(found, breslow(own.events, own.at_risk), rtol=1e-4)


def test_models_of_labels_give_a_probability_each(folder: Path, tmp_path: Path) -> None:
    result, _ = run(folder, "labels.npz", tmp_path / "run", task="labels")
    cards = models_of(tmp_path)
    row = result["final"]["personal"]["per_client"][2]
    point = cards[2]["uncertainty"]["tests"]["test"]["point"]
    assert point["macro_auroc"] == row["macro_auroc"]
    assert point["nll"] == pytest.approx(row["nll"], rel=1e-5)
    assert cards[2]["metrics"]["nll"] != point["nll"]
    assert cards[2]["data"]["classes"] == ["u", "v"]
    page = reported(tmp_path)
    for words in ("AUROC of each label", "Reliability: FedPer", ">u</td>", "macro, micro"):
        assert words in page
    model = load_personal(tmp_path / "models" / "client-2")
    raw = np.load(folder / "labels.npz")
    x, y = raw["x"][100:].astype(np.float32), raw["y"][100:]
    found = model.predict_proba(x)
    assert found.shape == (30, 2)
    np.testing.assert_array_equal(model.predict(x), found >= 0.5)
    np.testing.assert_allclose(found, outputs_drawn(model, x).sigmoid().mean(0), atol=0.012)
    assert model.score(x, y) == (model.predict(x) == y).mean() > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hazard", "cox", "labels"])
def test_programs_say_the_same(name: str, folder: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnxruntime")
    settings = {"task": "labels"}
    if name != "labels":
        settings = {"task": "survival", "likelihood": name}
    run(folder, "labels.npz" if name == "labels" else "times.npz", tmp_path / "run", **settings)
    card = export(tmp_path / "run", 1, tmp_path / "model", ("safetensors", "pt2", "onnx"))
    assert card["files"]["pt2"] == "model.pt2"
    model = load_personal(tmp_path / "model")
    x = np.load(folder / "times.npz")["x"][60:100].astype(np.float32)
    session = onnx.InferenceSession(tmp_path / "model" / "model.onnx")
    said = dict(
        zip(
            [one.name for one in session.get_outputs()],
            session.run(None, {session.get_inputs()[0].name: x}),
            strict=True,
        )
    )
    if name == "labels":
        np.testing.assert_allclose(said["probabilities"], model.predict_proba(x), atol=1e-5)
        return
    assert isinstance(model, PersonalSurvival)
    np.testing.assert_allclose(said["survival"], model.predict_survival(x), atol=2e-5)
    np.testing.assert_allclose(said["median"], model.predict_median(x), rtol=1e-5)
    np.testing.assert_allclose(said["risk"], model.predict(x), rtol=1e-4, atol=1e-5)


def test_a_new_clients_table_has_the_columns_of_the_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows = ["site,age,days,died"]
    for place in range(60):
        age = draw.uniform(30, 80)
        rows.append(f"{place % 2},{age:.1f},{draw.exponential(900 / age):.2f},{place % 3 > 0}")
    (tmp_path / "all.csv").write_text("\n".join(rows))
    (tmp_path / "new.csv").write_text("\n".join(["age,days,died", *(r[2:] for r in rows[1:20])]))
    given = {"target": "days,died", "sites": "site", "task": "survival", "intervals": 4}
    run(tmp_path, "all.csv", tmp_path / "run", rounds=1, **given)
    card = personalise(tmp_path / "run", tmp_path / "new.csv", tmp_path / "new", ("safetensors",))
    assert card["units"] == "times are in the units of the training times (column 'days')"
    assert card["data"]["targets"]["events"] > 0
    (tmp_path / "bad.csv").write_text("site,age,days,died\n0,50,12,maybe\n1,60,3,yes")
    with pytest.raises(
        ConfigError, match=r"the event in column 'died' of .*bad.csv must hold 1 and"
    ):
        run(tmp_path, "bad.csv", tmp_path / "bad", **given)
