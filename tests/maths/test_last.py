"""The last layer of a network: found where it has trainable weights of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayflower.networks.last import forward_last, last_layer
from bayflower.networks.model import Model


class Net(nn.Module):
    """A network whose last layer is its own, frozen, or tied to its embedding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(5, 4), nn.Linear(4, 5)
        if kind == "frozen":
            self.fc.requires_grad_(False)
        if kind == "tied":
            self.fc.weight = self.words.weight

    def forward(self, x):
        return self.fc(torch.tanh(self.words(x).mean(1)))


@pytest.mark.parametrize(("kind", "name"), [("own", "fc"), ("frozen", None), ("tied", None)])
def test_a_layer_without_weights_of_its_own_is_no_last_layer(kind, name):
    model = Model(lambda: Net(kind), 5)
    params, buffers = model.initial(0)
    assert last_layer(model) == name
    x = torch.randint(5, (3, 2), generator=torch.Generator().manual_seed(0))
    logits, features = forward_last(model, params, buffers, x, last_layer(model))
    assert (features is not None) == (name is not None)
    if features is not None:
        slow = features @ params["fc.weight"].T + params["fc.bias"]
        assert torch.allclose(slow, logits)


def test_a_network_that_is_one_layer_has_none():
    assert last_layer(Model(lambda: nn.Linear(4, 3), 3)) is None
