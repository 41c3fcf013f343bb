"""The uncertainty of numbers, counts and ordered classes: the posterior's spread, conformal
intervals from sums that add up, and personal models that are taken home.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import some
from oracles.hierarchy import Client, posterior

from bayflower import load_personal
from bayflower.calibration import intervals
from bayflower.calibration.conformal import BINS
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.maths import laplace
from bayflower.networks.model import Batch
from bayflower.personal import export, personalise
from bayflower.personal.runs import open_run
from bayflower.tasks import make
from bayflower.tasks.saved import from_json, to_json

TIMES = torch.float64


# -- mathematics -----------------------------------------------------------------------------------
def test_the_spread_of_a_linear_model_is_that_of_bayesian_regression() -> None:
    draw = torch.Generator().manual_seed(1)
    phi = torch.randn(30, 4, generator=draw, dtype=TIMES)
    task = make("regression", noise="known", noise_std=0.7)
    weights = torch.randn(1, 4, generator=draw, dtype=TIMES)
    batch = Batch(phi, torch.zeros(30, dtype=TIMES), torch.ones(30, dtype=TIMES))
    seen = laplace.see_task(task, phi @ weights.T, phi, batch)
    found = laplace.fitted(seen, weights)
    a = torch.linalg.eigvalsh(phi.T @ phi / 0.7**2)
    prior = laplace.best_prior(a[:, None], weights)
    exact = torch.linalg.inv(phi.T @ phi / 0.7**2 + prior * torch.eye(4, dtype=TIMES))
    new = torch.randn(5, 4, generator=draw, dtype=TIMES)
    wanted = ((new @ exact) * new).sum(-1)
    torch.testing.assert_close(laplace.variances(found.kind, found.tensors, new)[:, 0], wanted)


def test_a_dense_posterior_moves_logits_as_its_covariance_says() -> None:
    draw = torch.Generator().manual_seed(6)
    half = torch.randn(9, 9, generator=draw, dtype=TIMES)
    cover = half @ half.T
    cover[3:6] = cover[:, 3:6] = 0  # the second output is certain
    phi = torch.randn(4, 3, generator=draw, dtype=TIMES)
    phi[0] = 0
    rows = [torch.kron(torch.eye(3, dtype=TIMES), one[None]) for one in phi]
    exact = torch.stack([one @ cover @ one.T for one in rows])
    found = laplace.variances("dense", {"covariance": cover}, phi)
    torch.testing.assert_close(found, exact.diagonal(dim1=1, dim2=2))
    root = laplace.triangle(exact)
    torch.testing.assert_close(root @ root.mT, exact)
    moved = laplace.offsets("dense", {"covariance": cover}, torch.zeros(4, 3, dtype=TIMES), phi)
    torch.testing.assert_close(moved, torch.einsum("ncp,jp->jnc", root, laplace.draws(3)))


def test_an_uncertain_rate_widens_counts_to_the_mean_and_variance_of_the_mixture() -> None:
    draw = torch.Generator().manual_seed(2)
    for likelihood, extra in (("poisson", []), ("negative-binomial", [math.log(3.0)])):
        task = make("counts", likelihood)
        out = torch.tensor([[0.7, *extra]], dtype=TIMES)
        found = task.widened(out, torch.tensor([[0.3]], dtype=TIMES))
        rate = torch.exp(0.7 + math.sqrt(0.3) * torch.randn(400_000, generator=draw, dtype=TIMES))
        second = rate + rate.square() * (1 + bool(extra) / 3.0)
        mean, size = found[0].tolist()
        assert mean == pytest.approx(float(rate.mean()), rel=0.01)
        assert mean + mean**2 / size == pytest.approx(
            float(second.mean() - rate.mean().square()), rel=0.03
        )
        steps = task.distribution(found)[0]  # type: ignore[attr-defined]
        total = (1 - steps).sum()  # E Y = Σ P(Y > k)
        assert float(total) == pytest.approx(mean, rel=1e-6)


def test_an_uncertain_score_gives_ordered_classes_their_mean_probabilities() -> None:
    task = make("ordinal", size=4)
    out = torch.tensor([[0.4, *task.extra()]], dtype=TIMES)
    grid = torch.linspace(-12, 12, 20_001, dtype=TIMES)
    weight = torch.exp(-0.5 * grid.square())
    moved = out.repeat(len(grid), 1)
    moved[:, 0] = 0.4 + 1.3 * grid
    wanted = (task.predict(moved) * weight[:, None]).sum(0) / weight.sum()
    found = task.widened(out, torch.tensor([[1.3**2]], dtype=TIMES))
    torch.testing.assert_close(found[0], wanted, atol=1e-8, rtol=1e-6)


def counted(r: torch.Tensor) -> torch.Tensor:
    """Return the histogram of residuals r of a prediction N(0, 1)."""
    prediction = torch.stack([torch.zeros_like(r), torch.ones_like(r)], -1)
    return intervals.histogram(prediction, r, torch.ones_like(r))


def test_factors_are_the_sorted_residuals_and_sums_of_clients_are_the_pooled_ones() -> None:
    draw = torch.Generator().manual_seed(3)
    r = torch.randn(500, generator=draw, dtype=TIMES).abs()
    parts = [counted(part) for part in r.split([100, 250, 150])]
    pooled = counted(r)
    assert torch.equal(sum(parts), pooled)  # type: ignore[arg-type]
    found = intervals.factors(pooled, pooled, "client")
    ranks = [math.ceil(501 * level - 1e-9) for level in intervals.LEVELS]
    wanted = r.sort().values[torch.tensor(ranks) - 1]
    assert ((found >= wanted) & (found <= wanted * 1.01)).all()
    few = intervals.factors(counted(r[:5]), pooled, "client")
    assert torch.isinf(few[intervals.LEVELS.index(0.9)])  # five samples promise no 90 %
    task = make("regression")
    assert math.isfinite(intervals.factor_at(task, few, 0.9) or math.inf)


@pytest.mark.parametrize(("how", "held"), [("shrunk", 6), ("client", 60), ("global", 6)])
def test_intervals_cover_what_they_say_under_another_noise_than_the_models(
    how: str, held: int
) -> None:
    draw = torch.Generator().manual_seed(4)
    noise = torch.randn(300, held + 40, generator=draw, dtype=TIMES) ** 3  # heavy tails
    own = torch.stack([counted(row) for row in noise[:, :held]])
    total = own.sum(0)
    task = make("regression")
    inside = {0.5: 0, 0.9: 0}
    for row, mine in zip(noise[:, held:], own, strict=True):
        known = intervals.factors(mine, total, how)
        for level in inside:
            factor = intervals.factor_at(task, known, level)
            assert factor is not None
            inside[level] += int((row.abs() <= factor).sum())
    for level, number in inside.items():
        assert number / noise[:, held:].numel() == pytest.approx(level, abs=0.025), level
    assert total.shape == (BINS,)


def test_a_task_is_made_again_from_its_card() -> None:
    for task in (
        make("regression", "student-t", noise="input", location=3.0, scale=2.0, dof=5),
        make("counts", "negative-binomial"),
        make("ordinal", size=5),
    ):
        assert from_json(json.loads(json.dumps(to_json(task)))) == task


def test_a_noise_has_a_prior_worth_one_sample() -> None:
    """The most likely noise of N residuals is that of N + 1, one of them everyone's deviation."""
    for likelihood in ("gaussian", "student-t"):
        task: Any = make("regression", likelihood, noise="global", scale=4.0)
        z = torch.tensor([0.3, -0.2, 0.05], dtype=TIMES)
        logs = torch.linspace(-4, 2, 60_001, dtype=TIMES)
        total = task.standard_nll(z[:, None] * torch.exp(-logs)).sum(0) + 3 * logs
        prior = torch.stack([task.extra_prior(one[None]) for one in logs[::6000]])
        wanted = logs[::6000] + task.standard_nll(torch.exp(-logs[::6000]))
        torch.testing.assert_close(prior, wanted)
        if likelihood == "gaussian":
            best = logs[(total + logs + task.standard_nll(torch.exp(-logs))).argmin()]
            assert float(torch.exp(2 * best)) == pytest.approx((float(z @ z) + 1) / 4, rel=1e-3)
    assert float(make("counts", "negative-binomial").extra_prior(torch.ones(1))) == 0


