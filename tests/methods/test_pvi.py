"""PVI against golden vectors, the pooled posterior, and two rounds in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small
from plainsteps import LR, both, half_rounds
from torch import nn
from torch.func import functional_call

from bayflower.clients.pfedbayes import RHO, spread
from bayflower.clients.pvi import Client, kl, unspread
from bayflower.config import Training
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.strategies.pvi import Config, Server


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


class Conjugate:
    """Linear regression, coordinate by coordinate: every client's local optimum is known."""

    def __init__(self, known, damping):
        self.model = Model(lambda: nn.Sequential(nn.Linear(2, 1, bias=False)), 2)
        config = Config(pvi_damping=damping, pvi_prior_sigma=known["prior_precision"] ** -0.5)
        self.server = Server(config, self.model.anatomy)
        self.client = Client(config, Training(), self.model)
        initial = self.model.initial(0, torch.float64)
        self.state = self.server.init(*initial, (0, 1, 2))
        self.states = [self.client.init(*initial) for _ in range(3)]
        pairs = list(zip(map(doubles, known["x"]), map(doubles, known["y"]), strict=True))
        self.precision = [x.square().sum(0) / known["noise_variance"] for x, _ in pairs]
        self.shift = [(x * y).sum(0) / known["noise_variance"] for x, y in pairs]

    def round(self, clients):
        """One round in which each client finds its optimum exactly: cavity × likelihood."""
        total = Total()
        data = Batch(torch.zeros(3, 2).double(), torch.zeros(3).long(), torch.ones(3).double())
        for k in clients:
            sent = self.server.broadcast(self.state, k)
            work = self.client.begin(self.states[k], sent, data)
            cavity, mean = work.memo.precision["0.weight"][0], work.memo.mean["0.weight"][0]
            precision = cavity + self.precision[k]
            mu = (cavity * mean + self.shift[k]) / precision
            rho = unspread(precision.rsqrt())
            work = work._replace(params={"0.weight": mu[None], RHO + "0.weight": rho[None]})
            self.states[k], update = self.client.finish(self.states[k], work, data)
            assert self.server.check(self.state, k, update) is None
            total.add(self.server.statistic(self.state, k, update))
        self.state = self.server.finalise(self.state, total.value())


@pytest.mark.parametrize("damping", [1.0, 0.5, 1 / 3])
def test_golden_rounds_of_a_conjugate_model(baselines, damping):
    """[eq. 1], [eq. 2] and [eq. 3]: three synchronous rounds; 1/3 is also the default's."""
    known = baselines["pvi"]
    for given in {damping, 0.0 if damping == 1 / 3 else damping}:
        case = Conjugate(known, given)
        for want in known["synchronous"][f"damping_{damping:.6g}"]:
            case.round([0, 1, 2])
            for got, name in (
                (case.state.precision, "precision"),
                (case.state.shift, "shift"),
                (case.state.params, "mean"),
            ):
                torch.testing.assert_close(
                    got["0.weight"][0], doubles(want[name]), rtol=1e-9, atol=1e-9
                )


def test_partial_participation_reaches_the_pooled_posterior(baselines):
    """Rounds of one or two clients, damped: the exact posterior of all data; the total is always
    the prior and the clients' own factors.
    """
    known = baselines["pvi"]
    case, chosen = Conjugate(known, 0.5), np.random.default_rng(0)
    for _ in range(150):
        case.round(sorted(chosen.choice(3, chosen.integers(1, 3), replace=False).tolist()))
        held = sum(one.precision["0.weight"] for one in case.states)
        torch.testing.assert_close(case.state.precision["0.weight"], 1 + held)
    torch.testing.assert_close(
        case.state.precision["0.weight"][0], doubles(known["exact"]["precision"])
    )
    torch.testing.assert_close(case.state.shift["0.weight"][0], doubles(known["exact"]["shift"]))


def test_golden_optimum_of_a_logistic_model(baselines):
    """The local bound [eq. 2] is stationary at the known optimum, expectations by quadrature."""
    known = baselines["pvi"]["logistic"]
    first, nodes = known["first_local"], np.polynomial.hermite_e.hermegauss(64)
    points, weights = doubles(nodes[0]), doubles(nodes[1]) / np.sqrt(2 * np.pi)
    mu = doubles(first["shift"] / first["precision"]).requires_grad_()
    sigma = doubles(first["precision"] ** -0.5).requires_grad_()
    slope = doubles(known["a"][0]) * doubles(known["sign"][0])
    draws = mu + sigma * points
    nll = (nn.functional.softplus(-slope[:, None] * draws).sum(0) * weights).sum()
    bound = nll + kl(mu, sigma, *doubles(first["cavity"]))
    for grad in torch.autograd.grad(bound, (mu, sigma)):
        assert abs(float(grad)) < 1e-7


