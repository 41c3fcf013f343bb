"""dp=sample: a step against a slow loop over samples, what one sample can change, the same bits on
two engines, ε of local epochs, and what is refused.
"""

from __future__ import annotations

import math

import pytest
import torch

from bayflower import methods
from bayflower.config import parse
from bayflower.data import batches
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch
from bayflower.privacy import accounting
from bayflower.rounds.halves import make_halves
from bayflower.rounds.ownnoise import client_half

pytest.importorskip("dp_accounting")
BASE = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 4,
    "batch_size": 256,
    "rounds": 2,
    "local_epochs": 2,
    "calibration": "off",
    "evaluate_every": 0,
    "device": "cpu",
    "input_scale": "none",
    "dp": "sample",
}
CLIP, NOISE = 0.2, 1.3


def noisy_half(method="fedprox", **settings):
    run = parse(method, {"model": "mlp", "calibration": "off", "dtype": "float64", **settings})
    made = make_halves(run, (6,), 3)
    training = vars(made.client.training) | {"sample_clip": CLIP, "sample_noise": NOISE}
    half = client_half(type(made.client), run.options, type(run.training)(**training), made.model)
    return half, made


def some_step(half, made, rows=5):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64) * 3
    y = torch.randint(3, (rows,), generator=draw)
    mask = torch.ones(rows, dtype=torch.float64)
    mask[-1] = 0  # padding
    state = half.init(*made.initial)
    work = half.begin(state, made.server.broadcast(made.server.init(*made.initial, (0,)), 0), None)
    moved = {
        n: v + 0.1 * torch.randn(v.shape, generator=draw, dtype=v.dtype)
        for n, v in work.params.items()
    }
    work = work._replace(params=moved)
    (phase,) = half.phases("train")
    shapes = half.noise(phase.name, phase.batch_size)
    noise = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    return phase, work, Batch(x, y, mask), noise


def test_a_step_is_the_noisy_mean_of_cut_gradients():
    half, made = noisy_half()
    phase, work, batch, noise = some_step(half, made)
    found, buffers, _ = half.gradient(phase, work, (batch,), noise)
    total = {name: torch.zeros_like(value) for name, value in work.params.items()}
    cut = 0
    for row in range(4):  # the fifth is padding
        params = {n: v.clone().requires_grad_() for n, v in work.params.items()}
        single = Batch(*(one[row : row + 1] for one in batch))
        loss, _ = half.loss(params, work, single, {}, phase)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        cut += norm > CLIP
        for name, value in grads.items():
            total[name] += value * min(1.0, CLIP / norm)
    assert cut == 4
    for name, value in total.items():
        noisy = value + CLIP * NOISE * noise[f"secret/{name}"]
        torch.testing.assert_close(found[name], noisy / phase.batch_size)  # [eq. 1]
    assert buffers == work.buffers


def test_one_sample_changes_a_step_by_the_clip_at_most():
    half, made = noisy_half()
    phase, work, batch, noise = some_step(half, made)
    without = batch._replace(mask=batch.mask.clone().index_fill_(0, torch.tensor([1]), 0))
    usual = half.gradient(phase, work, (without,), noise)[0]
    found = []
    for label in range(3):
        x, y = batch.x.clone(), batch.y.clone()
        x[1], y[1] = 30 * x[1], label
        step = half.gradient(phase, work, (batch._replace(x=x, y=y),), noise)[0]
        apart = math.sqrt(sum(float((step[n] - usual[n]).square().sum()) for n in step))
        found.append(apart * phase.batch_size)
    assert max(found) == pytest.approx(CLIP, rel=1e-9)


def test_noise_does_not_follow_from_the_seed():
    keys = [batches.noise_key(0, "train/local", name, 1, 1) for name in ("secret/a", "a") * 2]
    assert keys[1] == keys[3]
    assert keys[0] != keys[2]


def carried(method, engine, **settings):
    return run_to_result(prepare(parse(method, {**BASE, **settings}), engine))


def test_fused_and_loop_have_the_same_bits_and_epochs_cost(monkeypatch):
    settings = {"dp_noise": 2.5, "dp_epsilon": 50.0, "stacking": "no", "fraction_train": 0.5}
    monkeypatch.setattr(batches, "SECRET", "nothing is secret/")  # as the seed says
    ours, theirs = (carried("fedavg", engine, **settings) for engine in ("fused", "loop"))
    assert ours["final"]["personal"]["nll"] == theirs["final"]["personal"]["nll"]
    assert ours["privacy"] == theirs["privacy"]
    cost = ours["privacy"]
    assert (cost["level"], cost["sums_per_round"]) == ("sample", 2)
    counts = {accounting.epsilon(2.5, 2 * rounds, 1e-5) for rounds in (1, 2)}
    assert set(cost["per_client"].values()) <= counts
    assert cost["epsilon"] == max(cost["per_client"].values())


@pytest.mark.slow
def test_a_stack_of_clients_steps_as_one_by_one(monkeypatch):
    monkeypatch.setattr(batches, "SECRET", "nothing is secret/")
    settings = {"dp_noise": 2.5, "dp_epsilon": 50.0, "dtype": "float64", "rounds": 1}
    alone, stacked = (carried("fedper", "fused", **settings, stacking=s) for s in ("no", "yes"))
    assert stacked["rounds"][0]["stacked"] == 4
    ours, theirs = (r["final"]["personal"]["nll"] for r in (alone, stacked))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_what_would_mingle_samples_is_refused():
    for row in methods.ROWS:
        if not row.in_loss_alone:
            with pytest.raises(ConfigError, match=f"dp=sample is not for {row.name}: "):
                parse(row.name, {"dp": "sample", "input_scale": "none"})
    for settings, text in (
        ({"input_scale": "client"}, "needs input_scale=none"),
        ({"local_steps": 3}, "needs local_steps=0"),
        ({"mixup": 0.2}, "needs mixup=0.0"),
        ({"class_weights": "federation"}, "needs class_weights=none"),
        ({"sample_noise": 1.0}, "follow from dp=sample"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse("fedavg", {"dp": "sample", "input_scale": "none", **settings})
    with pytest.raises(ConfigError, match="network without BatchNorm"):
        carried("fedavg", "fused", model="mlp-bn", rounds=1)
