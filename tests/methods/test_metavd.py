"""MetaVD against golden numbers and a slow oracle of whole rounds: [eq. 4] on every base, [eq. 5]
and the hypernetwork's step.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared
from rig import VICTIM, Rig, rewrite
from torch import nn
from vdplain import (
    ALPHA_RATE,
    ETA,
    FLOOR,
    KL,
    LAYER,
    LR,
    MU,
    RAMP,
    SETTINGS,
    as_module,
    assert_adapts,
    double,
    plain_direction,
    plain_loss,
    replied,
    server,
)

from bayflower.data import batches
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.maths.exact import Total
from bayflower.rounds import solo


@pytest.mark.parametrize("number", [0, 1, 2])
def test_golden_aggregate(golden, number):
    """[eq. 5] without the stray 1/M (E-V1), with and without floor (E-V8), and with dropped entries
    (E-V10).
    """
    case = golden["metavd_aggregate"]
    want = case["cases"][number]
    masks = None if want["mask"] is None else [double([row]) == 0 for row in want["mask"]]
    for rate, key in ((1.0, "theta_agg"), (0.9, "theta_new_eta_0.9")):
        half = server(
            variance_floor=want["eps"] or 1e-300,
            server_lr=rate,
            posterior="own",
            drop_above=0.0 if masks is None else 0.99,
        )
        start = {
            "w.weight": double([case["theta_old"]]),
            "head.weight": torch.zeros(1, 1, dtype=torch.float64),
        }
        state = half.init(start, {}, (0, 1, 2))
        thetas, logs = (
            [double([row]) for row in case["theta"]],
            [double([row]).log() for row in case["alpha"]],
        )
        after = replied(half, state, thetas, logs, [5, 3, 2], masks)
        torch.testing.assert_close(
            after.params["w.weight"][0], double(want[key]), rtol=2e-5, atol=1e-9
        )


@pytest.mark.parametrize("weighting", ["variance", "alpha"])
def test_the_average_is_never_nan(weighting):
    """Weights of 0, alpha at its limits, every entry dropped: finite, and what all dropped stays as
    it was.
    """
    half = server(posterior="own", drop_above=0.99, weighting=weighting)
    old = {
        "w.weight": double([[0.5, -0.5, 0.25, 0.125]]),
        "head.weight": torch.zeros(1, 1, dtype=torch.float64),
    }
    state = half.init(old, {}, (0, 1))
    thetas = [double([[0.0, 0.0, 3.0, 7.0]]), double([[0.0, 2.0, 0.0, 9.0]])]
    logs = [double([[-8.5, 8.5, -8.5, 0.0]]), double([[8.5, -8.5, 8.5, 0.0]])]
    masks = [torch.tensor([[False, False, False, True]])] * 2
    after = replied(half, state, thetas, logs, [3, 1], masks).params["w.weight"][0]
    assert bool(torch.isfinite(after).all())
    assert float(after[0]) == 0
    assert float(after[3]) == 0.125
    gone = replied(half, state, thetas, logs, [3, 1], [torch.ones(1, 4, dtype=torch.bool)] * 2)
    assert torch.equal(gone.params["w.weight"], old["w.weight"])


@pytest.mark.parametrize(
    ("base", "posterior"),
    [
        *(pytest.param(base, "hyper", marks=pytest.mark.slow) for base in ("fedavg", "maml")),
        *((base, "hyper") for base in ("reptile", "perfedavg")),
        ("reptile", "own"),
        ("reptile", "global"),
    ],
)
def test_two_rounds_equal_plain_torch(base, posterior):
    """Modules, torch.optim and loops: local steps [eq. 4], the average [eq. 5], the hypernetwork
    (E-V3), the adaptation.
    """
    prepared = small_prepared("metavd", base=base, posterior=posterior, **SETTINGS)
    half, client, _, (params, buffers) = prepared.halves
    clients = prepared.federation.clients[:3]
    assert len({len(data.y_train) for data in clients}) == 3
    numbers = [data.client for data in clients]
    state = half.init(params, buffers, tuple(numbers))
    theta, velocity = (
        {k: v.clone() for k, v in params.items()},
        {k: torch.zeros_like(v) for k, v in params.items()},
    )
    shape, own = (
        params[LAYER].shape,
        {c: nn.Parameter(double(-1.0).expand(params[LAYER].numel()).clone()) for c in numbers},
    )
    if posterior == "hyper":
        hyper = as_module(state.belief.psi)
        own = {c: nn.Parameter(state.belief.embeddings[str(c)].clone()) for c in numbers}
        steppers = [
            torch.optim.SGD(hyper.parameters(), lr=ETA, momentum=0.6, weight_decay=5e-4),
            torch.optim.SGD(own.values(), lr=ETA, momentum=0.3, weight_decay=5e-4),
        ]
    for round in (1, 2):
        total, moved, weights = Total(), {}, {}
        done: dict = {}
        beta = KL / (1 + math.exp(-10 * ((round - 1) / RAMP - 0.5)))
        for data in clients:
            samples = solo.samples(data, torch.device("cpu"), torch.float64).train
            fresh, broadcast = client.init(params, buffers), half.broadcast(state, data.client)
            update = solo.train(
                client, fresh, broadcast, samples, seed=0, client=data.client, round=round
            ).update
            total.add(half.statistic(state, data.client, update))
            log_alpha = (
                (hyper(own[data.client]) - 1 if posterior == "hyper" else own[data.client])
                .detach()
                .reshape(shape)
            )
            mine, step = theta, torch.zeros(shape, dtype=torch.float64)
            phase = client.phases("train")[0]
            shapes = client.noise("local", phase.batch_size)
            keys = {"seed": 0, "client": data.client, "round": round}

            def loss(p, step, x, y, noise, log_alpha=log_alpha, beta=beta):
                return plain_loss(p, step, log_alpha, beta, x, y, noise)

            for place, groups in enumerate(
                batches.plan(len(samples.y), phase, **keys, purpose="train", coupled=False)
            ):
                noise = batches.noise(
                    shapes, **keys, stage="train/local", step=place, dtype=torch.float64
                )["output"]
                mine = {name: value.detach().requires_grad_() for name, value in mine.items()}
                step = step.detach().requires_grad_()
                way = plain_direction(
                    base,
                    mine,
                    step,
                    loss,
                    [(samples.x[rows], samples.y[rows]) for rows in groups],
                    noise,
                )
                mine = {name: value - LR * way[name] for name, value in mine.items()}
                step = step - LR * ALPHA_RATE * way["step"]
            done[data.client], moved[data.client] = (
                {name: value.detach() for name, value in mine.items()},
                step.detach(),
            )
            weights[data.client] = (
                len(samples.y),
                1 / ((log_alpha + step.detach()).exp() * mine[LAYER].detach() ** 2 + FLOOR),
            )
            torch.testing.assert_close(update.log_alpha_step, step.detach(), rtol=1e-6, atol=1e-11)
        state = half.finalise(state, total.value())
        share = {c: n / sum(n for n, _ in weights.values()) for c, (n, _) in weights.items()}
        mean = {name: sum(share[c] * done[c][name] for c in done) for name in theta}
        mean[LAYER] = sum(share[c] * weights[c][1] * done[c][LAYER] for c in done) / sum(
            share[c] * weights[c][1] for c in done
        )
        velocity = {name: MU * velocity[name] + mean[name] - theta[name] for name in theta}
        theta = {name: value + ETA * velocity[name] for name, value in theta.items()}
        for name, value in theta.items():
            torch.testing.assert_close(state.params[name], value, rtol=1e-7, atol=1e-10)
        if posterior == "hyper":
            gradients = torch.autograd.grad(
                -sum(share[c] * (hyper(own[c]) * moved[c].reshape(-1)).sum() for c in own),
                hyper.parameters(),
            )
            for value, gradient in zip(hyper.parameters(), gradients, strict=True):
                value.grad = gradient
            for c, value in own.items():
                value.grad = torch.autograd.grad(
                    -(hyper(value) * moved[c].reshape(-1)).sum(), value
                )[0]
            for stepper in steppers:
                stepper.step()
            for name, value in state.belief.psi.items():
                torch.testing.assert_close(
                    value,
                    hyper.state_dict()[f"{2 * int(name[0])}{name[1:]}"],
                    rtol=1e-7,
                    atol=1e-10,
                )
        else:
            common = sum(share[c] * moved[c].reshape(-1) for c in own)
            own = {
                c: nn.Parameter(
                    own[c].detach() + ETA * (moved[c].reshape(-1) if posterior == "own" else common)
                )
                for c in own
            }
        for c, value in own.items():
            known = state.belief.embeddings["all" if posterior == "global" else str(c)]
            torch.testing.assert_close(known, value.detach(), rtol=1e-7, atol=1e-10)
            assert float((value.detach() + 1).abs().max()) > 1e-4
    assert_adapts(prepared, state, theta)


def test_dropped_weights_do_not_travel():
    """E-V10: from `drop_after` on both directions are smaller by the dropped entries, which stay as
    they are if no one keeps them.
    """
    settings = {
        "new_clients": 0,
        "rounds": 4,
        "posterior": "own",
        "drop_above": 0.5,
        "drop_after": 2,
        "evaluate_every": 0,
    }
    prepared = small_prepared("metavd", log_alpha_start=0.5, optimizer="sgd", lr=1e-3, **settings)
    outcome = execute(prepared)
    rounds = outcome.rounds
    size = prepared.halves.model.shapes[LAYER][0] * prepared.halves.model.shapes[LAYER][1]
    # of the round that comes
    assert [record["sparsity"] for record in rounds] == [0.0, 1.0, 1.0, 1.0]
    for key in ("bytes_up", "bytes_down"):
        saved = rounds[1][key] - rounds[2][key]
        # theta and log alpha of five clients; headers are a little shorter
        assert 5 * 2 * 4 * size <= saved < 5 * 2 * 4 * size + 200
    two = execute(
        small_prepared(
            "metavd", log_alpha_start=0.5, optimizer="sgd", lr=1e-3, **{**settings, "rounds": 2}
        )
    ).server_state
    four = outcome.server_state
    assert torch.equal(two.params[LAYER], four.params[LAYER])
    assert not torch.equal(two.params["head.weight"], four.params["head.weight"])
    assert_same_bits(two.belief.embeddings, four.belief.embeddings)


def test_a_reply_that_leaves_out_other_entries_is_refused():
    def lie(flat):
        flat["mask/layer"][0] ^= 128

    def fewer(flat):
        flat["mask/layer"][0] = 255
        flat["log_alpha_step"], flat[f"params/{LAYER}"] = (
            flat["log_alpha_step"][8:],
            flat[f"params/{LAYER}"][8:],
        )

    def far(flat):
        flat["log_alpha_step"] += 40

    for change, words in (
        (lie, "the mask leaves"),
        (fewer, "not those that were dropped"),
        (far, "log_alpha_step must be in"),
    ):
        rig = Rig("metavd", tamper=rewrite(change), drop_above=0.5, drop_after=0)
        rig.start(rounds=1)
        assert any(
            words in fault and f"client {VICTIM}" in fault for fault in rig.strategy.faults
        ), rig.strategy.faults


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "base",
            "scaffold",
            "base must be one of fedavg, reptile, maml, perfedavg, got 'scaffold'",
        ),
        ("posterior", "x", "posterior must be one of hyper, global, own"),
        ("variance_floor", 0, "variance_floor must be positive and finite, got 0"),
        ("kl_weight", -1, "kl_weight must not be negative, got -1"),
        ("drop_above", 1, r"drop_above must be in \[0, 1\), got 1"),
        ("log_alpha_start", 9, "log_alpha_start must be in ±8.5, got 9"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words):
        small("metavd", **{key: value})
