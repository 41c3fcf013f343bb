"""GPFL against golden vectors, and two rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from bayflower.clients.gpfl import Client, State, angle, cosine, valves
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch, Model
from bayflower.strategies.fedavg import State as Broadcast
from bayflower.strategies.gpfl import EMBEDDINGS, Config

E = "gpfl:"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-10)


def test_golden_routes_and_losses(baselines):
    """[eq. 1], [eq. 2] and [eq. 3] with an absent class and a padded row."""
    known = baselines["gpfl"]
    extra = {EMBEDDINGS: doubles(known["embeddings"])}
    for layer, name in (("scale", "gamma_layer"), ("shift", "beta_layer")):
        extra |= {
            f"{E}{layer}.weight": doubles(known[name][0]),
            f"{E}{layer}.bias": doubles(known[name][1]),
            f"{E}{layer}.norm": torch.ones(3).double(),
            f"{E}{layer}.normbias": torch.zeros(3).double(),
        }
    model = Model(lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 3)), 3)
    half = Client(Config(0.25, 0.5), Training(), model)
    params, _ = model.initial(0, torch.float64)
    y = torch.cat([torch.zeros(6), torch.full((2,), 2), torch.ones(1)]).long()
    data = Batch(torch.zeros(9, 3).double(), y, doubles([1.0] * 8 + [0.0]))
    sent = Broadcast(extra, {})
    work = half.begin(half.init(params, {}), sent, data)
    close(work.memo.generic, known["generic_condition"])
    close(work.memo.own, known["own_condition"])
    z = doubles(known["z"])
    batch = Batch(z, torch.tensor(known["y"]), doubles(known["mask"]))
    both = torch.stack((work.memo.generic, work.memo.own))
    shared, own = valves(extra, z, both)
    close(shared, known["generic_features"])
    close(own, known["own_features"])
    close(cosine(shared, extra[EMBEDDINGS]), known["cosine"])
    free = extra[EMBEDDINGS].clone().requires_grad_()
    loss = angle(shared, free, batch)
    close(loss.detach(), known["angle_loss"])
    close(torch.autograd.grad(loss, free)[0], known["grad_embeddings"])
    apart = shared - extra[EMBEDDINGS][batch.y]
    close(half.far(apart, batch.mask), known["magnitude_frobenius"])
    by_row = Client(Config(gpfl_norm="mean"), Training(), model)
    close(by_row.far(apart, batch.mask), known["magnitude_mean_norm"])
    head = doubles(known["own_features"]) @ params["1.weight"].T + params["1.bias"]
    decay = 0.25 * sum(v.square().sum() for v in extra.values())
    want = cross_entropy(head[:2], batch.y[:2]) + known["angle_loss"] + decay
    got, _ = half.loss(work.params, work, batch, {}, half.phases("train")[0])
    close(got, float(want + 0.25 * known["magnitude_frobenius"]))
    state = State(
        {"1.weight": params["1.weight"], "1.bias": params["1.bias"]}, {}, {}, work.memo.shares
    )
    close(half.predict("before", state, sent, z, {}), head.softmax(1).tolist())


def test_two_rounds_equal_plain_torch():
    """[eq. 3] by autograd with torch's own LayerNorm and cosine; heads stay."""
    weight, decay = 0.3, 0.02
    case = both("gpfl", gpfl_weight=weight, gpfl_decay=decay)
    (phase,) = case.prepared.halves.client.phases("train")
    server = case.prepared.halves.server
    world = server.init(*case.prepared.halves.initial, ()).params
    assert world[EMBEDDINGS].shape == (10, 32)
    heads = {k: {n: v for n, v in case.start.items() if n.startswith("head")} for k in case.clients}
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        sent = {}
        for k in case.clients:
            x, y = case.samples[k].x, case.samples[k].y
            p = {n: v.clone().requires_grad_() for n, v in {**world, **heads[k]}.items()}
            module = case.prepared.halves.model.factory().double()
            old = world[EMBEDDINGS]
            share = torch.bincount(y, minlength=10) / len(y)
            conditions = (old.mean(0), (share[:, None] * old).sum(0))

            def route(z, c, p=p):
                gamma, beta = (
                    nn.functional.layer_norm(
                        torch.relu(nn.functional.linear(c, p[f"{E}{n}.weight"], p[f"{E}{n}.bias"])),
                        (32,),
                        p[f"{E}{n}.norm"],
                        p[f"{E}{n}.normbias"],
                    )
                    for n in ("scale", "shift")
                )
                return torch.relu(z * (gamma + 1) + beta)

            for (rows,) in batches.plan(
                len(y), phase, seed=0, client=k, round=round, purpose="train", coupled=False
            ):
                base = {n.removeprefix("base."): v for n, v in p.items() if n.startswith("base")}
                z = torch.func.functional_call(module.base, base, (x[rows],))
                f_g, f_p = (route(z, c) for c in conditions)
                top = nn.functional.linear(f_p, p["head.weight"], p["head.bias"])
                cos = cosine_similarity(f_g[:, None], p[EMBEDDINGS][None], dim=2)
                loss = cross_entropy(top, y[rows]) + cross_entropy(cos, y[rows])
                loss = loss + weight * (f_g - old[y[rows]]).norm()
                squares = sum(v.square().sum() for n, v in p.items() if n.startswith(E))
                grads = torch.autograd.grad(loss + decay / 2 * squares, list(p.values()))
                with torch.no_grad():
                    for value, grad in zip(p.values(), grads, strict=True):
                        value -= LR * grad
            done = {n: v.detach() for n, v in p.items()}
            heads[k] = {n: done[n] for n in heads[k]}
            sent[k] = {n: done[n] for n in world}
            assert_equal(updates[k].params, sent[k], rtol=1e-6, atol=1e-8)
            assert_equal(states[k].params, heads[k], rtol=1e-6, atol=1e-8)
        sizes = {k: len(case.samples[k].y) for k in case.clients}
        world = {n: sum(sizes[k] * sent[k][n] for k in sizes) / sum(sizes.values()) for n in world}
        assert_equal(state.params, world, rtol=1e-6, atol=1e-8)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="gpfl_weight must be finite"):
        small("gpfl", gpfl_weight=-1.0)
