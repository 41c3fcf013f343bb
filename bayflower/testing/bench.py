"""What the promises are tested on: a small federation, a method with some clients' updates of one
round, and the comparison of trees.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..config import parse
from ..data import batches
from ..engines import Prepared, prepare
from ..flower.records import to_arrays, to_tensors
from ..maths.exact import Scaled, Total
from ..rounds import solo
from ..tree import Tensors, flatten, map_tree
from ..tree import worst_difference as worst_difference

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "num_clients": 5,
    "new_clients": 2,
    "keep": 0.25,
    "beta": 0.5,
    "min_size": 8,
    "batch_size": 16,
    "local_epochs": 2,
    "new_client_epochs": 3,
    "rounds": 2,
    "evaluate_every": 1,
    "calibration": "off",  # tests of calibration switch it on
    "stacking": "yes",
}
PEACE: dict[str, Any] = {  # three rounds with a part of the clients, left in peace
    "rounds": 3,
    "fraction_train": 0.6,
    "evaluate_every": 3,
    "local_epochs": 1,
    "new_client_epochs": 1,
    "keep": 0.15,
}


def small_prepared(method: str, engine: str = "loop", **changes: Any) -> Prepared:
    """Return a run of a few seconds."""
    return prepare(parse(method, {**SMALL, "device": "cpu", **changes}), engine)


class Bench:
    """A method with some clients' updates of one round. `settings` are what the method needs to be
    itself; `returns_one_update` says that one update alone, finalised, is the next global model;
    `near` is how far a stack may be from the same clients one by one.
    """

    def __init__(
        self,
        method: str,
        model: str,
        dtype: str = "float32",
        clients: int = 4,
        settings: Mapping[str, Any] | None = None,
        returns_one_update: bool = True,
        near: float = 2e-5,
    ) -> None:
        self.returns_one_update, self.near = returns_one_update, near
        # SGD, because Adam divides by the size of a gradient: one that is zero but for rounding (a
        # bias before BatchNorm) becomes a step
        sgd = {"dtype": dtype, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}
        few = {"keep": 0.15, "new_client_epochs": 1}
        self.prepared = small_prepared(method, **{**(settings or {}), "model": model, **sgd, **few})
        self.server, self.client, self.model, (self.params, self.buffers) = self.prepared.halves
        self.clients = [data.client for data in self.prepared.federation.clients[:clients]]
        self.state = self.server.init(self.params, self.buffers, tuple(self.clients))
        kind = torch.float64 if dtype == "float64" else torch.float32
        self.data = {
            d.client: solo.samples(d, torch.device("cpu"), kind)
            for d in self.prepared.federation.clients[:clients]
        }
        self.known: dict[int, Any] = {}

    @functools.cached_property
    def trained(self) -> dict[int, solo.Trained]:
        """Return what every client's training gave."""
        return {client: self.train(client) for client in self.clients}

    def train(self, client: int, round: int = 1) -> solo.Trained:
        """Return what a round of training of one client gives."""
        state = self.client.init(self.params, self.buffers)
        broadcast = self.server.broadcast(self.state, client)
        return solo.train(
            self.client,
            state,
            broadcast,
            self.data[client].train,
            seed=0,
            client=client,
            round=round,
        )

    def statistic(self, client: int) -> Any:
        """Return the statistic of a client's update, made once."""
        if client not in self.known:
            self.known[client] = self.server.statistic(self.state, client, self.received(client))
        return self.known[client]

    def received(self, client: int) -> Any:
        """Return what the server makes of the client's update after the wire."""
        sent = to_tensors(to_arrays(self.client.pack(self.trained[client].update)))
        return self.server.unpack(self.state, sent)

    def read(self, tree: Any) -> Any:
        """Return an update as its statistic, in which no arbitrary sign or order of vectors is
        left; other trees as they are.
        """
        if not isinstance(tree, self.client.update_type):
            return tree
        found = self.server.statistic(
            self.state, 0, self.server.unpack(self.state, self.client.pack(tree))
        )
        return {
            name: value.tensor * value.weight if isinstance(value, Scaled) else value
            for name, value in found.items()
        }

    def padded(self, client: int) -> Any:
        """Return the client's update as the fused engine has it: trained on data padded to the
        size of the largest client.
        """
        longest = max(len(samples.train.y) for samples in self.data.values())

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])

        data, broadcast = self.data[client].train, self.server.broadcast(self.state, client)
        state = self.client.init(self.params, self.buffers)
        keys = {"seed": 0, "client": client, "round": 1}
        with solo.seeded(**keys):
            work, _ = solo.run_phases(
                self.client, self.client.begin(state, broadcast, data), data, "train", **keys
            )
            more = map_tree(grow, data)
            return solo.detach(
                self.client.finish(state, solo.surveyed(self.client, work, more), more)[1]
            )

    def noise(self, stage: str, size: int) -> Tensors:
        """Return the noise of the first step, as engines draw it."""
        shapes = self.client.noise(stage, size)
        return batches.noise(
            shapes,
            seed=0,
            client=0,
            round=1,
            stage=stage,
            step=0,
            dtype=next(iter(self.params.values())).dtype,
        )

    def finalised(self, clients: list[int]) -> Any:
        """Return the server's state after the updates of these clients."""
        total = Total()
        for client in clients:
            total.add(self.statistic(client))
            total.drop(self.server.negligible(total.names()))
        return self.server.finalise(self.state, total.value())


def assert_same_bits(a: Any, b: Any) -> None:
    """Raise unless two trees have the same names, dtypes and bits."""
    left, right = flatten(a), flatten(b)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
