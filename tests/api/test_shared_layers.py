"""Layers under several names, tied weights and constants that are complex: the same numbers in
training, in tests and at home.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import some
from torch import nn
from torch.func import functional_call
from zoo import CLASSES, Case, agree

import bayflower
from bayflower.networks.model import Model
from bayflower.networks.parts import called, further_places

HOW = {"rounds": 2, "lr": 0.05, "batch_size": 5, "optimizer": "sgd", "device": "cpu"}


class TwoNames(nn.Module):
    """A layer under two names; its weights are tied to another's, and a norm is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.chain = nn.Sequential(self.own, nn.ReLU(), self.norm)
        self.tied, self.fc = nn.Linear(12, 12, bias=False), nn.Linear(12, CLASSES)
        self.tied.weight = self.own.weight

    def forward(self, x):
        return self.fc(self.norm(self.tied(self.own(self.chain(x)))))


class Turned(nn.Module):
    """Places as complex numbers of length 1 (rotary embedding), which never change."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.fc = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        turns = torch.outer(torch.arange(6.0), 1 / 10 ** (torch.arange(4) / 4))
        turns = torch.polar(torch.ones_like(turns), turns)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x):
        pairs = torch.view_as_complex(self.query(x).reshape(-1, 6, 4, 2))
        q = torch.view_as_real(pairs * self.turns).flatten(2)
        return self.fc((torch.softmax(q @ q.transpose(1, 2), -1) @ x).tanh().mean(1))


def clients(*shape: int) -> dict[str, tuple]:
    draw = np.random.default_rng(0)

    def part(size):
        x = draw.normal(size=(size, *shape)).astype(np.float32)
        return 3 * x, np.arange(size) % CLASSES

    return {name: (part(15), part(20)) for name in ("a", "b")}


@pytest.mark.parametrize("method", some(["fedavg", "fedper", "fedbps", "metavd"], ["fedper"]))
def test_a_layer_under_two_names_is_one_layer(method):
    layer = {"layer": "fc"} if method == "metavd" else {}
    agree(method, Case(TwoNames, (12,), **layer), 1e-6, batch_size=8, local_steps=1)


def test_a_pass_leaves_the_module_as_it_was():
    """Oracle: torch's own call, which leaves other tensors in a module with shared layers."""
    model = Model(TwoNames, CLASSES)
    module = model.module_for(False)
    assert further_places(module) == {"tied.weight": "own.weight"}
    before = {name: value for name, value in module.named_parameters(remove_duplicate=False)}
    params, buffers = model.initial(3)
    x = torch.randn(5, 12)
    want = functional_call(TwoNames().eval(), {**params, **buffers}, (x,))
    assert torch.equal(called(module, {**params, **buffers}, x), want)
    assert torch.equal(model.forward(params, buffers, x, False)[0], want)
    for name, value in module.named_parameters(remove_duplicate=False):
        assert value is before[name], name
    assert model.further_names == {
        "tied.weight": "own.weight",
        **{f"chain.0.{name}": f"own.{name}" for name in ("weight", "bias")},
        **{f"chain.2.{name}": f"norm.{name}" for name in ("weight", "bias")},
    }


@pytest.mark.parametrize("network", [TwoNames, Turned])
@pytest.mark.parametrize("engine", ["fused", "loop"])
def test_a_model_taken_home_predicts_what_the_run_measured(network, engine, tmp_path):
    data = clients(12) if network is TwoNames else clients(6, 8)
    found = bayflower.fit(
        "fedavg", data, model=network, engine=engine, calibration="off", out=tmp_path, **HOW
    )
    own = found.metrics.query("name == 'a' and model == 'personal'").nll.item()
    x, y = data["a"][1]
    told = np.asarray(found.personal("a").predict_proba(x))[np.arange(len(y)), y]
    assert -np.log(told).mean() == pytest.approx(own, rel=1e-5)
    assert told.std() > 1e-3


@pytest.mark.parametrize(("kind", "value"), [("complex", 1j), ("sparse", 1.0)])
def test_what_cannot_be_sent_is_named(kind, value):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)
            some = torch.full((3, 3), value)
            self.register_buffer("some", some.to_sparse() if kind == "sparse" else some)

        def forward(self, x):
            return self.fc(x)

    with pytest.raises(bayflower.ConfigError, match=f"buffer 'some' of model .*Net is {kind}, and"):
        bayflower.fit("fedavg", clients(12), model=Net, **HOW)
