"""FedEP and FedSEP against golden vectors, exact tilted moments, and rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import LR, both, half_rounds
from torch import nn
from torch.func import functional_call

from bayflower.clients.fedep import (
    Client,
    Natural,
    cavity_term,
    identity,
    laplace,
    spread_of_ends,
)
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.strategies.fedep import Config, Server

W = "0.weight"


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, doubles(want), rtol=1e-9, atol=1e-11)


class Weights:
    """A network of so many weights, with a posterior and one client's factor that are given."""

    def __init__(self, number, total, site, **settings):
        self.model = Model(lambda: nn.Sequential(nn.Linear(number, 1, bias=False)), 2)
        self.config = Config(**settings)
        self.server = Server(self.config, self.model.anatomy)
        self.client = Client(self.config, Training(), self.model)
        initial = self.model.initial(0, torch.float64)
        precision, shift = (doubles(one)[None] for one in total)
        self.state = self.server.init(*initial, (0, 1))._replace(
            params={W: shift / precision},
            precision={W: precision},
            shift={W: shift},
            turns={"0": torch.tensor(1), "1": torch.tensor(1)},
            fresh=torch.tensor(False),
        )
        self.states = [
            self.client.init(*initial)._replace(
                precision={W: doubles(one[0])[None]},
                shift={W: doubles(one[1])[None]},
                turns=torch.tensor(1),
            )
            for one in site
        ]

    def begun(self, client, samples):
        mask = torch.ones(samples).double()
        data = Batch(torch.zeros(samples, 1).double(), torch.zeros(samples).long(), mask)
        sent = self.server.broadcast(self.state, client)
        return self.client.begin(self.states[client], sent, data), data

    def round(self, found):
        """One round in which client k's tilted mean and precision are found[k](work)."""
        total = Total()
        for k, tilted in found.items():
            work, data = self.begun(k, 20)
            mean, precision = tilted(work)
            work = work._replace(params={W: mean[None]})
            half = Given(self.client, precision)
            self.states[k], update = half.finish(self.states[k], work, data)
            assert self.server.check(self.state, k, update) is None
            total.add(self.server.statistic(self.state, k, update))
        self.state = self.server.finalise(self.state, total.value())


class Given(Client):
    """A client whose tilted precision is given."""

    def __init__(self, half, precision):
        super().__init__(half.config, half.training, half.model)
        self.given = precision

    def tilted(self, work):
        return {W: self.given[None]}


@pytest.mark.parametrize("rule", ["identity", "laplace", "mcmc"])
def test_golden_rules_of_the_precision(baselines, rule):
    """[eq. 1], [eq. 3] and [eq. 4]: cavity, precision, change, length, damping, factor, total."""
    known = baselines["fedep"]
    want, samples = known["modes"][rule], torch.tensor(20.0).double()
    case = Weights(3, known["total"], [known["site"]], ep_damping=0.25, ep_max_norm=3.0)
    work, _ = case.begun(0, known["samples"])
    close(work.memo.cavity.precision[W][0], known["cavity"][0])
    close(work.memo.cavity.shift[W][0], known["cavity"][1])
    cavity, config = {W: doubles(known["cavity"][0])}, case.config
    plain = identity(cavity, samples, config)
    precision = {
        "identity": lambda: plain,
        "laplace": lambda: laplace({W: doubles(known["fisher"])}, cavity, samples, config),
        "mcmc": lambda: spread_of_ends({W: doubles(known["local_variance"])}, plain, config),
    }[rule]()[W]
    close(precision, want["tilted_precision"])
    case.round({0: lambda work: (doubles(known["local_mean"]), precision)})
    for place, group in enumerate(("precision", "shift")):
        close(getattr(case.states[0], group)[W][0], want["new_site"][place])
        close(getattr(case.state, group)[W][0], want["new_total"][place])


