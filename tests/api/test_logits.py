"""A network that gives probabilities would train badly in silence: it is refused by its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
