"""noise=client: each client has the noise of its own residuals, on both engines, and keeps it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.rounds import solo
from bayflower.tasks import EXTRA, make
from bayflower.tree import flatten

STDS = (0.1, 0.5, 2.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of three sites that differ in their noise."""
    draw = np.random.default_rng(5)
    client = np.repeat(np.arange(3), (60, 80, 50))
    x = draw.normal(size=(190, 3))
    y = 20 + 3 * (x @ [1.0, -2.0, 0.5] + draw.normal(size=190) * np.array(STDS)[client])
    path = tmp_path_factory.mktemp("noise") / "numbers.npz"
    np.savez(path, x=x, y=y, client=client)
    return path


def prepared(method: str, data: Path, engine: str = "fused", **settings: Any) -> Any:
    usual = {"dataset": str(data), "partition": "natural", "rounds": 3, "lr": 0.05, "seed": 1}
    usual |= {"task": "regression", "noise": "client", "model": "linear", "dtype": "float64"}
    usual |= {"calibration": "off", "stacking": "yes", "local_epochs": 5}
    return prepare(parse(method, {**usual, **settings}), engine)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t"])
def test_the_noise_is_the_mode_of_its_posterior(likelihood: str) -> None:
    task = make("regression", likelihood, noise="client", location=2.0, scale=3.0, dof=4)
    draw = torch.Generator().manual_seed(0)
    y = 2 + 3 * torch.randn(9, generator=draw, dtype=torch.float64)
    mask = torch.ones(9, dtype=torch.float64)
    mask[7:] = 0  # padding
    prediction = torch.stack([torch.full_like(y, 1.5), torch.ones_like(y)], -1)

    # −log p of 7 samples, and of a prior worth one sample of variance 1: s + ½ e^{−2s}
    tried = torch.linspace(-2, 2, 40001, dtype=torch.float64)
    mean = torch.full((40001, 9), (1.5 - 2) / 3, dtype=torch.float64)
    out = torch.stack([mean, tried[:, None].expand(-1, 9)], -1)
    objective = (task.nll(out, y, mask) * mask).sum(-1) + tried + 0.5 * torch.exp(-2 * tried)
    best = float(tried[objective.argmin()])
    assert float(task.own_extra(prediction, y, mask)) == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("method", ["fedavg-ft", "fedmap"])
def test_it_is_that_of_the_residuals_and_stays(method: str, data: Path) -> None:
    found = prepared(method, data, model="mlp")
    halves, half = found.halves, found.halves.client
    server = halves.server.init(*halves.initial, (0, 1, 2))
    state, sent = half.init(*halves.initial), halves.server.broadcast(server, 2)
    samples = solo.samples(found.federation.clients[2], torch.device("cpu"), torch.float64)
    keys: Any = {"seed": 1, "client": 2, "round": 1}
    trained = solo.train(half, state, sent, samples.train, **keys)
    assert not any(EXTRA in name for name in (*flatten(trained.update), *flatten(sent)))
    assert not any(EXTRA in name for name in flatten(trained.state.inner))
    ready = solo.adapt(half, trained.state, sent, samples.train, "finetune", **keys)
    said = half.predict("personal", ready, sent, samples.train.x, {})
    residuals = ((samples.train.y - said[:, 0]) / half.model.task.scale).tolist()
    variance = (1 + sum(r * r for r in residuals)) / (1 + len(residuals))
    assert float(ready.extra) == pytest.approx(0.5 * math.log(variance), rel=1e-9)
    assert said[:, 1].tolist() == pytest.approx(
        [half.model.task.scale**2 * variance] * len(residuals)
    )
    params, _ = solo.numbers(half, ready, sent, samples.train.x[:1])
    assert torch.equal(params[EXTRA], ready.extra)


@pytest.mark.parametrize("method", ["fedavg", "fedmap"])
def test_engines_agree_and_the_noise_is_found(method: str, data: Path) -> None:
    settings: dict[str, Any] = {"rounds": 5}
    if method == "fedmap":
        settings["prior"] = "learned"
    loop, fused = (
        run_to_result(prepared(method, data, engine, **settings))["final"]["personal"]
        for engine in ("loop", "fused")
    )
    shared = run_to_result(prepared(method, data, noise="global", **settings))["final"]["personal"]
    assert loop["nll"] == pytest.approx(fused["nll"], rel=1e-6)
    assert loop["nll"] < shared["nll"] - 0.3
    for one, std in zip(loop["per_client"], STDS, strict=True):
        # width of a 90 % interval: 2 × 1.645 σ; the prior makes small noise wider
        assert 0.7 * 3 * std < one["width_90"] / 3.29 < 3 * max(1.3 * std, 0.75)
