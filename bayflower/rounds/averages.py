"""Means of what is known of each client, as arrays: a round changes those of its own clients only,
and with a thousand others a list of all takes longer than the rest of a round's accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

Vector = np.ndarray[Any, Any]
FIRST = 64  # clients for which there is room at first


class Averages(NamedTuple):
    """Clients, the mean of each one's numbers, and how many these are."""

    clients: Vector
    means: Vector
    counts: Vector


class Table:
    """The averages of all clients that were ever noted."""

    def __init__(self) -> None:
        self.row: dict[int, int] = {}
        self.room = Averages(*(np.zeros(FIRST, kind) for kind in (np.int64, float, np.int64)))

    def note(self, numbers: Mapping[int, Sequence[float]], changed: Iterable[int]) -> None:
        """Take in the numbers of clients whose numbers have changed."""
        clients = list(changed)
        rows = [self.row.setdefault(client, len(self.row)) for client in clients]
        while len(self.row) > len(self.room.clients):
            both = (np.concatenate([one, np.zeros_like(one)]) for one in self.room)
            self.room = Averages(*both)
        known = [numbers[client] for client in clients]
        for column, values in zip(
            self.room, (clients, list(map(fmean, known)), list(map(len, known))), strict=True
        ):
            column[rows] = values

    def drop(self, clients: Iterable[int]) -> None:
        """Forget some clients; the last one takes the row of each."""
        for client in clients:
            row = self.row.pop(client, None)
            if row is None or row == len(self.row):
                continue
            for column in self.room:
                column[row] = column[len(self.row)]
            self.row[int(self.room.clients[row])] = row

    def mean(self, client: int) -> float:
        """Return the mean of a client's numbers."""
        return float(self.room.means[self.row[client]])

    def all(self) -> Averages:
        """Return the averages of all clients."""
        return Averages(*(column[: len(self.row)] for column in self.room))
