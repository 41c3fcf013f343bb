"""FedNP in whole rounds, against plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import small_prepared
from torch import nn

from bayflower.contract import Work
from bayflower.data import batches
from bayflower.maths import npn, tilted
from bayflower.maths.exact import Total
from bayflower.rounds import solo
from bayflower.strategies.fednp import EXTRA
from bayflower.tree import flatten

F64 = torch.float64


@pytest.mark.parametrize("site", ["vector", "scalar"])
def test_two_rounds_equal_plain_torch(site):
    """[eq. 3], [eq. 4], [eq. 8], [eq. 10], [eq. 18] written out: modules, torch.optim, loops,
    Stein's formulas, 1/λ.
    """
    weight, epsilon, rho, size = 0.03, 0.2, 0.7, 3
    settings = {
        "latent": size,
        "np_weight": weight,
        "epsilon": epsilon,
        "damping": rho,
        "site": site,
        "npn_hidden": 4,
    }
    prepared = small_prepared(
        "fednp", optimizer="sgd", lr=0.02, momentum=0.5, dtype="float64", **settings
    )
    run, halves = prepared.run, prepared.halves
    params, buffers = halves.initial
    clients = prepared.federation.clients[:3]
    state = halves.server.init(params, buffers, tuple(data.client for data in clients))
    states = {data.client: halves.client.init(params, buffers) for data in clients}
    theta, extra = (
        copy.deepcopy(params),
        {name: value.clone() for name, value in state.extra.items()},
    )
    factors = {
        data.client: (torch.zeros(size, dtype=F64), torch.zeros(size, dtype=F64))
        for data in clients
    }

    def site_moments(f, mean, var):
        """Tilted mean and variance of each coordinate by E[σ^d] and Stein's formulas, dividing by
        f.
        """
        m, s = f * mean, f**2 * var
        e1, e2, e3 = tilted.powers(m, s)
        first = ((m + s) * e1 - s * e2) / (e1 * f)
        second = (((m + s) ** 2 + s) * e1 - s * (2 * m + 3 * s) * e2 + 2 * s**2 * e3) / (e1 * f**2)
        return first, second - first**2

    def pooled(features, extra):
        out = (features @ extra[EXTRA + "f.weight"] + extra[EXTRA + "f.bias"]).mean(0)
        return out.mean().expand(size) if site == "scalar" else out

    def network(extra, mean, var):
        soft = nn.functional.softplus
        get = {name.removeprefix(EXTRA + "npn."): value for name, value in extra.items()}
        for layer in ("1", "2"):
            wm, ws = get[f"{layer}.weight.mean"], soft(get[f"{layer}.weight.rho"])
            bm, bs = get[f"{layer}.bias.mean"], soft(get[f"{layer}.bias.rho"])
            var = var @ ws + var @ wm**2 + mean**2 @ ws + bs
            mean = mean @ wm + bm
            if layer == "1":
                mean, var = npn.sigmoid(npn.Gauss(mean, var))
        return mean, var

    for round in (1, 2):
        total, sent, broadcast = Total(), {}, halves.server.broadcast(state, 0)
        precision = 1 + sum(one[0] for one in factors.values())
        shift = sum(one[1] for one in factors.values())
        new_factors = {}
        for data in clients:
            client, samples = data.client, solo.samples(data, torch.device("cpu"), F64).train
            states[client], sent[client], _ = solo.train(
                halves.client,
                states[client],
                broadcast,
                samples,
                seed=0,
                client=client,
                round=round,
            )
            total.add(halves.server.statistic(state, client, sent[client]))

            module = halves.model.factory().double()
            module.load_state_dict(copy.deepcopy(theta))
            mine = {name: value.clone().requires_grad_() for name, value in extra.items()}
            stepper = torch.optim.SGD([*module.parameters(), *mine.values()], lr=0.02, momentum=0.5)
            lam, eta = factors[client]
            var = 1 / (precision - lam)
            mean = (shift - eta) * var
            plan = batches.plan(
                len(samples.y),
                run.training.phase("local"),
                seed=0,
                client=client,
                round=round,
                purpose="train",
                coupled=False,
            )
            for (rows,) in plan:
                stepper.zero_grad()
                features = module.base(samples.x[rows])
                z_m, z_s = site_moments(pooled(features, mine), mean, var)
                mu, s = network(mine, z_m, z_s)
                kl_z = (0.5 * (z_s + z_m**2 - 1 - z_s.log())).sum()
                kl_theta = (
                    0.5
                    * (
                        (epsilon / s).log()
                        + (s + (mu - module.head.weight.reshape(-1)) ** 2) / epsilon
                        - 1
                    )
                ).sum()
                (
                    nn.functional.cross_entropy(module.head(features), samples.y[rows])
                    + weight * (kl_theta + kl_z)
                ).backward()
                stepper.step()
            with torch.no_grad():
                z_m, z_s = site_moments(pooled(module.base(samples.x), mine), mean, var)
            site_factor = (1 / z_s - 1 / var, z_m / z_s - mean / var)
            new_factors[client] = tuple(
                (1 - rho) * old + rho * new
                for old, new in zip((lam, eta), site_factor, strict=True)
            )
            for got, want in zip(states[client].factor, new_factors[client], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
            for name, value in module.named_parameters():
                torch.testing.assert_close(
                    sent[client].params[name], value.detach(), rtol=1e-7, atol=1e-9
                )
            for name, value in mine.items():
                torch.testing.assert_close(
                    sent[client].extra[name], value.detach(), rtol=1e-7, atol=1e-9
                )
        factors = new_factors
        state = halves.server.finalise(state, total.value())
        sizes = {data.client: len(data.y_train) for data in clients}
        theta = {
            name: sum(sizes[c] * sent[c].params[name] for c in sent) / sum(sizes.values())
            for name in theta
        }
        extra = {
            name: sum(sizes[c] * sent[c].extra[name] for c in sent) / sum(sizes.values())
            for name in extra
        }
        torch.testing.assert_close(
            state.total.precision, 1 + sum(one[0] for one in factors.values()), rtol=1e-6, atol=1e-9
        )
        torch.testing.assert_close(
            state.total.shift, sum(one[1] for one in factors.values()), rtol=1e-6, atol=1e-9
        )
        for name in theta:
            torch.testing.assert_close(state.params[name], theta[name], rtol=1e-9, atol=1e-12)
    equal = [float(value.std()) < 1e-12 for value in state.total]
    assert all(equal) == (site == "scalar")  # E-N10


def test_f_is_taken_over_all_local_data_in_evaluation_mode():
    """The survey in pieces equals one pass; BatchNorm uses its running statistics."""
    prepared = small_prepared("fednp", model="mlp-bn", dtype="float64", latent=4)
    half, (params, buffers) = prepared.halves.client, prepared.halves.initial
    samples = solo.samples(prepared.federation.clients[0], torch.device("cpu"), F64).train
    extra = prepared.halves.server.init(params, buffers, ()).extra
    work = Work({**params, **extra}, buffers, None)
    half.survey_size = 7
    found = solo.surveyed(half, work, samples).survey.total["f"] / len(samples.y)
    module = prepared.halves.model.factory().double()
    module.load_state_dict({**params, **buffers})
    with torch.no_grad():
        want = (
            module.eval().base(samples.x) @ extra[EXTRA + "f.weight"] + extra[EXTRA + "f.bias"]
        ).mean(0)
    torch.testing.assert_close(found, want)


def test_companions_are_seeded_by_the_model_and_alike_in_both_precisions():
    states = {}
    for seed, dtype in ((0, "float32"), (0, "float64"), (1, "float64")):
        prepared = small_prepared("fednp", seed=seed, dtype=dtype)
        states[seed, dtype] = prepared.halves.server.init(*prepared.halves.initial, ()).extra
    single = {name: value.double() for name, value in states[0, "float32"].items()}
    for name, value in flatten(states[0, "float64"]).items():
        torch.testing.assert_close(single[name], value, rtol=1e-6, atol=1e-8)
    assert not torch.equal(
        states[0, "float64"][EXTRA + "f.weight"], states[1, "float64"][EXTRA + "f.weight"]
    )
    assert single[EXTRA + "f.weight"].shape == (32, 10)


def test_a_placebo_learns_nothing_of_the_latent():
    """`site=none`: f is 0, so z stays at its prior, the f-layer where it started, and the pull of
    KL_theta is all that is left of the method.
    """
    found = {}
    for site in ("vector", "none"):
        prepared = small_prepared(
            *("fednp",), optimizer="sgd", lr=0.02, dtype="float64", site=site, np_weight=0.1
        )
        halves, data = prepared.halves, prepared.federation.clients[0]
        state = halves.server.init(*halves.initial, (data.client,))
        broadcast = halves.server.broadcast(state, data.client)
        trained = solo.train(
            halves.client,
            halves.client.init(*halves.initial),
            broadcast,
            solo.samples(data, torch.device("cpu"), F64).train,
            **{"seed": 0, "client": data.client, "round": 1},
        )
        found[site] = trained.update
    sent, start = found["none"], broadcast.extra
    for name in ("fednp.f.weight", "fednp.f.bias"):
        assert torch.equal(sent.extra[name], start[name])
        assert not torch.equal(found["vector"].extra[name], start[name])
    assert not sent.change.precision.any()
    assert not sent.change.shift.any()
    assert found["vector"].change.precision.any()
    assert not torch.equal(sent.extra["fednp.npn.2.bias.mean"], start["fednp.npn.2.bias.mean"])