def test_golden_cavities_and_their_term(baselines):
    """[eq. 1] of FedSEP; [eq. 2] and its gradient."""
    known = baselines["fedep"]
    case = Weights(3, known["total"], [known["site"]], ep_sites="shared")
    case.state = case.state._replace(sizes={"0": torch.tensor(20), "1": torch.tensor(80)})
    work, _ = case.begun(0, known["samples"])
    close(work.memo.cavity.precision[W][0], known["sep_cavity"][0])
    close(work.memo.cavity.shift[W][0], known["sep_cavity"][1])
    theta = doubles(known["prior_term"]["theta"]).requires_grad_()
    cavity = Natural({W: doubles(known["cavity"][0])}, {W: doubles(known["cavity"][1])})
    value = cavity_term({W: theta}, cavity, torch.tensor(20.0).double(), known["weight_decay"])
    close(value.detach(), known["prior_term"]["value"])
    close(torch.autograd.grad(value, theta)[0], known["prior_term"]["grad"])


def test_golden_rounds_with_exact_tilted_moments(baselines):
    """A logistic model of one weight, whose tilted moments a grid gives: three damped rounds."""
    known = baselines["fedep"]["logistic"]
    grid = torch.linspace(-14, 16, 60001, dtype=torch.float64)
    slopes = [doubles(a) * doubles(s) for a, s in zip(known["a"], known["sign"], strict=True)]

    def exact(k):
        def moments(work):
            precision, shift = (float(group[W][0, 0]) for group in work.memo.cavity)
            log = shift * grid - precision / 2 * grid.square()
            log = log - nn.functional.softplus(-slopes[k][:, None] * grid).sum(0)
            weight = (log - log.max()).exp()
            mean = (weight * grid).sum() / weight.sum()
            spread = (weight * (grid - mean).square()).sum() / weight.sum()
            return mean[None], 1 / spread[None]

        return moments

    # the prior N(0, 1) of the example is a part of the total that is nobody's factor
    case = Weights(1, [[1.0], [0.0]], [[[0.0], [0.0]]] * 2, ep_damping=known["damping"])
    first = case.begun(0, 3)[0]
    mean, precision = exact(0)(first)
    assert float(precision) == pytest.approx(known["first_tilted"]["precision"], rel=1e-8)
    assert float(mean * precision) == pytest.approx(known["first_tilted"]["shift"], rel=1e-8)
    for want in known["rounds"]:
        case.round({0: exact(0), 1: exact(1)})
        assert [float(case.state.precision[W]), float(case.state.shift[W])] == pytest.approx(
            want["total"], rel=1e-7
        )
        for k, site in enumerate(want["sites"]):
            got = [float(case.states[k].precision[W]), float(case.states[k].shift[W])]
            assert got == pytest.approx(site, rel=1e-7)


