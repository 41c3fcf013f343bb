"""Networks that `torch.func` cannot differentiate train all the same, one by one, on every engine;
curvature one sample after another, as it is defined.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import some, worst_difference
from torch import nn
from torch.func import vmap
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import (
    CLASSES,
    RANDOM,
    WORDS,
    Case,
    Reversed,
    agree,
    federation,
    halves_of,
    on_two_engines,
    same,
)
from zoomany import LAYERS

from bayflower.config import parse
from bayflower.maths import curvature
from bayflower.maths.gradients import grad, grad_and_value, plainly
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.rounds.persample import sample_private
from bayflower.stacked import chance, recomputed
from bayflower.stacked.plainly import cdist
from bayflower.stacked.randomly import fill_exponential, gumbel_softmax

STEP = {"local_steps": 1, "batch_size": 8, "lr": 0.1}


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between, first=None) -> None:
        super().__init__()
        self.first, self.head = first or nn.Linear(12, 8), nn.Linear(8, CLASSES)
        self.between = between

    def forward(self, x):
        return self.head(self.between(self, x))


class Packed(nn.Module):
    """Texts of different lengths, packed; 0 is no word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, 5), nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = x.long()
        sizes = (x > 0).sum(1).clamp(min=1).cpu()
        some = pack_padded_sequence(self.words(x), sizes, batch_first=True, enforce_sorted=False)
        return self.head(self.body(some)[1][0][-1])


def saved(net, x, reentrant=False):
    return checkpoint(lambda z: torch.tanh(net.first(torch.tanh(z))), x, use_reentrant=reentrant)


def parts():
    layers = nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 8)
    return nn.Sequential(*layers)


def in_parts(net, x):
    return checkpoint_sequential(net.first, 2, x, use_reentrant=False)


def branched(net, x):
    y = net.first(x)
    return torch.tanh(y) if float(y.detach().sum()) > 0 else torch.relu(y)


NETWORKS = {
    "own-function": Case(lambda: Net(lambda net, x: Reversed.apply(net.first(x)).tanh()), (12,)),
    "packed": Case(Packed, (6,), WORDS),
    "branches": Case(lambda: Net(branched), (12,)),
}
METHODS = ["fedavg", "fedbps", "maml", "metavd", "fedla", "fedpop", "pfedvmp"]
FEW = {("fedbps", "own-function"), ("maml", "own-function"), ("fedavg", "packed")}
# layers that are called once more in backward, in torch's three forms; ordinary layers beside them
SAVED = {
    "checkpoint": Case(lambda: Net(saved), (12,)),
    "checkpoint, reentrant": Case(lambda: Net(partial(saved, reentrant=True)), (12,)),
    "checkpoint in parts": Case(lambda: Net(in_parts, first=parts()), (12,)),
}
EACH_FORM = {
    ("fedavg", "checkpoint"),
    ("maml", "checkpoint, reentrant"),
    ("fedbps", "checkpoint in parts"),
}


@pytest.mark.parametrize("name", [*NETWORKS, "checkpoint"])
def test_a_step_is_that_of_a_plain_training_loop(name):
    """Oracle: torch's own module, `backward` and a step by hand."""
    case = {**NETWORKS, **SAVED}[name]
    data = federation(case).clients[0]
    run = parse("fedavg", {"optimizer": "sgd", "local_epochs": 1, **STEP})
    model = Model(case.factory, CLASSES, "own", case.head)
    halves = halves_of("fedavg", model, run)
    params, buffers = model.initial(3, torch.float64)  # not those that the structure has
    module = model.module(params, buffers).train()
    x, y = torch.tensor(data.x_train).double(), torch.tensor(data.y_train)
    nn.functional.cross_entropy(module(x), y).backward()
    want = {n: p.detach() - STEP["lr"] * p.grad for n, p in module.named_parameters()}
    start = halves.server.broadcast(halves.server.init(params, buffers, [0]), 0)
    batch = solo.samples(data, torch.device("cpu"), torch.float64).train
    fresh = halves.client.init(params, buffers)
    got = solo.train(halves.client, fresh, start, batch, seed=0, client=0, round=1).update
    assert worst_difference(got.params, want, 1e-12) < 1e-12


@pytest.mark.parametrize(
    "pair", some([(m, n) for n in NETWORKS for m in METHODS], FEW), ids=lambda pair: "-".join(pair)
)
def test_engines_give_the_same_bits_and_say_why_clients_are_not_stacked(pair):
    method, name = pair
    more = {"dropout_layer": "head"} if method == "metavd" else {}
    loop, fused = on_two_engines(method, NETWORKS[name], **more)
    assert "one by one because the network cannot be stacked" in fused.remarks[0]
    assert worst_difference(fused.server_state, loop.server_state, 0) == 0
    assert not loop.faults
    assert math.isfinite(loop.rounds[0]["train_loss"])


