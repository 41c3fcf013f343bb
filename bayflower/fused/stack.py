"""The samples of a stack of clients on one device: of all clients, or of those at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import ClientData
from ..data.crowd import Crowd
from ..networks.model import Batch
from ..rounds.solo import moved, targets
from ..tree import Rows


class Ragged(NamedTuple):
    """The concatenated samples of many clients, and the start and size of each client's part: x (S,
    …), y (S,), start and size (C,).
    """

    x: Tensor
    y: Tensor
    start: Tensor
    size: Tensor
    dtype: torch.dtype  # of masks: that of the parameters; x may hold whole numbers

    def rows(self, index: Tensor, real: Tensor) -> Batch:
        """Return the samples at `index` (C, B) of each client's own;
        those not `real` have mask 0.
        """
        place = self.start[: len(index), None] + torch.where(real, index, 0)
        return Batch(self.x[place], self.y[place], real.to(self.dtype))

    def of(self, clients: Tensor) -> Ragged:
        """Return the same samples for some clients in the given order."""
        return self._replace(start=self.start[clients], size=self.size[clients])


def ragged(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device, dtype: torch.dtype
) -> Ragged:
    """Return the clients' (x, y) on the device."""
    sizes = [len(y) for _, y in parts]
    x = torch.cat([moved(x, device, dtype) for x, _ in parts])
    y = torch.cat([targets(y, device, dtype) for _, y in parts])
    if not len(y):
        # a target for padded indices
        x, y = (tensor.new_zeros(1, *tensor.shape[1:]) for tensor in (x, y))
    size = torch.tensor(sizes, device=device)
    return Ragged(x, y, (size.cumsum(0) - size).clamp(max=len(y) - 1), size, dtype)


class Stack:
    """Clients of one kind (training or new), largest first."""

    moving = False  # whether the samples here are those of other clients in every round

    def __init__(
        self, clients: Sequence[ClientData], device: torch.device, dtype: torch.dtype
    ) -> None:
        ordered = sorted(clients, key=lambda data: (-len(data.y_train), data.client))
        self.clients: Sequence[int] = tuple(data.client for data in ordered)
        self.rows = Rows(self.clients, device)
        self.row = self.rows.of
        self.sizes = np.array([len(data.y_train) for data in ordered])
        self.test_sizes = np.array([len(data.y_test) for data in ordered])
        self.device, self.dtype = device, dtype
        self.train = ragged([(data.x_train, data.y_train) for data in ordered], device, dtype)
        self.test = ragged([(data.x_test, data.y_test) for data in ordered], device, dtype)
        self.held = ragged([held_out(data) for data in ordered], device, dtype)
        self._whole: tuple[tuple[int, ...], Batch] | None = None

    def hold(self, chosen: Sequence[int]) -> bool:
        """Bring the samples of some clients to the device; return whether the memory that held
        others moved. Here all are there.
        """
        return False

    def order(self, chosen: Sequence[int]) -> list[int]:
        """Return the clients in the stack's order."""
        return sorted(chosen, key=self.row.__getitem__)

    def size(self, client: int) -> int:
        """Return how many training samples a client has."""
        return int(self.sizes[self.row[client]])

    def index(self, chosen: Sequence[int]) -> Tensor:
        """Return the rows of some clients."""
        return self.rows.index(chosen)

    def whole(self, chosen: Sequence[int]) -> Batch:
        """Return all training samples of some clients, padded to the longest: x (C, N, …), y and
        mask (C, N).
        """
        key = tuple(chosen)
        if self._whole is None or self._whole[0] != key:
            part = self.train.of(self.index(chosen))
            places = torch.arange(
                int(max(self.sizes[self.row[client]] for client in chosen)), device=self.device
            )
            self._whole = None  # frees the old one first
            self._whole = (
                key,
                part.rows(places.expand(len(chosen), -1), places < part.size[:, None]),
            )
        return self._whole[1]

    def held_size(self, client: int) -> int:
        """Return how many samples of a client are held out for calibration."""
        return int(self.held.size[self.row[client]])

    def held_of(self, client: int) -> Batch | None:
        """Return the samples of one client that are held out for calibration; None without any."""
        start, size = int(self.held.start[self.row[client]]), self.held_size(client)
        if not size:
            return None
        mask = torch.ones(size, dtype=self.dtype, device=self.device)
        return Batch(self.held.x[start : start + size], self.held.y[start : start + size], mask)

    def alone(self, client: int, test: bool = False) -> Batch:
        """Return the training samples of one client, or its test samples."""
        row, data, sizes = (
            self.row[client],
            self.test if test else self.train,
            self.test_sizes if test else self.sizes,
        )
        start, size = int(sizes[:row].sum()), int(sizes[row])
        x, y = data.x[start : start + size], data.y[start : start + size]
        return Batch(x, y, torch.ones(size, dtype=self.dtype, device=self.device))


