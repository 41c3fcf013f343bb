"""What the clients of a chunk give back, without those whose training diverged.

Over a network the server refuses such a reply, names its client and has it go back to the state
before. Here the client is left out of the sum, keeps its state, and is named with the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BayflowerError
from ..rounds.diverged import loss_problem
from ..rounds.halves import Halves
from ..rounds.measured import norms
from ..tree import flatten, take, to
from ..wire.protocol import TRAIN_LOSS


class Replies(NamedTuple):
    """New states, updates and mean losses of some clients, stacked, and why others have none."""

    clients: list[int]
    states: Any
    updates: Any
    losses: Tensor
    lost: dict[int, str]
    before: Any = None  # the states that they started from

    def valid(self, halves: Halves, state: Any) -> Replies:
        """Return the replies whose numbers all are numbers; this waits for the device."""
        lost = {}
        for place in suspicious(self.updates, self.losses):
            update, loss = take(self.updates, place), float(self.losses[place])
            if why := problem(halves, to(state, "cpu"), to(update, "cpu"), loss):
                lost[self.clients[place]] = why
        if not lost:
            return self
        kept = [place for place, client in enumerate(self.clients) if client not in lost]
        rows = torch.tensor(kept, dtype=torch.int64, device=self.losses.device)
        return Replies(
            [self.clients[place] for place in kept],
            take(self.states, rows),
            take(self.updates, rows),
            self.losses[rows],
            self.lost | lost,
            take(self.before, rows),
        )


def suspicious(updates: Any, losses: Tensor) -> list[int]:
    """Return the places of clients with a sum that is not finite: few operations, read at once."""
    return [place for place, fine in enumerate(finite(updates, losses).tolist()) if not fine]


def finite(updates: Any, losses: Tensor, known: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return for each client whether all sums are finite. `known`: by field a size of each client
    that is finite only if all numbers of the field are (`Measured.telling`); they are not read
    again. A size may be infinite though the numbers are not, which the caller has to find out.
    """
    there = known or {}
    leaves = [
        leaf.detach()
        for name, leaf in flatten(updates).items()
        if leaf.is_floating_point() and leaf.numel() and name.split("/")[0] not in there
    ]
    told, rest = norms(leaves)
    sums = [leaf.reshape(len(leaf), -1).sum(1).double().to(losses.device) for leaf in rest]
    told = [one.to(losses.device) for one in (*told, *there.values())]
    rows = torch.stack([*sums, *told, losses.double()])
    return (rows - rows == 0).all(0)  # NaN for numbers that are not finite; `isfinite` takes longer


def problem(halves: Halves, state: Any, update: Any, loss: float) -> str | None:
    """Return why the server of a federation would refuse an update, or None. What does not travel
    does not count.
    """
    try:
        halves.server.unpack(state, halves.client.pack(update))
    except BayflowerError as error:
        return str(error)
    return loss_problem(TRAIN_LOSS, loss)