@pytest.mark.parametrize(
    ("sites", "rule"),
    [
        ("own", "mcmc"),
        pytest.param("own", "laplace", marks=pytest.mark.slow),
        ("shared", "identity"),
    ],
)
def test_three_rounds_equal_plain_torch(sites, rule):
    """[eq. 2] and [eq. 3] by autograd: one round of FedAvg, then two under cavities."""
    c, decay, damping = 20.0, 0.01, 0.5
    case = both(
        "fedep",
        ep_sites=sites,
        ep_moments=rule,
        ep_scale=c,
        ep_decay=decay,
        ep_damping=damping,
        ep_max_norm=40.0,
        ep_band=0.5,
    )
    module, (phase,) = (
        case.prepared.halves.model.factory().double(),
        case.prepared.halves.client.phases("train"),
    )
    names, sizes = list(case.start), {k: len(case.samples[k].y) for k in case.clients}
    flat = lambda tensors: torch.cat([tensors[n].flatten() for n in names])  # noqa: E731
    zero = torch.zeros_like(flat(case.start))
    total, mean, sites_of = (zero, zero), flat(case.start), {}

    def named(vector):
        found, at = {}, 0
        for n in names:
            found[n] = vector[at : at + case.start[n].numel()].reshape(case.start[n].shape)
            at += case.start[n].numel()
        return found

    def nll(theta, x, y):
        return nn.functional.cross_entropy(functional_call(module, named(theta), (x,)), y)

    def band(values):
        far = 0.5 * values.std(correction=0)
        return values.clamp(values.mean() - far, values.mean() + far)

    for round, (state, _, updates) in enumerate(half_rounds(case, 3), start=1):
        changes = {}
        for k in case.clients:
            samples, n = case.samples[k], sizes[k]
            own = sites_of.get(k, (zero, zero))
            if sites == "shared":
                own = tuple(n / sum(sizes.values()) * one for one in total)
            lam, eta = total[0] - own[0], total[1] - own[1]
            theta, ends = mean.clone().requires_grad_(), []
            plan = batches.plan(
                n, phase, seed=0, client=k, round=round, purpose="train", coupled=False
            )
            for step, (rows,) in enumerate(plan, start=1):
                pull = ((lam + decay * n) / 2 * theta**2 - eta * theta).sum() / n
                loss = nll(theta, samples.x[rows], samples.y[rows]) + pull
                (grad,) = torch.autograd.grad(loss, theta)
                with torch.no_grad():
                    theta -= LR * grad
                if 2 * step in (len(plan), 2 * len(plan)):  # two epochs
                    ends.append(theta.detach().clone())
            mu = torch.stack(ends).mean(0)
            tilted = c * n * decay + lam
            if rule == "mcmc" and round > 1:
                spread = band(1 / (1e-4 + (1 - 1e-4) * torch.stack(ends).var(0)))
                tilted = spread * tilted.norm() / spread.norm()
            if rule == "laplace" and round > 1:
                fisher = torch.zeros_like(mu)
                for x in samples.x:
                    p = functional_call(module, named(mu), (x[None],)).softmax(1)[0]
                    for label in range(10):
                        at = mu.clone().requires_grad_()
                        (grad,) = torch.autograd.grad(nll(at, x[None], torch.tensor([label])), at)
                        fisher += p[label] * grad**2
                tilted = c * (band(fisher) + decay * n) + lam
            change = [tilted - total[0], tilted * mu - total[1]]
            if round > 1:
                length = float(torch.cat(change).norm())
                change = [damping * min(1.0, 40.0 / length) * one for one in change]
            if sites == "own":
                good = own[0] + change[0] >= 0
                change = [one * good for one in change]
                sites_of[k] = tuple(a + b for a, b in zip(own, change, strict=True))
            changes[k] = change
            got = [flat(updates[k].precision), flat(updates[k].shift)]
            for one, want in zip(got, change, strict=True):
                torch.testing.assert_close(one, want, rtol=1e-6, atol=1e-8)
        total = tuple(
            old + sum(one[place] for one in changes.values()) for place, old in enumerate(total)
        )
        mean = total[1] / total[0]
        torch.testing.assert_close(flat(state.precision), total[0], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(flat(state.params), mean, rtol=1e-6, atol=1e-8)


def test_warm_rounds_are_fedavg_and_only_the_last_one_leaves_factors():
    """The mean of a warm round is FedAvg's; a factor of an earlier one is dropped."""
    # one epoch's end is the last iterate
    warm = both("fedep", local_epochs=1, ep_warm_rounds=2, ep_decay=0.0, ep_start=1.0)
    plain = both("fedavg", local_epochs=1)
    for round, (one, other) in enumerate(
        zip(half_rounds(warm, 3), half_rounds(plain, 3), strict=True), start=1
    ):
        state, states, _ = one
        same = all(torch.allclose(state.params[n], v) for n, v in other[0].params.items())
        assert same == (round < 3)
        assert bool(state.fresh) == (round < 2)
        held = sum(s.precision["head.bias"] for s in states.values())
        if round > 1:
            torch.testing.assert_close(state.precision["head.bias"], held)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ep_scale": 0.0}, "ep_scale must"),
        ({"ep_decay": 0.0}, "ep_start and ep_decay must not both be 0"),
        ({"ep_damping": 2.0}, "ep_damping must"),
        ({"ep_warm_rounds": 0}, "ep_warm_rounds must"),
    ],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ConfigError, match=match):
        small("fedep", **settings)


def test_turns_of_fedsep_say_only_whether_a_client_was_counted():
    case = both("fedsep")
    state, _, updates = next(iter(half_rounds(case, 1)))
    assert len(state.sizes) == 3
    half, one = case.prepared.halves.server, updates[case.clients[0]]
    number, counted = int(one.num_examples), {}
    for turns in (-2, -1, 0, 3):
        said = one._replace(turns=torch.tensor(turns))
        wrong = "turns must be in" in (half.check(state, case.clients[0], said) or "")
        assert wrong == (turns == -2)
        counted[turns] = int(half.summand(state, case.clients[0], said)["joined"])
    assert counted == {-2: 0, -1: 0, 0: number, 3: 0}
