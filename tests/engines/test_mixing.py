"""Networks in which samples of a batch influence each other, in ways that no list of layers knows:
they are found by trying, and trained one by one without padding, with the bits of the loop engine.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import some, worst_difference
from torch import nn
from torch.nn import functional
from zoo import (
    CLASSES,
    ONE_ROUND,
    RANDOM,
    WORDS,
    Case,
    agree,
    federation,
    halves_of,
    on_two_engines,
)
from zoomany import BROUGHT, LAYERS

from bayflower.cli.network import network
from bayflower.config import parse
from bayflower.errors import ConfigError
from bayflower.fused.run import run_fused
from bayflower.fused.trial import tried
from bayflower.networks.check import checked_model
from bayflower.networks.mixing import try_out
from bayflower.networks.model import Model
from bayflower.rounds.persample import sample_private


class Net(nn.Module):
    """A linear layer, something between, a head; `x.mean(0)` and the like need no layer."""

    def __init__(self, between=None, **parts) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(12, 8), nn.Linear(8, 5)
        self.head, self.between = nn.Linear(5, CLASSES), between
        for name, part in parts.items():
            setattr(self, name, part)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x):
        y = self.first(x)
        return self.head(torch.tanh(self.out(self.between(self, y) if self.between else y)))


class Words(nn.Module):
    """The mean of words' vectors."""

    def __init__(self, **more) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 8, **more), nn.Linear(8, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.out(self.words(x.long()).mean(1))))


def centred(net, y):
    return (y - y.mean(0)) / (y.std(0, unbiased=False) + 1e-3)


def attended(net, y):
    return (y[None] + net.over(y[None], y[None], y[None])[0])[0]


def contrasted(net, y):
    return functional.softmax(y @ y.t(), -1) @ y


def normed(net, y):
    return functional.batch_norm(y, net.mean, net.spread, None, None, net.training)


def running(net, y):
    if net.training:
        net.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y - net.mean


def renormed(net, y):
    if not net.training:
        return (y - net.mean) / (net.spread + 1e-5).sqrt()
    mean, spread = y.mean(0), y.var(0, unbiased=False)
    net.mean += 0.1 * (mean.detach() - net.mean)
    net.spread.lerp_(spread.detach(), 0.1)
    return (y - mean) / (spread + 1e-5).sqrt()


def flipped(net, y):
    return net.norm(y.flip(0)).flip(0)


def shares(net, y):
    return y / len(y) if net.training else y


def vector(between, **parts) -> Case:
    """Return a network on numbers; parts are made anew for each."""
    return Case(lambda: Net(between, **{name: part() for name, part in parts.items()}), (12,))


COUPLED = {
    "mean": vector(centred),
    "attention": vector(attended, over=lambda: nn.MultiheadAttention(8, 2, batch_first=True)),
    "contrast": vector(contrasted),
    "function": vector(normed),
    "running": vector(running),
    "renorm": vector(renormed),
    "flipped": vector(flipped, norm=lambda: nn.BatchNorm1d(8)),
    "share": vector(shares),
    "scale-grad": Case(lambda: Words(scale_grad_by_freq=True), (6,), WORDS),
    "max-norm": Case(lambda: Words(max_norm=1.0), (6,), WORDS),
}
IN_TESTS = ("mean", "attention", "contrast")
METHODS = ("fedavg", "fedmap", "fedper", "pfedvmp", "fednp", "metavd", "fedbps")
FEW = {("fedavg", name) for name in list(COUPLED)[::2]} | {
    ("fedmap", "attention"),
    ("fedmap", "scale-grad"),
    ("fedper", "max-norm"),
    ("fednp", "flipped"),
    ("pfedvmp", "mean"),
    ("fedbps", "running"),
}
# a last batch of one would join the one before it where samples are coupled: sizes 7, 5 and 4 have
# both, and two epochs have more than one step that is padded
TWICE = {"local_epochs": 2, "lr": 0.02}
CAN = [
    (method, name)
    for method in METHODS
    for name in COUPLED
    if (method, name) not in {("metavd", "scale-grad"), ("metavd", "max-norm")}
    and not (method == "fedbps" and name in IN_TESTS)
]


@pytest.mark.parametrize("pair", some(CAN, FEW), ids=lambda pair: "-".join(pair))
def test_padding_is_kept_from_networks_that_couple_samples(pair):
    method, name = pair
    inner = {"inner_lr": 0.001} if method == "metavd" else {}
    loop, fused = on_two_engines(method, COUPLED[name], **TWICE, **inner)
    assert worst_difference(fused.server_state, loop.server_state, 0) == 0
    for client, state in loop.client_states.items():
        assert worst_difference(fused.client_states[client], state, 0) == 0, client
    for mine, yours in ((loop.views, fused.views), (loop.new_clients, fused.new_clients)):
        for view, tallies in mine.items():
            for client, tally in tallies.items():
                assert float(yours[view][client].nll) == float(tally.nll), (view, client)
    assert "cannot be stacked: " in fused.remarks[0]
    assert ("so do predictions" in fused.remarks[0]) == (name in IN_TESTS)
    assert not loop.faults


def manner_of(case: Case, name: str = "zoo"):
    """Return what trying a network shows."""
    model = Model(case.factory, CLASSES, name, case.head)
    try_out(model, torch.as_tensor(federation(case).clients[0].x_train))
    return model


@pytest.mark.parametrize("name", COUPLED)
def test_what_is_found_decides_the_batches(name):
    model = manner_of(COUPLED[name])
    assert model.unstackable
    assert model.manner.mixes_in_tests == (name in IN_TESTS)
    # one sample less in a batch changes nothing for a table of words
    assert model.coupled == (name not in ("scale-grad", "max-norm"))
    assert model.for_stacks(gpu=False).coupled == model.coupled


