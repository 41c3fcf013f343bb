"""MetaVD's clients: new ones, samples of their weights, their networks, alone and stacked."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, worst_difference
from torch.func import vmap
from vdplain import BASES, LAYER, SETTINGS, double

from bayflower.clients.metavd import Client
from bayflower.data import batches
from bayflower.engines import execute
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.maths import dropout, hypernet
from bayflower.networks.model import Batch
from bayflower.networks.papers import build
from bayflower.rounds import solo
from bayflower.rounds.result import result
from bayflower.strategies.metavd import Broadcast
from bayflower.tree import stack
from bayflower.work import is_unchanged


# -- engines, new clients, samples, dropping -----------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        pytest.param({"base": "fedavg"}, "mlp", marks=pytest.mark.slow),
        pytest.param({"base": "maml"}, "mlp", marks=pytest.mark.slow),
        pytest.param({"base": "maml", "server_momentum": 0}, "mlp-bn", marks=pytest.mark.slow),
        # the velocity of a bias before BatchNorm is rounding and nothing else
        pytest.param({"base": "perfedavg", "server_momentum": 0}, "mlp-bn", marks=pytest.mark.slow),
        ({"base": "reptile", "drop_above": 0.27, "drop_after": 1, "predict_samples": 2}, "mlp"),
    ],
    ids=lambda p: "-".join(map(str, p.values())) if isinstance(p, dict) else p,
)
def test_loop_and_fused_agree(settings, model):
    few = {"rounds": 3, "fraction_train": 0.6, "keep": 0.15, "new_client_epochs": 1}
    prepared = small_prepared("metavd", model=model, **{**SETTINGS, **few, **settings})
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


@pytest.mark.parametrize("posterior", ["hyper", "own"])
def test_the_reported_dropout_rate_is_that_of_every_nth_of_many_clients(posterior):
    """Of 40 clients every third, 14 of at most 16; the share of dropped weights is of all 40."""
    half = small_prepared("metavd", posterior=posterior, drop_above=0.05, drop_after=0).halves
    state = half.server.init(*half.initial, tuple(range(40)))
    belief = state.belief
    if posterior == "own":  # clients that differ
        draw = torch.Generator().manual_seed(0)
        own = {
            name: value + torch.randn(value.shape, generator=draw, dtype=value.dtype)
            for name, value in belief.embeddings.items()
        }
        state = state._replace(belief=belief._replace(embeddings=own))
    rates = [torch.sigmoid(half.server.log_alpha(state, client)) for client in range(40)]
    told = half.server.report(state)
    assert told["dropout_rate"] == pytest.approx(float(torch.stack(rates[::3]).mean()), rel=1e-6)
    dropped = float((torch.stack(rates) > 0.05).double().mean())
    assert 0 < dropped < 1
    assert told["sparsity"] == pytest.approx(dropped)
    assert told["kl_weight_now"] == pytest.approx(float(half.server.kl_weight(state)))


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
    ("name", "classes", "number"),
    [
        ("cnn3", 10, 372_234),
        ("cnn3", 100, 383_844),
        ("cnn3", 62, 378_942),
        ("cnn3-256", 10, 2_270_346),
    ],
)
def test_the_papers_network(name, classes, number):
    """Three convolutions of 64 (or 256) maps, 256 and 128 hidden units; dropout on the 256 → 128
    layer.
    """
    model = build(name, (3, 32, 32), classes)
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


def step_of(base: str, **settings):
    """Return (the half, the phase, the gradient of its first step of a round)."""
    prepared = small_prepared("metavd", **{**SETTINGS, "base": base, **settings})
    half, client, _, (params, buffers) = prepared.halves
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float64).train
    work = client.begin(
        client.init(params, buffers), half.broadcast(half.init(params, buffers, (0, 1)), 0), data
    )
    (phase,) = client.phases("train")
    groups = (data, Batch(data.x.flip(0), data.y.flip(0), data.mask))[: phase.batches]
    draw = torch.Generator().manual_seed(0)
    shape = client.noise(phase.name, len(data.y))["output"]
    noise = {"output": torch.randn(shape, dtype=torch.float64, generator=draw)}
    grads, _, loss = client.gradient(phase, work, groups, noise)
    return client, phase, grads, loss


@pytest.mark.parametrize("base", BASES)
def test_the_rate_of_dropout_multiplies_its_gradient_once(base):
    """Also where a step goes through inner steps and differences; the weights move as without."""
    (*_, plain, value), (*_, fast, same) = (step_of(base, alpha_rate=rate) for rate in (1.0, 7.0))
    assert torch.equal(value, same)
    assert set(plain) == set(fast)
    for name, grad in plain.items():
        rate = 7.0 if name == "log_alpha_step" else 1.0
        torch.testing.assert_close(fast[name], rate * grad, rtol=1e-12, atol=0)
    assert float(plain["log_alpha_step"].abs().max()) > 0


@pytest.mark.parametrize("base", BASES)
def test_a_gradient_is_the_losss_own_where_a_step_has_one_batch(base):
    client, phase, *_ = step_of(base)
    gradient = type(client).gradient
    assert is_unchanged(gradient, phase) == (base in ("fedavg", "reptile"))
    assert not is_unchanged(gradient)  # not on every base
    assert all(is_unchanged(gradient, one) for one in client.phases("finetune"))
