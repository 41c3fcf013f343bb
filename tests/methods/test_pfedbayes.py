"""pFedBayes against golden vectors, two rounds in plain torch, and the spread that goes home."""

from __future__ import annotations

import pytest
import torch
from conftest import small, small_prepared
from plainsteps import LR, assert_equal, both, half_rounds, mean
from torch import nn
from torch.func import functional_call

from bayflower.clients.pfedbayes import kl, spread
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.rounds import solo
from bayflower.rounds.uncertain import Uncertain, fit_alone
from bayflower.strategies.pfedbayes import Config, Server, State, Update


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-11)


def test_golden_kl_and_its_gradients(baselines):
    """[eq. 2], its four gradients, and one step of the prior down zeta/n of it."""
    known = baselines["pfedbayes"]
    given = {n: doubles(known[n]).requires_grad_() for n in ("mu", "rho", "mu_w", "rho_w")}
    sigma, s = spread(given["rho"]), spread(given["rho_w"])
    close(sigma.detach(), known["sigma"])
    close(s.detach(), known["sigma_w"])
    found = kl(given["mu"], sigma, given["mu_w"], s)
    close(found.detach(), known["kl"])
    grads = dict(zip(given, torch.autograd.grad(found, list(given.values())), strict=True))
    for name, grad in grads.items():
        close(grad, known["grad_kl"][name])
    close(given["mu"].detach() + sigma.detach() * doubles(known["noise"]), known["weights"])
    weight = known["zeta"] / known["samples"]
    assert weight * float(found.detach()) == pytest.approx(known["kl_term_per_sample"], rel=1e-9)
    for name in ("mu_w", "rho_w"):
        after = given[name].detach() - known["lr"] * weight * grads[name]
        close(after, known[f"{name}_after_sgd_step"])


def test_golden_server_average(baselines):
    """[eq. 3] with a rate below 1."""
    known = baselines["pfedbayes"]["server"]
    server = Server(Config(bayes_rate=known["beta"]), None)
    old = {"w": doubles(known["old"])}
    state, total = State(old, {}, old), {}
    for number, value in zip(known["n"], known["clients"], strict=True):
        sent = {"w": doubles(value)}
        update = Update(torch.tensor(number), sent, {}, sent)
        assert server.check(state, 0, update) is None
        for name, one in server.statistic(state, 0, update).items():
            one = one if isinstance(one, torch.Tensor) else one.tensor * one.weight
            total[name] = total.get(name, 0) + one
    after = server.finalise(state, total)
    close(after.params["w"], known["new"])
    close(after.rho["w"], known["new"])
    wide = Update(torch.tensor(3), old, {}, {"w": doubles([0.0, 16.0, 0.0])})
    assert "rho must be in [-15, 15]" in (server.check(state, 0, wide) or "")


@pytest.mark.parametrize("layers", ["all", "head"])
def test_two_rounds_equal_plain_torch(layers):
    """[eq. 1] with two draws a step, by autograd on four groups of numbers of each client."""
    zeta, draws = 3.0, 2
    case = both(
        "pfedbayes", bayes_zeta=zeta, bayes_samples=draws, bayes_layers=layers, bayes_start_rho=-2.0
    )
    names = [n for n in case.start if layers == "all" or n.startswith("head")]
    world, spreads = case.start, {n: torch.full_like(case.start[n], -2.0) for n in names}
    module, half, own = (
        case.prepared.halves.model.factory().double(),
        case.prepared.halves.client,
        {},
    )
    (phase,) = half.phases("train")

    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        sent_means, sent_rho = {}, {}
        for client in case.clients:
            samples, keys = case.samples[client], {"seed": 0, "client": client, "round": round}
            copies = lambda tensors: {n: t.clone().requires_grad_() for n, t in tensors.items()}  # noqa: E731
            m, r = copies(world), copies(spreads)
            mu, rho = (
                copies(one) for one in own.get(client, ({n: world[n] for n in names}, spreads))
            )
            plan = batches.plan(len(samples.y), phase, **keys, purpose="train", coupled=False)
            for step, (rows,) in enumerate(plan):
                noise = batches.noise(
                    half.noise("local", 16),
                    **keys,
                    stage="train/local",
                    step=step,
                    dtype=torch.float64,
                )
                loss = 0.0
                for k in range(draws):
                    drawn = {n: mu[n] + (1 + rho[n].exp()).log() * noise[n][k] for n in names}
                    out = functional_call(module, {**m, **drawn}, (samples.x[rows],))
                    loss = loss + nn.functional.cross_entropy(out, samples.y[rows]) / draws
                for n in names:
                    q, p = (
                        torch.distributions.Normal(a, (1 + b.exp()).log())
                        for a, b in ((mu[n], rho[n]), (m[n], r[n]))
                    )
                    far = torch.distributions.kl_divergence(q, p).sum()
                    loss = loss + zeta / len(samples.y) * far
                groups = (m, r, mu, rho)
                every = [value for group in groups for value in group.values()]
                grads = torch.autograd.grad(loss, every, allow_unused=True)
                with torch.no_grad():
                    for value, grad in zip(every, grads, strict=True):
                        value -= LR * grad
            m, r, mu, rho = ({n: v.detach() for n, v in one.items()} for one in (m, r, mu, rho))
            own[client], sent_means[client], sent_rho[client] = (mu, rho), m, r
            assert_equal(updates[client].params, m)
            assert_equal(updates[client].rho, r)
            assert_equal(states[client].params, mu)
            assert_equal(states[client].rho, rho)
        world = mean(case, sent_means)
        weight = {c: len(case.samples[c].y) for c in case.clients}
        spreads = {
            n: sum(weight[c] * sent_rho[c][n] for c in weight) / sum(weight.values()) for n in names
        }
        assert_equal(state.params, world)
        assert_equal(state.rho, spreads)


def test_the_own_spread_goes_home_with_the_personal_model():
    prepared = small_prepared("pfedbayes", bayes_start_rho=-2.0)
    half, server, initial = prepared.halves.client, prepared.halves.server, prepared.halves.initial
    sent = server.broadcast(server.init(*initial, (0,)), 0)
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32)
    keys = {"seed": 0, "client": 0, "round": 1}
    state = solo.train(half, half.init(*initial), sent, data.train, **keys).state
    uncertain = Uncertain(half, by_class=False)
    fitted = fit_alone(uncertain, state, sent, data.train, 5)
    assert fitted.params.keys() == half.model.shapes.keys()
    assert_equal(fitted.params, state.params)
    want = {name: (1 + value.exp()).log() for name, value in state.rho.items()}
    assert_equal(fitted.posteriors["own"], want, rtol=1e-5, atol=1e-6)
    assert uncertain.kinds["own"][0] == "sampled"
    draws = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(shape, generator=draws)
        for name, shape in half.noise("predict", 9).items()
    }
    got, each = half.predict("sampled", state, sent, data.test.x, noise), []
    for k in range(10):
        drawn = {n: state.params[n] + want[n] * noise[n][k] for n in want}
        each.append(half.model.forward(drawn, {}, data.test.x, train=False)[0].softmax(1))
    torch.testing.assert_close(got, torch.stack(each).mean(0))


@pytest.mark.parametrize(
    ("key", "value"),
    [("bayes_zeta", -1), ("bayes_start_rho", 16), ("bayes_samples", 0), ("bayes_rate", 0)],
)
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"{key} must"):
        small("pfedbayes", **{key: value})