LARGE = {name for name in BROUGHT if name not in ("text-lstm", "ft-transformer")}


@pytest.mark.parametrize(
    "name", some([*LAYERS, *BROUGHT, *RANDOM], {*LAYERS, *BROUGHT, *RANDOM} - LARGE)
)
def test_no_network_of_independent_samples_is_found(name):
    model = manner_of({**LAYERS, **BROUGHT, **RANDOM}[name])
    assert model.manner.known
    assert model.unstackable is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["mean", "attention", "function", "share"])
def test_few_samples_are_enough(name, size):
    model = Model(COUPLED[name].factory, CLASSES)
    try_out(model, torch.randn(size, 12))
    assert model.unstackable


def test_a_network_that_takes_no_such_batch_is_left_as_it_was():
    model = manner_of(Case(lambda: Net(lambda net, y: y.view(4, 8)), (12,)))
    assert model.manner.known
    assert model.unstackable is None


def test_a_network_is_tried_once_and_leaves_generators_as_they_were():
    calls = []

    def counted(net, y):
        calls.append(len(y))
        return y

    x = torch.randn(5, 12)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    model = manner_of(vector(counted))
    number = len(calls)
    assert max(calls) <= 3
    try_out(model, x)
    assert len(calls) == number <= 7
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[2])


# -- padded batches of other networks --------------------------------------------------------------
PADDED = {"bag-mean", "instance-norm", "lstm-time-first", "norms", "conv1d", "transformer"}


@pytest.mark.parametrize("name", some([*LAYERS, *BROUGHT], PADDED))
def test_padded_batches_of_a_stack_are_those_of_the_loop(name):
    """Batches of 3, 3 and 1 samples beside one another, over two epochs."""
    if name in ("resnet18", "mobilenet", "shufflenet"):
        pytest.skip("BatchNorm over three samples of one place magnifies rounding at each step")
    agree("fedavg", {**LAYERS, **BROUGHT}[name], local_epochs=2, lr=0.005)


# -- what is refused -------------------------------------------------------------------------------
def test_curvature_of_coupled_predictions_is_refused_before_training():
    model = manner_of(COUPLED["attention"], "Saint")
    with pytest.raises(ConfigError, match="curvature is a sum over samples, but in model Saint"):
        halves_of("fedbps", model, parse("fedbps", {}))
    with pytest.raises(ConfigError, match="curvature is a sum over samples"):
        on_fused("fedbps", COUPLED["attention"])


def on_fused(method, case):
    """Train a network that nobody has checked before, on the fused engine."""
    data = federation(case)
    run = parse(method, {**ONE_ROUND, "num_clients": len(data.clients)})
    return run_fused(run, data, halves_of(method, Model(case.factory, CLASSES, "zoo"), run))


def test_single_samples_are_not_hidden_in_a_network_that_mixes_them():
    run = parse("fedavg", {})
    halves = halves_of("fedavg", manner_of(COUPLED["contrast"]), run)
    training = replace(run.training, sample_clip=0.3, sample_noise=0.0)
    with pytest.raises(ConfigError, match="dp=sample needs gradients of single samples"):
        sample_private(type(halves.client))(run.options, training, halves.model)


def counting(net, y):
    if net.training:
        net.number = getattr(net, "number", 0) + 1
    return y * min(1.0, getattr(net, "number", 10) / 10)


def noting(net, y):
    """What is kept changes nothing."""
    net.shape, net.number = tuple(y.shape), getattr(net, "number", 0) + 1
    return y


class Detached(Net):
    """A network that is cut from its parameters."""

    def forward(self, x):
        return super().forward(x).detach()


REFUSED = {
    "counter": (lambda: Net(counting), "model Net keeps 'number' from one call to the next"),
    "detached": (Detached, "the outputs of model Detached have no gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_one_clear_line(name):
    factory, words = REFUSED[name]
    x, y = torch.randn(6, 12), torch.arange(6) % CLASSES
    with pytest.raises(ConfigError, match=words):
        checked_model(factory, x, y)
    with pytest.raises(ConfigError, match=words.replace("Net", "zoo").replace("Detached", "zoo")):
        on_fused("fedavg", Case(factory, (12,)))


def test_what_is_kept_without_effect_is_nobodys_business():
    x, y = torch.randn(6, 12), torch.arange(6) % CLASSES
    assert checked_model(lambda: Net(noting), x, y).unstackable is None


def drawn(net, y):
    return y * random.choice([0.5, 2.0])


def drawn_by_numpy(net, y):
    return y * float(np.random.rand())


def drawn_by_its_own(net, y):
    return y * float(np.random.default_rng().random())


@pytest.mark.parametrize("between", [drawn, drawn_by_numpy, drawn_by_its_own])
def test_numbers_that_are_not_torchs_are_told(between):
    assert "draws numbers that are not torch's" in (manner_of(vector(between)).unstackable or "")


def test_doctor_says_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mixing_nets.py").write_text(
        "import torch\nclass Centred(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.fc = torch.nn.Linear(12, num_classes)\n"
        "    def forward(self, x):\n        return self.fc(x - x.mean(0))\n"
    )
    found = {one.what: one for one in network("mixing_nets:Centred", "12", 0)}
    said = found["model: mixing_nets:Centred"]
    assert said.state == "missing"
    assert "trained one by one: the network cannot be stacked: in mixing_nets:Centred" in said.seen
    assert "a sample's outputs depend on the other samples of its batch" in said.seen
    model = manner_of(COUPLED["mean"])
    assert "curvature is a sum over samples" in (tried(model, torch.randn(4, 12)).curvature or "")
