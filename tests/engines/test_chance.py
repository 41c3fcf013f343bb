"""Random layers: their numbers are a function of (key, pass, call, place), right in rate and
independent, the same alone and stacked; what the layers do with them is torch's formula.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, some
from devices import DEVICES
from torch import nn
from torch.func import functional_call, vmap
from zoo import CLASSES, ONE_ROUND, RANDOM, agree, federation, halves_of

from bayflower.config import parse
from bayflower.data import batches
from bayflower.errors import BayflowerError
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.maths import meta
from bayflower.networks.model import Model
from bayflower.stacked import chance
from bayflower.stacked.rewriting import Seen, passing

CPU = torch.device("cpu")


def drawn(key, draw, passes: int = 0, calls: int = 0):
    """Return what `draw` gives in one call of one pass of a step."""
    with chance.step(key):
        for _ in range(passes):
            with chance.one_pass():
                pass
        with chance.one_pass():
            for _ in range(calls):
                chance.next_key()
            return draw()


def mask(key, shape=(40, 50), drop=0.5, passes=0, calls=0):
    return drawn(key, lambda: chance.kept(shape, drop, CPU), passes, calls)


# -- numbers ---------------------------------------------------------------------------------------
def slow_bits(key: int, number: int, call: int, place: tuple[int, ...]) -> int:
    """The formula of the module's table, in whole numbers of any length."""
    word = 2**64

    def mixed(z):
        z %= word
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    shift = mixed(mixed((number + 1) * gamma) + call + 1)
    axes = [mixed((axis + 1) * 0xBF58476D1CE4E5B9) | 1 for axis in range(len(place))]
    return mixed(mixed(key + shift) + sum(i * c for i, c in zip(place, axes, strict=True)))


@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_of_the_formula(device):
    """For a number as key, for a tensor, and for a stack of them."""
    where, keys = torch.device(device), [-(2**61) + 7, 5, 2**61]
    found = [drawn(key, lambda: chance.bits((3, 2, 4), where), 2, 1).cpu() for key in keys]
    for key, one in zip(keys, found, strict=True):
        for place in np.ndindex(3, 2, 4):
            assert int(one[place]) % 2**64 == slow_bits(key, 2, 1, place)
    stack = vmap(lambda key: drawn(key, lambda: chance.bits((3, 2, 4), where), 2, 1))(
        torch.tensor(keys, device=where)
    )
    assert torch.equal(stack.cpu(), torch.stack(found))


def test_the_key_of_a_step_is_the_same_as_number_and_as_tensor():
    keys = [batches.layers_key(3, "train/local", client, 2) for client in range(4)]
    found = chance.further(torch.tensor(keys), torch.tensor(9))
    assert found.tolist() == [chance.further_number(key, 9) for key in keys]
    stages = [batches.layers_key(3, stage, 1, 2) for stage in ("train/local", "new/local")]
    assert len({*keys, *stages}) == 5  # the first stage is among the keys


@pytest.mark.parametrize("drop", [0.03, 0.25, 0.5, 0.9])
def test_the_rate_is_right(drop):
    number = 200_000
    kept = mask(11, (400, 500), drop).double()
    assert abs(float(kept.mean()) - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / number)
    for axis in (0, 1):  # rows and columns are binomial: their variance is that of independence
        sums = kept.sum(axis)
        want = kept.shape[axis] * drop * (1 - drop)
        assert abs(float(sums.var()) / want - 1) < 6 * math.sqrt(2 / len(sums))


def test_masks_of_clients_rounds_stages_steps_passes_and_layers_are_independent():
    """All pairs of many masks: correlations are those of independent ones."""
    masks = [mask(batches.layers_key(0, "train/local", client, 1)) for client in range(8)]
    masks += [mask(batches.layers_key(0, "train/local", 0, round)) for round in range(2, 8)]
    masks += [mask(batches.layers_key(seed, "train/local", 0, 1)) for seed in range(1, 4)]
    masks += [mask(batches.layers_key(0, stage, 0, 1)) for stage in ("new/fit", "train/head")]
    key = batches.layers_key(0, "train/local", 0, 1)
    masks += [mask(chance.further_number(key, step)) for step in range(8)]
    masks += [mask(key, passes=number) for number in range(1, 8)]
    masks += [mask(key, calls=number) for number in range(1, 8)]
    masks += [mask(key, calls=2, passes=3), mask(key, calls=3, passes=2)]
    flat = torch.stack([one.flatten().double() * 2 - 1 for one in masks])
    size, count = flat.shape[1], len(masks)
    found = (flat @ flat.T / size - torch.eye(count)).abs()
    assert float(found.max()) < 5 / math.sqrt(size)
    pairs = found[~torch.eye(count, dtype=torch.bool)]
    assert float(pairs.square().mean() * size) == pytest.approx(1, abs=0.15)


def test_neighbours_are_independent():
    kept = mask(4, (300, 300)).double() * 2 - 1
    for rows in range(3):
        for columns in range(3):
            if rows or columns:
                other = kept[rows:, columns:]
                product = other * kept[: other.shape[0], : other.shape[1]]
                assert abs(float(product.mean())) < 5 / math.sqrt(product.numel())


