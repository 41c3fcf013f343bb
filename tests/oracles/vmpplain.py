"""pFedVMP the slow way: dense pseudo-inverses in numpy, loops over clients and classes."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import numpy as np
import torch
from torch import nn

from bayflower.clients.pfedvmp import Client
from bayflower.config import Training
from bayflower.contract import Survey, Work
from bayflower.data import batches
from bayflower.engines import Prepared
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.networks.papers import BaseHead
from bayflower.strategies.pfedvmp import Config, Server, State, Update


def halves(dim: int, classes: int, **config: Any) -> tuple[Server, Client, State]:
    """Both halves and the state before the first round, for a network with `dim` features."""

    def net() -> nn.Module:
        return BaseHead(nn.Sequential(nn.Linear(4, dim), nn.ReLU()), nn.Linear(dim, classes))

    model = Model(net, classes)
    server = Server(Config(**config), model.anatomy)
    return (
        server,
        Client(Config(**config), Training(), model),
        server.init(*model.initial(0, torch.float64), ()),
    )


def finished(client: Client, state: State, z: torch.Tensor, y: torch.Tensor) -> Update:
    """What a client with these features makes."""
    params, buffers = client.model.initial(0, z.dtype)
    data = Batch(torch.zeros(len(y), 4, dtype=z.dtype), y, torch.ones(len(y), dtype=z.dtype))
    work = Work(params, buffers, memo=state, survey=Survey({}, {"features": z}))
    return client.finish(client.init(params, buffers), work, data)[1]


def aggregated(server: Server, client: Client, state: State, updates: list[Update]) -> State:
    total = Total()
    for number, update in enumerate(updates):
        total.add(server.statistic(state, number, server.unpack(state, client.pack(update))))
    return server.finalise(state, total.value())


def dense_precision(z: np.ndarray, alpha: float, cut: float = 1e-10) -> np.ndarray:
    """[eq. 11] the slow way: all eigenvalues of the dense
    covariance, those above the cut inverted.
    """
    centred = z - z.mean(0)
    values, vectors = np.linalg.eigh(sum(np.outer(row, row) for row in centred) / len(z))
    keep = (values > cut * values[-1]) & (values > 1e-25)
    return sum(
        (np.outer(v, v) / w for v, w in zip(vectors.T[keep], values[keep], strict=True)),
        alpha * np.eye(z.shape[1]),
    )


# -- rounds against an oracle --------------------------------------------------------------------
class Oracle:
    """pFedVMP the slow way: an ordinary module and torch.optim for training; numpy, dense matrices
    and loops for the messages.
    """

    def __init__(self, prepared: Prepared, clients: int = 4) -> None:
        self.options, self.training = prepared.run.options, prepared.run.training
        self.model, self.clients = prepared.halves.model, prepared.federation.clients[:clients]
        initial = {**prepared.halves.initial[0], **prepared.halves.initial[1]}
        self.base = {
            name: value.clone() for name, value in initial.items() if not name.startswith("head.")
        }
        head = {name: value.clone() for name, value in initial.items() if name.startswith("head.")}
        self.heads = {data.client: copy.deepcopy(head) for data in self.clients}
        self.centroids: dict[int, np.ndarray] = {}

    def train(self, data, round: int, purpose: str = "train") -> nn.Module:
        """[eq. 9] on every batch."""
        x, y = (torch.as_tensor(array) for array in (data.x_train.astype(float), data.y_train))
        module = self.model.factory().double().train()
        module.load_state_dict({**self.base, **self.heads[data.client]})
        stepper = torch.optim.SGD(
            module.parameters(), lr=self.training.lr, momentum=self.training.momentum
        )
        keys = {
            "seed": 0,
            "client": data.client,
            "round": round,
            "purpose": purpose,
            "coupled": self.model.coupled,
        }
        pull = self.weight() if self.centroids else 0.0
        for (rows,) in batches.plan(len(y), self.training.phase("local"), **keys):
            z = module.base(x[rows])
            loss = nn.functional.cross_entropy(module.head(z), y[rows])
            for i, row in enumerate(rows):
                if int(y[row]) in self.centroids:
                    distance = (z[i] - torch.as_tensor(self.centroids[int(y[row])])) ** 2
                    loss = loss + pull * distance.sum() / z.shape[1] / len(rows)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        return module

    def weight(self) -> float:
        """What multiplies the pull (E-P13): the variance of the centroids between classes over
        their mean square, coordinate by coordinate, and the features over 512.
        """
        if self.options.xi_rule == "fixed":
            return self.options.xi
        columns = list(
            zip(*(centroid.tolist() for centroid in self.centroids.values()), strict=True)
        )
        between = sum(statistics.pvariance(column) for column in columns)
        whole = sum(value**2 for column in columns for value in column) / len(columns[0])
        return self.options.xi * len(columns) / 512 * between / whole

    def round(self, round: int) -> None:
        """One round: [eq. 9], [eq. 11], [eq. 12], [eq. 13]."""
        bases, sizes, messages = [], [], {}
        for data in self.clients:
            module = self.train(data, round)
            weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
            self.heads[data.client] = {
                name: value for name, value in weights.items() if name.startswith("head.")
            }
            bases.append(
                {name: value for name, value in weights.items() if not name.startswith("head.")}
            )
            sizes.append(len(data.y_train))
            with torch.no_grad():
                z = module.eval().base(torch.as_tensor(data.x_train.astype(float))).numpy()
            for k in np.unique(data.y_train):
                mine = z[data.y_train == k]
                if len(mine) >= self.options.min_count:
                    messages.setdefault(int(k), []).append((self.precision(mine), mine.mean(0)))
        for name, old in self.base.items():
            mean = sum(size * base[name] for size, base in zip(sizes, bases, strict=True)) / sum(
                sizes
            )
            self.base[name] = mean if old.is_floating_point() else mean.round().long()
        for k, sent in messages.items():
            prior = self.options.prior_precision * np.eye(len(sent[0][1]))
            self.centroids[k] = np.linalg.solve(
                sum(p for p, _ in sent) + prior, sum(p @ mean for p, mean in sent)
            )

    def precision(self, z: np.ndarray) -> np.ndarray:
        """The matrix of one class at one client, in any variant (E-P5)."""
        identity = np.eye(z.shape[1])
        return {
            "precision": lambda: dense_precision(z, self.options.alpha),
            "diag": lambda: np.diag(len(z) / (z.var(0) + self.options.diag_floor)),
            "count_mean": lambda: len(z) * identity,
            "mean": lambda: identity,
        }[self.options.centroid]()
