"""A small Flower app as users write them: a network, data, and its strategy in one process."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from torch import nn

from bayflower.clients import make_client_app
from bayflower.flower.loop import InProcessGrid, contexts

CLIENTS = 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.base(x)))


def data(context):
    client = int(context.node_config["partition-id"])
    x = torch.randn(40 + 4 * client, 5, generator=torch.Generator().manual_seed(client))
    y = x[:, :3].argmax(1)
    return (x[:24], y[:24]), (x[24:], y[24:])


def app(method: str, state, model=Small, **options):
    return make_client_app(
        method,
        **{"model": model, "data": data, "state": state, "export": (), "device": "cpu", **options},
    )


def grid(made, clients: int = CLIENTS, run_config=None) -> InProcessGrid:
    nodes = contexts(range(clients))
    for node in nodes:
        node.run_config = dict(run_config or {})
    return InProcessGrid(made, nodes)


def initial(model=Small) -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(model().state_dict())


def make(kind, **more):
    """Return a strategy whose local training is short."""
    short = {"min_available_nodes": CLIENTS, "local_epochs": 1, "batch_size": 8, "lr": 0.01}
    return kind(**{**short, **more})