def held_out(data: ClientData) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples that a client holds out for calibration, which may be none."""
    if data.x_held is None or data.y_held is None:
        return data.x_train[:0], data.y_train[:0]
    return data.x_held, data.y_held


class Window(Stack):
    """Clients of a crowd, of which only those at work have their samples on the device. They all
    have as many samples.
    """

    moving = True

    def __init__(self, crowd: Crowd, device: torch.device, dtype: torch.dtype) -> None:
        self.crowd, self.clients, self.device, self.dtype = crowd, crowd.clients, device, dtype
        self._whole = None
        self.holds: tuple[int, ...] = ()
        self._room(1)
        self.hold(crowd.clients[:1])

    def _room(self, clients: int) -> None:
        """Make memory for so many clients."""
        shape = torch.empty(0, *self.crowd[0].x_train.shape[1:], dtype=self.dtype)
        made = []
        for rows in self.crowd.parts:
            each = len(rows)
            x = shape.new_zeros(max(clients * each, 1), *shape.shape[1:], device=self.device)
            y = torch.zeros(len(x), dtype=torch.int64, device=self.device)
            size = torch.full((clients,), each, device=self.device)
            start = (torch.arange(clients, device=self.device) * each).clamp(max=len(x) - 1)
            made.append(Ragged(x, y, start, size, self.dtype))
        self.train, self.test, self.held = made
        self.sizes, self.test_sizes, _ = (np.full(clients, len(rows)) for rows in self.crowd.parts)

    def hold(self, chosen: Sequence[int]) -> bool:
        """Bring the samples of some clients to the device; return whether the memory that held
        others moved: what was recorded with it cannot be replayed.
        """
        if not set(chosen) - set(self.holds):
            return False
        self.holds = tuple(dict.fromkeys(chosen))
        more = len(self.holds) > len(self.sizes)
        if more:
            self._room(len(self.holds))
        self.rows = Rows(self.holds, self.device)
        self.row, self._whole = self.rows.of, None
        x, y = self.crowd.samples(self.holds, self.device)
        for data, rows in zip((self.train, self.test, self.held), self.crowd.parts, strict=True):
            count = len(self.holds) * len(rows)
            places = torch.as_tensor(rows, device=self.device)
            data.x[:count].copy_(x[:, places].flatten(0, 1))
            data.y[:count].copy_(y[:, places].flatten())
        return more

    def order(self, chosen: Sequence[int]) -> list[int]:
        """Return the clients in the stack's order."""
        return sorted(chosen)

    def size(self, client: int) -> int:
        """Return how many training samples a client has."""
        return len(self.crowd.parts.train)


def stack_of(clients: Sequence[ClientData], device: torch.device, dtype: torch.dtype) -> Stack:
    """Return the samples of some clients as the engine has them."""
    if isinstance(clients, Crowd):
        return Window(clients, device, dtype)
    return Stack(clients, device, dtype)
