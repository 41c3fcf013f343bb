"""pFedGP against golden vectors, textbook formulas, and two rounds in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small
from plainsteps import LR, assert_equal, both, half_rounds
from torch.nn.functional import normalize

from bayflower.clients.pfedgp import query
from bayflower.data import batches
from bayflower.engines import execute, prepare
from bayflower.errors import BayflowerError, ConfigError
from bayflower.maths import processes
from bayflower.maths.processes import Kernel
from bayflower.strategies.pfedgp import Config


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, doubles(want), rtol=tolerance, atol=tolerance)


@pytest.fixture
def node(baselines):
    """The golden node: (kernel, features, their kernel, targets, which are there, test)."""
    known = baselines["pfedgp"]
    kernel = Kernel(known["output_scale"], known["length_scale"], known["jitter"])
    u, mask = normalize(doubles(known["features"])), doubles(known["mask"])[None]
    kappa = (doubles(known["labels"])[None] - 0.5) * mask
    return kernel, u, kernel.within(u), kappa, mask, normalize(doubles(known["test"]))


@pytest.mark.parametrize("number", [0, 1, 5, 200])
def test_golden_inference(node, baselines, number):
    """[eq. 1], [eq. 2], [eq. 3] with the kernel [eq. 5] and a padded sample."""
    kernel, u, gram, kappa, mask, new = node
    fitted = processes.fit(gram, kappa, mask, number)
    want = baselines["pfedgp"][f"iterations_{number}"]
    close(fitted.omega[0], want["omega"])
    close(fitted.weights[0], want["a"])
    mean, spread = processes.predicted(gram, kernel.between(u, new), kernel.own, fitted)
    close(mean[0], want["mean"])
    close(spread[0], want["variance"])
    if number == 200:
        said = baselines["pfedgp"]["left_probability_mean_sigma"]
        close(processes.left(mean, spread)[0], said, 1e-6)


def test_inference_is_the_textbooks_and_its_bound_rises(node):
    """k_*ᵀ (K + Ω⁻¹)⁻¹ κ/ω without the padded row; every iteration raises the evidence bound."""
    kernel, u, gram, kappa, mask, new = node
    rows = mask[0] > 0
    inner, own = gram[rows][:, rows], kappa[0, rows]
    last = -np.inf
    for number in range(8):
        fitted = processes.fit(gram, kappa, mask, number)
        omega = fitted.omega[0, rows]
        cross = kernel.between(u[rows], new)
        whole = torch.linalg.inv(inner + torch.diag(1 / omega))
        mean, spread = processes.predicted(gram, kernel.between(u, new), kernel.own, fitted)
        close(mean[0], (cross.mT @ whole @ (own / omega)).tolist())
        close(spread[0], (kernel.own - (cross * (whole @ cross)).sum(0)).tolist())
        # the bound for q(f) = N(m, S) of this ω, with the best ω for it
        cover = torch.linalg.inv(torch.linalg.inv(inner) + torch.diag(omega))
        m = cover @ own
        c = (m.square() + cover.diagonal()).sqrt()
        likely = (own * m - c / 2 - torch.log1p(torch.exp(-c))).sum()
        apart = torch.trace(torch.linalg.solve(inner, cover)) + m @ torch.linalg.solve(inner, m)
        apart = (apart - len(m) + torch.logdet(inner) - torch.logdet(cover)) / 2
        assert float(likely - apart) >= last - 1e-12
        last = float(likely - apart)


def test_golden_single_point_quadrature_and_tree(baselines):
    known = baselines["pfedgp"]
    gram, kappa = doubles([[8.001]]), doubles([[0.5]])
    fitted = processes.fit(gram, kappa, torch.ones_like(kappa), 500)
    mean, spread = processes.moments(gram, fitted.omega, kappa)
    close(mean[0, 0], known["one_point"]["mean"])
    close(spread[0, 0], known["one_point"]["variance"])
    for centre in (0.0, 2.0):
        said = processes.left(doubles([centre]), doubles([8.0]))
        close(said[0], known["gap"][f"mean_{centre:.0f}_var_8"][0], 1e-3)
    tree = known["tree"]
    signs, said = doubles(tree["signs"]), doubles(tree["left_probability"]).mT
    settled = processes.settled(said, signs, torch.tensor(tree["counts"]))
    close(processes.classes(signs, settled), tree["probabilities"])
    said[2] = 0.3  # whatever this node says: the class on its right has no sample
    settled = processes.settled(said, signs, torch.tensor(tree["counts"]))
    close(processes.classes(signs, settled), tree["probabilities"])


@pytest.mark.parametrize("number", [2, 3, 7, 10])
def test_trees_are_binary_and_keep_near_classes_together(number):
    """Every class is a leaf: probabilities add up to 1; pairs of near classes part last."""
    torch.manual_seed(number)
    said = torch.rand(number - 1, 4, dtype=torch.float64)
    centres = torch.randn(number, 3, dtype=torch.float64)
    counts = torch.randint(0, 3, (number,))
    for signs in (doubles(processes.halves(number).tolist()), processes.grown(centres, counts)):
        close(processes.classes(signs, said).sum(1), [1.0] * 4)
    if number == 10:
        near = doubles([[at, at + 0.1] for at in (1.0, 4.0, 13.0, 40.0, 121.0)]).reshape(10, 1)
        signs = processes.grown(near, torch.ones(10).long())
        for pair in range(0, 10, 2):
            apart = (signs[:, pair] * signs[:, pair + 1] < 0).nonzero()[0, 0]
            assert int(signs[apart].abs().sum()) == 2, "the pair is split alone"


def test_query_rows_are_the_first_of_each_class():
    y = torch.tensor([1, 0, 1, 1, 2, 0, 0, 0, 1])
    member = torch.nn.functional.one_hot(y, 3).double()
    member[-1] = 0  # padding
    close(query(member, 0.5), [1, 1, 0, 0, 0, 1, 0, 0, 0])


def test_two_rounds_equal_plain_torch():
    """[eq. 6] node by node on picked rows, by autograd; heads stay as they are."""
    case = both("pfedgp", gp_batch=24, gp_iterations=3, gp_tree="fixed")
    (phase,) = case.prepared.halves.client.phases("train")
    signs = doubles(processes.halves(10).tolist())
    world = {n: v for n, v in case.start.items() if not n.startswith("head")}
    for round, (state, _, _) in enumerate(half_rounds(case, 2), start=1):
        sent = {}
        for k in case.clients:
            x, y = case.samples[k].x, case.samples[k].y
            p = {n: v.clone().requires_grad_() for n, v in world.items()}
            module = case.prepared.halves.model.factory().double()
            for (rows,) in batches.plan(
                len(y), phase, seed=0, client=k, round=round, purpose="train", coupled=False
            ):
                base = {n.removeprefix("base."): v for n, v in p.items()}
                u = normalize(torch.func.functional_call(module.base, base, (x[rows],)))
                loss = by_node(u, y[rows], signs, 3)
                grads = torch.autograd.grad(loss, list(p.values()))
                with torch.no_grad():
                    p = {
                        n: (v - LR * g).requires_grad_()
                        for (n, v), g in zip(p.items(), grads, strict=True)
                    }
            sent[k] = {n: v.detach() for n, v in p.items()}
        number = {k: len(case.samples[k].y) for k in case.clients}
        world = {
            n: sum(number[k] * sent[k][n] for k in case.clients) / sum(number.values())
            for n in world
        }
        assert_equal(state.params, world)


def by_node(u, y, signs, iterations):
    """Return [eq. 6]: half of each class asked, rows picked, inverses instead of M."""
    asked = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        rows = (y == label).nonzero()[:, 0]
        asked[rows[: len(rows) // 2]] = True
    far = (u[:, None] - u[None]).square().sum(-1)
    gram, losses = 8 * torch.exp(-far / 2), []
    for row in signs:
        side = row[y]
        given, wanted = (side != 0) & ~asked, (side != 0) & asked
        if len(side[given].unique()) < 2 or not wanted.any():
            continue
        inner = gram[given][:, given] + 1e-3 * torch.eye(int(given.sum())).double()
        kappa, omega = side[given] / 2, torch.full((int(given.sum()),), 0.25).double()
        for _ in range(iterations):
            cover = torch.linalg.inv(torch.linalg.inv(inner.detach()) + torch.diag(omega))
            c = ((cover @ kappa).square() + cover.diagonal()).sqrt()
            omega = torch.tanh(c / 2) / (2 * c)
        whole, cross = torch.linalg.inv(inner + torch.diag(1 / omega)), gram[given][:, wanted]
        mean, spread = cross.mT @ whole @ (kappa / omega), 8.001 - (cross * (whole @ cross)).sum(0)
        losses.append(-processes.left(side[wanted] * mean, spread).log().mean())
    return torch.stack([*losses, 0 * u.sum()]).sum()


@pytest.mark.slow
def test_a_client_predicts_from_its_own_samples():
    """Better than chance by far after two rounds, also for a client that never trained, on both
    engines.
    """
    run = small("pfedgp", rounds=2, keep=0.25, beta=0.3, lr=0.05, evaluate_every=2)
    for engine in ("loop", "fused"):
        done = execute(prepare(run, engine))
        assert done.rounds[-1]["personal"]["accuracy"] > 0.6
        new = done.new_clients["personal"]
        assert sum(int(one.correct) for one in new.values()) > 0.5 * sum(
            int(one.num_examples) for one in new.values()
        )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"gp_predict_share": 1.0}, "gp_predict_share"),
        ({"gp_batch": 1}, "gp_batch"),
        ({"gp_scale": 0.0}, "gp_scale"),
        ({"gp_tree": "oak"}, "gp_tree"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        Config(**wrong)


def test_mixed_labels_are_refused():
    with pytest.raises(BayflowerError, match="mixup"):
        small("pfedgp", mixup=0.2)