@pytest.mark.parametrize(
    "pair",
    some([(m, n) for n in SAVED for m in METHODS], EACH_FORM),
    ids=lambda pair: "-".join(pair),
)
def test_checkpointed_layers_train_as_layers_do(pair, monkeypatch):
    """Oracle: the same network without checkpoints, to the bit. Clients are stacked."""
    method, name = pair
    more = {"dropout_layer": "head"} if method == "metavd" else {}
    found = on_two_engines(method, SAVED[name], **STEP, **more)
    same(*found)
    here = "test_plain_networks"
    monkeypatch.setattr(f"{here}.checkpoint", lambda run, *args, use_reentrant: run(*args))
    monkeypatch.setattr(f"{here}.checkpoint_sequential", lambda run, parts, x, **_: run(x))
    plain = on_two_engines(method, SAVED[name], **STEP, **more)
    for mine, wanted in zip(found, plain, strict=True):
        assert worst_difference(mine.server_state, wanted.server_state, 0) == 0


def test_elsewhere_checkpoints_are_torchs():
    """Somebody's own training loop recomputes as ever; where torch's function has changed its
    inside, a pass says so in one line.
    """
    calls = []

    def counted(x):
        calls.append(x)
        return torch.tanh(x)

    x = torch.ones(3, requires_grad=True)
    for reentrant in (False, True):
        calls.clear()
        checkpoint(counted, x, use_reentrant=reentrant).sum().backward()
        assert len(calls) == 2
    with recomputed.called_directly():
        checkpoint(counted, x, use_reentrant=False).sum().backward()
    assert len(calls) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "prepared", lambda: False)
        with pytest.raises(RuntimeError, match="leave it out"), recomputed.called_directly():
            checkpoint(counted, x, use_reentrant=False)


def test_private_samples_are_cut_one_by_one():
    """dp=sample. Oracle: the same function in the newer form, which torch.func takes; no noise,
    which is secret.
    """

    class Turned(torch.autograd.Function):
        """The newer form of `Reversed`."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.view_as(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return -g

    run = parse("fedavg", {"optimizer": "sgd", **STEP, "batch_size": 3})
    training = replace(run.training, sample_clip=0.3, sample_noise=0.0)
    found, plain = [], []
    for function in (Reversed, Turned):
        case = Case(lambda f=function: Net(lambda net, x: f.apply(net.first(x)).tanh()), (12,))
        data = federation(case).clients[0]
        model = Model(case.factory, CLASSES)
        halves = halves_of("fedavg", model, run)
        half = sample_private(type(halves.client))(run.options, training, model)
        params, buffers = model.initial(0, torch.float64)
        start = halves.server.broadcast(halves.server.init(params, buffers, [0]), 0)
        batch = solo.samples(data, torch.device("cpu"), torch.float64).train
        place = {"seed": 0, "client": 0, "round": 1}
        fresh = half.init(params, buffers)
        found.append(solo.train(half, fresh, start, batch, **place).update.params)
        plain.append(model.seen.plain)
    assert plain == [True, False]
    assert worst_difference(*found, 1e-12) < 1e-12


def test_an_error_of_the_network_itself_is_what_is_told():
    def broken(net, x):
        raise RuntimeError("no such thing")

    run = parse("fedavg", {"optimizer": "sgd", **STEP})
    model = Model(lambda: Net(broken), CLASSES)
    halves = halves_of("fedavg", model, run)
    params, buffers = model.initial(0)
    start = halves.server.broadcast(halves.server.init(params, buffers, [0]), 0)
    data = federation(NETWORKS["branches"]).clients[0]
    batch = solo.samples(data, torch.device("cpu"), torch.float32).train
    state = halves.client.init(params, buffers)
    with pytest.raises(RuntimeError, match="no such thing"):
        solo.train(halves.client, state, start, batch, seed=0, client=0, round=1)
    assert not model.seen.plain


def test_plain_gradients_are_those_of_torch_func_also_inside_each_other():
    """Oracle: torch.func; a gradient of a gradient, values beside it, an input without effect."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(4, generator=draw).double(),
        "b": torch.randn(4, generator=draw).double(),
    }

    def inner(some, scale):
        return (some["a"].sin() * scale).sum() ** 2, {"seen": some["a"] * 2}

    def outer(some):
        slopes, beside = grad(inner, has_aux=True)(some, 1.5)
        return (slopes["a"] ** 3).sum() + (some["b"] ** 2).sum(), beside

    want = grad_and_value(outer, has_aux=True)(params)
    with plainly(True), torch.no_grad():
        got = grad_and_value(outer, has_aux=True)(params)
    assert worst_difference(got[0], want[0], 1e-14) < 1e-14
    assert torch.equal(got[1][0], want[1][0])
    assert torch.equal(got[1][1]["seen"], want[1][1]["seen"])
    assert not got[1][0].requires_grad
    with plainly(True):
        assert torch.equal(grad(lambda some: some["a"].sum())(params)["b"], torch.zeros(4).double())


