"""What a network returns: logits, in any of the usual forms. One that gives probabilities would
train badly in silence: it is refused by its numbers.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import bayflower
from bayflower.errors import ConfigError
from bayflower.networks.check import checked_model


class Net(nn.Module):
    """A network whose last function is no layer."""

    def __init__(self, outputs: int, end) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(6, 8), nn.Linear(8, outputs), end

    def forward(self, x):
        return self.end(self.head(torch.relu(self.body(x))))


X, Y = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2


@pytest.mark.parametrize(
    ("outputs", "end"),
    [(3, lambda z: torch.softmax(z, 1)), (1, torch.sigmoid), (2, lambda z: torch.sigmoid(z))],
    ids=["softmax", "one sigmoid", "sigmoids"],
)
def test_probabilities_are_refused(outputs, end):
    with pytest.raises(ConfigError, match=r"model Net gives numbers from 0 to 1 .* give logits"):
        checked_model(lambda: Net(outputs, end), X, Y)


@pytest.mark.parametrize(
    "end", [lambda z: torch.log_softmax(z, 1), torch.abs, lambda z: z], ids=["log", "abs", "none"]
)
def test_logits_are_taken(end):
    assert checked_model(lambda: Net(3, end), X, Y).num_classes == 3


def test_a_head_of_zeros_and_a_frozen_one_are_taken():
    def zeros():
        net = Net(3, lambda z: z)
        nn.init.zeros_(net.head.weight)
        nn.init.zeros_(net.head.bias)
        return net

    assert checked_model(zeros, X, Y).num_classes == 3

    def frozen():
        net = Net(3, lambda z: z)
        net.head.requires_grad_(False)
        return net

    assert checked_model(frozen, X, Y).num_classes == 3


@pytest.mark.parametrize("what", ["a tuple", "a dict", ".logits"])
def test_logits_may_be_the_first_of_a_tuple_or_have_their_name(what):
    forms = {
        "a tuple": lambda z: (z, z.square()),
        "a dict": lambda z: {"hidden": z, "logits": z},
        ".logits": lambda z: SimpleNamespace(logits=z),
    }
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(12, *X.shape[1:])), np.arange(12) % 3) for _ in range(2)]
    how = {"rounds": 1, "calibration": "off", "device": "cpu", "optimizer": "sgd"}
    found, plain = (
        bayflower.fit("fedmap", clients, model=lambda end=end: Net(3, end), **how)
        for end in (forms[what], lambda z: z)
    )
    assert found.curves.train_loss.tolist() == plain.curves.train_loss.tolist()
    mine, yours = (one.personal(0).predict_proba(clients[0][0]) for one in (found, plain))
    assert np.array_equal(mine, yours)
