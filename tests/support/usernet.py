"""A network, data and an app as a user of Flower writes them."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from bayflower.flower.classes import strategy_class
from bayflower.flower.loop import InProcessGrid, contexts

FIVE = ("pfedvmp", "fednp", "metavd", "fedmap", "fedbps")
TRAINING = {"lr": 0.02, "local_epochs": 4, "batch_size": 16}
EASY = {
    "pfedvmp": {"xi": 1.0},
    "metavd": {"kl_weight": 0.1, "log_alpha_start": -6.0, "dropout_layer": "first"},
}  # a few rounds on little data


class Net(nn.Module):
    """A network as users write them: BatchNorm, dropout, a frozen layer, tied weights, a buffer of
    either kind, no base, no head.
    """

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(64, 12)
        self.again, self.twin = nn.Linear(12, 12), nn.Linear(12, 12)
        self.twin.weight = self.again.weight
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(12, classes)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("grid", torch.ones(1, 1, 8, 8), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x * self.grid * self.scale)))
        x = torch.relu(self.first(nn.functional.max_pool2d(x, 2).flatten(1)))
        return self.fc(self.drop(torch.relu(self.twin(torch.relu(self.again(x))))))


def load(context):
    """Three classes told apart by the brightest third of the
    picture; clients differ in brightness.
    """
    client = int(context.node_config["partition-id"])
    generator = torch.Generator().manual_seed(client)
    y = torch.randint(3, (96,), generator=generator)
    x = 0.3 * torch.randn(96, 1, 8, 8, generator=generator) + 0.2 * client
    for k in range(3):
        x[y == k, :, :, k * 3 : k * 3 + 2] += 2
    return (x[:72], y[:72]), (x[72:], y[72:])


def strategy_of(method: str, **more):
    return strategy_class(method)(min_available_nodes=3, **{**TRAINING, **more})


def run(app: ClientApp, method: str, rounds: int = 3, net=Net, clients: int = 3, **more):
    """Return the strategy after some rounds on an in-process grid."""
    strategy = strategy_of(method, **more)
    grid = InProcessGrid(app, contexts(range(clients)))
    torch.manual_seed(0)
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds, timeout=60)
    return strategy


def personal(strategy) -> float:
    from bayflower.metrics import summarise

    return summarise(strategy.outcome.views["personal"])["accuracy"]
