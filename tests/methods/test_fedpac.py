"""FedPAC against golden vectors, all supports of a mixture, and two rounds in plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds, mean
from torch import nn

from bayflower.clients.fedpac import Client
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch, Model
from bayflower.strategies.fedpac import Config, Server, mixtures


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-9)


def by_supports(gram, variance, i):
    """The mixture of client i by trying every set of heads, in closed form on each."""
    best, number = None, len(gram)
    for size in range(1, number + 1):
        for support in itertools.combinations(range(number), size):
            some = list(support)
            matrix = torch.zeros(size + 1, size + 1).double()
            matrix[:size, :size] = 2 * (gram[some][:, some] + torch.diag(variance[some]))
            matrix[:size, size] = matrix[size, :size] = 1
            right = torch.cat([2 * gram[some, i], torch.ones(1).double()])
            alpha = torch.zeros(number).double()
            alpha[some] = torch.linalg.lstsq(matrix, right).solution[:size]
            if alpha.min() < -1e-12:
                continue
            value = (alpha**2 * variance).sum() + alpha @ gram @ alpha - 2 * alpha @ gram[i]
            if best is None or value < best[0] - 1e-14:
                best = (value, alpha)
    return best[1]


def test_golden_statistics_of_the_classes(baselines):
    """[eq. 6] of four clients, padding left out: V is the variance of the mean of onehot ⊗ z."""
    known = baselines["fedpac"]
    model = Model(lambda: nn.Sequential(nn.Identity(), nn.Linear(2, 3)), 3)
    half = Client(Config(), Training(), model)
    params, buffers = model.initial(0, torch.float64)
    for k, (z, y) in enumerate(zip(known["features"], known["labels"], strict=True)):
        x, labels = doubles([*z, [9.0, 9.0]]), torch.tensor([*y, 1])
        data = Batch(x, labels, doubles([1.0] * len(z) + [0.0]))
        h, variance = half.seen(params, buffers, data, 3)
        close(h, known["h"][k])
        close(variance, known["V"][k])
        outer = torch.einsum("nk,nd->nkd", torch.eye(3).double()[labels[:-1]], x[:-1])
        torch.testing.assert_close(variance, outer.var(0, correction=0).sum() / len(z))


def test_golden_mixtures(baselines):
    """[eq. 8] with either variance, and [eq. 9]; also against all supports."""
    known = baselines["fedpac"]
    h, n = doubles(known["h"]).flatten(1), doubles([6.0, 4.0, 5.0, 1.0])
    close(h @ h.T, known["gram"])
    anatomy = Model(lambda: nn.Sequential(nn.Linear(2, 3)), 3).anatomy
    for name, want in (
        ("printed", "alpha_cut_and_renormalised"),
        ("unbiased", "alpha_unbiased"),
    ):
        server = Server(Config(pac_variance=name), anatomy)
        close(server.weights(h, doubles(known["V"]), n), known[want])
    found = mixtures(h @ h.T, doubles(known["V"]))
    for i in range(4):
        slow = by_supports(h @ h.T, doubles(known["V"]), i)
        torch.testing.assert_close(found[i], slow, rtol=1e-8, atol=1e-9)
    server = Server(Config(pac_variance="printed"), anatomy)
    params = {"0.weight": torch.zeros(3, 2).double(), "0.bias": torch.zeros(3).double()}
    state = server.init(params, {}, (0, 1, 2, 3))
    total = {f"size/{k}": value for k, value in enumerate(n)}
    for k, head in enumerate(known["heads"]):
        total |= {f"h/{k}": doubles(known["h"][k]), f"var/{k}": doubles(known["V"][k])}
        total |= {f"head/{k}/0.weight": doubles(head), f"head/{k}/0.bias": doubles([float(k)] * 3)}
    mixed = server.heads(state, total)
    for k, head in enumerate(known["combined_head_printed"]):
        close(mixed[f"{k}:0.weight"], head)


def test_random_mixtures_are_the_best_of_all_supports():
    draw = torch.Generator().manual_seed(3)
    for _ in range(4):
        h = torch.randn(5, 4, generator=draw).double()
        variance = torch.rand(5, generator=draw).double() / 3
        found = mixtures(h @ h.T, variance)
        for i in range(5):
            slow = by_supports(h @ h.T, variance, i)
            torch.testing.assert_close(found[i], slow, rtol=1e-7, atol=1e-8)


def test_two_rounds_equal_plain_torch():
    """[eq. 6], [eq. 7] and [eq. 9] by autograd: head, base, prototypes, mixed heads."""
    weight, rate = 3.0, 0.2
    case = both("fedpac", pac_weight=weight, pac_head_lr=rate, pac_head_epochs=2, min_count=1)
    phases = case.prepared.halves.client.phases("train")
    head = [n for n in case.start if n.startswith("head")]
    base = [n for n in case.start if n not in head]
    world, heads = {n: case.start[n] for n in base}, {k: case.start for k in case.clients}
    centre, known = torch.zeros(10, 32).double(), torch.zeros(10).double()
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        models, h, var, sums, counts = {}, [], [], torch.zeros(10, 32).double(), torch.zeros(10)
        for k in case.clients:
            x, y = case.samples[k].x, case.samples[k].y
            module = case.prepared.halves.model.factory().double()
            module.load_state_dict({**world, **{n: heads[k][n] for n in head}})
            onehot = torch.eye(10).double()[y]
            with torch.no_grad():
                z = module.base(x)
            h.append((onehot.T @ z) / len(y))
            var.append((z.square().sum(1).mean() - h[-1].square().sum()) / (len(y) - 1))
            for phase, lr, names in zip(phases, (rate, LR), (head, base), strict=True):
                plan = batches.plan(
                    len(y), phase, seed=0, client=k, round=round, purpose="train", coupled=False
                )
                for (rows,) in plan:
                    module.zero_grad()
                    z = module.base(x[rows])
                    loss = nn.functional.cross_entropy(module.head(z), y[rows])
                    far = (z - centre[y[rows]]).square().mean(1) * known[y[rows]]
                    (loss + weight * far.mean()).backward()
                    with torch.no_grad():
                        for n, value in module.named_parameters():
                            if n in names:
                                value -= lr * value.grad
            models[k] = {n: v.detach().clone() for n, v in module.named_parameters()}
            with torch.no_grad():
                sums += onehot.T @ module.base(x)
            counts += onehot.sum(0)
            assert_equal(updates[k].params, {n: models[k][n] for n in base})
            assert_equal(updates[k].head, {n: models[k][n] for n in head})
            assert_equal(states[k].params, updates[k].head)
            torch.testing.assert_close(updates[k].seen["h"], h[-1])
        average = mean(case, models)
        world = {n: average[n] for n in base}
        h, var = torch.stack(h).flatten(1), torch.stack(var)
        for place, k in enumerate(case.clients):
            alpha = by_supports(h @ h.T, var, place)
            alpha = torch.where(alpha > 1e-3, alpha, 0.0)
            alpha = alpha / alpha.sum()
            heads[k] = {
                n: sum(a * models[j][n] for a, j in zip(alpha, case.clients, strict=True))
                for n in head
            }
            got = case.prepared.halves.server.broadcast(state, k)
            assert bool(got.mixed)
            assert_equal(got.head, heads[k], rtol=1e-6, atol=1e-8)
        centre, known = sums / counts.clamp(min=1)[:, None], (counts > 0).double()
        torch.testing.assert_close(state.centroids, centre, rtol=1e-7, atol=1e-9)
        assert_equal(state.params, world)
    fresh = case.prepared.halves.server.broadcast(state, 99)
    assert not bool(fresh.mixed)


def test_without_mixtures_no_head_travels():
    case = both("fedpac", pac_mix=False, min_count=50)
    state, _, updates = next(iter(half_rounds(case, 1)))
    assert state.heads == {}
    assert all(u.head == {} and u.seen == {} and not u.counts.any() for u in updates.values())


def test_what_cannot_be_is_refused():
    for key, value in (("pac_weight", -1.0), ("pac_cut", 1.0), ("min_count", 0)):
        with pytest.raises(ConfigError, match=f"{key} must"):
            small("fedpac", **{key: value})
    case = both("fedpac")
    state, _, updates = next(iter(half_rounds(case, 1)))
    update, check = updates[case.clients[0]], case.prepared.halves.server.check
    wrong = {**update.seen, "variance": doubles(-1.0)}
    assert "must not be negative" in check(state, 0, update._replace(seen=wrong))
    many = update.counts + 1000
    assert "more than num_examples" in check(state, 0, update._replace(counts=many))
