"""The head is the layer that gives the logits, wherever it stands in the network: methods that keep
it private, or look at what it gets, take that one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import bayflower
from bayflower.files import checkpoint
from bayflower.networks.check import checked_model
from bayflower.networks.own import build_own, given, named

OUTPUTS = 4


class Gated(nn.Module):
    """The last layer by registration is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.gate = nn.Linear(12, 8), nn.Linear(8, OUTPUTS), nn.Linear(12, 8)

    def forward(self, x):
        return self.out(torch.relu(self.first(x)) * torch.sigmoid(self.gate(x)))


class Words(nn.Module):
    """Words, and a layer that only the test uses is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc, self.aside = nn.Embedding(9, 5), nn.Linear(5, OUTPUTS), nn.Linear(5, 5)

    def forward(self, x):
        found = self.words(x.long()).mean(1)
        return {"aside": self.aside(found), "logits": self.fc(found)}


class Scaled(Gated):
    """What the last layer gives is changed, so that no layer gives the logits."""

    def forward(self, x):
        return 2 * super().forward(x)


class Named(Gated):
    """An attribute called head is the head, whatever gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x):
        return super().forward(x) + self.head(torch.zeros(OUTPUTS))


class Fails(Gated):
    """It cannot be tried without its data."""

    def forward(self, x):
        if not bool(x.any()):
            raise ValueError("no samples of zeros")
        return super().forward(x)


HEADS = {Gated: "out", Words: "fc", Scaled: "gate", Named: "head", Fails: "gate"}


@pytest.mark.parametrize("network", HEADS)
def test_the_head_is_the_layer_that_gives_the_logits(network):
    shape = (5,) if network is Words else (12,)
    known = named(network)
    with given(known):
        model = build_own(known.name, shape, OUTPUTS, "")
        assert model.head == HEADS[network]
        if network is Gated:
            assert build_own(known.name, shape, OUTPUTS, "gate").head == "gate"
    draw = torch.Generator().manual_seed(0)
    x = torch.rand((6, *shape), generator=draw) * 8
    seen = {**HEADS, Fails: "out"}  # tried on real samples
    assert checked_model(network, x, torch.arange(6) % OUTPUTS).head == seen[network]


def test_what_is_private_is_the_layer_that_gives_the_logits(tmp_path):
    """FedPer's server never has it. Oracle for features: what the layer gets, by hand."""
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(15, 12)), np.arange(15) % OUTPUTS) for _ in range(3)]
    how = {"rounds": 1, "calibration": "off", "device": "cpu", "optimizer": "sgd"}
    bayflower.fit("fedper", clients, model=Gated, out=tmp_path, **how)
    kept = checkpoint.read(tmp_path).server
    names = {name.rpartition("/")[2] for name in kept if name.startswith("params/")}
    assert names == {
        f"{layer}.{what}" for layer in ("first", "gate") for what in ("weight", "bias")
    }
    known = named(Gated)
    with given(known):
        model = build_own(known.name, (12,), OUTPUTS, "")
    params, buffers = model.initial(0)
    x = torch.randn(3, 12)
    _, features, _ = model.forward_features(params, buffers, x, False)
    hidden = torch.relu(functional.linear(x, params["first.weight"], params["first.bias"]))
    gate = torch.sigmoid(functional.linear(x, params["gate.weight"], params["gate.bias"]))
    torch.testing.assert_close(features, hidden * gate)