def drifting(seed: int, clients: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows of clients whose level walks at random in time: steps of every tenth row."""
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(clients, size, 1)), []
    for number in range(clients):
        walk = np.repeat(draw.normal(size=size // 10).cumsum(), 10)
        y.append(x[number, :, 0] + walk + 0.3 * draw.normal(size=size))
    owner = np.repeat(np.arange(clients), size)
    return x.reshape(-1, 1).astype(np.float32), np.concatenate(y), owner


@pytest.mark.slow
def test_intervals_by_time_hold_what_comes_later(tmp_path: Path) -> None:
    """Levels walk, so the next block lies where its client's own blocks did not: everyone's first
    blocks, as long as the test, say how far. Own scores alone promise too much.
    """
    x, y, client = drifting(11, 60, 100)
    np.savez(tmp_path / "walks.npz", x=x, y=y, client=client)
    given = {"dataset": str(tmp_path / "walks.npz"), "task": "regression", "split": "time"}
    given |= {
        "partition": "natural",
        "model": "linear",
        "rounds": 12,
        "lr": 0.1,
        "prior": "learned",
    }
    covered = {}
    for how in ("shrunk", "client"):
        made = prepare(parse("fedmap", {**given, "calibration": how}), "fused")
        one = made.federation.clients[7]
        assert (len(one.y_train), len(one.y_held), len(one.y_test)) == (60, 20, 20)  # type: ignore[arg-type]
        np.testing.assert_allclose(one.y_held, y[client == 7][:20], rtol=1e-6)
        found = run_to_result(made)["uncertainty"]
        assert found["calibration"] == {"shrunk": "global"}.get(how, how)
        covered[how] = found["clients"]["forms"]["calibrated"]["coverage_90"]
    assert covered["shrunk"] == pytest.approx(0.9, abs=0.06)
    assert covered["client"] < covered["shrunk"] - 0.05
    tuned = prepare(parse("fedmap", {**given, "validation": 0.25}), "fused")
    last = tuned.federation.clients[7].y_test
    np.testing.assert_allclose(last, y[client == 7][60:80], rtol=1e-6)  # those before the test


# -- whole runs ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of sites of 60, 40, 30, 3 and 1 rows."""
    draw = np.random.default_rng(5)
    lines = ["site,a,b,y,visits,grade"]
    for site, size in enumerate((60, 40, 30, 3, 1)):
        for _ in range(size):
            a, b = draw.normal(size=2)
            y = 20 + 3 * site + 4 * a - 2 * b + 2 * draw.normal()
            visits, grade = draw.poisson(np.exp(0.4 * a + 1)), int(np.digitize(y, [18, 24]))
            lines.append(
                f"s{site},{a:.4f},{b:.4f},{y:.4f},{visits},{('1 low', '2 mid', '3 up')[grade]}"
            )
    path = tmp_path_factory.mktemp("sites") / "sites.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(table: Path, task: str, target: str, **more: Any) -> dict[str, Any]:
    others = ",".join({"y", "visits", "grade"} - {target})
    usual = {"dataset": str(table), "target": target, "sites": "site", "drop": others}
    return {**usual, "task": task, "model": "linear", "rounds": 4, "lr": 0.05, **more}


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the result of a calibrated run on the loop engine."""
    folder = tmp_path_factory.mktemp("run") / "out"
    given = settings(table, "regression", "y", dtype="float64", checkpoint_every=4)
    return folder, run_to_result(prepare(parse("fedmap", given), "loop"), folder)


def test_both_engines_calibrate_alike(table: Path, run: tuple[Path, dict[str, Any]]) -> None:
    given = settings(table, "regression", "y", dtype="float64", stacking="yes")
    ours = run_to_result(prepare(parse("fedmap", given), "fused"))["uncertainty"]
    theirs = run[1]["uncertainty"]
    assert theirs["rows"] == ours["rows"] == 21
    for form, block in theirs["clients"]["forms"].items():
        for key in ("nll", "crps", "coverage_90", "width_90"):
            assert block[key] == pytest.approx(ours["clients"]["forms"][form][key], rel=1e-6)
    for row, other in zip(
        theirs["clients"]["per_client"], ours["clients"]["per_client"], strict=True
    ):
        assert (row["posterior"], row["rows"]) == (other["posterior"], other["rows"])
        assert row["factor_90"] == pytest.approx(other["factor_90"], rel=0.01)
    assert theirs["clients"]["per_client"][-1]["num_examples"] == 0
    assert run[1]["task"]["likelihood"] == "gaussian"


def test_a_personal_model_of_numbers_is_taken_home(
    table: Path, run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, result = run
    card = export(folder, 0, tmp_path / "model", ("safetensors",))
    row = result["uncertainty"]["clients"]["per_client"][0]
    assert card["task"]["name"] == "regression"
    assert card["uncertainty"]["intervals"]["factor"] == pytest.approx(row["factor_90"])
    assert card["metrics"]["coverage_90"] == row["coverage_90"]
    assert "column 'y'" in card["units"]
    model = load_personal(tmp_path / "model")
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table)
    ours = frame[frame.site == "s0"]
    mean, ends = model.predict(ours), model.predict_interval(ours, 0.9)  # type: ignore[attr-defined]
    assert ((ends[:, 0] < mean) & (mean < ends[:, 1])).all()
    inside = ((ends[:, 0] <= ours.y) & (ours.y <= ends[:, 1])).mean()
    assert 0.8 <= inside <= 1
    assert model.score(ours, ours.y) > 0.3
    quantiles = model.predict_quantile(ours, (0.05, 0.5, 0.95))  # type: ignore[attr-defined]
    np.testing.assert_allclose(quantiles[:, [0, 2]], ends, rtol=1e-6)
    drawn = model.sample(ours, 400)  # type: ignore[attr-defined]
    np.testing.assert_allclose(drawn.mean(0), mean, atol=1.0)
    module = model(torch.as_tensor(ours[["a", "b"]].to_numpy()))
    np.testing.assert_allclose(module[:, 0].detach().numpy(), mean, rtol=1e-6)
    for call, said in (
        (lambda: model.predict_proba(ours), "has no classes"),
        (lambda: model.drift(ours), "alarms and drift are for task=classification"),
        (lambda: model.predict_interval(ours, 90), "must be in"),  # type: ignore[attr-defined]
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    alone = export(folder, 4, tmp_path / "alone")
    assert alone["data"]["num_train"] == 1
    assert alone["metrics"] is None
    new = tmp_path / "new.csv"
    ours[["a", "b", "y"]].to_csv(new, index=False)
    made = personalise(folder, new, tmp_path / "new", ("safetensors",))
    assert made["never_trained"]
    assert made["uncertainty"]["intervals"]["conformal"]


@pytest.mark.parametrize("prior", some(["learned", "learned, onnx", "full"], ["learned"]))
def test_a_model_with_a_learned_prior_takes_its_exact_posterior_home(
    prior: str, table: Path, tmp_path: Path
) -> None:
    """Mean and variance of predictions are those of the hierarchy, computed densely: posterior
    under the learned prior, and noise; from the files and by the program.
    """
    prior, _, form = prior.partition(", ")
    given = settings(table, "regression", "y", dtype="float64", checkpoint_every=24, rounds=24)
    given |= {"prior": prior, "calibration": "off", "test_fraction": 0.1}
    given |= {"input_scale": "none", "target_scale": "none", "start_variance": 100.0}
    given |= {"hyperprior": "flat"}  # the other one is for standardised inputs and targets
    prepared = prepare(parse("fedmap", given), "fused")
    run_to_result(prepared, tmp_path / "run")
    x = np.array([[1.0, 0.0], [-3.0, 2.0], [0.0, 0.0]])
    with_one = np.c_[np.ones(3), x]
    for number in (0, 3):
        formats = ("safetensors", form) if form and number == 0 else ("safetensors",)
        card = export(tmp_path / "run", number, tmp_path / f"{number}", formats)
        assert card["uncertainty"]["posterior"]["kind"] == "dense"
        model: Any = load_personal(tmp_path / f"{number}")
        end = open_run(tmp_path / "run").server
        bias, weight = end.params["head.bias"], end.params["head.weight"][0]
        gamma, noise = torch.cat([bias, weight]).numpy(), float(end.params["task_extra"].exp())
        if prior == "full":
            wide = (end.prior["root"] @ end.prior["root"].mT).numpy()
        else:
            std = torch.cat([end.prior["std/head.bias"], end.prior["std/head.weight"][0]])
            wide = std.square().diag().numpy()
        one = prepared.federation.clients[number]
        own = Client(np.c_[np.ones(len(one.y_train)), one.x_train], one.y_train)
        mean, cover = posterior(own, gamma, wide, noise)
        exact = np.einsum("nd,de,ne->n", with_one, cover, with_one) + noise**2
        said = model(torch.as_tensor(x)).detach().numpy()
        np.testing.assert_allclose(said[:, 0], with_one @ mean, rtol=1e-3)
        np.testing.assert_allclose(said[:, 1], exact, rtol=1e-3)
        assert number == 0 or exact.max() > 1.1 * noise**2  # three samples leave doubt
        ends = model.predict_interval(x, 0.9)
        np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 2 * 1.64485 * exact**0.5, rtol=1e-3)
    if form:
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "0" / "model.onnx")
        model = load_personal(tmp_path / "0")
        names = [one.name for one in session.get_outputs()]
        found = session.run(None, {session.get_inputs()[0].name: x})
        upper = dict(zip(names, found, strict=True))["upper"]
        np.testing.assert_allclose(upper, model.predict_interval(x)[:, 1], rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "target", "likelihood"),
    [
        ("counts", "visits", "poisson"),
        ("counts", "visits", "negative-binomial"),
        ("ordinal", "grade", "auto"),
        ("regression", "y", "student-t"),
    ],
)
def test_other_tasks_are_taken_home_too(
    task: str, target: str, likelihood: str, table: Path, tmp_path: Path
) -> None:
    given = settings(table, task, target, likelihood=likelihood, checkpoint_every=4)
    if task == "ordinal":
        given |= {"leave_out": "s3,s4"}
    if task == "regression":
        given |= {"noise": "input", "calibration": "off"}
    run_to_result(prepare(parse("fedavg", given)), tmp_path / "run")
    card = export(tmp_path / "run", 0, tmp_path / "model", ("safetensors",))
    assert card["uncertainty"]["used"] == "posterior"
    model: Any = load_personal(tmp_path / "model")
    x = np.array([[1.0, 0.0], [-1.0, 0.0]])
    ends = model.predict_interval(x, 0.9)
    assert (ends[:, 0] <= ends[:, 1]).all()
    if task == "ordinal":
        np.testing.assert_allclose(model.predict_proba(x).sum(1), 1, rtol=1e-6)
        assert set(model.predict(x)) <= {0, 1, 2}
    else:
        mean = model.predict(x)
        assert mean[0] > mean[1]
        assert ((ends[:, 0] <= mean) & (mean <= ends[:, 1])).all()