def test_uniform_and_normal_numbers_have_their_distributions():
    u = drawn(1, lambda: chance.uniform((300, 300), CPU)).flatten().sort().values
    steps = torch.arange(1, len(u) + 1) / len(u)
    assert float((u - steps).abs().max()) < 1.95 / math.sqrt(len(u))  # Kolmogorov and Smirnov
    z = drawn(1, lambda: chance.normal((300, 300), CPU)).flatten().sort().values
    assert float((torch.special.ndtr(z) - steps).abs().max()) < 1.95 / math.sqrt(len(z))


def test_padding_and_the_number_of_clients_change_no_mask():
    few = mask(7, (3, 5, 7), 0.4)
    assert torch.equal(mask(7, (9, 5, 7), 0.4)[:3], few)  # samples along the first axis
    assert torch.equal(mask(7, (3, 8, 7), 0.4)[:, :5], few)  # or the second
    assert torch.equal(mask(7, (3, 5, 12), 0.4)[..., :7], few)
    keys = torch.tensor([3, 7, 1, 0])
    for stack in (keys, keys[:2]):
        many = vmap(lambda key: mask(key, (3, 5, 7), 0.4))(stack)
        assert torch.equal(many[1], few)


# -- layers ----------------------------------------------------------------------------------------
def run(layer, x, key=3):
    """Return the output of a layer in a training pass, without torch's generator."""
    before = torch.get_rng_state()
    with chance.step(key), passing(Seen(), train=True, stacked=False):
        out = layer(x)
    assert torch.equal(torch.get_rng_state(), before)
    return out


def test_dropout_is_torchs_formula():
    x = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(0))
    kept = mask(3, x.shape, 0.3).float()
    torch.testing.assert_close(run(nn.Dropout(0.3), x), x * kept / 0.7)
    same = x.clone()
    assert run(nn.Dropout(0.3, inplace=True), same) is same
    torch.testing.assert_close(same, x * kept / 0.7)
    channels = mask(3, (6, 5), 0.3).float()
    for layer, part in ((nn.Dropout2d, x), (nn.Dropout1d, x[..., 0]), (nn.Dropout3d, x[..., None])):
        wanted = part * channels.reshape(6, 5, *(1,) * (part.ndim - 2)) / 0.7
        torch.testing.assert_close(run(layer(0.3), part), wanted)
    alone = mask(3, (1, 6), 0.3)[0].float()[:, None] / 0.7  # (channels, places) without a batch
    torch.testing.assert_close(run(nn.Dropout1d(0.3), x[..., 0, 0]), x[..., 0, 0] * alone)
    assert not run(nn.Dropout(1.0), x).any()


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    for layer in (nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)):
        out = run(layer, x)
        assert abs(float(out.mean())) < 0.02
        assert abs(float(out.var()) - 1) < 0.03
        low = -1.7580993408473766
        scale = ((1.7580993408473766**2 * 0.2 + 1) * 0.8) ** -0.5
        kept = mask(3, x.shape, 0.2)
        torch.testing.assert_close(out[kept], (x * scale - low * scale * 0.2)[kept])
        dropped = out[~kept]
        torch.testing.assert_close(dropped, torch.full_like(dropped, low * scale * 0.8))


def test_feature_alpha_dropout_drops_whole_channels():
    out = run(nn.FeatureAlphaDropout(0.5), torch.randn(8, 6, 5))
    same = (out == out[..., :1]).all(-1)
    assert torch.equal(same, ~mask(3, (8, 6, 1), 0.5)[..., 0])


def test_rrelu_draws_a_slope_for_each_number():
    x = -torch.ones(100, 200)
    slope = -run(nn.RReLU(0.1, 0.4), x)
    assert 0.1 <= float(slope.min()) < 0.1001
    assert 0.3999 < float(slope.max()) <= np.float32(0.4)
    assert abs(float(slope.mean()) - 0.25) < 5 * 0.3 / math.sqrt(12 * x.numel())
    assert torch.equal(run(nn.RReLU(), -x), -x)


def test_stochastic_depth_leaves_out_samples_or_the_batch():
    model = Model(RANDOM["depth"].factory, CLASSES)
    layers = dict(model.module_for(train=True).named_modules())
    x = torch.randn(50, 8)
    torch.testing.assert_close(
        run(layers["row"], x), x * mask(3, (50,), 0.4).float()[:, None] / 0.6
    )
    seen = {bool(run(layers["batch"], x, key).any()) for key in range(20)}
    assert seen == {True, False}


def test_evaluation_and_rate_zero_cost_nothing():
    """The first pass shows it; from then on nothing is looked at, and no number is drawn."""
    case = RANDOM["dropout"]

    def still():
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.0), nn.Linear(8, CLASSES))

    model, x = Model(still, CLASSES), torch.randn(3, 12)
    params, buffers = model.initial(0)
    assert model.draws is None
    model.forward(params, buffers, x, train=True)  # needs no key
    assert model.draws is False
    assert model.seen.replaced == {(True, "once"): False}
    drops = Model(case.factory, CLASSES)
    params, buffers = drops.initial(0)
    drops.forward(params, buffers, x, train=False)
    assert drops.seen.replaced == {(False, "once"): False}
    with pytest.raises(BayflowerError, match="needs the key of a step"):
        drops.forward(params, buffers, x, train=True)
    with chance.step(0):
        drops.forward(params, buffers, x, train=True)
    assert drops.draws is True


