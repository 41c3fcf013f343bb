"""MetaVD against golden numbers and a slow oracle of whole rounds: [eq. 4] on every base, [eq. 5]
and the hypernetwork's step.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, worst_difference
from metaplain import slopes
from test_strategy import VICTIM, Rig, rewrite
from torch import nn
from torch.func import vmap

from bayflower.clients.metavd import Client
from bayflower.data import batches
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.maths import dropout, hypernet
from bayflower.maths.exact import Total
from bayflower.networks.model import Anatomy, Batch
from bayflower.networks.papers import build
from bayflower.rounds import solo
from bayflower.rounds.result import result
from bayflower.strategies.metavd import Broadcast, Config, Server, Update
from bayflower.tree import stack

BASES = ["fedavg", "reptile", "maml", "perfedavg"]
LAYER = "base.3.weight"
LR, INNER, DELTA, ALPHA_RATE, KL, RAMP, FLOOR, ETA, MU = (
    0.05,
    0.3,
    0.05,
    5.0,
    3.0,
    3,
    1e-3,
    0.7,
    0.3,
)
SETTINGS = {
    "optimizer": "sgd",
    "lr": LR,
    "dtype": "float64",
    "server_lr": ETA,
    "server_momentum": MU,
    "inner_lr": INNER,
    "hf_delta": DELTA,
    "alpha_rate": ALPHA_RATE,
    "kl_weight": KL,
    "ramp_rounds": RAMP,
    "variance_floor": FLOOR,
    "log_alpha_start": -1.0,
    "hyper_reach": 0,
}


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def server(**config) -> Server:
    return Server(
        Config(**config),
        Anatomy(("w.weight", "head.weight"), (), frozenset(), frozenset({"head.weight"})),
    )


def replied(half: Server, state, thetas, log_alphas, counts, masks=None):
    """The state after clients 0, 1, … reply with these layers and log alphas."""
    total, updates = Total(), []
    for client, (theta, log_alpha, count) in enumerate(
        zip(thetas, log_alphas, counts, strict=True)
    ):
        step = log_alpha - half.log_alpha(state, client)
        mask = {} if masks is None else {"layer": masks[client]}
        updates.append(
            Update(
                torch.tensor(count),
                {"w.weight": theta, "head.weight": torch.ones(1, 1).double()},
                {},
                step,
                mask,
            )
        )
        total.add(half.statistic(state, client, updates[-1]))
    fast = half.total(state, tuple(range(len(updates))), stack(updates))
    assert worst_difference(fast, total.value()) < 1e-12
    return half.finalise(state, total.value())


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


# -- the oracle of whole rounds ------------------------------------------------------------------
def plain_loss(p: dict, step, log_alpha, beta: float, x, y, noise):
    """[eq. 4] of the perceptron, layer by layer."""
    x = torch.relu(x.flatten(1) @ p["base.1.weight"].T + p["base.1.bias"])
    now = (log_alpha + step).clamp(-8.5, 8.5)
    mean = x @ p[LAYER].T + p["base.3.bias"]
    variance = (x**2) @ (now.exp() * p[LAYER] ** 2).T
    x = torch.relu(mean + (variance + 1e-300).sqrt() * noise[: len(x)])
    nll = nn.functional.cross_entropy(x @ p["head.weight"].T + p["head.bias"], y)
    return nll + beta * (0.5 * torch.log(1 + 1 / now.exp())).mean()


def plain_direction(base: str, p: dict, step, loss, groups, noise) -> dict:
    """The direction of one step for theta and log alpha, on leaves that need a gradient."""
    both = {**p, "step": step}
    if base in ("fedavg", "reptile"):
        return slopes(loss(p, step, *groups[0], noise), both, False)
    exact = base == "maml"
    inner = slopes(loss(p, step, *groups[0], noise[0]), p, exact)
    fast = {name: p[name] - INNER * inner[name] for name in p}
    if exact:
        return slopes(loss(fast, step, *groups[1], noise[1]), both, False)
    fast = {name: value.detach().requires_grad_() for name, value in fast.items()}
    g = slopes(loss(fast, step, *groups[1], noise[1]), {**fast, "step": step}, False)
    length = torch.cat([g[name].reshape(-1) for name in p]).norm()
    ends = []
    for sign in (1, -1):
        there = {
            name: (p[name] + sign * DELTA * g[name] / length).detach().requires_grad_()
            for name in p
        }
        ends.append(slopes(loss(there, step, *groups[0], noise[0]), {**there, "step": step}, False))
    return {
        name: g[name] - INNER * (ends[0][name] - ends[1][name]) * length / (2 * DELTA) for name in g
    }


def as_module(psi: dict) -> nn.Sequential:
    sizes = [psi["0.weight"].shape[::-1], psi["1.weight"].shape[::-1], psi["2.weight"].shape[::-1]]
    parts = [nn.Linear(*size) for size in sizes]
    module = nn.Sequential(
        parts[0], nn.LeakyReLU(0.1), parts[1], nn.LeakyReLU(0.1), parts[2]
    ).double()
    module.load_state_dict({f"{2 * int(name[0])}{name[1:]}": value for name, value in psi.items()})
    return module


@pytest.mark.parametrize(
    ("base", "posterior"),
    [*((base, "hyper") for base in BASES), ("reptile", "own"), ("reptile", "global")],
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


def assert_adapts(prepared, state, theta: dict) -> None:
    """Assert that before a test theta takes a step down [eq. 4], its noise included, and alpha
    none; on fedavg nothing moves.
    """
    half, client, _, (params, buffers) = prepared.halves
    data = prepared.federation.clients[1]
    samples = solo.samples(data, torch.device("cpu"), torch.float64).train
    broadcast = half.broadcast(state, data.client)
    keys = {"seed": 0, "client": data.client, "round": 2}
    got = solo.adapt(client, client.init(params, buffers), broadcast, samples, "finetune", **keys)
    if prepared.run.options.base == "fedavg":
        assert not got.tuned
        return
    (phase,) = client.phases("finetune")
    assert phase.optimizer.lr == (
        INNER if prepared.run.options.base in ("maml", "perfedavg") else LR
    )
    ((rows,),) = batches.plan(len(samples.y), phase, **keys, purpose="finetune", coupled=False)
    noise = batches.noise(
        client.noise(phase.name, phase.batch_size),
        **keys,
        stage="finetune/adapt",
        step=0,
        dtype=torch.float64,
    )["output"]
    theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
    loss = plain_loss(
        theta, torch.zeros(()), broadcast.log_alpha, 1.0, samples.x[rows], samples.y[rows], noise
    )
    for name, slope in slopes(loss, theta, False).items():
        torch.testing.assert_close(
            got.tuned[name],
            (theta[name] - phase.optimizer.lr * slope).detach(),
            rtol=1e-6,
            atol=1e-9,
        )


# -- engines, new clients, samples, dropping -----------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"base": "fedavg"}, "mlp"),
        ({"base": "maml"}, "mlp"),
        ({"base": "maml", "server_momentum": 0}, "mlp-bn"),
        # the velocity of a bias before BatchNorm is rounding and nothing else
        ({"base": "perfedavg", "server_momentum": 0}, "mlp-bn"),
        ({"base": "reptile", "drop_above": 0.27, "drop_after": 1, "predict_samples": 2}, "mlp"),
    ],
    ids=lambda p: "-".join(map(str, p.values())) if isinstance(p, dict) else p,
)
def test_loop_and_fused_agree(settings, model):
    prepared = small_prepared(
        "metavd", model=model, rounds=3, fraction_train=0.6, **{**SETTINGS, **settings}
    )
    loop, fused = (
        run(prepared.run, prepared.federation, prepared.halves) for run in (run_loop, run_fused)
    )
    assert not fused.remarks
    assert worst_difference(fused.server_state, loop.server_state) < 1e-9
    for mine, yours in ((loop.views, fused.views), (loop.new_clients, fused.new_clients)):
        for view, tallies in mine.items():
            for client, tally in tallies.items():
                assert float(yours[view][client].nll) == pytest.approx(float(tally.nll), rel=1e-7)
    for one, two in zip(loop.rounds, fused.rounds, strict=True):
        assert (one["bytes_up"], one["bytes_down"]) == (two["bytes_up"], two["bytes_down"])
        assert one["dropout_rate"] == pytest.approx(two["dropout_rate"], rel=1e-9)


def test_a_new_client_has_the_mean_of_the_trained_embeddings():
    """E-V11: by default h(mean of those that took part); nearly no dropout where asked for."""
    prepared = small_prepared("metavd", fraction_train=0.4, rounds=1)
    half, belief = prepared.halves.server, execute(prepared).server_state
    seen = {int(client) for client, count in belief.belief.seen.items() if int(count)}
    assert 0 < len(seen) < 5
    mean = torch.stack([belief.belief.embeddings[str(client)] for client in sorted(seen)]).mean(0)
    want = (-3 + hypernet.output(belief.belief.psi, mean)).reshape(half.log_alpha(belief, 99).shape)
    assert torch.equal(half.broadcast(belief, 99).log_alpha, want)
    still = small_prepared("metavd", ood="deterministic").halves.server
    assert bool((still.broadcast(belief, 99).log_alpha == -8.5).all())
    assert torch.equal(still.broadcast(belief, 0).log_alpha, half.broadcast(belief, 0).log_alpha)


def test_samples_of_the_weights_make_a_prediction():
    """The view `sampled` is the mean over S draws of w ~ N(theta, alpha theta²), of the adapted
    model.
    """
    prepared = small_prepared("metavd", predict_samples=3, dtype="float64", log_alpha_start=0.0)
    half, client, model, (params, buffers) = prepared.halves
    data = prepared.federation.clients[0]
    samples = solo.samples(data, torch.device("cpu"), torch.float64)
    broadcast = half.broadcast(half.init(params, buffers, (0, 1, 2)), 0)
    fresh = client.init(params, buffers)
    state = solo.adapt(
        client, fresh, broadcast, samples.train, "finetune", seed=0, client=0, round=1
    )
    noise = batches.noise(
        client.noise("predict", 5),
        seed=0,
        client=0,
        round=1,
        stage="predict",
        step=0,
        dtype=torch.float64,
    )
    got = client.predict("sampled", state, broadcast, samples.test.x, noise)
    found = []
    for draw in noise["weight"]:
        module = model.factory().double()
        module.load_state_dict(
            {
                **state.tuned,
                LAYER: state.tuned[LAYER]
                + broadcast.log_alpha.exp().sqrt() * state.tuned[LAYER] * draw,
            }
        )
        with torch.no_grad():
            found.append(torch.softmax(module(samples.test.x), 1))
    torch.testing.assert_close(got, sum(found) / 3)
    mean = client.predict("personal", state, broadcast, samples.test.x, noise)
    assert float((mean - got).abs().max()) > 1e-3
    outcome = execute(prepared)
    assert set(outcome.views) == {"personal", "global", "sampled"}
    final = result(prepared.run, "loop", prepared.federation, prepared.halves, outcome)["final"]
    assert (
        final["new_clients"]["gap"]
        == final["new_clients"]["accuracy"] - final["personal"]["accuracy"]
    )
    assert {"ece", "ece_allclass", "mce", "nll"} <= set(final["sampled"])


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
    rounds = execute(prepared).rounds
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
    four = execute(prepared).server_state
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


def test_embeddings_belong_to_clients_not_places():
    """The same clients in another order, and only some of them: each moves its own embedding."""
    half = small_prepared("metavd").halves.server
    params, buffers = small_prepared("metavd").halves.initial
    one, two = half.init(params, buffers, (3, 11, 2)), half.init(params, buffers, (2, 3, 11))
    assert_same_bits(one.belief, two.belief)
    outcome = execute(small_prepared("metavd", "fused", fraction_train=0.4, rounds=1))
    start = small_prepared("metavd", "fused").halves
    before = start.server.init(*start.initial, (0, 1, 2, 3, 4)).belief
    for client, count in outcome.server_state.belief.seen.items():
        same = torch.equal(
            before.embeddings[client], outcome.server_state.belief.embeddings[client]
        )
        assert same == (int(count) == 0)


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


@pytest.mark.parametrize(("classes", "number"), [(10, 372_234), (100, 383_844), (62, 378_942)])
def test_the_papers_network(classes, number):
    """Three convolutions of 64 maps, 256 and 128 hidden units; dropout on the 256 → 128 layer."""
    model = build("cnn3", (3, 32, 32), classes)
    assert model.num_parameters == number
    assert model.shapes[dropout.find_layer(model.anatomy, model.shapes, model.shapes)] == (128, 256)


@pytest.mark.parametrize("base", ["reptile", "maml", "perfedavg"])
def test_layers_in_their_form_for_stacks_give_the_same_gradient(base):
    """The convolutions, pooling and loss that a GPU's stacks use, second derivatives and the
    layer's noise included; here on the CPU.
    """
    model = build("cnn3", (1, 16, 16), 4)
    run = small("metavd", base=base, dtype="float64", inner_lr=0.3, kl_weight=3.0)
    params, buffers = model.initial(0, torch.float64)
    draw = torch.Generator().manual_seed(0)
    found = []
    for one in (model, model.for_stacks(gpu=True)):
        client = Client(run.options, run.training, one)
        phase = client.phases("train")[0]
        weight = params[client.weight]
        broadcast = Broadcast(params, buffers, torch.full_like(weight, -1.0), double(1.0), {})
        draw.manual_seed(1)
        groups = []
        for _ in range(phase.batches):
            x, y = (
                torch.randn(2, 5, 1, 16, 16, dtype=torch.float64, generator=draw),
                torch.randint(0, 4, (2, 5), generator=draw),
            )
            groups.append(Batch(x, y, torch.ones(2, 5, dtype=torch.float64)))
        shape = client.noise("local", 5)["output"]
        noise = {"output": torch.randn(2, *shape, dtype=torch.float64, generator=draw)}
        begin = client.begin(client.init(params, buffers), broadcast, None)
        work = stack([begin, begin])
        found.append(
            vmap(lambda w, b, n, client=client, phase=phase: client.gradient(phase, w, b, n))(
                work, tuple(groups), noise
            )[0]
        )
    assert worst_difference(found[1], found[0]) < (1e-6 if base == "perfedavg" else 1e-10)