def test_two_rounds_equal_plain_torch():
    """[eq. 2] by autograd; in the second round the cavity is the prior and the others' factors."""
    heat, prior, start = 2.0, 0.5, 0.05
    case = both(
        "pvi", pvi_temperature=heat, pvi_prior_sigma=prior, pvi_start_sigma=start, pvi_damping=0.5
    )
    module, half = case.prepared.halves.model.factory().double(), case.prepared.halves.client
    names, (phase,) = list(case.start), half.phases("train")
    flat = {n: torch.full_like(v, prior**-2) for n, v in case.start.items()}
    total = (flat, {n: torch.zeros_like(v) for n, v in flat.items()})
    sites, mean = {}, case.start
    for round, (state, _, updates) in enumerate(half_rounds(case, 2), start=1):
        changes = {}
        for client in case.clients:
            samples, keys = case.samples[client], {"seed": 0, "client": client, "round": round}
            zero = {n: torch.zeros_like(v) for n, v in flat.items()}
            own = sites.get(client, (zero, zero))
            cavity = {n: total[0][n] - own[0][n] for n in names}
            centre = {n: (total[1][n] - own[1][n]) / cavity[n] for n in names}
            sigma = {
                n: total[0][n].rsqrt() if round > 1 else torch.full_like(v, start)
                for n, v in flat.items()
            }
            mu = {n: mean[n].clone().requires_grad_() for n in names}
            rho = {n: sigma[n].expm1().log().requires_grad_() for n in names}
            plan = batches.plan(len(samples.y), phase, **keys, purpose="train", coupled=False)
            for step, (rows,) in enumerate(plan):
                drawn = batches.noise(
                    half.noise("local", 16),
                    **keys,
                    stage="train/local",
                    step=step,
                    dtype=torch.float64,
                )
                std = {n: (1 + rho[n].exp()).log() for n in names}
                weights = {n: mu[n] + std[n] * drawn[n][0] for n in names}
                out = functional_call(module, weights, (samples.x[rows],))
                loss = nn.functional.cross_entropy(out, samples.y[rows])
                for n in names:
                    q = torch.distributions.Normal(mu[n], std[n])
                    p = torch.distributions.Normal(centre[n], cavity[n].rsqrt())
                    far = torch.distributions.kl_divergence(q, p).sum()
                    loss = loss + heat / len(samples.y) * far
                every = [*mu.values(), *rho.values()]
                grads = torch.autograd.grad(loss, every)
                with torch.no_grad():
                    for value, grad in zip(every, grads, strict=True):
                        value -= LR * grad
            new = {n: (1 + rho[n].exp()).log().detach() ** -2 for n in names}
            change = [
                {n: 0.5 * (new[n] - total[0][n]) for n in names},
                {n: 0.5 * (new[n] * mu[n].detach() - total[1][n]) for n in names},
            ]
            good = {n: own[0][n] + change[0][n] >= 0 for n in names}
            changes[client] = [{n: one[n] * good[n] for n in names} for one in change]
            sites[client] = tuple(
                {n: old[n] + one[n] for n in names}
                for old, one in zip(own, changes[client], strict=True)
            )
            for n in names:
                for got, want in zip(
                    (updates[client].precision, updates[client].shift), changes[client], strict=True
                ):
                    torch.testing.assert_close(got[n], want[n], rtol=1e-6, atol=1e-7)
        total = tuple(
            {n: old[n] + sum(one[place][n] for one in changes.values()) for n in names}
            for place, old in enumerate(total)
        )
        mean = {n: total[1][n] / total[0][n] for n in names}
        for n in names:
            torch.testing.assert_close(state.precision[n], total[0][n], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state.params[n], mean[n], rtol=1e-6, atol=1e-7)


def test_a_lost_factor_makes_all_start_anew_from_the_mean(baselines):
    """Its place in the total is unknown: the prior alone is left, and older factors are dropped."""
    case = Conjugate(baselines["pvi"], 1.0)
    case.round([0, 1, 2])
    mean = case.state.params["0.weight"]
    case.states[1] = case.client.init(*case.model.initial(0, torch.float64))
    case.round([1])
    assert (int(case.state.epoch), bool(case.state.fresh), case.state.turns) == (1, True, {})
    assert torch.equal(case.state.params["0.weight"], mean)
    assert torch.equal(case.state.precision["0.weight"], torch.ones(1, 2).double())
    case.round([0, 1, 2])  # factors of the first epoch count no more
    want = doubles(baselines["pvi"]["exact"]["precision"])
    torch.testing.assert_close(case.state.precision["0.weight"][0], want)
    sent = case.server.broadcast(case.state, 0)
    data = Batch(torch.zeros(3, 2).double(), torch.zeros(3).long(), torch.ones(3).double())
    ahead = case.states[0]._replace(turns=torch.tensor(5))
    work = case.client.begin(ahead, sent, data)
    update = case.client.finish(ahead, work, data)[1]
    assert "after 5 turns, of which 1 are known here" in case.server.check(case.state, 0, update)