# -- runs ------------------------------------------------------------------------------------------
CHEAP = {
    ("fedmap", "dropout"),
    ("fedper", "rrelu"),
    ("pfedvmp", "alpha"),
    ("metavd", "dropout2d"),
    ("maml", "depth"),
}
MANY = sorted({"fedavg", "perfedavg", *(method for method, _ in CHEAP)})
PAIRS = [(m, n) for m in MANY for n in RANDOM]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", some(PAIRS, CHEAP), ids=str)
def test_engines_agree_on_networks_with_random_layers(pair, device):
    agree(pair[0], RANDOM[pair[1]], device=device)


def outcomes(engine, method="fedavg", name="functional", **settings):
    data = federation(RANDOM[name])
    values = {**ONE_ROUND, "rounds": 2, "num_clients": len(data.clients), **settings}
    run = parse(method, values)
    return engine(run, data, halves_of(method, Model(RANDOM[name].factory, CLASSES, "zoo"), run))


def test_torchs_generators_have_no_influence_and_one_by_one_has_the_bits_of_the_loop():
    torch.manual_seed(1)
    first = outcomes(run_loop)
    torch.manual_seed(2)
    torch.rand(100)
    assert_same_bits(outcomes(run_loop).server_state, first.server_state)
    assert_same_bits(outcomes(run_fused, stacking="no").server_state, first.server_state)
    other = outcomes(run_loop, seed=1)
    assert not torch.equal(
        other.server_state.params["fc.weight"], first.server_state.params["fc.weight"]
    )


def test_a_difference_of_gradients_is_that_of_one_function():
    """Without second derivatives: both ends of the difference have the dropout of the point."""
    net = RANDOM["dropout"].factory().double()
    model = Model(RANDOM["dropout"].factory, CLASSES)
    params = {name: value.detach() for name, value in net.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 12, generator=draw, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (2, 6), generator=draw)

    def loss(params, buffers, group):
        logits, buffers = model.forward(params, buffers, x[group], train=True)
        return nn.functional.cross_entropy(logits, y[group]), buffers

    way = meta.Way(tuple(params), 0.3, steps=2)
    with chance.step(5):
        exact, _, value = meta.second_order(loss, params, {}, way)
    with chance.step(5):
        near, _, same = meta.hessian_free(loss, params, {}, way, delta=1e-5)
        assert chance.passes() == 3
    torch.testing.assert_close(same, value)
    for name in params:
        torch.testing.assert_close(near[name], exact[name], rtol=1e-5, atol=1e-7)


def test_a_network_that_draws_in_a_way_we_do_not_know_is_trained_one_by_one_and_says_so(caplog):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x):
            return self.fc(x + torch.poisson(torch.ones(len(x), 12)).to(x.dtype) * self.training)

    case = RANDOM["dropout"]._replace(factory=Strange)
    data = federation(case)
    run = parse("fedavg", {**ONE_ROUND, "num_clients": len(data.clients)})
    halves = halves_of("fedavg", Model(Strange, CLASSES, "strange"), run)
    fused = run_fused(run, data, halves)
    assert "one by one because the network cannot be stacked" in fused.remarks[0]
    assert "one by one" in caplog.text
    assert_same_bits(fused.server_state, run_loop(run, data, halves).server_state)


def test_dropout_that_is_always_on_is_tested_one_by_one_and_says_so():
    class Always(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x):
            return self.fc(nn.functional.dropout(x, 0.5))

    data = federation(RANDOM["dropout"])
    run = parse("fedavg", {**ONE_ROUND, "num_clients": len(data.clients)})
    fused = run_fused(run, data, halves_of("fedavg", Model(Always, CLASSES, "always"), run))
    assert "tested, and from then on trained, one by one" in fused.remarks[0]
    loop = run_loop(run, data, halves_of("fedavg", Model(Always, CLASSES, "always"), run))
    for client, tally in loop.views["personal"].items():
        assert float(fused.views["personal"][client].nll) == pytest.approx(float(tally.nll))


def test_a_module_alone_and_in_a_stack_has_the_same_masks():
    """Bit for bit, with shared weights, where rounding cannot differ."""
    model = Model(RANDOM["functional"].factory, CLASSES)
    params, _ = model.initial(0, torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    module = model.module_for(train=True)

    def one(key):
        with chance.step(key), passing(Seen(), train=True, stacked=False):
            return functional_call(module, params, (x,))

    keys = torch.tensor([4, 9])
    stacked = vmap(one)(keys)
    for key, mine in zip(keys.tolist(), stacked, strict=True):
        torch.testing.assert_close(mine, one(key), rtol=1e-12, atol=1e-12)
