"""FedCP against golden vectors, two Gumbel variables, and two rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, linear

from bayflower.clients.ditto import with_own
from bayflower.clients.fedcp import Client, State, logistic, mmd, scores, shares
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.strategies.fedavg import State as Broadcast
from bayflower.strategies.fedcp import Config

E = "fedcp:"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-10)


def test_golden_policy_logits_and_message(baselines):
    """[eq. 1] to [eq. 4]: context, scores, shares, logits, MMD² [eq. 2] [eq. 3], head sent."""
    known = baselines["fedcp"]
    model = Model(lambda: nn.Sequential(nn.Identity(), nn.Linear(2, 3)), 3)
    half = Client(Config(), Training(), model)
    own, shared = (
        {"1.weight": doubles(known[n][0]), "1.bias": doubles(known[n][1])}
        for n in ("own_head", "global_head")
    )
    policy = {
        E + "weight": doubles(known["policy"][0]),
        E + "bias": doubles(known["policy"][1]),
        E + "norm": torch.ones(4).double(),
        E + "normbias": torch.zeros(4).double(),
    }
    context = half.context(own)
    close(context, known["unit_context"])
    close(own["1.weight"].sum(0), known["context"])
    z, mask, noise = (doubles(known[n]) for n in ("z", "mask", "normal_noise"))
    close(scores(policy, z, context), known["scores"])
    close(shares(policy, z, context, None, 1.0), known["share_personal_without_noise"])
    share = shares(policy, z, context, noise, 1.0)
    close(share, known["share_personal"])
    close(half.split(own, shared, z, share), known["logits"])
    close(mmd(z, doubles(known["z_global"]), mask), known["mmd"])
    state = State(own, {}, torch.tensor(True))
    sent = Broadcast({**shared, **policy}, {})
    data = Batch(z, torch.tensor([0, 1, 2]), mask)
    work = half.begin(state, sent, data)
    after, update = half.finish(state, work, data)
    for name, want in zip(("1.weight", "1.bias"), known["head_sent"], strict=True):
        close(update.params[name], want)
        # the server, which knows the global head, can tell the own one
        torch.testing.assert_close(2 * update.params[name] - shared[name], after.params[name])
    quiet = doubles(known["share_personal_without_noise"])
    got = half.predict("before", state, sent, z, {})
    torch.testing.assert_close(got, half.split(own, shared, z, quiet).softmax(1))


def test_one_logistic_variable_is_two_of_gumbel():
    """The mean of a Gumbel softmax over two entries, by drawing both."""
    draw = torch.Generator().manual_seed(0)
    a = doubles([0.7, -0.4])
    gumbel = -(-torch.rand(200_000, 2, generator=draw).double().log()).log()
    want = ((a + gumbel) / 0.5).softmax(1)[:, 0]
    noise = torch.randn(200_000, generator=draw).double()
    got = ((a[0] - a[1] + logistic(noise)) / 0.5).sigmoid()
    far = doubles([-9.0, 0.0, 9.0])
    want_far = torch.special.log_ndtr(far) - torch.special.log_ndtr(-far)
    torch.testing.assert_close(logistic(far), want_far)
    for power in (1, 2):
        assert float((got**power).mean()) == pytest.approx(float((want**power).mean()), abs=4e-3)


def test_two_rounds_equal_plain_torch():
    """[eq. 3] by autograd with given noise; own heads are kept, halves are averaged [eq. 4]."""
    weight, heat = 2.0, 0.7
    case = both("fedcp", cp_weight=weight, cp_temperature=heat)
    half, server = case.prepared.halves.client, case.prepared.halves.server
    (phase,) = half.phases("train")
    world, own = server.init(*case.prepared.halves.initial, ()).params, {}
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        sent = {}
        for k in case.clients:
            x, y = case.samples[k].x, case.samples[k].y
            keys = {"seed": 0, "client": k, "round": round}
            mine = own.get(k, {n: v for n, v in world.items() if n.startswith("head")})
            moving = {n: v for n, v in world.items() if not n.startswith("head")}
            p = {n: v.clone().requires_grad_() for n, v in {**moving, **with_own(mine)}.items()}
            module = case.prepared.halves.model.factory().double()
            context = nn.functional.normalize(mine["head.weight"].sum(0), dim=0)

            def features(params, rows, module=module, x=x):
                base = {n[5:]: v for n, v in params.items() if n.startswith("base.")}
                return torch.func.functional_call(module.base, base, (x[rows],))

            plan = batches.plan(len(y), phase, **keys, purpose="train", coupled=False)
            for step, (rows,) in enumerate(plan):
                noise = batches.noise(
                    half.noise("local", 16),
                    **keys,
                    stage="train/local",
                    step=step,
                    dtype=torch.float64,
                )["logistic"][: len(rows)]
                u = torch.distributions.Normal(0, 1).cdf(noise)
                z, before = features(p, rows), features(world, rows)
                hidden = linear(z * context, p[E + "weight"], p[E + "bias"])
                a = torch.relu(layer_norm(hidden, (64,), p[E + "norm"], p[E + "normbias"]))
                r = torch.sigmoid((a[:, :32] - a[:, 32:] + (u / (1 - u)).log()) / heat)
                logits = linear(r * z, p["own:head.weight"], p["own:head.bias"])
                logits = logits + linear((1 - r) * z, world["head.weight"], world["head.bias"])
                both_sets = torch.cat([z, before])
                far = torch.cdist(both_sets, both_sets, compute_mode="donot_use_mm_for_euclid_dist")
                kernel = sum(torch.exp(-far.square() / (2 * s)) for s in (10, 15, 20, 50))
                b = len(rows)
                apart = (kernel[:b, :b] + kernel[b:, b:] - 2 * kernel[:b, b:]).mean()
                loss = cross_entropy(logits, y[rows]) + weight * apart
                grads = torch.autograd.grad(loss, list(p.values()))
                with torch.no_grad():
                    for value, grad in zip(p.values(), grads, strict=True):
                        value -= LR * grad.nan_to_num()
            done = {n: v.detach() for n, v in p.items()}
            own[k] = {n: done["own:" + n] for n in mine}
            sent[k] = {n: done[n] for n in moving}
            sent[k] |= {n: (v + world[n]) / 2 for n, v in own[k].items()}
            assert_equal(states[k].params, own[k], rtol=1e-6, atol=1e-8)
            assert_equal(updates[k].params, {n: sent[k][n] for n in updates[k].params}, 1e-6, 1e-8)
        sizes = {k: len(case.samples[k].y) for k in case.clients}
        world = {n: sum(sizes[k] * sent[k][n] for k in sizes) / sum(sizes.values()) for n in world}
        assert_equal(state.params, world, rtol=1e-6, atol=1e-8)


def test_a_new_client_fits_its_own_head_and_noise_is_asked_for():
    case = both("fedcp", cp_test_noise=True)
    half, server = case.prepared.halves.client, case.prepared.halves.server
    sent = server.init(*case.prepared.halves.initial, ())
    samples = case.samples[case.clients[0]]
    fresh = half.init(*case.prepared.halves.initial)
    keys = {"seed": 0, "client": 9, "round": 1}
    state = solo.adapt(half, fresh, sent, samples, "new", **keys)
    assert bool(state.started)
    assert half.noise("predict", 7)["logistic"] == (8, 32)
    noise = {"logistic": torch.randn(len(samples.y), 32).double()}
    quiet = half.predict("personal", state, sent, samples.x, {})
    assert not torch.allclose(half.predict("personal", state, sent, samples.x, noise), quiet)
    assert (
        half.model.nll(quiet.log(), samples.y).mean()
        < half.model.nll(
            half.predict("personal", fresh, sent, samples.x, {}).log(), samples.y
        ).mean()
    )


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="cp_weight must be finite"):
        small("fedcp", cp_weight=-1.0)
    with pytest.raises(ConfigError, match="cp_temperature must be positive"):
        small("fedcp", cp_temperature=0.0)