def test_spreads_go_there_and_back():
    sigma = doubles([1e-6, 1e-3, 0.5, 3.0])
    torch.testing.assert_close(spread(unspread(sigma)), sigma, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pvi_damping", 1.5), ("pvi_prior_sigma", 0), ("pvi_samples", 0), ("predict_samples", -1)],
)
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"{key} must"):
        small("pvi", **{key: value})


class Logistic(Conjugate):
    """One weight, logistic likelihoods: local optima by iteration, expectations by quadrature."""

    def __init__(self, known, damping):
        self.model = Model(lambda: nn.Sequential(nn.Linear(1, 1, bias=False)), 2)
        config = Config(pvi_damping=damping, pvi_prior_sigma=1.0)
        self.server = Server(config, self.model.anatomy)
        self.client = Client(config, Training(), self.model)
        initial = self.model.initial(0, torch.float64)
        self.state = self.server.init(*initial, (0, 1))
        self.states = [self.client.init(*initial) for _ in range(2)]
        self.slopes = [
            doubles(a) * doubles(s) for a, s in zip(known["a"], known["sign"], strict=True)
        ]
        nodes = np.polynomial.hermite_e.hermegauss(64)
        self.points, self.weights = doubles(nodes[0]), doubles(nodes[1]) / np.sqrt(2 * np.pi)

    def optimum(self, slopes, cavity, mean):
        """Where λ = λ_c + E L'' and λ_c (μ − m_c) = −E L' of the loss L [eq. 2]."""
        mu, precision = mean, cavity
        for _ in range(400):
            draws = mu + precision**-0.5 * self.points
            p = torch.sigmoid(-slopes[:, None] * draws)
            first = ((-slopes[:, None] * p).sum(0) * self.weights).sum()
            second = ((slopes[:, None] ** 2 * p * (1 - p)).sum(0) * self.weights).sum()
            precision = cavity + second
            mu = mu - (cavity * (mu - mean) + first) / precision
        return mu, precision

    def round(self, clients):
        total = Total()
        data = Batch(torch.zeros(3, 1).double(), torch.zeros(3).long(), torch.ones(3).double())
        for k in clients:
            work = self.client.begin(self.states[k], self.server.broadcast(self.state, k), data)
            cavity, mean = work.memo.precision["0.weight"], work.memo.mean["0.weight"]
            mu, precision = self.optimum(self.slopes[k], cavity, mean)
            params = {"0.weight": mu, RHO + "0.weight": unspread(precision.rsqrt())}
            self.states[k], update = self.client.finish(
                self.states[k], work._replace(params=params), data
            )
            assert self.server.check(self.state, k, update) is None
            total.add(self.server.statistic(self.state, k, update))
        self.state = self.server.finalise(self.state, total.value())


@pytest.mark.slow
@pytest.mark.slow
def test_a_logistic_model_reaches_the_pooled_posterior(baselines):
    """Golden damped rounds; then rounds of one client at a time: the optimum of all data at once,
    whose mean and spread are those of the exact posterior, by a grid, to 2 %.
    """
    known = baselines["pvi"]["logistic"]
    case = Logistic(known, known["damping"])
    for want in known["rounds"]:
        case.round([0, 1])
        got = [float(case.state.precision["0.weight"]), float(case.state.shift["0.weight"])]
        assert got == pytest.approx(want["total"], rel=1e-8)
    for turn in range(80):
        case.round([turn % 2])
    precision, mean = case.state.precision["0.weight"], case.state.params["0.weight"]
    assert float(precision) == pytest.approx(known["fixed_point"][0], rel=1e-8)
    assert float(precision * mean) == pytest.approx(known["fixed_point"][1], rel=1e-8)
    pooled = case.optimum(torch.cat(case.slopes), doubles([[1.0]]), doubles([[0.0]]))
    torch.testing.assert_close((mean, precision), pooled, rtol=1e-8, atol=1e-9)
    grid = torch.linspace(-8, 9, 20001, dtype=torch.float64)
    log = -nn.functional.softplus(-torch.cat(case.slopes)[:, None] * grid).sum(0) - grid**2 / 2
    weight = (log - log.max()).exp()
    exact = (weight * grid).sum() / weight.sum()
    spread = ((weight * (grid - exact) ** 2).sum() / weight.sum()).sqrt()
    assert float(mean) == pytest.approx(float(exact), rel=0.02)
    assert float(precision) ** -0.5 == pytest.approx(float(spread), rel=0.02)
