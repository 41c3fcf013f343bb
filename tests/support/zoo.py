"""Networks of many kinds on a few samples, and the same round of them on two engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from conftest import worst_difference
from torch import nn

from bayflower.config import parse
from bayflower.data import ClientData, Federation
from bayflower.files.records import Outcome
from bayflower.files.store import MemoryStore
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.methods import get
from bayflower.networks.model import Model
from bayflower.rounds.halves import Halves
from bayflower.tree import unflatten

CLASSES, WORDS = 4, 11
SIZES = (7, 5, 4)  # training samples of the clients: the last batch of one is padded
ONE_ROUND = {
    "rounds": 1,
    "local_epochs": 1,
    "new_client_epochs": 1,
    "batch_size": 3,
    "optimizer": "sgd",
    "lr": 0.05,
    "dtype": "float64",
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "stacking": "yes",
    "device": "cpu",
    "calibration": "off",  # it has tests of its own
}


class Case(NamedTuple):
    """A network, and what its samples look like: `words` are whole numbers below it, 0 for real
    numbers.
    """

    factory: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    layer: str = ""  # of MetaVD, if it is not the last linear one before the head
    head: str | None = None


def federation(case: Case, sizes: tuple[int, ...] = SIZES) -> Federation:
    """Return clients with a few samples each, and one that never trains."""
    draw = np.random.default_rng(5)

    def part(size: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (size, *case.shape)
        x = draw.integers(0, case.words, shape) if case.words else draw.normal(size=shape)
        return x.astype(np.float32), draw.integers(0, CLASSES, size)

    clients = [ClientData(i, *part(size), *part(3)) for i, size in enumerate((*sizes, 4))]
    return Federation(tuple(clients[:-1]), tuple(clients[-1:]), CLASSES, case.shape, "few", {}, "")


def halves_of(method: str, model: Model, run: Any) -> Halves:
    """Return the halves of a method on a network."""
    row = get(method)
    return Halves(
        row.server(run.options, model.anatomy),
        row.client(run.options, run.training, model),
        model,
        model.initial(0, run.settings.torch_dtype()),
    )


def on_two_engines(method: str, case: Case, **settings: Any) -> tuple[Outcome, Outcome]:
    """Return (loop, fused) outcomes of one round, the loop's with the states in its store."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    data = federation(case)
    layer = {"dropout_layer": case.layer} if case.layer and method == "metavd" else {}
    run = parse(method, {**ONE_ROUND, "num_clients": len(data.clients), **layer, **settings})
    models = [Model(case.factory, CLASSES, "zoo", case.head) for _ in range(2)]
    memory, halves = MemoryStore(), halves_of(method, models[0], run)
    loop = run_loop(run, data, halves, store=memory)
    fused = run_fused(run, data, halves_of(method, models[1], run))
    kind = halves.client.state_type
    kept = {client: unflatten(kind, s[0].state) for (_, client), s in memory.kept.items() if s}
    return loop._replace(client_states=kept), fused


def agree(method: str, case: Case, tolerance: float = 1e-9, **settings: Any) -> None:
    """Raise unless the clients were stacked and both engines have the same numbers."""
    same(*on_two_engines(method, case, **settings), tolerance)


def same(loop: Outcome, fused: Outcome, tolerance: float = 1e-9) -> None:
    """Raise unless the clients of a fused run were stacked and have the loop's numbers."""
    assert fused.remarks == ()  # or the clients were trained one by one
    zero = tolerance / 10
    assert worst_difference(fused.server_state, loop.server_state, zero) < tolerance
    for client, state in loop.client_states.items():
        assert worst_difference(fused.client_states[client], state, zero) < tolerance, client
    losses = [one.rounds[0]["train_loss"] for one in (loop, fused)]
    assert abs(losses[0] - losses[1]) < 1e-6
    for mine, yours in ((loop.views, fused.views), (loop.new_clients, fused.new_clients)):
        assert mine.keys() == yours.keys()
        for view, tallies in mine.items():
            for client, tally in tallies.items():
                off = abs(float(yours[view][client].nll) - float(tally.nll))
                assert off < max(1e-6, 10 * tolerance), (view, client)


# -- networks with random layers -------------------------------------------------------------------
def dense(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a network of three layers, with `layers` behind the first."""
    return lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, 8),
        *(layer() for layer in layers),
        nn.Linear(8, 6),
        nn.Linear(6, CLASSES),
    )


class Reversed(torch.autograd.Function):
    """The older form of a function of one's own, which torch.func does not differentiate: the
    sign of slopes is turned round.
    """

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Functional(nn.Module):
    """Dropout, noise and draws as functions, on the inputs too; one layer of dropout used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(12, 8), nn.Linear(8, CLASSES)
        self.between, self.drop = nn.Linear(8, 8), nn.Dropout(0.3, inplace=True)

    def forward(self, x):
        x = nn.functional.dropout(x.flatten(1), 0.2, self.training)
        x = self.drop(self.first(x))
        if self.training:
            x = x + 0.1 * torch.randn_like(x) * torch.bernoulli(torch.full_like(x, 0.7))
            x = x + nn.functional.gumbel_softmax(x, 0.7) + 0.1 * torch.empty_like(x).exponential_()
        return self.fc(self.drop(self.between(x)))


class Deep(nn.Module):
    """Residual branches of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        from bayflower.data.vision import import_torchvision

        kind = import_torchvision().ops.StochasticDepth
        self.first, self.fc = nn.Linear(12, 8), nn.Linear(8, CLASSES)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.row, self.batch = kind(0.4, "row"), kind(0.3, "batch")

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = x + self.row(torch.tanh(self.one(x)))
        return self.fc(x + self.batch(torch.tanh(self.two(x))))


class Transformer(nn.Module):
    """A small transformer on words."""

    def __init__(self, dropout: float = 0.1, first: bool = True, **more: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=first, **more)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.out, self.fc = first, nn.Linear(8, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.words(x.long())
        x = self.body(x) if self.first else self.body(x.transpose(0, 1)).transpose(0, 1)
        return self.fc(torch.relu(self.out(x.mean(1))))


PICTURE = (1, 6, 6)
RANDOM: dict[str, Case] = {
    "dropout": Case(dense(nn.ReLU, lambda: nn.Dropout(0.4)), (12,)),
    "dropout2d": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.Dropout2d(0.3),
            nn.Flatten(),
            nn.Linear(96, 5),
            nn.Linear(5, CLASSES),
        ),
        PICTURE,
    ),
    "alpha": Case(dense(nn.SELU, lambda: nn.AlphaDropout(0.3)), (12,)),
    "rrelu": Case(dense(lambda: nn.RReLU(0.1, 0.6)), (12,)),
    "depth": Case(Deep, (12,)),
    "functional": Case(Functional, (12,)),
    "transformer": Case(Transformer, (5,), WORDS),
}