ALL = {**RANDOM, **LAYERS}


@pytest.mark.parametrize(
    "name", some(sorted(ALL), ["distances", "lstm-cell", "transformer", "rnn"])
)
def test_curvature_by_formulas_is_that_of_its_definition(name):
    """Each sample and each column by itself, with plain autograd; the last sample is masked."""
    case = ALL[name]
    model = Model(case.factory, CLASSES, "own", case.head)
    params, buffers = model.initial(0, torch.float64)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, *case.shape, generator=draw).double()
    x = torch.randint(0, case.words, x.shape, generator=draw).double() if case.words else x
    batch = Batch(x, torch.tensor([0, 1, 2]), torch.tensor([1.0, 1.0, 0.0]).double())
    want = curvature.one_after_another(model, params, buffers, batch, "fisher")
    got = curvature.diagonal(model, params, buffers, batch)
    two = {n: torch.stack([value] * 2) for n, value in params.items()}
    kept = {n: torch.stack([value] * 2) for n, value in buffers.items()}
    stacked = model.for_stacks(False)
    both = vmap(lambda p, b: curvature.diagonal(stacked, p, b, batch))(two, kept)
    for entry, value in want.items():
        scale = 1e-9 * max(float(value.abs().max()), 1e-30)
        assert float((got[entry] - value).abs().max()) < scale, entry
        assert float((both[entry][1] - value).abs().max()) < scale, entry


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
def test_distances_are_torchs_with_slopes(p):
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randn(2, n, 5, generator=draw).double().requires_grad_() for n in (3, 4))
    found = [fn(x, y, p) for fn in (torch.cdist, cdist)]
    assert torch.allclose(*found, rtol=1e-12)
    slopes = [torch.autograd.grad(one.square().sum(), (x, y)) for one in found]
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*slopes, strict=True))


def test_classes_are_drawn_with_their_probabilities():
    """Gumbel's rule: the largest of logits + noise is a draw from the softmax. Slopes of a hard
    draw are those of the soft one.
    """
    logits = torch.tensor([0.0, 1.0, -0.5, 2.0]).double()
    many = logits.expand(200_000, 4)
    with chance.step(7), chance.one_pass():
        hard = gumbel_softmax(many, hard=True)
        times = fill_exponential(torch.empty(200_000).double(), 2.0)
    assert set(hard.round(decimals=9).unique().tolist()) == {0.0, 1.0}
    error = 4 * (0.25 / 200_000) ** 0.5
    assert float((hard.mean(0) - logits.softmax(0)).abs().max()) < error
    assert abs(float(times.mean()) - 0.5) < 4 * 0.5 / 200_000**0.5
    assert abs(float((times > 1).double().mean()) - math.exp(-2)) < error
    x = logits.clone().requires_grad_()
    slopes = []
    for sharp in (False, True):
        with chance.step(3), chance.one_pass():
            drawn = gumbel_softmax(x, 0.5, sharp)
        slopes.append(torch.autograd.grad((drawn * torch.arange(4)).sum(), x)[0])
    assert torch.allclose(*slopes)


def test_batchnorm_without_running_statistics_is_tested_client_by_client():
    """Its tests depend on the whole batch, so padding must not be there."""
    case = Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.Flatten(),
            nn.Linear(144, CLASSES),
        ),
        (3, 8, 8),
    )
    loop, fused = on_two_engines("fedper", case)
    assert "takes the statistics of a batch in tests, too" in fused.remarks[0]
    assert worst_difference(fused.server_state, loop.server_state, 0) == 0


def test_curvature_of_a_network_that_makes_tensors_of_its_own():
    """They are on the CPU, whatever its inputs are on; clients are stacked all the same."""
    case = Case(lambda: Net(lambda net, x: (net.first(x) + torch.ones(8)).tanh()), (12,))
    agree("fedbps", case)
