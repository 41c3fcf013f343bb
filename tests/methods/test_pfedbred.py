"""pFedBreD and pFedMe against golden vectors, the proximal point, and two rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds, mean
from torch import nn
from torch.func import functional_call

from bayflower.clients.pfedbred import Client, Memo
from bayflower.config import Training
from bayflower.contract import ClientHalf
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch, Model, masked_mean
from bayflower.rounds import solo
from bayflower.strategies.fedavg import State as Broadcast
from bayflower.strategies.pfedbred import Config

W = "0.weight"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got[W][0], doubles(want), rtol=1e-9, atol=1e-11)


@pytest.fixture
def quadratic(monkeypatch):
    """F(w; B) = ½ Σ a (w − t)², the batch's input being t."""

    def of(curvature):
        def loss(self, params, work, batch, noise, phase):
            apart = (doubles(curvature) * (params[W] - batch.x).square()).sum(1) / 2
            return masked_mean(apart, batch.mask), work.buffers

        monkeypatch.setattr(ClientHalf, "loss", loss)

    return of


@pytest.mark.parametrize("prior", ["lg", "meg", "mh", "none"])
def test_golden_iterations(baselines, quadratic, prior):
    """[eq. 1], [eq. 2], [eq. 3] to [eq. 6]: two steps with given theta and w_last."""
    every = baselines["pfedbred"]
    known = every["pfedme" if prior == "none" else prior]
    quadratic(known["curvature"])
    model = Model(lambda: nn.Sequential(nn.Linear(2, 1, bias=False)), 2)
    config = Config(
        prior,
        every["weight"],
        every["eta"],
        every["meta_lr"],
        every["prox_steps"],
        every["personal_lr"],
    )
    half = Client(config, Training(optimizer="sgd", lr=every["lr"]), model)
    (phase,) = half.phases("train")
    start = [{W: doubles(known[f"{n}_start"])[None]} for n in ("w", "theta", "last")]
    work = half.begin(
        half.init(start[0], {}), Broadcast(start[0], {}), Batch(*[torch.zeros(1, 2)] * 3)
    )._replace(memo=Memo(*start[1:]))
    work = solo.fresh_optimizer(phase, work)
    each = [
        Batch(doubles([t, [7.0, 7.0]]), torch.zeros(2).long(), doubles([1.0, 0.0]))
        for t in known["optima"]
    ]
    for number, want in enumerate(known["trace"]):
        some = each[2 * number : 2 * number + 2] if prior == "mh" else each[number : number + 1]
        close(half.prior(work, tuple(some), {}, phase)[1], want["prior_mean"])
        work, _ = half.step(phase, work, tuple(some), {})
        close(work.memo.theta, want["theta"])
        close(work.params, want["w"])


def test_many_personal_steps_reach_the_proximal_point(quadratic):
    """[eq. 5] without end is (a t + lambda s) / (a + lambda)."""
    a, t, s = doubles([2.0, 0.5]), doubles([1.0, -2.0]), doubles([0.3, 0.1])
    quadratic(a.tolist())
    model = Model(lambda: nn.Sequential(nn.Linear(2, 1, bias=False)), 2)
    half = Client(Config(bred_prox_steps=400), Training(), model)
    batch = Batch(t[None], torch.zeros(1).long(), torch.ones(1).double())
    work = half.begin(half.init({W: s[None]}, {}), Broadcast({W: s[None]}, {}), batch)
    after, _ = half.near({W: s[None]}, {W: s[None]}, work, batch, {}, half.phases("new")[0])
    torch.testing.assert_close(after.memo.theta[W][0], (a * t + 15 * s) / (a + 15))


@pytest.mark.parametrize("method", ["pfedbred", "pfedme"])
def test_two_rounds_equal_plain_torch(method):
    """[eq. 3] and [eq. 4] with [eq. 5] and [eq. 6], by autograd; theta and w_last are kept."""
    tie, eta, a, p, times = 8.0, 0.3, 0.02, 0.03, 3
    case = both(
        method,
        bred_weight=tie,
        bred_eta=eta,
        bred_meta_lr=a,
        bred_personal_lr=p,
        bred_prox_steps=times,
    )
    module, names = case.prepared.halves.model.factory().double(), list(case.start)
    (phase,) = case.prepared.halves.client.phases("train")
    world, own = case.start, {}
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        models = {}
        for client in case.clients:
            samples = case.samples[client]
            w = world
            theta, last = own.get(client, (world, world))

            def slope(params, rows, samples=samples):
                params = {n: v.detach().requires_grad_() for n, v in params.items()}
                out = functional_call(module, params, (samples.x[rows],))
                loss = nn.functional.cross_entropy(out, samples.y[rows])
                return dict(zip(names, torch.autograd.grad(loss, params.values()), strict=True))

            for group in batches.plan(
                len(samples.y),
                phase,
                seed=0,
                client=client,
                round=round,
                purpose="train",
                coupled=False,
            ):
                s = w
                if method == "pfedbred":
                    first = slope(w, group[0])
                    second = slope({n: w[n] - a * first[n] for n in names}, group[1])
                    w = {n: w[n] - a * second[n] for n in names}
                    s = {n: w[n] - eta * (last[n] - theta[n]) for n in names}
                x = w
                for _ in range(times):
                    grads = slope(x, group[-1])
                    x = {n: x[n] - p * (grads[n] + tie * (x[n] - s[n])) for n in names}
                theta = x
                w = {n: w[n] - LR * tie * (s[n] - theta[n]) for n in names}
            models[client], own[client] = w, (theta, w)
            assert_equal(updates[client].params, w)
            assert_equal(states[client].params, theta)
            assert_equal(states[client].last, w)
        world = mean(case, models)
        assert_equal(state.params, world)


def test_a_new_client_fits_its_model_around_the_global_one():
    case = both("pfedme")
    half, samples = case.prepared.halves.client, case.samples[case.clients[0]]
    sent = Broadcast(*case.prepared.halves.initial)
    fresh = half.init(*case.prepared.halves.initial)
    keys = {"seed": 0, "client": 9, "round": 1}
    state = solo.adapt(half, fresh, sent, samples, "new", **keys)
    assert_equal(state.last, sent.params)
    got = half.predict("personal", state, sent, samples.x, {})
    want = half.model.forward(state.params, state.buffers, samples.x, train=False)[0].softmax(1)
    torch.testing.assert_close(got, want)
    whole = half.predict("global", state, sent, samples.x, {})
    assert (
        half.model.nll(got.log(), samples.y).mean() < half.model.nll(whole.log(), samples.y).mean()
    )


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="bred_eta must be finite"):
        small("pfedbred", bred_eta=-1.0)
    with pytest.raises(ConfigError, match="must be below 2, or the personal steps diverge"):
        small("pfedbred", bred_personal_lr=0.2)
    with pytest.raises(ConfigError, match="bred_prox_steps must be at least 1"):
        small("pfedme", bred_prox_steps=0)
